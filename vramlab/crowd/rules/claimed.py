"""Third round, last part: verdicts on claims of papers follow from the records, by the rules of the report."""

from __future__ import annotations

from collections.abc import Iterator

from vramlab.counted import count_of
from vramlab.crowd.layout import CLAIMS_FILE
from vramlab.crowd.rules.agreeing import disagreements
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.crowd.verdicts import verdicts


@rule(Round.DERIVATION, "verdicts", "every verdict is what the records come to")
def _verdicts(e: Examination) -> Iterator[Fault]:
    claimed, derived = e.contents.json(CLAIMS_FILE), verdicts(e.contents.run)
    e.count(len(derived))
    if len(claimed) != len(derived):
        yield CLAIMS_FILE, f"{count_of(len(claimed), 'verdict')}; the workflow lists {count_of(len(derived), 'claim')}"
        return
    for index, (ours, theirs) in enumerate(zip(claimed, derived)):
        yield from disagreements(f"{CLAIMS_FILE}:{index}", ours, theirs)
