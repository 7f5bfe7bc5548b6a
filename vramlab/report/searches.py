"""Tables of searches for the largest batch, depth or image size: what fits, why no more does, and every trial."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping

from vramlab.finder import BATCH
from vramlab.record import Outcome, RunRecord
from vramlab.report.tables import (
    IDENTITY, STATE, Numbers, Row, Table, Value, add_row, cells_of, identity, link, signed_bytes, word,
)
from vramlab.report.words import DASH, bytes_in_words, counts, is_simulated, join_words, seconds_in_words, significant
from vramlab.runs import Run

ORDINARY = (Outcome.OK, Outcome.OOM, Outcome.PLAN_INFEASIBLE)  # how a trial ends that says something about memory


def search_table(run: Run) -> Table:
    """Searches that the simulator answers."""
    columns = ("largest", "as fast as one more forward", "fastest", "memory", "searched", "values tried")
    table = Table("searches", "Largest that fits, simulated", (("", (*IDENTITY, *STATE)), ("simulated", columns), ("", ("evidence",))))
    for cell in cells_of(run, "max_batch", simulated=True):
        add_row(table, cell, len(columns), lambda record: _found(table, record) + _where(table, record))
    return table


def measured_search_table(run: Run) -> Table:
    """Searches whose trials ran."""
    columns = ("largest", "as fast as one more forward", "fastest", "peak at the largest", "memory", "searched", "trials")
    table = Table("searches-measured", "Largest that trains, measured",
                  (("", (*IDENTITY, *STATE)), ("measured", columns), ("simulated", ("largest", "peak off by")), ("", ("evidence",))))
    for cell in cells_of(run, "max_batch", simulated=False):
        add_row(table, cell, len(columns) + 2, lambda record: _measured(table, record))
    return table


def _measured(table: Table, record: RunRecord) -> list[Value]:
    numbers, block = Numbers(table, record), record.search
    peak, predicted = record.measured.get("peak_bytes"), block.get("simulated_peak_bytes")
    error = None if peak is None or predicted is None else predicted - peak
    found = _found(table, record)
    found[0] = replace(found[0], note=found[0].note or table.note(definition(record)))
    return [*found, numbers.bytes(peak, "measured.peak_bytes"), *_where(table, record),
            numbers.show(block.get("simulated_largest"), str, "search.simulated_largest"),
            numbers.show(error, signed_bytes, "search.at_peak", "measured.peak_bytes")]


def _found(table: Table, record: RunRecord) -> list[Value]:
    """The largest, with its holes or that the range ended; the largest that is fast; the fastest."""
    numbers, block = Numbers(table, record), record.search
    over, fastest = block.get("over", BATCH), block.get("fastest")
    largest = numbers.show(block.get("largest"), lambda v: f"{over} {v}", "search.largest")
    if block.get("largest") is not None and block.get("largest") == block.get("high") and counts(record):
        largest = Value(text=f"{over} at least {block['largest']}", note=table.note("the search ended at its own limit"))
    elif told := _irregular(block) if counts(record) else "":
        largest = replace(largest, note=table.note(told if is_simulated(record) else f"{definition(record)}; {told}"))
    return [largest, numbers.show(block.get("largest_within_slowdown"), str, "search.largest_within_slowdown"),
            numbers.show(fastest and _fastest(fastest), str, "search.fastest")]


def _fastest(block: Mapping[str, Any]) -> str:
    return f"{block['value']} ({significant(block['samples_per_second'], 3)}/s)"


def _irregular(block: Mapping[str, Any]) -> str:
    """Holes, values that answered twice differently, and trials that ended in another way than by memory."""
    told = []
    if holes := block.get("holes"):
        told.append(f"below it {join_words(map(str, holes))} {'does' if len(holes) == 1 else 'do'} not fit")
    if unstable := block.get("unstable"):
        told.append(f"{join_words(map(str, unstable))} fitted once and failed once")
    odd = [t for t in block.get("trials") or () if t.get("outcome") not in ORDINARY]
    told += [f"{t['value']} ended as {t['outcome']} ({t['reason']})" for t in odd]
    return "; ".join(dict.fromkeys(told))


def _where(table: Table, record: RunRecord) -> list[Value]:
    """The memory, the range, the number of trials."""
    numbers, block = Numbers(table, record), record.search
    bounds = f"{block.get('low')} to {block.get('high')}" if block.get("high") is not None else None
    return [numbers.bytes(block.get("memory_bytes"), "search.memory_bytes"), numbers.show(bounds, str, "search.high"),
            numbers.show(len(block.get("trials") or []) or None, str, "search.trials")]


def definition(record: RunRecord) -> str:
    """What a measured largest value means: cap, steps, optimizer, numbers, input, slowdown."""
    block, config = record.search, record.config
    training, slowdown = config.get("training") or {}, block.get("slowdown")
    size = (config.get("model_options") or {}).get("image_size")
    fast = "one more forward phase than its ops' first runs take" if slowdown is None else f"{slowdown:g} times its ops' first runs"
    parts = [f"the cap is {block.get('cap')}", f"{block.get('steps')} whole steps a trial, each in a fresh process",
             f"optimizer {training.get('optimizer')}", f"computed in {training.get('autocast') or 'float32'}",
             *([f"{size} px"] if size else []), f"fast: at most {fast}", "the largest fitted twice and the next failed twice"]
    return "; ".join(parts)


def trials_table(run: Run) -> Table:
    """Every trial of the measured searches, in its order."""
    columns = ("value", "trial", "ended", "peak", "step time", "samples/s", "time / first runs", "fast")
    table = Table("trials", "Trials of the searches, measured", (("", IDENTITY), ("measured", columns), ("", ("evidence",))),
                  is_detail=True)
    for cell in cells_of(run, "max_batch", simulated=False):
        for one in cell.record.search.get("trials") or () if cell.record else ():
            table.rows.append(Row(values=(*identity(cell), *_trial(table, one), link(cell))))
    return table


def _trial(table: Table, one: Mapping[str, Any]) -> list[Value]:
    ended = str(one["outcome"]).replace("_", " ") + (f" ({str(one['reason']).replace('_', ' ')})" if one["reason"] else "")
    why = f"this trial ended as {ended}"

    def show(value: Any, words: Any) -> Value:
        return table.dash(why) if value is None else Value(text=words(value), exact=str(value))

    fast = one.get("within_slowdown")
    return [Value(text=str(one["value"])), Value(text=str(one["attempt"])),
            replace(word(ended, tone="good" if one["fits"] else "open"), note=table.note(one["message"]) if one["message"] else None),
            show(one["peak_bytes"], bytes_in_words), show(one["step_seconds"], seconds_in_words),
            show(one["samples_per_second"], lambda v: significant(v, 3)), show(one["slowdown"], lambda v: f"{v:.2f}"),
            word(DASH) if fast is None else word("yes" if fast else "no")]
