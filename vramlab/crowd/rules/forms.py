"""Second round: JSON of the known schema, so that the rules after it may read it without asking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from vramlab.crowd.findings import Severity
from vramlab.crowd.forms import Baseline, Plan, Record, Verdicts, unknown_fields
from vramlab.crowd.layout import CLAIMS_FILE
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.runs import RUN_FILE, SCHEDULE_FILE, TELEMETRY_FILE

MOST_FAULTS = 20  # of one file that are told


@rule(Round.FORM, "schema", "run.json, claims.json, every record and every baseline are of the known schema")
def _schema(e: Examination) -> Iterator[Fault]:
    for name in (RUN_FILE, CLAIMS_FILE):
        if name not in e.contents.files:
            yield name, "is missing"
    if not e.contents.record_files:
        yield "", "no cell has a record"
    for name in sorted(e.contents.files):
        if (form := _form_of(name)) is not None:
            e.count()
            yield from _faults(e, name, form)


@rule(Round.FORM, "timed-steps", "no more timed steps in all than intervals can be drawn from anew in half a minute")
def _timed(e: Examination) -> Iterator[Fault]:
    steps = 0
    for name in (name for name in sorted(e.contents.files) if _form_of(name) in (Record, Baseline)):
        steps += sum(_numbers_in(e.contents.json(name)))
        e.count()
    if steps > e.contents.limits.timed_steps:
        yield "", f"{steps:,} timed steps; at most {e.contents.limits.timed_steps:,} are taken"


def _numbers_in(body: Any) -> Iterator[int]:
    """Of every list under a name of seconds in a file, whatever else it is, how many there are."""
    below = [body]
    while below:
        value = below.pop()
        if isinstance(value, dict):
            yield from (len(inner) for key, inner in value.items() if isinstance(inner, list) and key.endswith("seconds"))
            below += value.values()
        elif isinstance(value, list):
            below += (inner for inner in value if isinstance(inner, dict | list))


def _form_of(name: str) -> type[BaseModel] | None:
    if name.endswith("/record.json"):
        return Record
    return {RUN_FILE: Plan, CLAIMS_FILE: Verdicts}.get(name, Baseline if name.startswith("baselines/") else None)


def _faults(e: Examination, name: str, form: type[BaseModel]) -> Iterator[Fault]:
    body: Any = e.contents.json(name)
    try:
        form.model_validate({"verdicts": body} if form is Verdicts else body)
    except ValidationError as error:
        yield from faults_of(error, name)


@rule(Round.FORM, "unknown-field", "records hold no field that this vramlab does not know", Severity.WARNING)
def _unknown(e: Examination) -> Iterator[Fault]:
    for name in e.contents.record_files:
        try:
            record = Record.model_validate(e.contents.json(name))
        except ValidationError:  # told by the rule `schema`
            continue
        e.count()
        yield from ((f"{name}:{field}"[:300], "nobody reads this field") for field in unknown_fields(record))


@rule(Round.FORM, "packed-files", "tapes, schedules and telemetry are what they are called, and unpack to a sound form")
def _packed(e: Examination) -> Iterator[Fault]:
    for name in sorted(e.contents.files):
        place, _, last = name.rpartition("/")
        if place == "tapes":
            e.contents.tape(last.removesuffix(".json.gz"))  # raises by rule: tape, gzip, zip-bomb, json-...
        elif last == SCHEDULE_FILE:
            e.contents.schedule(place.partition("/")[2])
        elif last == TELEMETRY_FILE:
            e.contents.telemetry(place.partition("/")[2])
        else:
            continue
        e.count()
    yield from ()


def faults_of(error: ValidationError, name: str) -> Iterator[Fault]:
    """One fault for each place that is not of the schema."""
    found = error.errors(include_url=False, include_context=False)
    for detail in found[:MOST_FAULTS]:
        shown = repr(detail["input"])
        place = ".".join(str(step) for step in detail["loc"])
        yield f"{name}:{place}"[:300], f"{detail['msg']}; it is {shown if len(shown) <= 60 else shown[:57] + '...'}"
    if len(found) > MOST_FAULTS:
        yield name, f"{len(found) - MOST_FAULTS} more faults of form"
