"""Every rule that answers a checklist item from evidence: with the evidence it answers and links to what is there; with that evidence taken
away it does not say yes. A rule without an entry in WITHOUT fails here."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Mapping

import pytest
from hand_made import CLAIMS, ENVIRONMENT, MIB, measured_step, search, simulated_step, training, write_run, write_telemetry
from test_checklists import CHECKLISTS, NEEDS_MORE_THAN_A_RUN, ROOT, evidence_of

from vramlab.record import Outcome, RunRecord
from vramlab.report.facts import Open
from vramlab.report.rules import RULES
from vramlab.runs import load_run

ROOT_FILES = {"run": "", "requirements.lock": "", "workflows/smoke.yaml": "", "LICENSE": "Apache License\nVersion 2.0, ...",
              "artifact_appendix.md": "./run workflow hand-made.yaml"}
AGAINST = {"No", "present", "not met", "evidence missing"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run and the checkout beside it, as they are written for a test."""

    records: tuple[RunRecord, ...]
    plan: Mapping[str, Any]
    root_files: Mapping[str, str]
    after: Callable[[Path], None] = lambda folder: None  # what becomes of the run's folder once it is written

    def of_records(self, change: Callable[[RunRecord], RunRecord | None]) -> Case:
        """Each record changed, or left out where that gives None."""
        changed = (change(record) for record in self.records)
        return replace(self, records=tuple(record for record in changed if record is not None))


def whole() -> Case:
    """A run that has all that rules ask for: two batch sizes, two budgets, a search, a training, a simulated cell; all went well."""
    steps = [measured_step(*args, config={"batch_size": n}, **keywords) for n in (8, 16)
             for args, keywords in ((("eager", 1000), {}), (("delta", 590), {"budget": "60%"}), (("delta", 390), {"budget": "40%"}))]
    records = (*steps, simulated_step("delta", 590, budget="60%"), search("eager", 200), search("delta", 408), training("delta"))
    return Case(records=records, plan={"claims": CLAIMS}, root_files=ROOT_FILES)


def config(**changes: Any) -> Callable[[Case], Case]:
    """A key of every cell's config changed; None takes it out."""
    def change(record: RunRecord) -> RunRecord:
        body = {k: v for k, v in (dict(record.config) | changes).items() if v is not None or k not in changes}
        return replace(record, config=body)

    return lambda case: case.of_records(change)


def without_seed(case: Case) -> Case:
    def change(record: RunRecord) -> RunRecord:
        return replace(record, config={**record.config, "training": {k: v for k, v in record.config["training"].items() if k != "seed"}})

    return case.of_records(change)


def measured(**changes: Any) -> Callable[[Case], Case]:
    """Keys of every measured block changed."""
    return lambda case: case.of_records(lambda r: replace(r, measured={**r.measured, **changes}) if r.measured else r)


def provenance(key: str) -> Callable[[Case], Case]:
    """A key of every provenance taken out."""
    return lambda case: case.of_records(lambda r: replace(r, provenance={k: v for k, v in r.provenance.items() if k != key}))


def field(**changes: Any) -> Callable[[Case], Case]:
    """Fields of every record changed."""
    return lambda case: case.of_records(lambda r: replace(r, **changes))


def environment(**changes: Any) -> Callable[[Case], Case]:
    """Blocks of the environment emptied, in every record and in the run."""
    def change(case: Case) -> Case:
        body = {**ENVIRONMENT, **changes}
        return replace(case.of_records(lambda r: replace(r, environment=body)), plan={**case.plan, "environment": body})

    return change


def software(**changes: Any) -> Callable[[Case], Case]:
    return environment(software={**ENVIRONMENT["software"], **changes})


def workflow(**changes: Any) -> Callable[[Case], Case]:
    """Keys of the run's workflow changed."""
    def change(case: Case) -> Case:
        body = {"name": "hand-made", "path": "workflows/hand-made.yaml", "sha256": "c" * 64, "claims": CLAIMS}
        return replace(case, plan={**case.plan, "workflow": body | changes})

    return change


def root_without(name: str) -> Callable[[Case], Case]:
    return lambda case: replace(case, root_files={k: v for k, v in case.root_files.items() if k != name})


def unrecorded(case: Case) -> Case:
    """The cells stay planned; their records are gone."""
    return replace(case, after=lambda folder: [path.unlink() for path in folder.glob("cells/*/record.json")])


def one_unrecorded(case: Case) -> Case:
    return replace(case, after=lambda folder: next(folder.glob("cells/*/record.json")).unlink())


def a_file_gone(case: Case) -> Case:
    return replace(case, after=lambda folder: next(folder.glob("cells/*/schedule.json.gz")).unlink())


