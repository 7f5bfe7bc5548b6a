"""Capuchin (Peng et al., ASPLOS 2020): tensor accesses of a measured iteration say what to evict, when, and how it comes back.

    measured iteration ─► candidates of the memory peak ─► hidden swaps by FT ─► swap or recompute by MSPS ─► guided iterations
    a swap in is late in a guided iteration ─► its trigger is 5 % of SwapTime earlier in the next

Where this departs from the paper stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import Rollout, Stuck, refusal
from vramlab.schedule import Prefetch, Schedule, Wait
from vramlab.simulate import simulate
from vramlab.tape import Tape

from .accesses import candidates_of, over_budget
from .choice import Choice, choose
from .guided import Guided

UID = "adbbecef645fef56"
NEEDS = ("timings",)
ADVANCE = 0.05  # of SwapTime, each time a swap in is late


@dataclass(frozen=True, slots=True, kw_only=True)
class Capuchin:
    """The planner. Options as card.yaml declares them."""

    iterations: int = 10

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """PlanInfeasible where not even on-demand swapping fits, Unsupported where the tape has no op times."""
        check_needs(tape, NEEDS, "capuchin")
        try:
            return self._best(tape, device, budget).schedule
        except Stuck as stuck:
            stuck_op = stuck.op
        raise refusal(lambda at: _first(tape, device, at), tape, budget, "capuchin", stuck_op)

    def _best(self, tape: Tape, device: DeviceProfile, budget: Budget) -> CheckedSchedule:
        """The fastest of the guided iterations. Raises Stuck where the first gets stuck."""
        over = over_budget(tape, budget.device_bytes)
        choice = choose(tape, candidates_of(tape, device, over), over)
        advance: defaultdict[int, float] = defaultdict(float)
        best = _play(tape, device, budget, choice, triggers_of(tape, choice, over, advance))
        best_seconds = simulate(best, device).metrics.step_seconds
        checked = best
        for _ in range(self.iterations - 1):
            late = late_storages(checked, device) & {c.storage for c in choice.swaps}
            if not late:
                break
            for s in late:
                advance[s] += ADVANCE
            try:
                checked = _play(tape, device, budget, choice, triggers_of(tape, choice, over, advance))
            except Stuck:
                break
            seconds = simulate(checked, device).metrics.step_seconds
            if seconds < best_seconds:
                best, best_seconds = checked, seconds
        return best


def triggers_of(tape: Tape, choice: Choice, over: np.ndarray, advance: Mapping[int, float]) -> dict[int, int]:
    """In-triggers: the last op that starts no later than SwapInStart less the advance (shares of SwapTime), but after the memory peak."""
    begins = np.cumsum([0.0, *(op.seconds for op in tape.ops)])[:-1]
    starts = choice.lanes.swap_in_starts()
    found = {}
    for c in choice.swaps:
        start = starts[c.storage] - advance[c.storage] * c.swap_in_seconds
        op = int(np.searchsorted(begins, start, side="right")) - 1
        inside = np.flatnonzero(over[c.evicted + 1:c.back] > 0)
        after_peak = c.evicted + 1 + int(inside[-1]) + 1 if len(inside) else c.evicted + 1
        found[c.storage] = min(max(op, after_peak), c.back)
    return found


def late_storages(checked: CheckedSchedule, device: DeviceProfile) -> set[int]:
    """Those for whose swap in the step stands still at their back access."""
    trace = simulate(checked, device)
    coming, late = set(), set()
    for i, begin, end in zip(checked.schedule.instructions, trace.start_seconds.tolist(), trace.end_seconds.tolist()):
        if isinstance(i, Prefetch):
            coming.add(i.storage)
        elif isinstance(i, Wait) and i.storage in coming:
            coming.discard(i.storage)
            if end > begin:
                late.add(i.storage)
    return late


def _play(tape: Tape, device: DeviceProfile, budget: Budget, choice: Choice, triggers: dict[int, int]) -> CheckedSchedule:
    rollout = Rollout(tape, device, budget, Guided(choice, triggers))
    rollout.play()
    return check_schedule(tape, rollout.schedule(UID), budget)


def _first(tape: Tape, device: DeviceProfile, budget: Budget) -> CheckedSchedule | None:
    """The first guided iteration; None where it gets stuck."""
    try:
        return Capuchin(iterations=1)._best(tape, device, budget)
    except Stuck:
        return None


def build(iterations: int = 10) -> Capuchin:
    """The planner for these options."""
    return Capuchin(iterations=iterations)
