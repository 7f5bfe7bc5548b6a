"""Answers that hold until the collection changes: leaderboards and what there is to choose from.

Whatever changes a result leaves a row in the audit log, in the same transaction. So the log's last row names the state of the collection,
for every process that serves it: an answer is kept under the row that was the last one *before* it was made, and given to those only who
find that row last. It is never older than what a request of theirs would read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from sqlalchemy.orm import Session

from vramlab.crowd.server.audit import last_row

MOST_ANSWERS = 512  # the one that was asked for longest ago goes first


class Recent:
    """The answers of one process."""

    def __init__(self, most: int = MOST_ANSWERS) -> None:
        self._most, self._lock = most, threading.Lock()
        self._last = (0, "")
        self._kept: OrderedDict[Hashable, _Answer] = OrderedDict()

    def answer(self, session: Session, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives from this session, or gave since the last change. Of those who ask for the same at once one makes it. What
        `make` raises is raised, and kept for nobody. Nobody may change an answer."""
        last = last_row(session)
        found = self._find(last, key)
        with found.lock:
            if not found.is_made:
                found.value = make()
                found.is_made = True
            return found.value

    def _find(self, last: tuple[int, str], key: Hashable) -> _Answer:
        with self._lock:
            if last[0] < self._last[0]:
                return _Answer()  # a reader who began before the change that others know of
            if last != self._last:
                self._kept.clear()
                self._last = last
            found = self._kept.setdefault(key, _Answer())
            self._kept.move_to_end(key)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return found


class _Answer:
    def __init__(self) -> None:
        self.lock, self.is_made, self.value = threading.Lock(), False, None
