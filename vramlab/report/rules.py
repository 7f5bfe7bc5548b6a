"""Rules that answer checklist items: (checklist, item) -> Answer or Open.

Most items are answered when a fact can be had and open when it cannot (`_says`). Items that ask for faults or for
agreement can also be answered to the run's disadvantage, which is what makes the other answers worth something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Mapping

from vramlab.counted import all_of, count_of
from vramlab.record import Outcome, Truth
from vramlab.report import facts
from vramlab.report.evidence import RUN_LINK, Evidence
from vramlab.report.facts import CELLS_LINK, CLAIMS_LINK, ENVIRONMENT_LINK, METRICS_LINK, Fact, Open
from vramlab.report.words import is_of_few_pairs, join_words, span_in_words

LEAST_TRIALS = 10  # pairs of steps below which a bootstrap interval says little


@dataclass(frozen=True)
class Answer:
    """An answer with its justification and where the evidence lies."""

    value: str
    justification: str
    evidence: tuple[str, ...]


Rule = Callable[[Evidence], Answer | Open]


def _says(value: str, fact: Callable[[Evidence], Fact]) -> Rule:
    """`value` when the fact can be had, open with its reason otherwise."""
    def rule(e: Evidence) -> Answer | Open:
        found = fact(e)
        return found if isinstance(found, Open) else Answer(value, found[0], evidence=found[1])
    return rule


def _always_open(reason: str) -> Rule:
    """An item that a single run cannot answer."""
    return lambda e: Open(reason)


# ------------------------------------------------------------------------------------------- rules that can say no


def no_binaries(e: Evidence) -> Answer | Open:
    """Binaries in the run's folder."""
    if not e.records:
        return Open("the run has no record")
    binaries = [p.name for p in e.files if p.suffix in (".whl", ".so", ".exe", ".bin", ".dll")]
    if binaries:
        return Answer("filled", join_words(binaries), (RUN_LINK,))
    packed = sum(p.suffix == ".gz" for p in e.files)
    told = f", {count_of(packed, 'file')} of it packed with gzip" if packed else ""
    return Answer("not applicable", evidence=(RUN_LINK,),
                  justification=f"nothing in the run's folder is to be executed: it is JSON, CSV and text{told}; vramlab is Python source")


def needs_no_download(fact: Callable[[Evidence], Fact]) -> Rule:
    """A section on data or models that are not included: not applicable where all of them are."""
    return _says("not applicable", fact)


def complete(e: Evidence) -> Answer | Open:
    """Every file that a record names is there with its hash."""
    named, faults = e.broken_files
    if not named:
        return Open("no record names a file with its hash")
    if faults:
        return Answer("evidence missing", f"missing or changed: {join_words(faults[:5])}", (CELLS_LINK,))
    return Answer("evidence present", evidence=(CELLS_LINK,),
                  justification=f"{count_of(named, 'file')} named by the records, all there with the SHA-256 that the record states")


def exercisable(e: Evidence) -> Answer | Open:
    """All planned cells ended in a way that says something."""
    if not e.records:
        return Open("the run has no record")
    bad, absent = e.unexpected(), len(e.run.cells) - len(e.records)
    if bad or absent:
        told = join_words(filter(None, [f"{count_of(len(bad), 'cell')} failed" if bad else "", f"{absent} have not run" if absent else ""]))
        return Answer("evidence missing", told, evidence=tuple(e.link(r) for r in bad[:5]) or (CELLS_LINK,))
    return Answer("evidence present", f"{all_of(len(e.records), 'planned cell')} ran to a result", (CELLS_LINK,))


def repeatable(yes: str, no: str) -> Rule:
    """What a repeat needs is there, and the code that ran is a commit or a version that can be had again."""
    def rule(e: Evidence) -> Answer | Open:
        found = facts.repeat(e)
        if isinstance(found, Open):
            return found
        if any((environment.get("git") or {}).get("dirty") for environment in e.environments):
            return Answer(no, "the checkout differed from its commit, so the code that ran cannot be had again", (ENVIRONMENT_LINK,))
        return Answer(yes, found[0], found[1])
    return rule


