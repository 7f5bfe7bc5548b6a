"""Second round: JSON of the known schema, so that the rules after it may read it without asking."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from vramlab.crowd.rules.asking import Fault

MOST_FAULTS = 20  # of one file that are told


def faults_of(error: ValidationError, name: str) -> Iterator[Fault]:
    """One fault for each place that is not of the schema."""
    found = error.errors(include_url=False, include_context=False)
    for detail in found[:MOST_FAULTS]:
        shown = repr(detail["input"])
        place = ".".join(str(step) for step in detail["loc"])
        yield f"{name}:{place}"[:300], f"{detail['msg']}; it is {shown if len(shown) <= 60 else shown[:57] + '...'}"
    if len(found) > MOST_FAULTS:
        yield name, f"{len(found) - MOST_FAULTS} more faults of form"
