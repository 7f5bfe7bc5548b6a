"""Facts that checklists ask for, each from evidence: (words, links), or Open with the reason when the evidence is missing."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, Callable, Mapping

from vramlab.counted import all_of, count_of
from vramlab.report.evidence import RUN_LINK, Evidence
from vramlab.report.words import bytes_in_words, join_words, seconds_in_words, span_in_words, target_in_words
from vramlab.telemetry import Telemetry

ENVIRONMENT_LINK, CLAIMS_LINK, CELLS_LINK, TELEMETRY_LINK, METRICS_LINK = "#environment", "#claims", "#cells", "#telemetry", "#metrics"


@dataclass(frozen=True)
class Open:
    """No answer, and why."""

    reason: str
    evidence: tuple[str, ...] = ()


Fact = tuple[str, tuple[str, ...]] | Open

METRICS: Mapping[str, str] = {
    "measured.peak_bytes": "most device bytes that one warm training step holds at once: parameters, gradients, buffers, optimizer state, "
                           "inputs, activations and the inside of ops; allocator traffic on a CPU, requested bytes on CUDA",
    "measured.cold_peak_bytes": "the same in the first step of the process",
    "measured.ratio": "median of step time / eager's step time over pairs of steps that alternate in two processes, with its 95 % "
                      "bootstrap interval; fewer than 6 pairs have none",
    "measured.drift": "the same with eager on both sides: below it no difference can be told",
    "measured.step_seconds": "wall time of one training step, every sample kept",
    "predicted.peak_bytes": "peak of the schedule by its order alone; holds for any device (simulated)",
    "predicted.step_seconds": "length of the simulated timeline on the stated profile (simulated)",
    "search.largest": "largest batch, depth or image size that fits the memory, found by doubling, bisection and a few probes beyond; "
                      "measured: three whole steps in a fresh process a trial, it fits twice and the next fails twice",
    "search.largest_within_slowdown": "the same where a step takes no longer than its ops' first runs and one more forward phase, or as "
                                      "many times the first runs as the workflow says",
    "training.loss": "training loss of each step, eager's on the same batches beside it",
    "training.accuracy": "share of test samples classified right, eager's beside it",
}
DIGITS_TEST_SHARE = 0.2
DATA: Mapping[str, Mapping[str, str]] = {
    "synthetic": {"what": "generated: standard normal images or uniform tokens, uniform labels", "size": "one batch a step",
                  "split": "no test set: there is nothing to learn", "preparation": "none", "access": "made by vramlab from the seed"},
    "digits": {"what": "1,797 handwritten digits of 8x8 pixels in ten classes", "size": "1,797 images",
               "split": f"a seeded share of {100 * DIGITS_TEST_SHARE:.0f} % is the test set, the rest is trained on",
               "preparation": "nothing left out; mean and deviation of the training pixels taken out, resized to the model's image size",
               "access": "ships inside scikit-learn (sklearn.datasets.load_digits)"},
}


def _environment(e: Evidence) -> Mapping[str, Any] | None:
    return e.environments[0] if e.environments else None


def program(e: Evidence) -> Fact:
    """Models and harness."""
    environment = _environment(e)
    harness = (environment or {}).get("software", {}).get("vramlab")
    if not e.values("model") or not harness:
        return Open("no cell has run, or none says with which vramlab")
    return f"Training steps of {join_words(e.values('model'))}, run by vramlab {harness}; both are part of the artifact", (RUN_LINK,)


def compilers(e: Evidence) -> Fact:
    """Compilers on the machine and torch's build."""
    software = (_environment(e) or {}).get("software", {})
    if not software.get("torch_build") or not software.get("packages", {}).get("torch"):
        return Open("no record has an environment")
    found = [text for text in software.get("compilers", {}).values() if text]
    build = software["torch_build"]
    on_machine = f"on the machine: {'; '.join(found)}" if found else "no gcc and no nvcc on the machine"
    return (f"Nothing is compiled but numba's loops at first use; torch {software['packages']['torch']} is a binary build for "
            f"CUDA {build.get('cuda') or 'none'} (source {str(build.get('git_version'))[:10]}); {on_machine}", (ENVIRONMENT_LINK,))


def models(e: Evidence) -> Fact:
    """Models, their options and how they start."""
    if not e.values("model") or not e.seeds:
        return Open("no cell names a model and a seed")
    named = "; ".join(dict.fromkeys(_model(c.config) for c in e.run.cells if c.config.get("model")))
    return f"{named}; initialised at random from {_seeds(e)}; no trained weights are used or fetched", (RUN_LINK,)