def statistics_given(e: Evidence) -> tuple[list[str], list[str]] | Open:
    """(timed records with interval and drift, timed records without)."""
    if not e.timed:
        return Open("no step was timed in this run")
    good, lacking = [], []
    for record in e.timed:
        blocks = [record.measured.get(key) or {} for key in ("ratio", "drift")]
        whole = all(block.get(k) is not None for block in blocks for k in ("median", "low", "high")) and blocks[0].get("n")
        whole = whole and not any(map(is_of_few_pairs, blocks))
        (good if whole else lacking).append(e.link(record))
    return good, lacking


def significance(yes: str, no: str) -> Rule:
    """Median, interval, number of pairs and drift for every timed cell."""
    def rule(e: Evidence) -> Answer | Open:
        found = statistics_given(e)
        if isinstance(found, Open):
            return found
        good, lacking = found
        if lacking:
            told = f"{count_of(len(lacking), 'timed cell')} without interval or drift: not timed, or of too few pairs"
            return Answer(no, told, tuple(lacking[:5]))
        return Answer(yes, evidence=(*good[:3], METRICS_LINK), justification=(
            f"all {len(good)} timed cells: median of paired step times and its 95 % percentile-bootstrap interval, kept asymmetric; "
            "what varies is the step within two processes; eager against itself beside it"))
    return rule


def distribution(e: Evidence) -> Answer | Open:
    """Raw samples are kept."""
    if not e.timed:
        return Open("no step was timed in this run")
    lacking = [e.link(r) for r in e.timed if not r.measured.get("step_seconds") or not r.measured.get("baseline_step_seconds")]
    if lacking:
        return Answer("present", f"{count_of(len(lacking), 'timed cell')} without raw samples", tuple(lacking[:5]))
    return Answer("avoided", f"all raw step times of {count_of(len(e.timed), 'timed cell')} are kept in the records",
                  evidence=tuple(e.link(r) for r in e.timed[:3]))


def trials(e: Evidence) -> Answer | Open:
    """Pairs of steps of each timed cell against the threshold."""
    if not e.timed:
        return Open("no step was timed in this run")
    pairs = {e.link(r): (r.measured.get("ratio") or {}).get("n") for r in e.timed}
    if None in pairs.values():
        return Open("a timed cell does not say how many pairs it has")
    few = [link for link, n in pairs.items() if n < LEAST_TRIALS]
    told = f"{span_in_words(list(pairs.values()), 'pairs of steps', 0)} a cell after warm-up; the threshold is {LEAST_TRIALS}"
    return Answer("present" if few else "avoided", told, evidence=tuple(few[:5]) or (CELLS_LINK,))


def baseline(e: Evidence) -> Answer | Open:
    """Eager PyTorch in every comparison."""
    groups = list(e.comparisons())
    if not groups:
        return Open("no training step was compared")
    without = [g for g in groups if not any(r.config.get("method") == "eager" for r in g) and not all(r.eager_peak_bytes for r in g)]
    if without:
        return Answer("present", f"{len(without)} of {count_of(len(groups), 'comparison')} without eager PyTorch",
                      evidence=tuple(e.link(g[0]) for g in without[:5]))
    return Answer("avoided", f"eager PyTorch stands in each of {count_of(len(groups), 'comparison')}", (CELLS_LINK,))


def fair(e: Evidence) -> Answer | Open:
    """Every setting outside the method is equal in a comparison."""
    if not any(len(group) > 1 for group in e.comparisons()):
        return Open("no two methods were compared")
    if differing := e.unequal_settings():
        told = "; ".join(f"{key}: {' / '.join(values)}" for key, values in sorted(differing.items()))
        return Answer("present", f"differ within a comparison: {told}", (RUN_LINK,))
    return Answer("avoided", evidence=(RUN_LINK, ENVIRONMENT_LINK),
                  justification="within each comparison all settings but the method, its options and its budget are equal, and so are "
                                "software and machine")


def applications(e: Evidence) -> Answer | Open:
    """Whole training steps, no kernels."""
    if not e.records:
        return Open("the run has no record")
    return Answer("avoided", f"whole training steps of {join_words(e.values('model'))}: forward, loss, backward, optimizer",
                  evidence=(RUN_LINK,))


