"""Copies for gpu_check.py: a plan that hides them under compute, links that time them, and links that cheat.

On CUDA a cheating link slows each copy down and leaves out one of the things that order the streams. What the missing order would let
happen by luck, it makes happen: the region of a copy that was not waited for is overwritten at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from vramlab.device import DeviceProfile
from vramlab.link import CudaLink, PacedLink
from vramlab.liveness import replay_schedule
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Schedule, Wait
from vramlab.tape import Phase, Role, Tape

SLOWDOWN_CYCLES = 4_000_000  # of the GPU's clock, about 2 ms: longer than the ops around a copy
LEAD_CYCLES = 100_000_000  # by which compute is late, so that a copy that does not wait for it is early
MARGIN = 2.0  # of a copy's predicted seconds: how much compute it is given to hide under


# --- a plan whose copies hide under compute -------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Trip:
    """One storage leaves and comes back. Ops by id."""

    storage: int
    offload_after: int
    free_after: int
    prefetch_before: int
    wait_before: int


def trips(tape: Tape, profile: DeviceProfile, share: float) -> list[Trip]:
    """The largest activations that can go and come back while other ops run, until a direction is busy for `share` of the step."""
    ends = list(accumulate(op.seconds for op in tape.ops))
    limit, found = share * ends[-1], []
    busy_out = 0.0
    for storage in sorted(_movable(tape), key=lambda s: -tape.storages[s].nbytes):
        seconds = profile.copy_seconds(tape.storages[storage].nbytes, to_host=True)
        if busy_out + seconds <= limit:
            found.append(storage)
            busy_out += seconds
    return _timed(tape, profile, found, ends)


def _movable(tape: Tape) -> list[int]:
    """Activations that no op writes over before the backward phase reads them. No indices: a cheat would make them point anywhere."""
    indices = {t.storage for t in tape.tensors if not t.dtype.startswith(("float", "bfloat"))}
    overwritten = {i.reuse for i in replay_schedule(tape).instructions if isinstance(i, Compute)}
    return [s.id for s in tape.storages if s.role is Role.ACTIVATION and s.nbytes >= 4096 and tape.producer[s.id] is not None
            and not s.at_end and s.id not in overwritten | indices and _reads(tape, s.id, Phase.BACKWARD)]


def _reads(tape: Tape, storage: int, phase: Phase) -> list[int]:
    return [op for op in tape.readers[storage] if tape.ops[op].phase is phase]


def _timed(tape: Tape, profile: DeviceProfile, storages: Sequence[int], ends: Sequence[float]) -> list[Trip]:
    """When each copy can start and must be over, both directions in the order of the step; who has no time to leave stays."""
    starts = [0.0, *ends[:-1]]
    last_forward = {s: max([tape.producer[s], *_reads(tape, s, Phase.FORWARD)]) for s in storages}
    first_backward = {s: min(_reads(tape, s, Phase.BACKWARD)) for s in storages}
    free_after, clock = {}, 0.0
    for s in sorted(storages, key=last_forward.__getitem__):
        clock = max(clock, ends[last_forward[s]]) + MARGIN * profile.copy_seconds(tape.storages[s].nbytes, to_host=True)
        free_after[s] = next((op for op, end in enumerate(ends) if end >= clock), len(ends))
    found, clock = [], float("inf")
    for s in sorted(storages, key=first_backward.__getitem__, reverse=True):
        begin = min(clock, starts[first_backward[s]]) - MARGIN * profile.copy_seconds(tape.storages[s].nbytes, to_host=False)
        before = max((op for op, start in enumerate(starts) if start <= begin), default=-1)
        if before <= free_after[s]:
            continue
        clock = begin
        found.append(Trip(storage=s, offload_after=last_forward[s], free_after=free_after[s], prefetch_before=before,
                          wait_before=first_backward[s]))
    return found


def in_the_open(trip: Trip) -> Trip:
    """The same trip with nothing to hide under: waited for as soon as it starts."""
    return replace(trip, free_after=trip.offload_after, prefetch_before=trip.wait_before)


def schedule_of(tape: Tape, found: Sequence[Trip]) -> Schedule:
    """Eager's order with these trips in it."""
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    for trip in found:
        after.setdefault(trip.offload_after, []).append(Offload(trip.storage))
    for trip in found:
        after.setdefault(trip.free_after, []).extend([Wait(trip.storage), Free(trip.storage)])
        before.setdefault(trip.prefetch_before, []).append(Prefetch(trip.storage))
    for trip in found:
        before.setdefault(trip.wait_before, []).extend([Wait(trip.storage), FreeHost(trip.storage)])
    out: list[Instruction] = []
    for instruction in replay_schedule(tape).instructions:
        if isinstance(instruction, Compute):
            out += [*before.get(instruction.op, []), instruction, *after.get(instruction.op, [])]
        else:
            out.append(instruction)
    return Schedule(tuple(out), tape.digest, "gpu_check")