def _model(config: Mapping[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in sorted(config.get("model_options", {}).items()))
    return f"{config['model']} ({options})" if options else str(config["model"])


def _seeds(e: Evidence) -> str:
    return f"seed {e.seeds[0]}" if len(e.seeds) == 1 else f"seeds {join_words(map(str, e.seeds))}"


def data(e: Evidence) -> Fact:
    """Data sets with size and origin."""
    return _of_data(e, lambda known: f"{known['what']}; {known['access']}")


def data_size(e: Evidence) -> Fact:
    """Number of examples."""
    return _of_data(e, lambda known: known["size"])


def data_split(e: Evidence) -> Fact:
    """Training and test sets."""
    return _of_data(e, lambda known: known["split"])


def data_preparation(e: Evidence) -> Fact:
    """What was left out and changed."""
    return _of_data(e, lambda known: known["preparation"])


def data_access(e: Evidence) -> Fact:
    """Where the data comes from."""
    return _of_data(e, lambda known: known["access"])


def _of_data(e: Evidence, words: Callable[[Mapping[str, str]], str]) -> Fact:
    names = e.values("data")
    if not names or not e.seeds:
        return Open("no cell names its data and seed")
    if unknown := [name for name in names if name not in DATA]:
        return Open(f"{join_words(unknown)} is the user's own data: its author describes it", (RUN_LINK,))
    return "; ".join(f"{name} ({_seeds(e)}): {words(DATA[name])}" for name in names), (RUN_LINK,)


def system(e: Evidence) -> Fact:
    """Operating system, drivers and main software."""
    environment = _environment(e)
    if not environment or not environment.get("system") or not environment.get("software"):
        return Open("no record has an environment")
    found, software = environment["system"], environment["software"]
    drivers = join_words(dict.fromkeys(f"NVIDIA driver {g['driver']}" for g in environment.get("gpus", ()) if g.get("driver")))
    by = "by an administrator" if found.get("is_administrator") else "by a user without administrator rights"
    return (f"{found.get('distribution') or found.get('os')}, kernel {found.get('kernel')}, {drivers or 'no NVIDIA driver'}; Python "
            f"{software.get('python')}, torch {software.get('packages', {}).get('torch')}; this run was made {by}", (ENVIRONMENT_LINK,))


def hardware(e: Evidence) -> Fact:
    """Processor, memory and GPUs of each environment."""
    told = []
    for environment in e.environments:
        cpu = environment.get("cpu", {})
        if not cpu.get("model") or not cpu.get("memory_bytes"):
            return Open("no record describes its processor and memory")
        gpus = [f"{g.get('name')} with {bytes_in_words(g.get('memory_bytes'))}, PCIe {g.get('pcie_generation')}.0 x{g.get('pcie_width')}"
                for g in environment.get("gpus", ())]
        told.append(f"{cpu['model']}, {cpu.get('usable_cores')} usable cores, {bytes_in_words(cpu['memory_bytes'])} of memory; "
                    f"{join_words(gpus) or 'no NVIDIA GPU'}")
    if not told:
        return Open("no record has an environment")
    simulated = sorted({target_in_words(r.config, {}) for r in e.records if r.config.get("target", "").startswith("sim:")})
    return "; ".join(dict.fromkeys(told)) + (f"; {join_words(simulated)}" if simulated else ""), (ENVIRONMENT_LINK,)


def execution(e: Evidence) -> Fact:
    """Conditions of execution and how long it took."""
    if e.seconds is None:
        return Open("not every record tells how long it took")
    pace = "cells that measure run one at a time, each in fresh processes; nothing is pinned and no clock is locked"
    return f"{pace}; {count_of(len(e.records), 'cell')} took {seconds_in_words(e.seconds)}", (CELLS_LINK,)


def metrics(e: Evidence) -> Fact:
    """What is measured, each with its definition."""
    used = [name for name in METRICS if any(_has(r, name) for r in e.records)]
    return (join_words(used), (METRICS_LINK,)) if used else Open("no record holds a number")


def _has(record: Any, name: str) -> bool:
    block, _, key = name.partition(".")
    return getattr(record, block).get(key) not in (None, [])


def output(e: Evidence) -> Fact:
    """Files that the run produced."""
    files = e.files
    if not e.records:
        return Open("the run has no record")
    kinds = join_words(sorted({p.name if p.parent.parent.name == "cells" else p.relative_to(e.run.folder).parts[0] for p in files}
                              | {"report.html"}))
    expected = "; expected values and tolerances stand in artifact_appendix.md" if _in_appendix(e) else ""
    return f"{count_of(len(files) + 1, 'file')}: {kinds}{expected}", (RUN_LINK, CELLS_LINK)


def _in_appendix(e: Evidence) -> bool:
    """Whether the appendix expects something of this workflow: it lists the claims of each."""
    return bool(e.run.workflow.get("claims")) and f"workflow {e.run.workflow.get('name')}" in e.text("artifact_appendix.md")


def command(e: Evidence) -> str:
    """The command that makes this run again."""
    workflow, auto = e.run.workflow, str(e.run.plan.get("auto", ""))
    words = [workflow.get("path", workflow.get("name")), *e.run.plan.get("overrides", ())]
    device = ["--device", auto] if auto.startswith("sim:") else []  # no machine takes a simulated device of its own accord
    return shlex.join(["./run", "workflow", *map(str, words), *device])


def experiments(e: Evidence) -> Fact:
    """Commands, and how far results may vary."""
    if not e.claims or not e.run.workflow.get("path"):
        return Open("the workflow names no claim, so there is no tolerance")
    tolerances = "; ".join(f"{c.id}: {100 * c.tolerance:g} %" for c in e.claims)
    return f"{command(e)}; tolerances as shares of the claimed value: {tolerances}", (CLAIMS_LINK, RUN_LINK)


def disk(e: Evidence) -> Fact:
    """Bytes of the run's files."""
    sizes = [path.stat().st_size for path in e.files]
    return (f"{bytes_in_words(sum(sizes))} in {count_of(len(sizes), 'file')} without this report", (RUN_LINK,)) if e.records else Open(
        "the run has no record")


def time_to_complete(e: Evidence) -> Fact:
    """Sum of wall times, failed cells included."""
    if e.seconds is None:
        return Open("not every record tells how long it took")
    return f"{seconds_in_words(e.seconds)} over {count_of(len(e.records), 'cell')}, failed ones included", (CELLS_LINK,)


def framework(e: Evidence) -> Fact:
    """Harness, version and the workflow's hash."""
    software, sha256 = (_environment(e) or {}).get("software", {}), e.run.workflow.get("sha256")
    if not software.get("vramlab") or not sha256:
        return Open("the harness's version or the workflow's hash is not recorded")
    return f"vramlab {software['vramlab']}, workflow {e.run.workflow.get('name')}, SHA-256 {sha256[:16]}\u2026", (RUN_LINK,)


def software_versions(e: Evidence) -> Fact:
    """Versions and the lock file."""
    software = (_environment(e) or {}).get("software", {})
    packages = {k: v for k, v in software.get("packages", {}).items() if v}
    if not packages or not software.get("python"):
        return Open("no record has an environment")
    lock = "; requirements.lock pins every package" if e.has("requirements.lock") else ""
    named = join_words(f"{k} {v}" for k, v in packages.items())
    return f"Python {software['python']}, {named}{lock}", (ENVIRONMENT_LINK,)


def installation(e: Evidence) -> Fact:
    """Set-up steps and a way to test them."""
    absent = [name for name in ("run", "requirements.lock", "workflows/smoke.yaml") if not e.has(name)]
    if absent:
        return Open(f"{join_words(absent)} not found beside this vramlab")
    return "`./run` makes .venv from requirements.lock; `./run workflow smoke.yaml` tests it", ("#again",)


def workflow_graph(e: Evidence) -> Fact:
    """Experiments and how they connect."""
    names = e.values("experiment")
    if not names:
        return Open("the workflow has no cells")
    sizes = [f"{name} ({count_of(sum(c.config.get('experiment') == name for c in e.run.cells), 'cell')})" for name in names]
    return f"capture, plan, check, then simulate or measure and gate: {join_words(sizes)}; claims are judged from the records", (
        RUN_LINK, CLAIMS_LINK)


def customization(e: Evidence) -> Fact:
    """What may be changed, and what this run changed."""
    if not e.run.workflow.get("path"):
        return Open("the workflow's file is not recorded")
    changed = join_words(map(str, e.run.plan.get("overrides", ()))) or "nothing"
    return f"any key of the workflow, as key=value behind the command; this run changed {changed}", (RUN_LINK, "#again")


def appendix_fields(e: Evidence) -> Fact:
    """Whether the fields of the artifact check-list that evidence can fill are filled."""
    fields = (program, compilers, models, data, system, hardware, execution, metrics, output, experiments, disk, time_to_complete,
              framework)
    absent = [f.__name__.replace("_", " ") for f in fields if isinstance(f(e), Open)]
    return Open(f"not filled yet: {join_words(absent)}") if absent else (f"{len(fields)} fields are filled from evidence", ("#checklists",))


def settings(e: Evidence) -> Fact:
    """Every training and test setting, defaults filled in."""
    needed = ("training", "model_options", "data", "batch_size", "measure")
    lacking = [c for c in e.run.cells if any(key not in c.config for key in needed) or not c.config["training"].get("optimizer")]
    if lacking or not e.run.cells:
        return Open("a cell's resolved settings are not complete")
    training = e.run.cells[0].config["training"]
    shown = ", ".join(f"{key} {value}" for key, value in training.items() if value not in (None, 0, 0.0, False))
    return f"each cell's config holds every option with its default filled in; the first cell: {shown}", (RUN_LINK,)


def repeat(e: Evidence) -> Fact:
    """What a repeat needs: config, software, hardware, seed and source of every record."""
    lacking = []
    for record in e.records:
        environment = e.run.environment_of(record)
        software, cpu = environment.get("software", {}), environment.get("cpu", {})
        complete = record.config.get("sources") and software.get("python") and software.get("packages", {}).get("torch")
        if not complete or not cpu.get("model") or not record.workflow.get("sha256"):
            lacking.append(record)
    if not e.records or lacking:
        return Open(f"{count_of(len(lacking), 'record')} without complete settings, software and hardware" if lacking else "no record")
    where = all_of(len(e.records), "record")
    return f"resolved settings, source hashes, seed, software and hardware stand in {where}", (RUN_LINK, ENVIRONMENT_LINK)


def resources(e: Evidence) -> Fact:
    """Hardware and time of each run and in total."""
    described, spent = hardware(e), time_to_complete(e)
    for fact in (described, spent):
        if isinstance(fact, Open):
            return fact
    return f"{described[0]}; {spent[0]}; the time of each cell stands in its record", (*described[1], *spent[1])


def hyper_parameters(e: Evidence) -> Fact:
    """Ranges and final values."""
    fact = settings(e)
    if isinstance(fact, Open):
        return fact
    swept = {key: e.values(key) for key in ("method", "batch_size", "budget", "target")}
    told = "; ".join(f"{key.replace('_', ' ')}: {join_words(values)}" for key, values in swept.items() if values)
    return f"swept as a full grid, nothing was selected: {told}; all else is fixed in each cell's config", fact[1]


def number_of_runs(e: Evidence) -> Fact:
    """How many runs, failed ones included."""
    if not e.records:
        return Open("the run has no record")
    bad = len(e.unexpected())
    rounds = [r.measured["ratio"]["n"] for r in e.timed if (r.measured.get("ratio") or {}).get("n")]
    timed = f"; timed cells have {span_in_words(rounds, 'pairs of steps', 0)}" if rounds else ""
    return f"{count_of(len(e.records), 'cell')}, {bad} of them failed{timed}", (CELLS_LINK,)


def cost(e: Evidence) -> Fact:
    """Run time and, where a counter exists, energy."""
    spent = time_to_complete(e)
    if isinstance(spent, Open):
        return spent
    joules = [j for t in e.telemetry.values() if (j := _joules(t)) is not None]
    energy = f"; {sum(joules):.0f} J by the GPU's own counter" if joules else "; energy was not measured: no GPU counter"
    return f"{spent[0]}, {seconds_in_words(e.seconds / len(e.records))} a cell on average{energy}", (*spent[1], TELEMETRY_LINK)


def _joules(telemetry: Telemetry) -> float | None:
    counted = [v for v in telemetry.columns["energy_joules"] if v is not None]
    return counted[-1] - counted[0] if len(counted) > 1 else None


def results_and_commands(e: Evidence) -> Fact:
    """A document with the command of each result."""
    if not _in_appendix(e):
        return Open("artifact_appendix.md beside this vramlab lists no claim of this workflow")
    return f"artifact_appendix.md lists this workflow's claims with command, expected value and tolerance: {command(e)}", ("#again",)


def dependencies(e: Evidence) -> Fact:
    """Dependencies with versions, and a hash over all that is installed."""
    fact, environment = software_versions(e), _environment(e)
    if isinstance(fact, Open):
        return fact
    if not e.has("requirements.lock") and not environment["software"].get("installed_sha256"):
        return Open("neither a lock file nor a hash of what is installed")
    return f"{fact[0]}; hash over all that is installed: {environment['software'].get('installed_sha256', '')[:16]}\u2026", fact[1]


def provenance(e: Evidence) -> Fact:
    """Where every record comes from: command, source, time."""
    if not e.records:
        return Open("the run has no record")
    needed = ("started", "method_source_sha256")
    lacking = [r for r in e.records if not all(map(r.provenance.get, needed)) or not e.run.environment_of(r)]
    if lacking:
        return Open(f"{count_of(len(lacking), 'record')} without start time, method source or environment")
    commits = {(e.run.environment_of(r).get("git") or {}).get("commit") for r in e.records} - {None}
    git = f"commit {join_words(sorted(c[:10] for c in commits))}" if commits else "not run from a git checkout"
    told = f"each record holds start and end, method source hash and environment; {git}; command: {command(e)}"
    return told, (RUN_LINK, ENVIRONMENT_LINK)
