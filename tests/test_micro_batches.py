"""Steps over micro-batches equal eager over the same micro-batches, bit for bit, and what is wrong about one is found."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from oracle import Machine
from steps import cross_entropy
from torch import nn

import vramlab.micro_step
from vramlab.capture import Captured, capture
from vramlab.check import check_schedule
from vramlab.errors import ScheduleError, Unsupported
from vramlab.execute import Executor
from vramlab.gate import Side, run_gate
from vramlab.liveness import replay_schedule
from vramlab.micro_batches import changes_semantics, equal_passes, scaled_passes
from vramlab.micro_step import capture_passes, eager_over_micro_batches
from vramlab.record import Truth
from vramlab.schedule import Compute, Free, FreeHost, Offload, Prefetch, Schedule, Wait
from vramlab.tape import Phase, Role, Tape

SIZES = (4, 4, 2)


def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5),
                         nn.Linear(144, 5))


class Tied(nn.Module):
    """One weight twice, and a tensor that the code closes over."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(192, 192, bias=False), nn.Linear(192, 5), torch.full((192,), 0.5)

    def forward(self, x):
        h = F.relu(self.a(x.flatten(1)) * self.scale)
        return self.b(self.a(h))


NETWORKS = {"plain": plain, "normalised": normalised, "tied": Tied}