def effects(e: Evidence) -> Answer | Open:
    """Memory, time, host memory and agreement with eager in every measured cell."""
    if not e.measured:
        return Open("nothing was measured in this run")
    lacking: dict[str, int] = {}
    for record in e.measured:
        host = [record.measured.get(key) for key in ("rss_peak_bytes", "pinned_host_bytes", "host_peak_bytes")]
        for name, value in {"peak": record.measured.get("peak_bytes"), "step time": record.measured.get("step_seconds"),
                            "host memory": next((v for v in host if v is not None), None),
                            "bit-for-bit agreement with eager": True if record.truth is Truth.EXACT else None}.items():
            if value in (None, []):
                lacking[name] = lacking.get(name, 0) + 1
    if lacking:
        told = join_words(f"{name} in {count_of(n, 'cell')}" for name, n in lacking.items())
        return Answer("present", f"not there: {told}", (CELLS_LINK,))
    told = f"peak, step time, host memory and bit-for-bit agreement with eager in all {len(e.measured)} measured cells"
    return Answer("avoided", told, (CELLS_LINK,))


def parameters(e: Evidence) -> Answer | Open:
    """Batch size and budget swept."""
    if not e.run.cells:
        return Open("the workflow has no cells")
    swept = {key: e.values(key) for key in ("budget", "batch_size")}
    single = [key.replace("_", " ") for key, values in swept.items() if len(values) < 2]
    told = "; ".join(f"{key.replace('_', ' ')}: {join_words(values) or 'none'}" for key, values in swept.items())
    if single:
        return Answer("present", f"{join_words(single)} at one value only ({told})", (RUN_LINK,))
    return Answer("avoided", told, (RUN_LINK,))


def of_this_report(justification: str) -> Rule:
    """A fault of presentation that the report's own construction avoids; there must be something presented."""
    def rule(e: Evidence) -> Answer | Open:
        drawn = any(r.outcome is Outcome.OK for r in e.records)
        return Answer("avoided", justification, evidence=("#figures",)) if drawn else Open("nothing is presented yet")
    return rule


def named_files(e: Evidence) -> Answer | Open:
    """Hashes of data files inside the records."""
    named, faults = e.broken_files
    if not e.records:
        return Open("the run has no record")
    if faults or not named:
        return Answer("not met", "records name no files" if not named else f"missing or changed: {join_words(faults[:5])}",
                      evidence=(CELLS_LINK,))
    return Answer("met", f"records state the SHA-256 of {count_of(named, 'file')} that they describe", (CELLS_LINK,))


def attributes(e: Evidence) -> Answer | Open:
    """Null numbers carry a reason."""
    if not e.records:
        return Open("the run has no record")
    if nulls := e.unexplained_nulls():
        return Answer("partly", f"{count_of(len(nulls), 'number')} missing without a reason, first {nulls[0]}",
                      evidence=(CELLS_LINK,))
    return Answer("met", f"{count_of(len(e.records), 'record')}: every missing number carries its reason", (CELLS_LINK,))


def rich_metadata(e: Evidence) -> Answer | Open:
    """Config, environment, provenance in every record."""
    found = facts.repeat(e)
    if isinstance(found, Open):
        return Answer("partly", found.reason, (CELLS_LINK,)) if e.records else found
    return Answer("met", found[0], evidence=found[1])


def language(e: Evidence) -> Answer | Open:
    """Format of the records."""
    if not e.records:
        return Open("the run has no record")
    told = f"JSON in UTF-8, schema version {e.records[0].schema_version}, units in the key names; no JSON Schema is published"
    return Answer("partly", told, (e.link(e.records[0]),))


def references(e: Evidence) -> Answer | Open:
    """References between records and to papers."""
    if not e.records:
        return Open("the run has no record")
    digests = sum(bool(r.provenance.get("tape_digest")) for r in e.records)
    if not digests:
        return Answer("not met", "records do not name the step that they describe", (CELLS_LINK,))
    return Answer("partly", f"{count_of(digests, 'record')} name their captured step by digest and claims name their papers; "
                                                "there are no typed links to other data sets", evidence=(CELLS_LINK, CLAIMS_LINK))


