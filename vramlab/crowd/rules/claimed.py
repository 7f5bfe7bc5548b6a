"""Third round, last part: verdicts on claims of papers follow from the records, by the rules of the report, and what they were asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import zip_longest
from typing import Any

from vramlab.collection import Library, built_in_collection
from vramlab.counted import count_of
from vramlab.crowd.findings import Severity
from vramlab.crowd.layout import CLAIMS_FILE
from vramlab.crowd.rules.agreeing import disagreements
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.crowd.verdicts import verdicts
from vramlab.runs import RUN_FILE
from vramlab.workflow import load_workflow


@rule(Round.DERIVATION, "verdicts", "every verdict is what the records come to")
def _verdicts(e: Examination) -> Iterator[Fault]:
    claimed, derived = e.contents.json(CLAIMS_FILE), verdicts(e.contents.run)
    e.count(len(derived))
    if len(claimed) != len(derived):
        yield CLAIMS_FILE, f"{count_of(len(claimed), 'verdict')}; the workflow lists {count_of(len(derived), 'claim')}"
        return
    for index, (ours, theirs) in enumerate(zip(claimed, derived)):
        yield from disagreements(f"{CLAIMS_FILE}:{index}", ours, theirs)


@cache
def known_claims_of(workflow: str) -> tuple[Mapping[str, Any], ...] | None:
    """What the built-in workflow of a name judges, as a run of it writes that down; None where there is no such workflow."""
    library = Library([built_in_collection()])
    if workflow not in library.workflow_paths:  # no path of a stranger's is read
        return None
    return tuple(claim.model_dump() for claim in load_workflow(str(library.workflow_paths[workflow][0]), library).claims)


@rule(Round.DERIVATION, "own-claims", "a workflow of a name that this vramlab has judges the same claims by the same values and tolerances",
      Severity.WARNING)
def _own_claims(e: Examination) -> Iterator[Fault]:
    """A run states what its verdicts are asked of: another value or tolerance is another question under a known name."""
    asked, name = e.contents.run.workflow.get("claims", ()), e.contents.run.workflow.get("name")
    known = known_claims_of(str(name))
    if known is None:
        return
    ours, theirs, place = _by_place(known), _by_place(asked), f"{RUN_FILE}:workflow.claims"
    e.count(len(asked))
    for claim in dict.fromkeys([*theirs, *ours]):
        for (index, one), (_, other) in zip_longest(theirs[claim], ours[claim], fillvalue=(None, None)):
            if one is None:
                yield place, f"{' on '.join(claim)} is left out; {name} here has it"
            elif other is None:
                yield f"{place}.{index}", f"{' on '.join(claim)} is judged; {name} here does not"
            else:
                yield from ((f"{place}.{index}.{key}", f"{' on '.join(claim)}: {one.get(key)!r}; {name} here has {value!r}")
                            for key, value in other.items() if key != "note" and one.get(key) != value)


def _by_place(claims: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[tuple[int, Mapping[str, Any]]]]:
    """(id, experiment) -> the claims with their numbers in the list."""
    found: dict[tuple[str, str], list[tuple[int, Mapping[str, Any]]]] = defaultdict(list)
    for index, claim in enumerate(claims):
        named = claim.get("experiment") or ()
        found[claim["id"], ", ".join([named] if isinstance(named, str) else named)].append((index, claim))
    return found
