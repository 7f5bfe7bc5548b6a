"""What a method is to the engine: a Planner that decides before the step, or a Policy that decides during it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, runtime_checkable

from vramlab.device import DeviceProfile
from vramlab.errors import CaptureError, PlanInfeasible
from vramlab.schedule import Schedule
from vramlab.tape import Tape

_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNLIMITED = 2**62
_LONGEST_NUMBER = 40  # characters; more say no more, and fill the line of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The most bytes that a step may hold: on the device (everything), and as host copies."""

    device_bytes: int
    host_bytes: int = UNLIMITED
    wants_smallest: bool = True  # a refusal names the smallest budget that the method reaches; who only asks "does it fit" does without


def parse_bytes(text: str | int) -> int:
    """`"6GiB"`, `"6GB"`, `"1.5 GiB"`, `1024` -> bytes. ValueError says what is allowed."""
    if isinstance(text, int) and not isinstance(text, bool):
        value, unit = text, ""
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
        if not match or match[2] not in _UNITS:
            raise ValueError(f"{text!r} is no size; write for example 6GiB, 6GB, 512MiB or a number of bytes")
        if len(match[1]) > _LONGEST_NUMBER:
            raise ValueError(f"a number of {len(match[1])} digits is no size")
        value, unit = Fraction(match[1]), match[2]
        if _UNITS[unit] == 1 and value.denominator != 1:
            raise ValueError(f"{text!r} is no size: a part of a byte; write a unit, for example 1.5GiB")
    nbytes = int(value * _UNITS[unit])
    if nbytes <= 0:
        raise ValueError(f"{text!r} is no size: it must be above zero")
    if nbytes >= UNLIMITED:
        raise ValueError(f"{text!r} is no size: no device has 4 EiB or more")
    return nbytes


def parse_percent(text: str | int | float) -> float | None:
    """`"60%"` -> 0.6; None when the text is not a percentage. ValueError outside 0 < p <= 1000 %."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", str(text))
    if not match:
        return None
    share = float(match[1]) / 100
    if not 0 < share <= 10:
        raise ValueError(f"{text!r} is no share of eager's peak: it must be above 0 % and at most 1000 %")
    return share


@runtime_checkable
class Planner(Protocol):
    """A method that decides before the step."""

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """A legal schedule whose peak is at most the budget. Raises PlanInfeasible or Unsupported."""
        ...


@runtime_checkable
class SeededPlanner(Planner, Protocol):
    """A planner that may begin with schedules of others for the same tape, which the engine hands over (vramlab/seeds.py)."""

    def plan_from(self, seeds: Sequence[Schedule], tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """As `plan`, and never slower than a seed that is legal and within the budget."""
        ...


def ask(planner: Planner, tape: Tape, device: DeviceProfile, budget: Budget, name: str, seeds: Sequence[Schedule] = ()) -> Schedule:
    """The planner's schedule. TypeError names the method whose `plan` returned something else."""
    is_seeded = seeds and isinstance(planner, SeededPlanner)
    schedule = planner.plan_from(seeds, tape, device, budget) if is_seeded else planner.plan(tape, device, budget)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"plan() of method {name!r} returned {type(schedule).__name__}, not a Schedule")
    return schedule


def needs_of(planner: Planner, stated: Sequence[str]) -> Sequence[str]:
    """What the tapes that it is given are prepared for: what its card states, unless the planner itself knows (a saved schedule does)."""
    return getattr(planner, "needs", stated)


@runtime_checkable
class SubBatchPlanner(Planner, Protocol):
    """A planner that may cut the batch. The engine asks for the sizes first; `plan` then gets the tape of all passes."""

    def micro_batches(self, at: Callable[[int], Tape], batch_size: int, budget: Budget) -> tuple[int, ...]:
        """Sizes of the passes, which add up to the batch; one pass leaves it whole. `at` gives the tape of a pass of so many samples,
        whose op times may be zero; it raises CaptureError where the network takes no batch so small. Raises PlanInfeasible or Unsupported.
        """
        ...


def passes_of(planner: Planner, at: Callable[[int], Tape], batch_size: int, budget: Budget,
              measured: Callable[[int], Tape] | None = None) -> tuple[int, ...]:
    """The passes that a planner wants over the batch; empty when it leaves the batch whole.

    `measured` gives the tape of a pass with measured costs. Few sizes are measured: those that the planner chooses, which it is asked
    for again until it has chosen by measured costs. At other sizes workspaces are in proportion to those of the size measured nearest.
    """
    if not isinstance(planner, SubBatchPlanner):
        return ()
    known = {batch_size: measured(batch_size)} if measured else {}

    def tape_of(size: int) -> Tape:
        return known[size] if size in known else _in_proportion(at(size), known.values())

    while True:
        try:
            sizes = planner.micro_batches(tape_of, batch_size, budget)
            missing = {*sizes} - {*known}
        except PlanInfeasible:
            fewest = next(size for size in range(1, batch_size + 1) if size == batch_size or _runs(at, size))
            missing = {fewest} - {*known}
            if not measured or not missing:
                raise
        if not measured or not missing:
            return sizes if len(sizes) > 1 else ()
        known |= {size: measured(size) for size in sorted(missing)}


def _runs(at: Callable[[int], Tape], size: int) -> bool:
    try:
        at(size)
    except CaptureError:
        return False
    return True


def _in_proportion(tape: Tape, known: Iterable[Tape]) -> Tape:
    """With workspaces as large as those of the known tape of the nearest size, in proportion; as it is where that one has other ops."""
    nearest = min(known, key=lambda other: abs(other.batch_size - tape.batch_size), default=None)
    if nearest is None or [op.target for op in nearest.ops] != [op.target for op in tape.ops]:
        return tape
    spaces = [op.least_workspace_bytes * tape.batch_size // nearest.batch_size for op in nearest.ops]
    return tape.with_costs([0.0] * len(spaces), [max(space, op.workspace_bytes) for space, op in zip(spaces, tape.ops)])
