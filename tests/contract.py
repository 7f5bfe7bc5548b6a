"""What every method promises, whatever its paper. Each rule is a function that fails with what it saw.

The schedules are judged by a symbolic machine (tests/oracle.py) that shares no code with the planner, the checker or the
simulator; the budgets by hand-countable tapes (tests/tapes.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from oracle import Machine
from tapes import TOYS, StepBuilder

from vramlab import in_place
from vramlab.check import check_schedule
from vramlab.collection import Method
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible, Unsupported
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Free, FreeHost, Offload, Prefetch, Recompute, Schedule
from vramlab.simulate import simulate
from vramlab.tape import Op, Phase, Tape, Variant
from vramlab.trace import Metrics

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # of the peak without a method
FINE_SHARES = tuple(1 - i / 50 for i in range(36))
# 1000 bytes, a toy's map, take 1.25 s each way: near the second or two that an op takes, so that both actions are worth it.
DEVICE = DeviceProfile(name="toy", memory_bytes=10**6, flops_per_second=1, flops_efficiency=1, memory_bytes_per_second=1,
                       h2d_bytes_per_second=800, d2h_bytes_per_second=800, copy_latency_seconds=0)
EXEMPTIBLE = ("no-overhead-without-a-budget", "peak-falls-with-the-budget", "time-rises-as-the-budget-falls", "state-stays-where-it-is")


def residual() -> Tape:
    """Three residual blocks of convolution (2 s), BatchNorm, in-place relu and addition (0.25 s): the toy that is asked at fine steps."""
    step = StepBuilder()
    x = step.relu(step.batch_norm(step.convolution(step.input)), inplace=True)
    for _ in range(3):
        y = step.relu(step.batch_norm(step.convolution(x)), inplace=True)
        x = step.relu(step.add(step.batch_norm(step.convolution(y)), x), inplace=True)
    tape = step.finish(x)
    return tape.with_costs([2.0 if "convolution" in op.target else 0.25 for op in tape.ops])


TAPES = {**TOYS, "residual": residual}


def option_sets(method: Method) -> Iterator[dict[str, Any]]:
    """The defaults, then each other value of each option that has few."""
    yield {}
    for name, option in method.card.options.items():
        values = option.choices or ([True, False] if option.type == "bool" else [1, 3] if option.type == "int" else [])
        yield from ({name: value} for value in values if value != option.default)


def plain_peak(tape: Tape) -> int:
    """Peak of eager's order and liveness, counted op by op."""
    last = {s: op.id for op in tape.ops for s in (*tape.reads[op.id], *op.mutates, *tape.creates[op.id])}
    live = {s.id for s in tape.storages if s.at_start}
    peak = sum(tape.storages[s].nbytes for s in live)
    for op in tape.ops:
        live |= set(tape.creates[op.id])
        taken = op.takeover and op.takeover[1]
        is_inplace = op.is_eager_inplace or op.target in ("vramlab.accumulate_grad", "aten.add.Tensor")
        if taken is not None and is_inplace and last[taken] == op.id:
            live.discard(taken)
        peak = max(peak, sum(tape.storages[s].nbytes for s in live) + op.workspace_bytes)
        live -= {s for s, at in last.items() if at == op.id and not tape.storages[s].at_end}
    return peak


def toy_variants(op: Op) -> tuple[Variant, ...]:
    """Of a convolution: one that is slower and needs nothing inside, one that is faster and needs 300 bytes."""
    if not op.target.startswith("aten.convolution"):
        return ()
    return Variant("lean", 1.5 * op.seconds, 0), Variant("fast", 0.5 * op.seconds, 300)


@dataclass(frozen=True)
class Answer:
    """What a method says to one budget: a schedule or a refusal."""

    budget: Budget
    schedule: Schedule | None = None
    refusal: PlanInfeasible | None = None


