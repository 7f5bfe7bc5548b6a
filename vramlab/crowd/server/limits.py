"""How often somebody may ask: token buckets in this process's memory. What has to hold over restarts is counted in the database."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Callable

MOST_NAMES = 20_000  # that are remembered; the one that has asked longest ago is forgotten first


class Limiter:
    """At most `per_minute` for each name, all of them at once if need be, then as many as come back with time."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._rate, self._clock = float(per_minute), per_minute / 60, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (left, at)
        self._lock = threading.Lock()

    def take(self, name: str) -> float:
        """0 when it may be, else the seconds after which it may."""
        return self._ask(name, takes=True)

    def wait(self, name: str) -> float:
        """What `take` would answer, without taking."""
        return self._ask(name, takes=False)

    def _ask(self, name: str, *, takes: bool) -> float:
        with self._lock:
            moment = self._clock()
            left, at = self._left.pop(name, (self._most, moment))
            left = min(self._most, left + (moment - at) * self._rate)
            is_allowed = left >= 1
            self._left[name] = (left - 1 if takes and is_allowed else left, moment)
            if len(self._left) > MOST_NAMES:
                self._left.popitem(last=False)
            return 0.0 if is_allowed else (1 - left) / self._rate