# --- links that time ------------------------------------------------------------------------------------------------------
class TimedCudaLink(CudaLink):
    """Times each copy on its stream, and on the compute stream how long it stands at each wait."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.nbytes = 0

    def _copy(self, engine: str, storage: int, to: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._streams[engine]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        begin, end = _timer(), _timer()
        with torch.cuda.stream(stream):
            begin.record(stream)
            to.copy_(source, non_blocking=True)
            end.record(stream)
        self._done[storage] = end
        self._copies.append((begin, end))
        self.nbytes += source.numel()

    def wait(self, storage: int) -> None:
        """See Link."""
        compute = torch.cuda.current_stream(self.device)
        begin, end = _timer(), _timer()
        begin.record(compute)
        super().wait(storage)
        end.record(compute)
        self._waits.append((begin, end))

    def take(self) -> tuple[float, float, int]:
        """(seconds of all copies, seconds of all waits, bytes) since the last call."""
        torch.cuda.synchronize(self.device)
        copies, waits = (sum(a.elapsed_time(b) for a, b in pairs) / 1000 for pairs in (self._copies, self._waits))
        nbytes, self.nbytes, self._copies, self._waits = self.nbytes, 0, [], []
        return copies, waits, nbytes


class TimedPacedLink(PacedLink):
    """The same on the CPU, where a copy takes what its pace says."""

    def __init__(self, profile: DeviceProfile) -> None:
        super().__init__(profile)
        self._seconds = [0.0, 0.0]
        self.nbytes = 0

    def _start(self, engine: str, storage: int, to: int, source: int, nbytes: int, *, to_host: bool) -> None:
        self._seconds[0] += self.profile.copy_seconds(nbytes, to_host=to_host)
        self.nbytes += nbytes
        super()._start(engine, storage, to, source, nbytes, to_host=to_host)

    def wait(self, storage: int) -> None:
        """See Link."""
        started = time.perf_counter()
        super().wait(storage)
        self._seconds[1] += time.perf_counter() - started

    def take(self) -> tuple[float, float, int]:
        """As of TimedCudaLink."""
        (copies, waits), nbytes = self._seconds, self.nbytes
        self._seconds, self.nbytes = [0.0, 0.0], 0
        return copies, waits, nbytes


def timed_link(device: torch.device, profile: DeviceProfile) -> TimedCudaLink | TimedPacedLink:
    """Of this device."""
    return TimedCudaLink(device) if device.type == "cuda" else TimedPacedLink(profile)


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


# --- links that cheat -----------------------------------------------------------------------------------------------------
CHEATS = {  # what a link leaves out -> must the truth gate find it?
    "nothing": False,
    "wait-for-prefetch": True,
    "wait-for-offload": True,
    "wait-for-compute": True,
}


class CheatingCudaLink(CudaLink):
    """Slow copies, and one thing left out."""

    def __init__(self, device: torch.device, cheat: str) -> None:
        super().__init__(device)
        self.cheat = cheat
        self._moves: dict[int, tuple[str, torch.Tensor]] = {}

    def start_step(self) -> None:
        """Compute is late where copies are not to wait for it."""
        if self.cheat == "wait-for-compute":
            torch.cuda._sleep(LEAD_CYCLES)

    def _copy(self, engine: str, storage: int, to: torch.Tensor, source: torch.Tensor) -> None:
        if engine == "h2d":
            to.fill_(255)  # a fresh region holds anything: here NaNs
        stream = self._streams[engine]
        if not (self.cheat == "wait-for-compute" and engine == "d2h"):
            stream.wait_stream(torch.cuda.current_stream(self.device))
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            if self.cheat != "wait-for-compute":
                torch.cuda._sleep(SLOWDOWN_CYCLES)
            to.copy_(source, non_blocking=True)
            event.record(stream)
        self._done[storage] = event
        self._moves[storage] = engine, source

    def wait(self, storage: int) -> None:
        """See Link."""
        engine, source = self._moves.pop(storage)
        if (self.cheat, engine) == ("wait-for-prefetch", "h2d"):
            self._done.pop(storage)
        elif (self.cheat, engine) == ("wait-for-offload", "d2h"):
            self._done.pop(storage)
            source.fill_(255)  # the region's next owner writes
        else:
            super().wait(storage)


class CheatingPacedLink(PacedLink):
    """What each missing wait comes to on a CPU, where an early read of freed memory would end the process."""

    def __init__(self, profile: DeviceProfile, cheat: str) -> None:
        super().__init__(profile)
        self.cheat = cheat
        self._later: dict[int, torch.Tensor] = {}

    def start_step(self) -> None:
        """Nothing: there are no streams."""

    def offload(self, arena: Any, storage: int, stay: int, source: torch.Tensor) -> None:
        """See Link. Not waited for, the copy finds what the region's next owner wrote."""
        if self.cheat == "wait-for-offload":
            source = self._later[storage] = torch.full((source.untyped_storage().nbytes(),), 255, dtype=torch.uint8)
        super().offload(arena, storage, stay, source)

    def prefetch(self, arena: Any, storage: int, stay: int, target: torch.Tensor) -> None:
        """See Link. Not waited for, nothing has come yet."""
        if self.cheat == "wait-for-prefetch":
            target.zero_()
        else:
            super().prefetch(arena, storage, stay, target)

    def wait(self, storage: int) -> None:
        """See Link."""
        if storage in self._done:
            super().wait(storage)


def cheating_link(device: torch.device, profile: DeviceProfile, cheat: str) -> CheatingCudaLink | CheatingPacedLink | None:
    """Of this device; None where the cheat needs streams."""
    if device.type == "cuda":
        return CheatingCudaLink(device, cheat)
    return None if cheat == "wait-for-compute" else CheatingPacedLink(profile, cheat)