def without_eager(case: Case) -> Case:
    return case.of_records(lambda r: None if r.config["method"] == "eager" else replace(r, eager_peak_bytes=None))


def only_eager(case: Case) -> Case:
    return case.of_records(lambda r: r if r.config["method"] == "eager" else None)


NO_NUMBERS = field(measured={}, predicted={}, search={}, training={})
NO_DATA, NO_SOURCES, NO_MEASURE = config(data=None), config(sources=None), config(measure=None)
NO_CPU, NO_SECONDS, NOTHING_DRAWN = environment(cpu={}), provenance("seconds"), field(outcome=Outcome.CRASHED)

# (checklist, item) -> the evidence that its rule needs, taken away
WITHOUT: Mapping[tuple[str, str], Callable[[Case], Case]] = {
    ("ctuning-ae", "AE-2"): software(vramlab=None), ("ctuning-ae", "AE-3"): software(torch_build=None),
    ("ctuning-ae", "AE-5"): unrecorded, ("ctuning-ae", "AE-6"): without_seed, ("ctuning-ae", "AE-7"): NO_DATA,
    ("ctuning-ae", "AE-8"): environment(system={}), ("ctuning-ae", "AE-9"): NO_CPU, ("ctuning-ae", "AE-11"): NO_SECONDS,
    ("ctuning-ae", "AE-12"): NO_NUMBERS, ("ctuning-ae", "AE-13"): unrecorded, ("ctuning-ae", "AE-14"): workflow(claims=[]),
    ("ctuning-ae", "AE-15"): unrecorded, ("ctuning-ae", "AE-17"): NO_SECONDS, ("ctuning-ae", "AE-21"): workflow(sha256=None),
    ("ctuning-ae", "AE-S2"): NO_SECONDS, ("ctuning-ae", "AE-S4"): NO_CPU, ("ctuning-ae", "AE-S5"): software(packages={}),
    ("ctuning-ae", "AE-S6"): NO_DATA, ("ctuning-ae", "AE-S7"): without_seed, ("ctuning-ae", "AE-S8"): root_without("run"),
    ("ctuning-ae", "AE-S9"): config(experiment=None), ("ctuning-ae", "AE-S11"): workflow(path=None), ("ctuning-ae", "AE-S14"): unrecorded,
    ("acm-badges", "BF-3"): a_file_gone, ("acm-badges", "BF-4"): one_unrecorded,
    ("neurips", "N4"): NO_SOURCES, ("neurips", "N6"): NO_MEASURE, ("neurips", "N7"): measured(ratio=None), ("neurips", "N8"): NO_SECONDS,
    ("pineau-v2", "D1"): NO_DATA, ("pineau-v2", "D2"): NO_DATA, ("pineau-v2", "D3"): NO_DATA, ("pineau-v2", "D4"): NO_DATA,
    ("pineau-v2", "C1"): software(packages={}), ("pineau-v2", "C5"): root_without("artifact_appendix.md"),
    ("pineau-v2", "R1"): NO_MEASURE, ("pineau-v2", "R2"): unrecorded, ("pineau-v2", "R3"): NO_NUMBERS,
    ("pineau-v2", "R4"): measured(drift=None), ("pineau-v2", "R5"): NO_SECONDS, ("pineau-v2", "R6"): NO_CPU,
    ("sigplan", "S2.1"): without_eager, ("sigplan", "S2.2"): only_eager, ("sigplan", "S3.3"): unrecorded,
    ("sigplan", "S4.1"): measured(ratio={"median": 1.0, "low": 0.9, "high": 1.1}), ("sigplan", "S4.3"): measured(step_seconds=[]),
    ("sigplan", "S5.2"): measured(rss_peak_bytes=None), ("sigplan", "S6.1"): NO_SOURCES, ("sigplan", "S6.3"): config(batch_size=8),
    ("sigplan", "S7.1"): NOTHING_DRAWN, ("sigplan", "S7.2"): NOTHING_DRAWN, ("sigplan", "S7.3"): NOTHING_DRAWN,
    ("sigplan", "S7.4"): NOTHING_DRAWN,
    ("fair", "F2"): NO_SOURCES, ("fair", "F3"): a_file_gone, ("fair", "I1"): unrecorded, ("fair", "I3"): provenance("tape_digest"),
    ("fair", "R1"): field(missing={}), ("fair", "R1.2"): provenance("started"),
}


