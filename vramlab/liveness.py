"""When storages live in eager's order, the schedule that follows from it, and the least memory that a step needs."""

from __future__ import annotations

from collections.abc import Callable

from vramlab.schedule import Compute, Free, Instruction, Schedule
from vramlab.tape import Op, Phase, Tape

ACCUMULATIONS = frozenset({"aten.add.Tensor", "vramlab.accumulate_grad"})


def first_use(tape: Tape) -> tuple[int | None, ...]:
    """Per storage: the first op that creates, reads or overwrites it; None when no op does."""
    found: list[int | None] = [None] * len(tape.storages)
    for op in reversed(tape.ops):
        for s in used_storages(tape, op.id):
            found[s] = op.id
    return tuple(found)


def last_use(tape: Tape) -> tuple[int | None, ...]:
    """Per storage: the last op that creates, reads or overwrites it; None when no op does."""
    found: list[int | None] = [None] * len(tape.storages)
    for op in tape.ops:
        for s in used_storages(tape, op.id):
            found[s] = op.id
    return tuple(found)


def used_storages(tape: Tape, op: int) -> tuple[int, ...]:
    """The storages that an op reads, overwrites or creates, ascending."""
    return tuple(sorted({*tape.reads[op], *tape.ops[op].mutates, *tape.creates[op]}))


def live_storages(tape: Tape, op: int) -> tuple[int, ...]:
    """The storages that are on the device after op `op` of the liveness schedule, ascending."""
    first, last = first_use(tape), last_use(tape)
    return tuple(
        s.id for s in tape.storages
        if (s.at_start or (first[s.id] is not None and first[s.id] <= op)) and (s.at_end or (last[s.id] is not None and last[s.id] > op))
    )


def eager_reuse(tape: Tape, op: Op, dies_here: bool) -> int | None:
    """The input whose region eager itself lets the op's output take over, None where it allocates anew."""
    if op.takeover is None or not dies_here or tape.storages[op.takeover[1]].at_end:
        return None
    return op.takeover[1] if op.is_eager_inplace or op.target in ACCUMULATIONS else None


def gradient_reuse(tape: Tape, op: Op, dies_here: bool) -> int | None:
    """As `eager_reuse`, and in the backward every input that the tape allows: for frameworks that write gradients over each other."""
    if op.takeover is None or not dies_here or tape.storages[op.takeover[1]].at_end:
        return None
    return op.takeover[1] if op.phase is Phase.BACKWARD else eager_reuse(tape, op, dies_here)


def replay_schedule(tape: Tape, method: str = "", reuse_of: Callable[[Tape, Op, bool], int | None] = eager_reuse) -> Schedule:
    """Eager's order and liveness: every op in tape order, each storage freed right after its last use unless the step keeps it.

    `reuse_of` (tape, op, does the input that it may write over die there?) says what an op writes over: what eager does.
    """
    last = last_use(tape)
    dying: list[list[int]] = [[] for _ in tape.ops]
    instructions: list[Instruction] = []
    for s in tape.storages:
        if last[s.id] is not None and not s.at_end:
            dying[last[s.id]].append(s.id)
        elif s.at_start and not s.at_end:
            instructions.append(Free(s.id))
    for op in tape.ops:
        reuse = reuse_of(tape, op, op.takeover is not None and last[op.takeover[1]] == op.id)
        instructions.append(Compute(op.id, reuse))
        instructions += [Free(s) for s in dying[op.id] if s != reuse]
    return Schedule(instructions=tuple(instructions), tape_digest=tape.digest, method=method)


def working_set_bytes(tape: Tape, op: int) -> int:
    """The least that the device holds while an op runs: what it reads, overwrites and creates, and the inside of its leanest variant.

    A region that the output can take over counts once.
    """
    return _used_beside(tape, op, frozenset()) + tape.ops[op].least_workspace_bytes


def floor_bytes(tape: Tape) -> list[int]:
    """Per op: the state that stays resident and what the op uses, its inside apart. A region that its output can take over counts once."""
    state = frozenset(s.id for s in tape.storages if s.at_start and s.at_end)
    state_bytes = sum(tape.storages[s].nbytes for s in state)
    return [state_bytes + _used_beside(tape, op.id, state) for op in tape.ops]


def lower_bound_bytes(tape: Tape) -> int:
    """No legal schedule that keeps the step's state resident has a lower peak.

    State is what is resident at the start and at the end. While an op first runs, the device holds that state and the op's
    working set; every op runs; so the largest of these sums stands below every peak, as does what the step ends with.
    """
    ends = [sum(s.nbytes for s in tape.storages if s.at_start), sum(s.nbytes for s in tape.storages if s.at_end)]
    return max([*ends, *(floor + op.least_workspace_bytes for floor, op in zip(floor_bytes(tape), tape.ops))])


def _used_beside(tape: Tape, op: int, state: frozenset[int]) -> int:
    used = set(used_storages(tape, op)) - state
    if takeover := tape.ops[op].takeover:
        used.discard(takeover[1])
    return sum(tape.storages[s].nbytes for s in used)
