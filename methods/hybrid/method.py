"""Our own planner: in each gap between two uses a storage is kept, swapped or dropped, as a search says.

    seeds, and choices made from nothing ─► fitted into the budget ─► rounds of annealing and sweeps ─► the fastest

The engine hands over the schedules of other planners (`seeds` in card.yaml); without them the search begins with its own. How the choices
become a schedule stands in vramlab/residence.py. The search is measured in ops that are decoded, not in seconds, so that it does not depend
on how fast the machine is: `plan_seconds` is what they take at OPS_PER_SECOND.
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
OPS_PER_SECOND = 15_500_000  # ops that are walked and runs that are timed, on one core of an AMD EPYC
FIRST_PRICES = (0.02, 0.1, 0.3, 1.0)  # of a second of the link, at which choices are made from nothing
STARTS = (99, 0.08), (1, 0.7)  # first so many of the fastest are searched from, with this share of the effort together, then so many
MOST_STARTS = 4  # from nothing, at each of these prices
LAST_SHARE = 0.22  # of the effort, for each round after those
MOST_TRIES = 1000, 100, 0.6  # decoded steps in a round, at most: these, so many for each gap, and for each pair of gaps
HEATS = (0.3, 1.0, 3.0)  # of those rounds in turn
WITHOUT_GAIN = 8  # rounds after which the search ends
GAIN = 1e-4  # of the step's seconds
LARGE = 2_000  # gaps of storages of more than this part of the largest, between ops that use them, are drawn most
FEW = 64  # gaps, of which all are drawn as often
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
        found = Search(tape, device, budget, self.seed).run([c.schedule for c in given], int(self.plan_seconds * OPS_PER_SECOND))
        if found is not None:
            given.insert(0, check_schedule(tape, found, budget))
        if not given:  # host memory is short
            raise PlanInfeasible(method="hybrid", budget_bytes=budget.device_bytes, smallest_bytes=None, op=tape.op_name(0))
        best = min(given, key=lambda checked: simulate(checked, device).metrics.step_seconds)
        return Schedule(best.schedule.instructions, tape.digest, UID)


def _within(tape: Tape, schedules: Sequence[Schedule], budget: Budget):
    for schedule in schedules:
        try:
            yield check_schedule(tape, schedule, budget)
        except ScheduleError:
            continue


class Search:
    """One search."""

    def __init__(self, tape: Tape, device: DeviceProfile, budget: Budget, seed: int) -> None:
        from vramlab import annealing, gaps, occupancy, residence  # numba is slow to load

        self._search, self._names = annealing, occupancy
        self.residence = residence.Residence(tape, device, budget)
        self.seed, self.effort = seed, 0
        self.goal = float(sum(min([op.seconds, *(v.seconds for v in op.variants)]) for op in tape.ops)) * (1 + 1e-12)
        step = self.residence.step
        size = step.nbytes[step.gap_storage]
        is_between = step.gap_kind == gaps.BETWEEN
        is_drawn = (size >= size.max(initial=0) / LARGE) & (is_between | (len(size) <= FEW))
        self.pool = np.flatnonzero(is_drawn if is_drawn.any() else size > 0).astype(np.int32)
        self.tunable = np.flatnonzero(np.diff(step.first_variant) > 1).astype(np.int32)
        self.undo = np.zeros(annealing.MOST_CHANGES + 1, np.int64), np.zeros((annealing.MOST_CHANGES + 1, 3), np.int64)
        self.longest = int(sum(count * int(is_between.sum())**k for k, count in enumerate(MOST_TRIES)))

    def run(self, seeds: Sequence[Schedule], effort: int) -> Schedule | None:
        """The fastest schedule that was met; None where no choices were found that fit."""
        self.effort = effort
        starts = self._starts(seeds)
        if not starts:
            return None
        seconds, best = starts[0]
        if len(self.residence.step.gap_storage) and seconds > self.goal:
            seconds, best = self._improve(starts)
        self.residence.decode(best)
        return self.residence.schedule(UID)

    @property
    def left(self) -> int:
        """Effort that may still be spent."""
        return self.effort - int(self.residence.work.count[self._names.EFFORT])

    # --- where to begin -----------------------------------------------------------------------------------------------------
    def _starts(self, seeds: Sequence[Schedule]):
        """Choices that fit, the fastest first."""
        r, found = self.residence, []
        everything = r.choices()
        status, seconds = r.decode(everything)
        if status == self._names.FITS and seconds <= self.goal:
            return [(seconds, everything)]
        for k in range(self._many() * len(FIRST_PRICES)):
            self._fit(r.choices(), FIRST_PRICES[k % len(FIRST_PRICES)], k, found)
        for k, schedule in enumerate(seeds):
            self._fit(r.choices_of(schedule), FIRST_PRICES[1], k, found)
        return sorted(found, key=lambda start: start[0])

    def _many(self) -> int:
        """How often each price is begun with: of a small step, for which there is effort, more than once."""
        whole_round = self.longest * max(1, self.residence.step.ops)
        return max(1, min(MOST_STARTS, int(STARTS[0][1] * self.effort / (len(FIRST_PRICES) * whole_round))))

    def _fit(self, choices, price: float, k: int, found: list) -> None:
        r = self.residence
        most = FITTING * max(10, r.gaps) * max(1, r.step.ops)
        if self._search.fit(r.step, choices, r.costs, r.work, self.pool, *self.undo, self.seed + k, price, most):
            found.append((r.decode(choices)[1], choices))

    # --- from there on ------------------------------------------------------------------------------------------------------
    def _improve(self, starts):
        """Every start a little, the best of these more, and the best of all as long as there is effort left."""
        searched, whole = starts, self.left
        for number, (count, share) in enumerate(STARTS):
            some = searched[:count]
            rounds = [self._round(choices, 1.0, number, int(share * whole / len(some))) for _, choices in some if self.left > 0]
            searched = sorted([*rounds, *searched], key=lambda found: found[0])
        seconds, best = searched[0]
        number, idle = len(STARTS), 0
        while self.left > 0 and idle < WITHOUT_GAIN and seconds > self.goal:
            begin = best if idle % 2 == 0 else searched[idle // 2 % len(searched)][1]  # without gain, every other round begins elsewhere
            after, choices = self._round(begin, HEATS[(number - len(STARTS)) % len(HEATS)], number, int(LAST_SHARE * whole))
            idle = 0 if after < seconds * (1 - GAIN) else idle + 1
            if after < seconds:
                seconds, best = after, choices
            number += 1
            _logger.info("hybrid: round %d, %.6g s a step, simulated; %d %% of the search is left", number, seconds,
                         100 * max(0, self.left) // whole)
        return seconds, best

    def _round(self, choices, heat: float, number: int, effort: int):
        """Annealing and a sweep. Seconds and choices."""
        r = self.residence
        best, cost = r.choices(), np.zeros(r.gaps)
        current = type(choices)(*(column.copy() for column in choices))
        most = max(1, min(self.left, effort, self.longest * r.step.ops))
        seconds = self._search.anneal(r.step, current, best, r.costs, r.work, self.pool, self.tunable, *self.undo, cost,
                                      self.seed * 1009 + number, most, heat, self.goal)
        if self.left > 0 and seconds > self.goal:
            seconds = self._search.sweep(r.step, best, r.costs, r.work, self.pool, min(self.left, most))
        return (seconds if math.isfinite(seconds) else math.inf), best


def build(plan_seconds: float = 30.0, seed: int = 0) -> Hybrid:
    """The planner with these options."""
    return Hybrid(plan_seconds=plan_seconds, seed=seed)