def write(case: Case, folder: Path) -> Any:
    """The evidence of a case, written as a run beside a checkout. Records state the hashes of their files."""
    run = write_run(folder / "run", case.records, **case.plan)
    for record in load_run(run).records:
        cell = run / "cells" / record.cell_id
        write_telemetry(cell / "telemetry.csv.gz", [(0.1 * i, (500 + i) * MIB) for i in range(3)])
        files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in cell.iterdir() if p.name != "record.json"}
        replace(record, files=files).save(cell / "record.json")
    case.after(run)
    for name, text in case.root_files.items():
        path = folder / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return evidence_of(run, folder / "checkout")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The evidence of a whole run."""
    return write(whole(), tmp_path_factory.mktemp("whole"))


def favour(answer: Any) -> int:
    """How far an answer speaks for the run: 0 open, 1 against it, 2 in part, 3 yes."""
    return 0 if isinstance(answer, Open) else 1 if answer.value in AGAINST else 2 if answer.value == "partly" else 3


def test_every_rule_has_its_control():
    assert set(WITHOUT) == set(RULES) - NEEDS_MORE_THAN_A_RUN and NEEDS_MORE_THAN_A_RUN <= set(RULES)


@pytest.mark.parametrize("key", RULES, ids="-".join)
def test_a_rule_answers_from_evidence_and_not_without_it(key, good, tmp_path):
    found = RULES[key](good)
    if key in NEEDS_MORE_THAN_A_RUN:
        assert isinstance(found, Open) and found.reason
        return
    assert favour(found) == (2 if key in (("fair", "I1"), ("fair", "I3")) else 3), found
    assert found.evidence and found.justification
    parts = set(re.findall(r'id="([a-z]+)"', (ROOT / "reports" / "templates" / "report.html.j2").read_text()))
    for link in found.evidence:
        assert link[1:] in parts if link.startswith("#") else (good.run.folder / link).is_file(), link
    bare = RULES[key](write(WITHOUT[key](whole()), tmp_path))
    assert favour(bare) < favour(found), bare
    assert bare.reason if isinstance(bare, Open) else bare.justification


# Items by what answers them, as the venues' lists were transcribed: A from evidence, D drafted for a person, P a person alone.
TRANSCRIBED = {
    "ctuning-ae": "AE-1 D AE-2 A AE-3 A AE-4 D AE-5 A AE-6 A AE-7 A AE-8 A AE-9 A AE-10 D AE-11 A AE-12 A AE-13 A AE-14 A AE-15 A AE-16 A "
                  "AE-17 A AE-18 D AE-19 D AE-20 D AE-21 A AE-22 P AE-S1 D AE-S2 A AE-S3 D AE-S4 A AE-S5 A AE-S6 A AE-S7 A AE-S8 A AE-S9 A "
                  "AE-S10 D AE-S11 A AE-S12 P AE-S13 D AE-S14 A",
    "acm-badges": "BA-1 P BA-2 D BF-1 D BF-2 P BF-3 A BF-4 A BF-5 D BR-1 P BV-1 A BV-2 A BV-3 A BP-1 P",
    "neurips": "N1 P N2 D N3 D N4 A N5 D N6 A N7 A N8 A N9 P N10 P N11 D N12 D N13 D N14 D N15 D N16 P",
    "pineau-v2": "M1 D M2 P M3 D T1 P T2 P D1 A D2 A D3 A D4 A D5 P C1 A C2 A C3 A C4 D C5 A R1 A R2 A R3 A R4 A R5 A R6 A",
    "sigplan": "S1.1 P S1.2 D S1.3 P S2.1 A S2.2 A S3.1 P S3.2 D S3.3 A S4.1 A S4.2 D S4.3 A S5.1 D S5.2 A S6.1 A S6.2 D S6.3 A S6.4 D "
               "S6.5 D S7.1 A S7.2 A S7.3 A S7.4 A",
    "fair": "F1 D F2 A F3 A F4 A A1 A A1.1 A A1.2 A A2 A I1 A I2 D I3 A R1 A R1.1 D R1.2 A R1.3 D",
}
# The first 16 hex digits of the SHA-256 over "id|title|ask" lines, taken from the transcription and not from the files of this repository.
WORDED = {
    "ctuning-ae": "30f1711ac0e6c814", "acm-badges": "5dd7426f3ecd96ad", "neurips": "d9851be4fb90ad7e",
    "pineau-v2": "cef647402a709fd0", "sigplan": "281ea84359e083af", "fair": "307ed18bbc31f165",
}


@pytest.mark.parametrize("checklist", CHECKLISTS, ids=lambda c: c.id)
def test_no_item_is_missing_or_reworded(checklist):
    fills = {"A": "auto", "D": "prefill", "P": "person"}
    words = TRANSCRIBED[checklist.id].split()
    assert [(i.id, i.fill) for i in checklist.items] == [(name, fills[fill]) for name, fill in zip(words[::2], words[1::2], strict=True)]
    text = "\n".join(f"{i.id}|{i.title}|{i.ask}" for i in checklist.items)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == WORDED[checklist.id]
