"""Our own planner: in each gap between two uses a storage is kept, swapped or dropped, as a search says.

    seeds, and choices made from nothing ─► fitted into the budget ─► rounds of annealing and sweeps ─► the fastest

The engine hands over the schedules of other planners (`seeds` in card.yaml); without them the search begins with its own. How the choices
become a schedule stands in vramlab/residence.py. The search is measured in decoded steps, not in seconds, so that it does not depend on how
fast the machine is: `plan_seconds` is what they take at OPS_PER_SECOND.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vramlab.bounds import leanest_schedule, least_peak_bytes
from vramlab.check import check_schedule
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible, ScheduleError
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import infeasible
from vramlab.schedule import Schedule
from vramlab.simulate import simulate
from vramlab.tape import Tape

UID = "9c41d7e05b8a36f2"
NEEDS = ("timings", "variants", "inplace_gradients")
OPS_PER_SECOND = 11_400_000  # ops of decoded steps: 20,000 steps of ResNet-50's 570 ops
FIRST_PRICES = (0.02, 0.1, 0.3, 1.0)  # of a second of the link, at which choices are made from nothing
STARTS = 4  # of all that fit, the fastest are searched from
A_ROUND = 200, 30  # decoded steps: at least, and for each gap
HEATS = (1.0, 0.3, 3.0)  # of the rounds in turn
WITHOUT_GAIN = 3  # rounds after which the search ends
GAIN = 1e-4  # of the step's seconds
LARGE = 2_000  # gaps of storages of more than this part of the largest are drawn most
FITTING = 40  # decoded steps a gap, at most, until choices fit

_logger = logging.getLogger("vramlab")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """The planner. Options as card.yaml declares them."""

    plan_seconds: float = 30.0
    seed: int = 0

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """Without seeds. PlanInfeasible below the least peak of any schedule in which state stays."""
        return self.plan_from((), tape, device, budget)

    def plan_from(self, seeds: Sequence[Schedule], tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The fastest that was found, never slower than a seed that is within the budget."""
        check_needs(tape, NEEDS, "hybrid")
        if budget.device_bytes < least_peak_bytes(tape):
            raise infeasible(check_schedule(tape, leanest_schedule(tape)), budget, "hybrid")
        given = list(_within(tape, (*seeds, leanest_schedule(tape)), budget))
        found = Search(tape, device, budget, self.seed).run([c.schedule for c in given], self._edits(tape))
        if found is not None:
            given.insert(0, check_schedule(tape, found, budget))
        if not given:  # host memory is short
            raise PlanInfeasible(method="hybrid", budget_bytes=budget.device_bytes, smallest_bytes=None, op=tape.op_name(0))
        best = min(given, key=lambda checked: simulate(checked, device).metrics.step_seconds)
        return Schedule(best.schedule.instructions, tape.digest, UID)

    def _edits(self, tape: Tape) -> int:
        return max(1, int(self.plan_seconds * OPS_PER_SECOND / max(1, len(tape.ops))))


def _within(tape: Tape, schedules: Sequence[Schedule], budget: Budget):
    for schedule in schedules:
        try:
            yield check_schedule(tape, schedule, budget)
        except ScheduleError:
            continue


class Search:
    """One search."""

    def __init__(self, tape: Tape, device: DeviceProfile, budget: Budget, seed: int) -> None:
        from vramlab import annealing, residence  # numba is slow to load

        self._search, self._decoder = annealing, residence
        self.residence = residence.Residence(tape, device, budget)
        self.seed, self.left = seed, 0
        self.goal = float(sum(min([op.seconds, *(v.seconds for v in op.variants)]) for op in tape.ops)) * (1 + 1e-12)
        size = self.residence.step.nbytes[self.residence.step.gap_storage]
        self.pool = np.flatnonzero(size >= size.max(initial=0) / LARGE).astype(np.int32)
        self.undo = np.zeros(annealing.MOST_CHANGES + 1, np.int64), np.zeros((annealing.MOST_CHANGES + 1, 3), np.int64)
        self.with_variants = any(op.variants for op in tape.ops)

    def run(self, seeds: Sequence[Schedule], edits: int) -> Schedule | None:
        """The fastest schedule that was met; None where no choices were found that fit."""
        self.left = edits
        starts = self._starts(seeds)
        if not starts:
            return None
        seconds, best = starts[0]
        if len(self.residence.step.gap_storage) and seconds > self.goal:
            seconds, best = self._improve(starts)
        self.residence.decode(best)
        return self.residence.schedule(UID)

    # --- where to begin -----------------------------------------------------------------------------------------------------
    def _starts(self, seeds: Sequence[Schedule]):
        """Choices that fit, the fastest first."""
        r, found = self.residence, []
        everything = r.choices()
        status, seconds = r.decode(everything)
        if status == self._decoder.FITS and seconds <= self.goal:
            return [(seconds, everything)]
        for k, price in enumerate(FIRST_PRICES):
            self._fit(r.choices(), price, k, found)
        for k, schedule in enumerate(seeds):
            self._fit(r.choices_of(schedule), FIRST_PRICES[1], k, found)
        return sorted(found, key=lambda start: start[0])

    def _fit(self, choices, price: float, k: int, found: list) -> None:
        r = self.residence
        most = FITTING * max(10, r.gaps)
        took = self._search.fit(r.step, choices, r.costs, r.work, self.pool, *self.undo, self.seed + k, price, most)
        self.left -= abs(took)
        status, seconds = r.decode(choices)
        if status == self._decoder.FITS:
            found.append((seconds, choices))

    # --- from there on ------------------------------------------------------------------------------------------------------
    def _improve(self, starts):
        """Rounds: first from some starts, then from the best."""
        searched = [self._round(choices, 1.0, k) for k, (_, choices) in enumerate(starts[:STARTS]) if self.left > 0]
        seconds, best = min([*searched, *starts[:1]], key=lambda found: found[0])
        number, idle = STARTS, 0
        while self.left > 0 and idle < WITHOUT_GAIN and seconds > self.goal:
            after, choices = self._round(best, HEATS[number % len(HEATS)], number)
            idle = 0 if after < seconds * (1 - GAIN) else idle + 1
            if after < seconds:
                seconds, best = after, choices
            number += 1
            _logger.info("hybrid: round %d, %.6g s a step, simulated; %d decoded steps left", number, seconds, max(0, self.left))
        return seconds, best

    def _round(self, choices, heat: float, number: int):
        """Annealing and a sweep. Seconds and choices."""
        r = self.residence
        best, cost = r.choices(), np.zeros(r.gaps)
        edits = min(self.left, A_ROUND[0] + A_ROUND[1] * r.gaps)
        current = type(choices)(*(column.copy() for column in choices))
        least, took = self._search.anneal(r.step, current, best, r.costs, r.work, self.pool, *self.undo, cost,
                                          self.seed * 1009 + number, edits, self.with_variants, heat, self.goal)
        self.left -= took
        if self.left > 0 and least > self.goal:
            least, took = self._search.sweep(r.step, best, r.costs, r.work, self.pool, self.left)
            self.left -= took
        return (least if math.isfinite(least) else math.inf), best


def build(plan_seconds: float = 30.0, seed: int = 0) -> Hybrid:
    """The planner with these options."""
    return Hybrid(plan_seconds=plan_seconds, seed=seed)
