"""Results for other programs: CSV, JSON and an Atom feed. Every row says whether its numbers were measured or *simulated*."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree

from vramlab.crowd.server.tables import UNVERIFIED, Result
from vramlab.report.cells_csv import FORMULA

COLUMNS = (
    "result", "bundle", "cell_id", "numbers", "state", "is_unverified", "reproduced_count", "repeated_count", "submitter", "submitted_at",
    "workflow", "experiment", "kind", "model", "workload", "method", "method_source_sha256", "harness_version", "device", "target",
    "batch_size", "budget",
    "budget_bytes", "seed", "outcome", "reason", "truth", "peak_bytes", "eager_peak_bytes", "memory_saved", "step_seconds", "overhead",
    "overhead_low", "overhead_high", "samples", "largest", "recomputes", "simulated_moved_bytes", "machine_hash",
)
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ATOM = "http://www.w3.org/2005/Atom"


def result_row(result: Result) -> dict[str, Any]:
    """A result under the names of COLUMNS, as JSON has it."""
    special = {"result": result.id, "bundle": result.bundle.name, "numbers": "simulated" if result.is_simulated else "measured",
               "state": str(result.state), "is_unverified": result.state in UNVERIFIED, "submitter": result.account.name,
               "submitted_at": rfc3339(result.submitted_at), "simulated_moved_bytes": result.moved_bytes}
    return {name: special[name] if name in special else getattr(result, name) for name in COLUMNS}


def csv_lines(columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """RFC 4180, heading first, one piece a row. A text that a spreadsheet would run as a formula gets an apostrophe before it."""
    names = list(columns)
    yield _line(names)
    for row in rows:
        yield _line([_harmless(row.get(name)) for name in names])


def _line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(cells)
    return text.getvalue()


def _harmless(value: Any) -> Any:
    if isinstance(value, str) and FORMULA.match(value):
        return f"'{value}"
    return value


def json_pieces(heading: Mapping[str, Any], key: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One JSON object, `rows` as the list under `key`, written a row at a time."""
    start = json.dumps(dict(heading), allow_nan=False)[:-1]
    yield f"{start}{', ' if heading else ''}{json.dumps(key)}: ["
    for number, row in enumerate(rows):
        yield f"{',' if number else ''}\n{json.dumps(row, allow_nan=False)}"
    yield "\n]}\n"


def atom_feed(results: Iterable[Result], base: str, title: str) -> bytes:
    """The newest results, RFC 4287. `base`: the server's address without a slash at its end."""
    found = list(results)
    ElementTree.register_namespace("", _ATOM)
    feed = ElementTree.Element(f"{{{_ATOM}}}feed")
    _add(feed, "id", f"{base}/feed.atom")
    _add(feed, "title", title)
    _add(feed, "updated", rfc3339(max((r.submitted_at for r in found), default=datetime(1970, 1, 1, tzinfo=UTC))))
    for rel, path in (("self", "/feed.atom"), ("alternate", "/")):
        _add(feed, "link", rel=rel, href=f"{base}{path}")
    for result in found:
        _add_entry(feed, result, base)
    return ElementTree.tostring(feed, encoding="utf-8", xml_declaration=True)


def _add_entry(feed: ElementTree.Element, result: Result, base: str) -> None:
    entry = ElementTree.SubElement(feed, f"{{{_ATOM}}}entry")
    where = result.device if not result.is_simulated or result.device.startswith("simulated ") else f"simulated {result.device}"
    unverified = " (unverified)" if result.state in UNVERIFIED else ""
    _add(entry, "id", f"{base}/results/{result.id}")
    _add(entry, "title", f"{result.method} on {result.model}, {where}: {result.state}{unverified}")
    _add(entry, "updated", rfc3339(result.submitted_at))
    _add(entry, "link", rel="alternate", href=f"{base}/results/{result.id}")
    _add(ElementTree.SubElement(entry, f"{{{_ATOM}}}author"), "name", result.account.name)
    batch = f", batch {result.batch_size}" if result.batch_size is not None else ""
    _add(entry, "summary", f"{result.outcome}{batch}, budget {result.budget or 'none'}")


def _add(parent: ElementTree.Element, name: str, text: str | None = None, **attributes: str) -> None:
    element = ElementTree.SubElement(parent, f"{{{_ATOM}}}{name}", attributes)
    element.text = None if text is None else _NOT_IN_XML.sub("\ufffd", text)


def rfc3339(moment: datetime) -> str:
    """`2026-03-01T12:00:00Z`."""
    return f"{(moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