def reviewing_rules(e: Evidence) -> Answer | Open:
    """Links to the rules of the venues."""
    if not e.records:
        return Open("the run has no record")
    return Answer("filled", "the official pages are linked at the head of each checklist of this report", ("#checklists",))


_NEEDS_SUBMISSION = _always_open("only a collection of submitted results can answer this; this run lies in a folder")
_NEEDS_OTHERS = _always_open("needs the result of another submitter on another machine; a run holds its own results only")

RULES: Mapping[tuple[str, str], Rule] = {
    ("ctuning-ae", "AE-2"): _says("filled", facts.program),
    ("ctuning-ae", "AE-3"): _says("filled", facts.compilers),
    ("ctuning-ae", "AE-5"): no_binaries,
    ("ctuning-ae", "AE-6"): _says("filled", facts.models),
    ("ctuning-ae", "AE-7"): _says("filled", facts.data),
    ("ctuning-ae", "AE-8"): _says("filled", facts.system),
    ("ctuning-ae", "AE-9"): _says("filled", facts.hardware),
    ("ctuning-ae", "AE-11"): _says("filled", facts.execution),
    ("ctuning-ae", "AE-12"): _says("filled", facts.metrics),
    ("ctuning-ae", "AE-13"): _says("filled", facts.output),
    ("ctuning-ae", "AE-14"): _says("filled", facts.experiments),
    ("ctuning-ae", "AE-15"): _says("filled", facts.disk),
    ("ctuning-ae", "AE-16"): _always_open("a run does not time the installation before it; docs/install.md names the minutes"),
    ("ctuning-ae", "AE-17"): _says("filled", facts.time_to_complete),
    ("ctuning-ae", "AE-21"): _says("filled", facts.framework),
    ("ctuning-ae", "AE-S2"): _says("filled", facts.appendix_fields),
    ("ctuning-ae", "AE-S4"): _says("filled", facts.hardware),
    ("ctuning-ae", "AE-S5"): _says("filled", facts.software_versions),
    ("ctuning-ae", "AE-S6"): needs_no_download(facts.data_access),
    ("ctuning-ae", "AE-S7"): needs_no_download(facts.models),
    ("ctuning-ae", "AE-S8"): _says("filled", facts.installation),
    ("ctuning-ae", "AE-S9"): _says("filled", facts.workflow_graph),
    ("ctuning-ae", "AE-S11"): _says("filled", facts.customization),
    ("ctuning-ae", "AE-S14"): reviewing_rules,
    ("acm-badges", "BF-3"): complete,
    ("acm-badges", "BF-4"): exercisable,
    ("acm-badges", "BV-1"): _NEEDS_OTHERS,
    ("acm-badges", "BV-2"): _NEEDS_OTHERS,
    ("acm-badges", "BV-3"): _NEEDS_OTHERS,
    ("neurips", "N4"): repeatable("Yes", "No"),
    ("neurips", "N6"): _says("Yes", facts.settings),
    ("neurips", "N7"): significance("Yes", "No"),
    ("neurips", "N8"): _says("Yes", facts.resources),
    ("pineau-v2", "D1"): _says("Yes", facts.data_size),
    ("pineau-v2", "D2"): _says("Yes", facts.data_split),
    ("pineau-v2", "D3"): _says("Yes", facts.data_preparation),
    ("pineau-v2", "D4"): _says("Yes", facts.data_access),
    ("pineau-v2", "C1"): _says("Yes", facts.dependencies),
    ("pineau-v2", "C2"): _always_open("a run knows the commit of its code, not whether that is public"),
    ("pineau-v2", "C3"): _always_open("a run knows the commit of its code, not whether that is public"),
    ("pineau-v2", "C5"): _says("Yes", facts.results_and_commands),
    ("pineau-v2", "R1"): _says("Yes", facts.hyper_parameters),
    ("pineau-v2", "R2"): _says("Yes", facts.number_of_runs),
    ("pineau-v2", "R3"): _says("Yes", facts.metrics),
    ("pineau-v2", "R4"): significance("Yes", "No"),
    ("pineau-v2", "R5"): _says("Yes", facts.cost),
    ("pineau-v2", "R6"): _says("Yes", facts.hardware),
    ("sigplan", "S2.1"): baseline,
    ("sigplan", "S2.2"): fair,
    ("sigplan", "S3.3"): applications,
    ("sigplan", "S4.1"): trials,
    ("sigplan", "S4.3"): distribution,
    ("sigplan", "S5.2"): effects,
    ("sigplan", "S6.1"): repeatable("avoided", "present"),
    ("sigplan", "S6.3"): parameters,
    ("sigplan", "S7.1"): of_this_report("every cell is a row of the tables, failed and infeasible ones too"),
    ("sigplan", "S7.2"): of_this_report("axes of memory, loss, accuracy and time start at zero"),
    ("sigplan", "S7.3"): of_this_report("time ratios are drawn on a log axis around 1"),
    ("sigplan", "S7.4"): of_this_report("ratios show the digits that the width of their interval supports"),
    ("fair", "F2"): rich_metadata,
    ("fair", "F3"): named_files,
    ("fair", "F4"): _NEEDS_SUBMISSION,
    ("fair", "A1"): _NEEDS_SUBMISSION,
    ("fair", "A1.1"): _NEEDS_SUBMISSION,
    ("fair", "A1.2"): _NEEDS_SUBMISSION,
    ("fair", "A2"): _NEEDS_SUBMISSION,
    ("fair", "I1"): language,
    ("fair", "I3"): references,
    ("fair", "R1"): attributes,
    ("fair", "R1.2"): _says("met", facts.provenance),
}


