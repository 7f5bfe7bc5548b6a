"""vDNN (Rhu et al., MICRO 2016): the input maps of layers wait in host memory between forward and backward, one layer's copy beside one
layer's kernel.

    all, conv   whose inputs move: every layer's of the feature extraction, or the convolutions' only
    (m), (p)    memory-optimal algorithm (no workspace), or performance-optimal (the fastest, whatever its workspace)
    dyn         the first that fits of: no offload (p), conv(p), all(p), conv and all with algorithms stepped down where they
                would not fit, all(m)

Where this departs from the paper stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import infeasible
from vramlab.schedule import Compute, Schedule
from vramlab.tape import Tape
from vramlab.variants import fastest, leanest, next_leaner

from .offload import moves_of
from .step import Algorithms, Step

UID = "a6c782eef93e3cc6"
NEEDS = ("backward", "variants", "inplace_gradients")
NO_NAME = "-"  # in no variant's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As card.yaml declares them."""

    policy: str = "dyn"
    algorithms: str = "p"
    winograd: bool = False
    is_async: bool = False
    prefetch_trigger: str = "every-layer"


@dataclass(frozen=True, slots=True)
class Trial:
    """One combination that dyn tries: `algorithms` is m, p or greedy."""

    policy: str
    algorithms: str


TRIALS = (Trial("none", "p"), Trial("conv", "p"), Trial("all", "p"), Trial("conv", "greedy"), Trial("all", "greedy"), Trial("all", "m"))


@dataclass(frozen=True, slots=True)
class Vdnn:
    """The planner."""

    options: Options

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The first trial that fits; a static policy has one. PlanInfeasible names the least peak of those tried."""
        check_needs(tape, NEEDS, "vdnn")
        tried = []
        for trial in self.trials():
            checked = self.schedule_of(trial, tape, device, budget)
            if fits(checked, budget):
                return checked.schedule
            tried.append(checked)
        raise self._refusal(tried, tape, device, budget)

    def trials(self) -> tuple[Trial, ...]:
        """In order."""
        return TRIALS if self.options.policy == "dyn" else (Trial(self.options.policy, self.options.algorithms),)

    def schedule_of(self, trial: Trial, tape: Tape, device: DeviceProfile, budget: Budget) -> CheckedSchedule:
        """The schedule of a trial, legal and perhaps beyond the budget."""
        moves = moves_of(tape, trial.policy)
        algorithms = self._memory(tape) if trial.algorithms == "m" else self._performance(tape)

        def written(algorithms: Algorithms) -> CheckedSchedule:
            step = Step(tape, device, budget, moves, algorithms, is_async=self.options.is_async,
                        skips_small=self.options.prefetch_trigger == "heavy-layers")
            return check_schedule(tape, Schedule(instructions=step.write(), tape_digest=tape.digest, method=UID))

        checked = written(algorithms)
        return written(self._stepped_down(checked, algorithms, budget)) if trial.algorithms == "greedy" else checked

    # --- algorithms ------------------------------------------------------------------------------------------------------
    @property
    def _without(self) -> str:
        return NO_NAME if self.options.winograd else "winograd"

    def _performance(self, tape: Tape) -> Algorithms:
        return {op.id: fastest(op, self._without).name or None for op in tape.ops if op.variants}

    def _memory(self, tape: Tape) -> Algorithms:
        return {op.id: leanest(op, self._without).name or None for op in tape.ops if op.variants}

    def _stepped_down(self, checked: CheckedSchedule, algorithms: Algorithms, budget: Budget) -> Algorithms:
        """Layer by layer: where an op would not fit, the next algorithm with less workspace, to the leanest."""
        found = dict(algorithms)
        for op, inner_peak_bytes in _runs(checked):
            now = checked.tape.ops[op].variant(found.get(op))
            over = inner_peak_bytes - budget.device_bytes
            while over > 0 and (leaner := next_leaner(checked.tape.ops[op], now, self._without)) is not None:
                over -= now.workspace_bytes - leaner.workspace_bytes
                now = leaner
                found[op] = now.name or None
        return found

    # --- refusals --------------------------------------------------------------------------------------------------------
    def _refusal(self, tried: list[CheckedSchedule], tape: Tape, device: DeviceProfile, budget: Budget) -> PlanInfeasible:
        """Names the least budget at which one of the trials does fit."""
        candidates = [*tried, *(self.schedule_of(Trial(policy, "m"), tape, device, budget) for policy in self._greedy_policies())]
        reachable = [c for c in candidates if c.peak_host_bytes <= budget.host_bytes and c.peak_bytes > budget.device_bytes]
        if reachable:
            return infeasible(min(reachable, key=lambda c: c.peak_bytes), budget, "vdnn")
        return PlanInfeasible(method="vdnn", budget_bytes=budget.device_bytes, smallest_bytes=None, op=_binding_op(tried[-1]))

    def _greedy_policies(self) -> tuple[str, ...]:
        """With a budget as low as (m) needs, their algorithms are those of (m) at the peak, at most."""
        return ("conv", "all") if self.options.policy == "dyn" else ()


def fits(checked: CheckedSchedule, budget: Budget) -> bool:
    """On the device and on the host."""
    return checked.peak_bytes <= budget.device_bytes and checked.peak_host_bytes <= budget.host_bytes


def _runs(checked: CheckedSchedule) -> Iterator[tuple[int, int]]:
    """(op, device bytes at its highest instant), in order."""
    for instruction, nbytes in zip(checked.schedule.instructions, checked.inner_peak_bytes.tolist()):
        if isinstance(instruction, Compute):
            yield instruction.op, nbytes


def _binding_op(checked: CheckedSchedule) -> str:
    """The op before whose end the host holds most."""
    ran = [i.op for i in checked.schedule.instructions[:int(checked.host_bytes.argmax()) + 1] if isinstance(i, Compute)]
    return checked.tape.op_name((ran or [0])[-1])


def build(**options: object) -> Vdnn:
    """The planner for these options."""
    return Vdnn(Options(**options))
