"""The numbers of one memory timeline, small: whole bytes and whole nanoseconds, as steps from one entry to the next.

Series of instants are written as `at` (how many entries further) and `by` (how much more): most groups stay as they are at most instants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vramlab.at_peak import INPUTS, layer_of
from vramlab.check import CheckedSchedule
from vramlab.live_bytes import START, LiveBytes, lanes, live_bytes, phase_spans
from vramlab.report.words import bytes_in_words, seconds_in_words
from vramlab.schedule import OPCODES, Compute, Recompute
from vramlab.tape import STATE_ROLES, Phase, Role, Tape
from vramlab.trace import Trace

ROLES = tuple(Role)
MOST_MODULES, LEAST_MODULES, DEEPEST = 7, 4, 6  # named in a stack by layer; what makes a path worth cutting there; components of a path
OTHERS, ROOT, INSIDE = "other modules", "outside any module", "inside the op"
THIN_ABOVE_RUNS = 5000  # runs of ops; longer steps keep their local maxima and minima only
NANO = 1e9
KEYS = {"kinds": list(OPCODES), "phases": [str(p) for p in Phase], "roles": [str(r).replace("_", " ") for r in ROLES],
        "inside": INSIDE, "others": OTHERS}


def tape_json(tape: Tape) -> dict[str, Any]:
    """Names: of each op its target, module and phase; of each storage its name, maker and bytes; and the groups of a stack by layer."""
    targets, modules = _Words(), _Words()
    module_groups, _ = groups_by_module(tape)
    return {
        "op_target": [targets.index(op.target) for op in tape.ops], "op_module": [modules.index(op.layer) for op in tape.ops],
        "op_phase": [list(Phase).index(op.phase) for op in tape.ops], "targets": targets.words, "modules": modules.words,
        "storage_name": [s.name if s.role in STATE_ROLES else "" for s in tape.storages],
        "storage_op": [START if op is None else op for op in tape.producer], "storage_bytes": [s.nbytes for s in tape.storages],
        "layers": list(module_groups),
    }


class _Words:
    """Each word once."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, word: str) -> int:
        if word not in self._index:
            self._index[word] = len(self.words)
            self.words.append(word)
        return self._index[word]


