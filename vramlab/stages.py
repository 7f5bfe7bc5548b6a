"""The chain of stages of a tape, and a step written as what chain planners decide: which stage runs, and what it leaves behind.

A stage ends at an articulation point of the forward phase at which the backward phase can be split too:

    forward     x_0 ─► stage 1 ─► x_1 ─► stage 2 ─► x_2 ─► ... ─► stage L ─► loss
    backward           B 1      ◄─       B 2      ◄─       ...     B L

Stage k has index k - 1 here; `x` of a stage is the map that it hands on, None for the last, which ends with the loss. What a stage leaves
for its own backward beside x is `saved`. Storages that cannot be computed again stay where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.layers import Cut, articulation_points, layers_of
from vramlab.planner import Budget
from vramlab.player import ABSENT, Player, StepFacts
from vramlab.tape import Phase, Tape


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive forward ops with the backward ops that belong to them. Op ids and storage ids of the tape."""

    id: int
    forward_ops: range
    backward_ops: range
    x: int | None
    made: tuple[int, ...]  # every storage that its forward creates


def stages_of(tape: Tape, most: int | None = None) -> tuple[Stage, ...]:
    """The longest chain, or one of at most `most` stages; one stage where the tape has no articulation point. At least one forward op."""
    forward = [op.id for op in tape.ops if op.phase is Phase.FORWARD]
    first_backward = next((op.id for op in tape.ops if op.phase is not Phase.FORWARD), len(tape.ops))
    is_one_pass = forward[-1] < first_backward
    cuts = _splits(tape, articulation_points(tape), first_backward) if is_one_pass else []
    if most is not None and len(cuts) >= most:
        cuts = _evenly(tape, cuts, most)
    if not is_one_pass:  # micro-batches: what is forward of one pass comes after the backward of another
        return (Stage(0, range(0), range(len(tape.ops)), None, ()),)
    starts = [0, *(cut.op + 1 for cut, _ in cuts)]
    ends = [*starts[1:], first_backward]
    backward = [*(at for _, at in cuts), first_backward]  # where the backward of a stage begins, the first stage's first
    stops = [len(tape.ops), *backward[:-1]]
    x = [*(cut.storages[0] for cut, _ in cuts), None]
    return tuple(Stage(k, range(starts[k], ends[k]), range(backward[k], stops[k]), x[k],
                       tuple(s for op in range(starts[k], ends[k]) for s in tape.creates[op])) for k in range(len(starts)))


def _splits(tape: Tape, cuts: Iterable[Cut], first_backward: int) -> list[tuple[Cut, int]]:
    """The cuts at which the backward can be split, each with the op at which the backward of what is before it begins.

    From that op on nothing needs what was made after the cut, before it nothing needs what was made before the cut, the map that crosses
    it apart. Between these two it is where the backward of a layer before the cut begins, and what needs that map is through.
    """
    facts, end = StepFacts.of(tape), len(tape.ops)
    made_at = np.array([end if p is None else p for p in tape.producer])
    made_at[made_at >= first_backward] = end
    needs = [[op for op in needed if first_backward <= op < end] for needed in facts.needed_at]
    first = np.array([needed[0] if needed else end for needed in needs])
    last = np.array([needed[-1] if needed else first_backward - 1 for needed in needs])
    layers = layers_of(tape)
    layer_at = np.array([layer.forward_ops[-1] for layer in layers])
    layer_begins = np.array([min(layer.backward_ops, default=end) for layer in layers])
    found = []
    for cut in cuts:
        before = made_at <= cut.op
        before[cut.storages[0]] = False
        low = int(last[(made_at > cut.op) & (made_at < end)].max(initial=first_backward - 1)) + 1
        high = int(first[before].min(initial=end))
        through = int(last[cut.storages[0]]) + 1
        begins = min(max(int(layer_begins[layer_at <= cut.op].min(initial=end)), through, low), high)
        if low <= begins < end:
            found.append((cut, begins))
    return found


