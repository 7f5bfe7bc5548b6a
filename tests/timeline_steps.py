"""One training step written by hand with all that happens in it, second by second: the oracle of the memory timeline."""

from __future__ import annotations

from vramlab.device import DeviceProfile
from vramlab.liveness import replay_schedule
from vramlab.schedule import Compute, Free, FreeHost, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.tape import Phase, Role, Tape

from tapes import TapeBuilder

LINK = {"d2h_bytes_per_second": 50.0, "h2d_bytes_per_second": 100.0, "copy_latency_seconds": 0.0}
DEVICE = DeviceProfile(name="by-hand", memory_bytes=1000, flops_per_second=1.0, flops_efficiency=1.0, memory_bytes_per_second=1.0, **LINK)


def swapping_tape(module: str = "block.conv", target: str = "aten.convolution.default") -> Tape:
    """Bytes: w 10, its gradient 10 and momentum 10, x 100, a 200, b 60, loss 4, da 200."""
    tape = TapeBuilder()
    w, x = tape.state(f"{module}.weight", 10), tape.state("input.0", 100, Role.INPUT)
    a, b, loss = tape.temporary(200, Role.ACTIVATION), tape.temporary(60, Role.ACTIVATION), tape.temporary(4, at_end=True)
    da, g = tape.temporary(200), tape.state(f"{module}.weight.grad", 10, Role.GRADIENT, at_start=False)
    momentum = tape.state(f"{module}.weight.momentum", 10, Role.OPTIMIZER_STATE)
    tape.call(target, [w, x], [a], layer=module, workspace_bytes=7, seconds=2.0)
    tape.call("aten.relu.default", [a], [b], layer="block.relu")
    tape.call("aten.mean.default", [b], [loss], layer="head", workspace_bytes=1)
    tape.call("aten.mean_backward.default", [loss, b], [da], layer="head", phase=Phase.BACKWARD, seconds=2.0)
    tape.call("aten.convolution_backward.default", [da, a, x, w], [g], layer=module, phase=Phase.BACKWARD, workspace_bytes=90, seconds=3.0)
    tape.call("vramlab.optimizer_step", [w, g, momentum], phase=Phase.OPTIMIZER, mutates=[w, momentum], workspace_bytes=20, seconds=4.0)
    return tape.build(loss)


# Storages: 0 w, 1 x, 2 a, 3 b, 4 loss, 5 da, 6 g, 7 momentum.
SWAPPING = (Compute(0), Compute(1), Offload(2), Compute(2), Free(3), Wait(2), Free(2), Prefetch(2), Wait(2), Recompute(1), Compute(3),
            Free(3), FreeHost(2), Compute(4), Free(2), Free(5), Compute(5))
PLAIN = (Compute(0), Compute(1), Compute(2), Compute(3), Free(3), Compute(4), Free(2), Free(5), Compute(5))


def schedule_of(tape: Tape, instructions=SWAPPING) -> Schedule:
    return Schedule(instructions=tuple(instructions), tape_digest=tape.digest)


ROLES = ("parameter", "buffer", "gradient", "optimizer_state", "input", "activation", "temporary")
# Second, instruction, inside the op, then bytes by role.
INSTANTS = (
    (0, -1, 0, 10, 0, 0, 10, 100, 0, 0),
    (0, 0, 7, 10, 0, 0, 10, 100, 200, 0), (2, 0, 0, 10, 0, 0, 10, 100, 200, 0),  # a
    (2, 1, 0, 10, 0, 0, 10, 100, 260, 0),  # b; the copy of a goes out from 3 to 7
    (3, 3, 1, 10, 0, 0, 10, 100, 260, 4), (4, 3, 0, 10, 0, 0, 10, 100, 260, 4),  # the loss
    (4, 4, 0, 10, 0, 0, 10, 100, 200, 4), (7, 6, 0, 10, 0, 0, 10, 100, 0, 4), (7, 7, 0, 10, 0, 0, 10, 100, 200, 4),  # in from 7 to 9
    (9, 9, 0, 10, 0, 0, 10, 100, 260, 4),  # b again
    (10, 10, 0, 10, 0, 0, 10, 100, 260, 204), (12, 11, 0, 10, 0, 0, 10, 100, 200, 204),
    (12, 13, 90, 10, 0, 10, 10, 100, 200, 204), (15, 13, 0, 10, 0, 10, 10, 100, 200, 204),
    (15, 14, 0, 10, 0, 10, 10, 100, 0, 204), (15, 15, 0, 10, 0, 10, 10, 100, 0, 4),
    (15, 16, 20, 10, 0, 10, 10, 100, 0, 4), (19, 16, 0, 10, 0, 10, 10, 100, 0, 4),
)
PEAK_BYTES = 10 + 10 + 10 + 100 + 200 + 204 + 90
PLAIN_PEAK_BYTES = PEAK_BYTES
PHASES = (("forward", 0, 10, 0), ("backward", 10, 15, 10), ("optimizer", 15, 19, 16))  # start, end, first instruction
EVENTS = {  # (instruction, start, end)
    "compute": ((0, 0, 2), (1, 2, 3), (3, 3, 4), (10, 10, 12), (13, 12, 15), (16, 15, 19)), "recompute": ((9, 9, 10),),
    "wait": ((5, 4, 7), (8, 7, 9)), "copy out": ((2, 3, 7),), "copy in": ((7, 7, 9),),
}


def long_tape(layers: int) -> Tape:
    """So many convolutions in a row and back: two ops a layer, and one in the middle. Maps of 1000 bytes, weights of 10."""
    tape = TapeBuilder()
    x, names = tape.state("input.0", 1000, Role.INPUT), [f"block{k // 100}.{k % 100}.conv" for k in range(layers)]
    weights = [tape.state(f"{name}.weight", 10) for name in names]
    maps = [x]
    for name, w in zip(names, weights):
        maps.append(tape.temporary(1000, Role.ACTIVATION))
        tape.call("aten.convolution.default", [maps[-2], w], [maps[-1]], layer=name, workspace_bytes=700)
    loss, dx = tape.temporary(4, at_end=True), tape.temporary(1000)
    tape.call("aten.mean.default", [maps[-1]], [loss, dx], layer="head", phase=Phase.BACKWARD)
    for k in reversed(range(layers)):
        dy, dx = dx, tape.temporary(1000)
        g = tape.state(f"{names[k]}.weight.grad", 10, Role.GRADIENT, at_start=False)
        tape.call("aten.convolution_backward.default", [dy, maps[k], weights[k]], [dx, g], layer=names[k], phase=Phase.BACKWARD,
                  workspace_bytes=300, seconds=2.0)
    return tape.build(loss)


def swapping(tape: Tape) -> Schedule:
    """Eager's order; every third map leaves for the host after its last forward reader and comes back for its backward one."""
    forward = {op.id for op in tape.ops if op.phase is Phase.FORWARD}
    moved = [s.id for s in tape.storages if s.role is Role.ACTIVATION and len(tape.readers[s.id]) == 2][::3]
    out, back = ({tape.readers[s][k]: s for s in moved} for k in (0, 1))
    assert set(out) <= forward and not forward & set(back)
    instructions = []
    for i in replay_schedule(tape).instructions:
        op = i.op if isinstance(i, Compute) else None
        instructions += [Prefetch(back[op]), Wait(back[op]), FreeHost(back[op])] if op in back else []
        instructions.append(i)
        instructions += [Offload(out[op]), Wait(out[op]), Free(out[op])] if op in out else []
    return schedule_of(tape, instructions)