def batch_of(n: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.randint(0, 5, (n,), generator=generator)


def sides(make, sizes=SIZES, *, schedule=replay_schedule, tamper=None, reference_sizes=None):
    """Builders of eager over micro-batches and of the executed step over them."""
    def side(is_tested: bool) -> Side:
        model, batch = make(), batch_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = executor(model, batch, optimizer) if is_tested else lambda: eager_over_micro_batches(
            model, cross_entropy, batch, reference_sizes or sizes)

        def step(_i: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = run()
            optimizer.step()
            return loss

        return Side(model=model, step=step, optimizer=optimizer)

    def executor(model, batch, optimizer):
        captured = capture_passes(model, cross_entropy, batch, sizes, optimizer=optimizer)
        if tamper:
            captured = Captured(tamper(captured.tape), captured.binding)
        step = Executor(captured, check_schedule(captured.tape, schedule(captured.tape)), model)
        return lambda: step(*batch, verify=True).loss

    return lambda: side(False), lambda: side(True)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("sizes", [(4, 4, 2), (5, 5), (1,) * 10, (10,)])
def test_equals_eager_over_the_same_micro_batches(name: str, sizes):
    result = run_gate(*sides(NETWORKS[name], sizes))
    assert (result.truth, result.differing) == (Truth.EXACT, ())


def test_gradients_that_are_there_are_added_to():
    torch.manual_seed(0)
    reference = normalised()
    tested = copy.deepcopy(reference)
    batch = batch_of()
    for model in (reference, tested):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    names = frozenset(dict(tested.named_parameters()))
    captured = capture_passes(tested, cross_entropy, batch, SIZES, with_gradient=names)
    for _ in range(2):
        torch.manual_seed(1)
        loss = eager_over_micro_batches(reference, cross_entropy, batch, SIZES)
        torch.manual_seed(1)
        found = Executor(captured, check_schedule(captured.tape, replay_schedule(captured.tape)), tested)(*batch).loss
        assert torch.equal(loss, found)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(reference.parameters(), tested.parameters()))


def offload_everything(tape: Tape) -> Schedule:
    """Each activation leaves after its last forward use in its pass and comes back before its next use."""
    instructions = []
    on_host, copied = set(), set()
    for i in replay_schedule(tape).instructions:
        op = tape.ops[i.op] if isinstance(i, Compute) else None
        for s in [s for s in (*tape.reads[op.id], *op.mutates) if s in on_host] if op else []:
            instructions += [Prefetch(s), Wait(s)]
            on_host.discard(s)
        if op and i.reuse is not None and tape.storages[i.reuse].role is Role.ACTIVATION:
            i = replace(i, reuse=None)
        instructions.append(i)
        if isinstance(i, Free) and i.storage in copied:
            instructions.append(FreeHost(i.storage))
        made = [s for s in tape.creates[op.id] if tape.storages[s].role is Role.ACTIVATION] if op and op.phase is Phase.FORWARD else []
        for s in made:
            if len(tape.readers[s]) > 1 and not any(tape.ops[r].takeover and tape.ops[r].takeover[1] == s for r in tape.readers[s]):
                instructions += [Offload(s), Wait(s), Free(s)]
                on_host.add(s)
                copied.add(s)
    return Schedule(instructions=tuple(instructions), tape_digest=tape.digest, micro_batches=tape.micro_batches)


def test_a_swapping_schedule_over_micro_batches_is_exact():
    offloads = []

    def schedule(tape: Tape) -> Schedule:
        planned = offload_everything(tape)
        offloads.append(planned.count(Offload))
        return planned

    result = run_gate(*sides(plain, schedule=schedule))
    assert result.truth is Truth.EXACT and offloads[0] >= 3


def test_a_gradient_that_leaves_in_every_pass_has_a_stay_on_the_host_of_its_own_each_time():
    """Each addition makes the host's copy stale: it is gone without a `FreeHost`, and the next copy lies elsewhere in time."""
    moves = []

    def schedule(tape: Tape) -> Schedule:
        gradient = max((s for s in tape.storages if s.role is Role.GRADIENT), key=lambda s: s.nbytes).id
        instructions = []
        for i in replay_schedule(tape).instructions:
            op = tape.ops[i.op] if isinstance(i, Compute) else None
            if op and gradient in tape.reads[op.id]:
                instructions += [Prefetch(gradient), Wait(gradient)]
                instructions += [FreeHost(gradient)] if op.phase is Phase.OPTIMIZER else []
            instructions.append(i)
            if op and gradient in (*op.mutates, *tape.creates[op.id]):
                instructions += [Offload(gradient), Wait(gradient), Free(gradient)]
        planned = Schedule(instructions=tuple(instructions), tape_digest=tape.digest, micro_batches=tape.micro_batches)
        moves.append(planned.count(Offload))
        return planned

    assert run_gate(*sides(plain, schedule=schedule)).truth is Truth.EXACT and moves == [len(SIZES)]


# --- negative controls ---------------------------------------------------------------------------------------------------
def test_a_wrong_weight_is_found(monkeypatch):
    weighted = vramlab.micro_step._weighted
    monkeypatch.setattr(vramlab.micro_step, "_weighted", lambda loss_fn, _share: weighted(loss_fn, 1 / len(SIZES)))
    result = run_gate(*sides(plain))
    assert result.truth is Truth.WRONG and "loss" in {d.name for d in result.differing}


def test_other_micro_batches_have_other_batch_statistics():
    """BatchNorm over passes of 5 is not BatchNorm over passes of 4, 4 and 2, nor over the whole batch."""
    for other in ((5, 5), (10,)):
        result = run_gate(*sides(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5)),
                                 reference_sizes=other))
        assert result.truth is Truth.WRONG and "state 1.running_mean" in {d.name for d in result.differing}