@dataclass(frozen=True)
class Inquiry:
    """One method with one set of options on one toy, asked at every budget."""

    method: Method
    options: Mapping[str, Any]
    toy: str
    device = DEVICE

    @cached_property
    def tape(self) -> Tape:
        tape = TAPES[self.toy]()
        if in_place.NEED in self.method.card.needs:
            tape = in_place.with_inplace_gradients(tape)
        return tape.with_variants([toy_variants(op) for op in tape.ops]) if "variants" in self.method.card.needs else tape

    @cached_property
    def answers(self) -> list[Answer]:
        """Without a budget first, then downwards."""
        peak = plain_peak(self.tape)
        return [self.ask(UNLIMITED), *(self.ask(int(share * peak)) for share in self.shares)]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the peak without a method."""
        return FINE_SHARES if self.toy == "residual" else SHARES

    def ask(self, device_bytes: int, tape: Tape | None = None) -> Answer:
        budget = Budget(device_bytes=device_bytes)
        try:
            return Answer(budget, self.method.build(**self.options).plan(tape or self.tape, self.device, budget))
        except PlanInfeasible as refusal:
            return Answer(budget, refusal=refusal)

    @cached_property
    def planned(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.schedule]

    @cached_property
    def peaks(self) -> list[int]:
        """Of each answer that is planned, on symbolic values; fails unless every value is that of a plain run."""
        return [peak_of_machine(self.tape, answer.schedule) for answer in self.planned]

    @cached_property
    def metrics(self) -> list[Metrics]:
        """Of each answer that is planned."""
        return [simulate(check_schedule(self.tape, answer.schedule), self.device).metrics for answer in self.planned]


def peak_of_machine(tape: Tape, schedule: Schedule) -> int:
    """Runs the schedule on symbolic values; fails unless every value is that of a plain run. The peak in device bytes."""
    machine = Machine(tape)
    peak = machine.device_bytes
    for instruction in schedule.instructions:
        machine.step(instruction)
        peak = max(peak, machine.inner_peak)
    machine.finish()
    return peak


def plans_compute_what_a_plain_run_computes(inquiry: Inquiry) -> None:
    assert inquiry.planned, "no budget at all can be met"
    for answer, peak in zip(inquiry.planned, inquiry.peaks):
        assert peak == check_schedule(inquiry.tape, answer.schedule).peak_bytes


def plans_keep_the_budget(inquiry: Inquiry) -> None:
    for answer, peak in zip(inquiry.planned, inquiry.peaks):
        assert peak <= answer.budget.device_bytes, f"{peak} bytes at a budget of {answer.budget.device_bytes}"


def refusals_name_what_can_be_reached(inquiry: Inquiry) -> None:
    """The smallest reachable budget is above the refused one, and the method does reach it; the op is one of the tape."""
    for answer in inquiry.answers:
        if answer.refusal:
            smallest = answer.refusal.smallest_bytes
            assert smallest > answer.budget.device_bytes == answer.refusal.budget_bytes
            assert inquiry.ask(smallest).schedule, f"refuses the {smallest} bytes that it says it can reach"
            assert answer.refusal.op in {inquiry.tape.op_name(op.id) for op in inquiry.tape.ops}


def no_overhead_without_a_budget(inquiry: Inquiry) -> None:
    unlimited = inquiry.answers[0].schedule
    assert not any(isinstance(i, Recompute | Offload | Prefetch) for i in unlimited.instructions)
    fastest = sum(min([op.seconds, *(v.seconds for v in op.variants)]) for op in inquiry.tape.ops)
    assert fastest <= inquiry.metrics[0].step_seconds <= sum(op.seconds for op in inquiry.tape.ops)


def peak_falls_with_the_budget(inquiry: Inquiry) -> None:
    peaks = [metrics.peak_bytes for metrics in inquiry.metrics]
    assert peaks == sorted(peaks, reverse=True), f"peaks from no budget to the lowest: {peaks}"


def time_rises_as_the_budget_falls(inquiry: Inquiry) -> None:
    seconds = [metrics.step_seconds for metrics in inquiry.metrics]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(seconds)), f"seconds from no budget to the lowest: {seconds}"


def equal_questions_get_equal_answers(inquiry: Inquiry) -> None:
    for answer in inquiry.planned:
        assert inquiry.ask(answer.budget.device_bytes).schedule.digest == answer.schedule.digest


def unmet_needs_are_refused(inquiry: Inquiry) -> None:
    lacking = {
        "timings": inquiry.tape.with_costs([0.0] * len(inquiry.tape.ops)),
        "backward": replace(inquiry.tape, ops=tuple(replace(op, phase=Phase.FORWARD) for op in inquiry.tape.ops)),
        "chain": TOYS["diamond"](),
    }
    for need in set(inquiry.method.card.needs) & set(lacking):
        try:
            inquiry.ask(UNLIMITED, lacking[need])
        except Unsupported as refusal:
            assert need in str(refusal), f"a step without {need} is refused for another reason: {refusal}"
        else:
            raise AssertionError(f"a step without {need} is planned all the same")


def random_ops_are_recomputed_from_a_recorded_state(inquiry: Inquiry) -> None:
    """First runs keep the tape's order, and so draw as eager does; a recompute comes after the run whose state the executor keeps."""
    random_ops = [op.id for op in inquiry.tape.ops if op.is_random]
    for answer in inquiry.planned:
        first = [i.op for i in answer.schedule.instructions if isinstance(i, Compute) and i.op in random_ops]
        assert first == random_ops
        for k, i in enumerate(answer.schedule.instructions):
            assert not isinstance(i, Recompute) or any(isinstance(j, Compute) and j.op == i.op for j in answer.schedule.instructions[:k])


def json_round_trips(inquiry: Inquiry) -> None:
    for answer in inquiry.planned:
        again = Schedule.from_json(json.loads(json.dumps(answer.schedule.to_json())))
        assert again == answer.schedule and again.digest == answer.schedule.digest


def schedules_carry_uid_and_tape(inquiry: Inquiry) -> None:
    for answer in inquiry.planned:
        assert (answer.schedule.method, answer.schedule.tape_digest) == (inquiry.method.card.uid, inquiry.tape.digest)


def a_method_without_budget_ignores_it(inquiry: Inquiry) -> None:
    if not inquiry.method.card.takes_budget:
        assert len({answer.schedule.digest for answer in inquiry.planned}) == 1


def state_stays_where_it_is(inquiry: Inquiry) -> None:
    """Parameters, buffers, inputs and optimizer state neither move nor leave."""
    state = {s.id for s in inquiry.tape.storages if s.at_start and s.at_end}
    for answer in inquiry.planned:
        assert not [i for i in answer.schedule.instructions if isinstance(i, Free | Offload | Prefetch | FreeHost) and i.storage in state]


RULES = {rule.__name__.replace("_", "-"): rule for rule in (
    plans_compute_what_a_plain_run_computes, plans_keep_the_budget, refusals_name_what_can_be_reached, no_overhead_without_a_budget,
    peak_falls_with_the_budget, time_rises_as_the_budget_falls, equal_questions_get_equal_answers, unmet_needs_are_refused,
    random_ops_are_recomputed_from_a_recorded_state, json_round_trips, schedules_carry_uid_and_tape, a_method_without_budget_ignores_it,
    state_stays_where_it_is,
)}