def _evenly(tape: Tape, cuts: list[tuple[Cut, int]], most: int) -> list[tuple[Cut, int]]:
    """At most `most - 1` of the cuts, with about as many bytes made between one and the next."""
    made = np.cumsum([sum(tape.storages[s].nbytes for s in tape.creates[op.id]) for op in tape.ops])
    bytes_at = made[[cut.op for cut, _ in cuts]]
    wanted = bytes_at[-1] * np.arange(1, most) / most
    return [cuts[k] for k in sorted({min(int(k), len(cuts) - 1) for k in np.searchsorted(bytes_at, wanted)})]


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a stage, forward or backward, took."""

    seconds: float
    rise_bytes: int  # at its highest instant, above what was there before it
    grown_bytes: int  # what it left behind, less what it found


class StagePlayer(Player):
    """Writes a step stage by stage: forward runs that keep or drop what the backward needs, backward runs in turn."""

    def __init__(self, tape: Tape, device: DeviceProfile, stages: tuple[Stage, ...], budget: Budget | None = None) -> None:
        super().__init__(tape, device, budget)
        self.stages = stages
        self.can_return = [self._can_return(s) for s in range(len(tape.storages))]
        self.held: set[int] = set()  # inputs of stages that will run again
        self._high_bytes = 0
        for s in tape.storages:
            if s.at_start:
                self._free_if_dead(s.id)

    # --- runs ------------------------------------------------------------------------------------------------------------
    def forward(self, stage: Stage, *, keeps: bool, hands_on: bool = True, holds: bool = False) -> Run:
        """Run a stage forward. `keeps`: what its backward needs stays, else only x does; `holds`: its input stays, for a further run.

        Again, it runs only what has to run; x comes back only if it `hands_on` or the backward needs it.
        """
        source = self._source(stage)
        if source is not None and holds:
            self.held.add(source)
        elif source is not None:
            self.held.discard(source)
        began, live = self.clock_seconds, self.live_bytes
        self._high_bytes = live
        if stage.forward_ops.stop > self.next_op:
            self._first_forward(stage, keeps)
        else:
            self._forward_again(stage, keeps, hands_on)
        if source is not None and self.next_op > stage.forward_ops.start:
            self._free_if_dead(source)
        return Run(self.clock_seconds - began, self._high_bytes - live, self.live_bytes - live)

    def backward(self, stage: Stage) -> Run:
        """Run the backward of a stage. Its input is free to go afterwards."""
        began, live = self.clock_seconds, self.live_bytes
        self._high_bytes = live
        for op in stage.backward_ops:
            self._compute(op, frozenset())
        for s in (*stage.made, self._source(stage)):
            if s is not None:
                self.held.discard(s)
                self._free_if_dead(s)
        return Run(self.clock_seconds - began, self._high_bytes - live, self.live_bytes - live)

    def drop(self, storages: Iterable[int | None]) -> None:
        """Let go of what can be computed again."""
        for s in storages:
            if s is not None and self.is_settled[s] and (self.can_return[s] or not self.is_live(s)):
                self.held.discard(s)
                self.free(s)

    def make_room(self, nbytes: int, op: int) -> None:
        """Called before `nbytes` are added by a run of `op`. Nothing leaves by itself here."""

    # --- how -------------------------------------------------------------------------------------------------------------
    def _source(self, stage: Stage) -> int | None:
        return self.stages[stage.id - 1].x if stage.id else None

    def _can_return(self, s: int) -> bool:
        """Can it be dropped in the forward phase and be computed again whenever the step needs it?"""
        made_by, needed = self.tape.producer[s], self.facts.needed_at[s]
        return made_by is not None and self.facts.recomputable_until[made_by] >= max([made_by, *needed]) and \
            self.facts.end not in needed

    def _first_forward(self, stage: Stage, keeps: bool) -> None:
        last_read = {s: op for op in stage.forward_ops for s in (*self.tape.creates[op], *self.tape.reads[op])}
        drops = frozenset() if keeps else frozenset(s for s in stage.made if s != stage.x and self.can_return[s])
        for op in stage.forward_ops:
            self._compute(op, frozenset(s for s in self.facts.uses[op] if s in drops and last_read[s] == op))

    def _forward_again(self, stage: Stage, keeps: bool, hands_on: bool) -> None:
        wanted = [s for s in stage.made if keeps and self.is_live(s) or hands_on and s == stage.x]
        ops = self.ops_to_recompute(wanted)
        reads = Counter(s for op in ops for s in self.tape.reads[op])
        passing = {s for op in ops for s in self.tape.creates[op] if self.residency[s] is ABSENT}.difference(wanted)
        for op in ops:
            out, taken = self.tape.ops[op].takeover or (None, None)
            is_free = taken in passing and reads[taken] == 1 and bool(self.is_settled[taken]) and self.residency[out] is ABSENT
            self._note_high(op, taken if is_free else None)
            self.recompute(op, taken if is_free else None)
            reads.subtract(self.tape.reads[op])
            for s in self.facts.uses[op]:
                if s in passing and not reads[s] and self.is_settled[s]:
                    self.free(s)

    def _compute(self, op: int, drops: Collection[int]) -> None:
        """The first run of an op; what is dead or to be dropped goes after it."""
        out, taken = self.tape.ops[op].takeover or (None, None)
        if taken is not None and not (self._dies_at(taken, op, drops) and self.is_settled[taken] and self.residency[out] is ABSENT):
            taken = None
        self._note_high(op, taken)
        self.compute(op, taken)
        for s in self.facts.uses[op]:
            if s in drops and self.is_settled[s]:
                self.free(s)
            else:
                self._free_if_dead(s)

    def _dies_at(self, s: int, op: int, drops: Collection[int]) -> bool:
        return s in drops or self.facts.last_use[s] == op and s not in self.held

    def _note_high(self, op: int, reuse: int | None) -> None:
        nbytes = self.run_bytes(op, reuse)
        self.make_room(nbytes, op)
        self._high_bytes = max(self._high_bytes, self.live_bytes + nbytes)

    def _free_if_dead(self, s: int) -> None:
        if self.is_settled[s] and not self.is_live(s) and s not in self.held:
            self.free(s)


@dataclass(frozen=True)
class ChainFacts:
    """What the runs of the stages take: bytes and seconds, one entry a stage, int64 and float64. `first`: the first run of all."""

    x_bytes: np.ndarray  # of the map that it hands on; 0 for the last
    saved_bytes: np.ndarray  # of x and all that its backward needs: what a run leaves that keeps everything
    gradient_bytes: np.ndarray  # made by later stages and alive when its backward begins: gradients of maps and of parameters, the loss
    forward_seconds: np.ndarray
    drop_rise_bytes: np.ndarray  # of a first run that keeps x alone, above its input
    keep_rise_bytes: np.ndarray  # of a first run that keeps all
    again_drop_seconds: np.ndarray
    again_drop_rise_bytes: np.ndarray
    again_keep_seconds: np.ndarray  # of a further run that keeps all and hands x on
    again_keep_rise_bytes: np.ndarray
    again_last_seconds: np.ndarray  # of a further run right before the backward: x comes back only if that needs it
    again_last_rise_bytes: np.ndarray
    backward_seconds: np.ndarray
    backward_bytes: np.ndarray  # at its highest instant, what its forward saved included, gradients of later stages and its input apart

    @property
    def count(self) -> int:
        """How many stages."""
        return len(self.x_bytes)

    @property
    def most_bytes(self) -> int:
        """What the chain holds at most when everything is kept."""
        before = np.cumsum(self.saved_bytes) - self.saved_bytes
        return int(max((before + self.keep_rise_bytes).max(), (before + self.gradient_bytes + self.backward_bytes).max(), 1))


def chain_facts(tape: Tape, device: DeviceProfile, stages: tuple[Stage, ...]) -> ChainFacts:
    """Played on the tape twice: once keeping everything, once running each stage again in each way."""
    kept, backward = _play_keeping(tape, device, stages)
    drop, again = _play_again(tape, device, stages)

    def column(runs: Iterable[Run], field: str) -> np.ndarray:
        return np.array([getattr(run, field) for run in runs], np.float64 if field == "seconds" else np.int64)

    of_drop, of_keep, of_last = ([runs[k] for runs in again] for k in range(3))
    return ChainFacts(
        x_bytes=np.array([0 if stage.x is None else tape.storages[stage.x].nbytes for stage in stages], np.int64),
        saved_bytes=np.maximum(column(kept, "grown_bytes"), 0), gradient_bytes=_behind(tape, stages),
        forward_seconds=column(kept, "seconds"), drop_rise_bytes=column(drop, "rise_bytes"), keep_rise_bytes=column(kept, "rise_bytes"),
        again_drop_seconds=column(of_drop, "seconds"), again_drop_rise_bytes=column(of_drop, "rise_bytes"),
        again_keep_seconds=column(of_keep, "seconds"), again_keep_rise_bytes=column(of_keep, "rise_bytes"),
        again_last_seconds=column(of_last, "seconds"), again_last_rise_bytes=column(of_last, "rise_bytes"),
        backward_seconds=column(backward, "seconds"),
        backward_bytes=column(backward, "rise_bytes") + column(of_last, "grown_bytes"))


def _play_keeping(tape: Tape, device: DeviceProfile, stages: tuple[Stage, ...]) -> tuple[list[Run], list[Run]]:
    player = StagePlayer(tape, device, stages)
    kept = [player.forward(stage, keeps=True) for stage in stages]
    return kept, [player.backward(stage) for stage in reversed(stages)][::-1]


def _play_again(tape: Tape, device: DeviceProfile, stages: tuple[Stage, ...]) -> tuple[list[Run], list[tuple[Run, Run, Run]]]:
    """First runs that keep x alone; then, from the last stage to the first, a further run that keeps x alone, one that keeps all, and one
    right before the backward. The last stage keeps all from the start."""
    player = StagePlayer(tape, device, stages)
    drop = [player.forward(stage, keeps=stage.x is None, holds=True) for stage in stages]
    again = []
    for stage in reversed(stages):
        if stage.x is None:
            again.append((drop[-1],) * 3)
        else:
            player.drop([stage.x])
            one = player.forward(stage, keeps=False, holds=True)
            player.drop([stage.x])
            two = player.forward(stage, keeps=True, holds=True)
            player.drop(stage.made)
            again.append((one, two, player.forward(stage, keeps=True, hands_on=False)))
        player.backward(stage)
    return drop, again[::-1]


def _behind(tape: Tape, stages: tuple[Stage, ...]) -> np.ndarray:
    """Per stage: bytes that ops between its forward and its backward have made and that are still needed then."""
    last = np.array(StepFacts.of(tape).last_use)
    made_at = np.array([-1 if p is None else p for p in tape.producer])
    nbytes = np.array([s.nbytes for s in tape.storages], np.int64)
    return np.array([nbytes[(made_at >= stage.forward_ops.stop) & (made_at < stage.backward_ops.start) & (last >= stage.backward_ops.start)
                            ].sum() for stage in stages], np.int64)


# --- tables over memory in slots ------------------------------------------------------------------------------------------
MOST_STAGES = 128  # neighbouring stages of longer chains are merged for such a table
_MOST_RUNS = 20_000  # of ops, in the steps of all levels together: up to here each level is written and checked


def in_slots(nbytes: np.ndarray, slot_bytes: int) -> np.ndarray:
    """Rounded up."""
    return -(-nbytes // slot_bytes)


def levels_of(cost: np.ndarray) -> list[int]:
    """Of the least cost at every number of slots: those at which it becomes lower, ascending, each a step that is worth looking at."""
    return [m for m in range(len(cost)) if cost[m] < (cost[m - 1] if m else np.inf)]


def highest_that_fits(levels: Sequence[int], fits: Callable[[int], bool], ops: int, lowest: int) -> tuple[int | None, Sequence[int]]:
    """The highest level whose step fits; None where none does, with the levels that were looked at then.

    Exact peaks need not rise with levels, whose sizes are rounded. Steps of few `ops` are all tried, from the highest down. Of others the
    levels are bisected, as if they rose; where that meets none that fits, the `lowest` so many are tried.
    """
    if fits(levels[-1]):
        return levels[-1], levels
    looked_at = levels
    if len(levels) * ops > _MOST_RUNS:
        found = _bisected(levels, fits)
        if found is not None:
            return found, levels
        looked_at = levels[:lowest]
    return next((level for level in reversed(looked_at) if fits(level)), None), looked_at


def _bisected(levels: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    low, high = -1, len(levels) - 1  # levels[low] fits, or is none; levels[high] does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(levels[middle]) else (low, middle)
    return None if low < 0 else levels[low]