def groups_by_module(tape: Tape) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The groups of a stack by layer, in the network's order, and the group of each storage. Paths are cut where they first differ enough;
    the modules that make most have a group of their own, the rest is one."""
    paths = [layer_of(tape, s) for s in tape.storages]
    heads = next((cut for depth in range(1, DEEPEST) if len(set(cut := _cut(paths, depth)) - {INPUTS, ROOT}) >= LEAST_MODULES),
                 _cut(paths, DEEPEST))
    weight = Counter[str]()
    for head, storage in zip(heads, tape.storages):
        weight[head] += storage.nbytes
    named = {head for head, _ in weight.most_common(MOST_MODULES)}
    shown = [head if head in named else OTHERS for head in heads]
    names = tuple(sorted(dict.fromkeys(shown), key=lambda name: name == OTHERS))
    return names, tuple(names.index(name) for name in shown)


def _cut(paths: Sequence[str], depth: int) -> list[str]:
    return [path if path == INPUTS else ".".join(path.split(".")[:depth]) or ROOT for path in paths]


def timeline_json(checked: CheckedSchedule, trace: Trace) -> dict[str, Any]:
    """Everything that is drawn of one step, but its names."""
    live, tape = live_bytes(checked, trace), checked.tape
    runs = sum(isinstance(i, Compute | Recompute) for i in checked.schedule.instructions)
    keep = kept_instants(live.total(), runs)
    module_names, module_of = groups_by_module(tape)
    kinds = list(OPCODES.values())
    return {
        "kinds": [kinds.index(type(i)) for i in checked.schedule.instructions],
        "operands": [i.op if isinstance(i, Compute | Recompute) else i.storage for i in checked.schedule.instructions],
        "at": _steps(_nanoseconds(live.seconds[keep])), "instruction": _steps(live.instruction[keep]),
        "runs": _steps(live.runs[keep]),
        "roles": _series(live.by_group([ROLES.index(s.role) for s in tape.storages], len(ROLES))[keep]),
        "layers": _series(live.by_group(module_of, len(module_names))[keep]),
        "inside": _series(live.inside_bytes[keep, None])[0],
        "lanes": {name: _events(events) for name, events in lanes(checked, trace).items()},
        "phases": [[list(Phase).index(s.phase), *_nanoseconds(np.array([s.start_seconds, s.end_seconds])).tolist(), s.first_instruction]
                   for s in phase_spans(checked, trace)],
        "peak": checked.peak_bytes, "step": int(_nanoseconds(np.array([trace.metrics.step_seconds]))[0]),
        "instants": len(live.seconds), "thinned": len(live.seconds) - int(keep.sum()),
    }


def kept_instants(total: np.ndarray, runs: int) -> np.ndarray:
    """Which instants are drawn, bool [instants]: all of a step of up to THIN_ABOVE_RUNS runs; of a longer one the first, the last and every
    local maximum and minimum, so that no peak is lost."""
    keep = np.ones(len(total), bool)
    if runs <= THIN_ABOVE_RUNS:
        return keep
    keep[1:] = np.diff(total) != 0  # of a plateau the first instant
    index = np.flatnonzero(keep)
    level = total[index]
    is_turn = np.ones(len(index), bool)
    is_turn[1:-1] = (level[1:-1] > level[:-2]) != (level[2:] > level[1:-1])
    keep[:] = False
    keep[index[is_turn]] = True
    keep[-1] = True
    return keep


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
    return np.rint(seconds * NANO).astype(np.int64)


def _steps(values: np.ndarray) -> list[int]:
    return np.diff(values, prepend=0).tolist()


def _series(levels: np.ndarray) -> list[dict[str, list[int]]]:
    """[instants, groups] -> for each group the instants at which it changes and by how much."""
    changes = np.diff(levels, axis=0, prepend=0)
    found = []
    for column in changes.T:
        at = np.flatnonzero(column)
        found.append({"at": _steps(at), "by": column[at].tolist()})
    return found


def _events(events: Sequence[Any]) -> dict[str, list[int]]:
    start, end = (_nanoseconds(np.array([getattr(e, key) for e in events], float)) for key in ("start_seconds", "end_seconds"))
    return {"instruction": _steps(np.array([e.instruction for e in events], np.int64)), "start": _steps(start),
            "length": (end - start).tolist()}


ROW_HEADINGS = ("instant", "at", "live", *KEYS["roles"], INSIDE, "op that runs")


def peak_rows(checked: CheckedSchedule, trace: Trace) -> Iterator[tuple[str, ...]]:
    """In words, under ROW_HEADINGS: the start, the highest instant of each phase, and the end. Simulated."""
    live = live_bytes(checked, trace)
    total, roles = live.total(), live.by_group([ROLES.index(s.role) for s in checked.tape.storages], len(ROLES))
    yield _row("start", 0, checked, live, total, roles)
    spans = phase_spans(checked, trace)
    ends = [*(s.first_instruction for s in spans[1:]), len(checked.schedule.instructions)]
    for phase in dict.fromkeys(s.phase for s in spans):
        inside = np.zeros(len(total), bool)
        for span, end in zip(spans, ends):
            if span.phase is phase:
                inside |= (live.instruction >= span.first_instruction) & (live.instruction < end)
        if inside.any():
            yield _row(f"highest of {phase}", int(np.where(inside, total, -1).argmax()), checked, live, total, roles)
    yield _row("end", len(total) - 1, checked, live, total, roles)


def _row(what: str, at: int, checked: CheckedSchedule, live: LiveBytes, total: np.ndarray, roles: np.ndarray) -> tuple[str, ...]:
    index = int(live.instruction[at])
    op = None if index == START else getattr(checked.schedule.instructions[index], "op", None)
    held = [bytes_in_words(int(n)) for n in (total[at], *roles[at], live.inside_bytes[at])]
    runs = op is not None and (live.inside_bytes[at] or what.startswith("highest"))
    return what, seconds_in_words(float(live.seconds[at])), *held, checked.tape.op_name(op) if runs else "none"
