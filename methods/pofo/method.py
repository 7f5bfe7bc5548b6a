"""POFO (Beaumont, Eyraud-Dubois, Shilova): recomputation and offloading of a chain together, one using the device, the other the link.

    tape ─► chain of stages ─► First(1, m) at a price of the link ─► sequence ─► schedule ─► simulated
                        a search over prices         ▲ the largest m that fits      the fastest is taken

Time on the device and time on the link are two resources. At each price of a second of the link the recurrence minimises device time plus
price; a high price moves little, a low one recomputes little. Where this departs from the paper stands in card.yaml under `deviations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import infeasible
from vramlab.schedule import Schedule
from vramlab.simulate import simulate
from vramlab.stages import MOST_STAGES, Stage, chain_facts, highest_that_fits, stages_of
from vramlab.tape import Tape

UID = "0e9be38e59c10aab"
NEEDS = ("timings", "backward")
# Prices of a second of the link, in seconds of the device, between which one is searched, and in how many steps.
PRICES = (0.003, 1.0)
PRICE_STEPS = 4
# A step stands still for more than this share of its time: too much moves.
MOST_STALL = 0.01
# Of bisected levels, so many from the lowest are looked at before a price is given up.
LOWEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pofo:
    """The planner. Options as card.yaml declares them."""

    slots: int = 500

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """PlanInfeasible where no schedule of the class that was looked at fits."""
        check_needs(tape, NEEDS, "pofo")
        attempts = []
        for price, attempt in self.attempts(tape, device, budget):
            attempts.append(attempt)
            if attempt.is_whole and np.isinf(price):
                break  # everything fits and nothing moves
        found = [attempt.fitting for attempt in attempts if attempt.fitting]
        if not found:
            lowest = [checked for attempt in attempts for checked in attempt.lowest if checked.peak_host_bytes <= budget.host_bytes]
            raise infeasible(min(lowest, key=lambda checked: checked.peak_bytes), budget, "pofo")
        return min(found, key=lambda checked: simulate(checked, device).metrics.step_seconds).schedule

    def attempts(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Iterator[tuple[float, Attempt]]:
        """At an infinite price, at none, and, where the step then stands still for copies, at prices in between: dearer where it does."""
        from .recurrence import Again, First  # numba is slow to load
        from .sequence import sequence
        from .step import hoisted, written

        stages = stages_of(tape, MOST_STAGES)
        facts = chain_facts(tape, device, stages)
        again = Again(facts, self.slots + 2 * facts.count, -(-facts.most_bytes // self.slots))
        seconds = link_seconds(tape, device, stages)

        def at(price: float) -> Attempt:
            first = First(again, priced(seconds, price))

            def write(slots: int) -> CheckedSchedule:
                schedule = written(tape, device, stages, sequence(again, first, slots), budget, UID)
                return hoisted(check_schedule(tape, schedule), device, budget)

            return _attempt(first.levels(), cache(write), budget, len(tape.ops))

        yield np.inf, at(np.inf)
        free = at(0.0)
        yield 0.0, free
        low, high = PRICES
        for _ in range(PRICE_STEPS if stands_still(free, device) else 0):
            price = math.sqrt(low * high)
            attempt = at(price)
            yield price, attempt
            low, high = (price, high) if stands_still(attempt, device) else (low, price)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one price gives: the step of the highest level that fits, None where none does."""

    fitting: CheckedSchedule | None
    is_whole: bool  # it is the highest of all
    lowest: list[CheckedSchedule]  # where none fits, the lowest that were looked at


def stands_still(attempt: Attempt, device: DeviceProfile) -> bool:
    """Is the step held up by copies?"""
    if attempt.fitting is None:
        return False
    metrics = simulate(attempt.fitting, device).metrics
    return metrics.stall_seconds > MOST_STALL * metrics.step_seconds


def link_seconds(tape: Tape, device: DeviceProfile, stages: Sequence[Stage]) -> tuple[np.ndarray, np.ndarray]:
    """Per stage, out and back: of x, and of all that it makes beside x and that its backward may need."""
    def both_ways(storages: Sequence[int]) -> float:
        return sum(device.copy_seconds(tape.storages[s].nbytes, to_host=to_host) for s in storages for to_host in (True, False))

    backward = min(stage.backward_ops.start for stage in stages)
    needed = {s.id for s in tape.storages if any(op >= backward for op in tape.readers[s.id])}
    inside = [both_ways([s for s in stage.made if s != stage.x and s in needed]) for stage in stages]
    return np.array([0.0 if stage.x is None else both_ways([stage.x]) for stage in stages]), np.array(inside)


def priced(seconds: tuple[np.ndarray, np.ndarray], price: float):
    """What each copy counts at this price of a second."""
    from .recurrence import Prices

    return Prices(*(np.full_like(column, np.inf) if np.isinf(price) else price * column for column in seconds))


def _attempt(levels: Sequence[int], write: Callable[[int], CheckedSchedule], budget: Budget, ops: int) -> Attempt:
    def fits(level: int) -> bool:
        return write(level).peak_bytes <= budget.device_bytes and write(level).peak_host_bytes <= budget.host_bytes

    level, looked_at = highest_that_fits(levels, fits, ops, LOWEST)
    return Attempt(None, False, [write(level) for level in looked_at]) if level is None else Attempt(write(level), level == levels[-1], [])


def build(slots: int = 500) -> Pofo:
    """The planner for these options."""
    return Pofo(slots=slots)