# ------------------------------------------------------------------------------------------- drafts for a person to confirm


def method_papers(e: Evidence) -> Answer | Open:
    """Methods with what they cite."""
    if not e.papers:
        return Open("the cards of the methods are not at hand")
    told = "; ".join(f"{p.name}: {p.title} ({p.venue} {p.year})" if p.title else f"{p.name}: no paper" for p in e.papers)
    return Answer("filled", told, (RUN_LINK,))


def limits(e: Evidence) -> Answer | Open:
    """What was covered, for a paragraph on limits."""
    if not e.records:
        return Open("the run has no record")
    covered = "; ".join(f"{key.replace('_', ' ')} {join_words(e.values(key))}" for key in ("model", "batch_size", "target", "data"))
    return Answer("Yes", f"covered and no more: {covered}", (RUN_LINK,))


def _draft(value: str, justification: str, *evidence: str) -> Rule:
    return lambda e: Answer(value, justification, evidence=evidence or (RUN_LINK,))


def licence(e: Evidence) -> Answer | Open:
    """Licence of vramlab, from its file."""
    head = " ".join(e.text("LICENSE").split()[:4])
    return Answer("filled", f"LICENSE begins: {head}", evidence=("#again",)) if head else Open("there is no LICENSE file")


DRAFTS: Mapping[tuple[str, str], Rule] = {
    ("ctuning-ae", "AE-1"): method_papers,
    ("ctuning-ae", "AE-19"): licence,
    ("ctuning-ae", "AE-20"): _draft("not applicable", "synthetic data has no licence; digits comes under scikit-learn's BSD licence"),
    ("neurips", "N2"): limits,
    ("neurips", "N3"): _draft("NA", "a benchmark states no theorem"),
    ("neurips", "N11"): _draft("NA", "no model weights and no data are released"),
    ("neurips", "N14"): _draft("NA", "benchmark results submitted by others are no research with human subjects"),
    ("neurips", "N15"): _draft("NA", "no human subjects"),
    ("pineau-v2", "M1"): lambda e: (Answer("Yes", found.justification, evidence=found.evidence)
                                    if isinstance(found := method_papers(e), Answer) else found),
    ("pineau-v2", "C4"): _draft("NA", "memory and time do not depend on trained weights; models start at random"),
    ("sigplan", "S4.2"): _draft("avoided", "medians of paired ratios, no means of ratios", METRICS_LINK),
    ("sigplan", "S6.4"): _draft("not applicable", "training is a closed loop: there is no load generator"),
}