def test_a_second_run_of_the_optimizer_is_illegal_and_found():
    captured = capture_passes(model := plain(), cross_entropy, batch_of(), SIZES, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    tape = captured.tape
    assert [op.id for op in tape.ops if op.phase is Phase.OPTIMIZER] == [len(tape.ops) - 1]
    replay = replay_schedule(tape)
    twice = replace(replay, instructions=(*replay.instructions, Compute(len(tape.ops) - 1)))
    with pytest.raises(ScheduleError, match="computed-twice"):
        check_schedule(tape, twice)
    reference, tested = sides(plain)

    def twice_stepped() -> Side:
        side = tested()

        def step(i: int) -> torch.Tensor:
            loss = side.step(i)
            side.optimizer.step()
            return loss

        return replace(side, step=step)

    assert run_gate(reference, twice_stepped).truth is Truth.WRONG


def test_gradients_that_are_overwritten_instead_of_added_are_found():
    def tamper(tape: Tape) -> Tape:
        last = max(op.id for op in tape.ops if op.target == "vramlab.accumulate_grad")
        ops = tuple(replace(op, target="aten.copy_.default", args=op.args[::-1]) if op.id == last else op for op in tape.ops)
        return replace(tape, ops=ops)

    result = run_gate(*sides(plain, tamper=tamper))
    assert result.truth is Truth.WRONG and all(d.name.startswith(("gradient", "state", "optimizer")) for d in result.differing)


def test_a_schedule_for_other_micro_batches_is_refused():
    tape = capture_passes(plain(), cross_entropy, batch_of(), SIZES).tape
    with pytest.raises(ScheduleError, match="micro-batches-mismatch"):
        check_schedule(tape, replace(replay_schedule(tape), micro_batches=(5, 5)))


# --- memory ----------------------------------------------------------------------------------------------------------------
def test_peak_counts_the_whole_inputs_and_the_accumulated_gradients():
    """By hand: what stays is there in every pass; beyond it the largest pass binds, the later of two equal ones for its gradients."""
    model, batch = plain(), batch_of()
    whole = capture_passes(model, cross_entropy, batch, (5, 5)).tape
    one = capture(model, cross_entropy, tuple(part[:5] for part in batch)).tape
    inputs = sum(t.numel() * t.element_size() for t in batch)
    assert whole.bytes_of(Role.INPUT) == inputs == 2 * one.bytes_of(Role.INPUT)
    assert whole.bytes_of(Role.GRADIENT) == one.bytes_of(Role.GRADIENT)
    alone = check_schedule(one, replay_schedule(one)).peak_bytes
    peak = check_schedule(whole, replay_schedule(whole)).peak_bytes
    slack = 64  # weights of losses
    assert alone + inputs // 2 <= peak <= alone + inputs // 2 + one.bytes_of(Role.GRADIENT) + slack


def test_the_oracle_agrees():
    tape = capture_passes(normalised(), cross_entropy, batch_of(), SIZES).tape
    machine = Machine(tape)
    schedule = replay_schedule(tape)
    peak = machine.device_bytes
    for instruction in schedule.instructions:
        machine.step(instruction)
        peak = max(peak, machine.inner_peak)
    machine.finish()
    assert peak == check_schedule(tape, schedule).peak_bytes
    assert Tape.from_json(tape.to_json()) == tape and tape.micro_batches == SIZES


# --- sizes -----------------------------------------------------------------------------------------------------------------
def test_sizes():
    assert equal_passes(10, 4) == (4, 4, 2) and equal_passes(10, 5) == (5, 5) and equal_passes(3, 3) == (3,)
    assert scaled_passes((64, 64, 32), 10) == (4, 4, 2) and scaled_passes((8,) * 4, 4) == (1, 1, 1, 1)
    assert scaled_passes((100, 1, 1), 4) == (2, 1, 1)
    for size in (0, 11):
        with pytest.raises(ValueError, match="from 1 to 10"):
            equal_passes(10, size)
    with pytest.raises(ValueError, match="3 passes"):
        scaled_passes((4, 4, 2), 2)


def test_which_steps_change_with_micro_batches():
    def step(model: nn.Module) -> Tape:
        return capture(model, cross_entropy, batch_of()).tape

    assert changes_semantics(step(normalised()))
    assert not changes_semantics(step(plain())) and not changes_semantics(step(normalised().eval()))


def test_batches_that_cannot_be_cut_are_refused():
    x, y = batch_of()
    with pytest.raises(Unsupported, match="samples"):
        capture_passes(plain(), cross_entropy, (x, y), (4, 4))
    with pytest.raises(Unsupported, match="requires a gradient"):
        capture_passes(plain(), cross_entropy, (x.requires_grad_(), y), SIZES)
