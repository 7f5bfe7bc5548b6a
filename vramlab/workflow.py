"""From one YAML file to resolved cells.

    file -> places (yaml_nodes) -> schema (pydantic) -> names and options (collections) -> Workflow
    Workflow + Host -> when: blocks, experiments and overrides laid on each other -> Plan of Cells

What is laid on what, the later winning: the file, the file's `when`, the experiment, the experiment's `when`, overrides
`key=value` from the command line. Mappings merge key by key; lists and everything else are replaced. A method's own budgets win
over its experiment's, and an override of budgets wins over both.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence

from vramlab import __version__
from vramlab.collection import Library, Method, Model, UnknownName, files_of_options, option_problems, resolve_options
from vramlab.errors import WorkflowError
from vramlab.finder import BATCH
from vramlab.record import Outcome, hash_config
from vramlab.schema import shown, validate
from vramlab.this_machine import THIS, is_calibrated, read_calibration
from vramlab.workflow_layers import (
    Merged, Override, file_for, merge_experiments, names_of, own_experiments, parse_overrides, set_in_file, when_block, without,
)
from vramlab.workflow_schema import (
    OF_EXPERIMENTS, OF_THE_FILE, PLATFORMS, Claim, CompleteExperiment, Expected, Measure, MethodEntry, Search, Training,
    Untestable, WorkflowFile,
)
from vramlab.yaml_nodes import (
    Argument, InvalidFile, Mark, Node, Problem, key_place, near, nearest, node_from, offer, one_of, plain, raise_problems, read_yaml,
)

# What a cell may come to without the run having failed. An OOM is one only where it is searched for.
EXPECTED_OUTCOMES = (Outcome.OK, Outcome.PLAN_INFEASIBLE, Outcome.UNSUPPORTED)
_WHERE_IT_MAY_STAND = frozenset({"experiments", "*.when", "*.kind"})  # what a key may be missing for, besides itself
_LEARNING_RATE = {"sgd": 0.01, "adam": 0.001, "adamw": 0.001, "none": 0.0}
_MOMENTUM = {"sgd": 0.9}


@dataclass(frozen=True)
class Workflow:
    """A checked workflow file with its overrides; not yet bound to a machine."""

    path: str  # as given
    sha256: str  # of the file's bytes
    root: Node
    overrides: tuple[Override, ...]
    library: Library

    @property
    def name(self) -> str:
        """Names the folder of its runs."""
        return self.root.value["name"].value

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """As written; `experiment` filled in where there is only one."""
        only = own_experiments(self.root)[0].value["name"].value
        return tuple(Claim(**{"experiment": only, **plain(node)}) for node in _children(self.root, "claims"))

    @cached_property
    def untestable(self) -> tuple[Untestable, ...]:
        """What the file says that nothing here can decide."""
        return tuple(Untestable(**plain(node)) for node in _children(self.root, "untestable"))


def load_workflow(name: str, library: Library, overrides: Iterable[str] = ()) -> Workflow:
    """Read and check a workflow by path or by name, for both platforms. WorkflowError lists all problems, one a line."""
    path, shown_path = _locate(name, library)
    parsed = parse_overrides(overrides)
    root = read_yaml(path, shown_path)
    if not isinstance(root.value, dict):
        raise InvalidFile([Problem(root.mark, "a workflow is a mapping of keys to values")])
    problems = list(_check_overrides(root, parsed))
    raise_problems(problems)
    for override in parsed:
        if override.steps[0] in OF_THE_FILE - {"experiments"}:
            root = set_in_file(root, override)
    return check_workflow(root, shown_path, hashlib.sha256(path.read_bytes()).hexdigest(), library, parsed)


def check_workflow(root: Node, path: str, sha256: str, library: Library, overrides: Sequence[Override] = ()) -> Workflow:
    """The same for a tree that may stem from no file."""
    of_experiments = [override for override in overrides if override.steps[0] in OF_EXPERIMENTS | {"experiments"}]
    _, problems = validate(WorkflowFile, root)
    is_clean = not problems
    for platform in PLATFORMS:
        merged, lost = merge_experiments(root, platform, of_experiments)
        problems += lost
        for experiment in merged:
            if is_clean:
                problems += validate(CompleteExperiment, experiment.node)[1]
            problems += _check_experiment(experiment, library)
        problems += _check_claims(root, {experiment.name: experiment for experiment in merged}, library)
    problems += [*_check_names(root), *_check_nulls(root)]
    raise_problems(problems)
    return Workflow(path, sha256, root, tuple(overrides), library)


def _locate(name: str, library: Library) -> tuple[Path, str]:
    """The file, and the path to show. A path that exists wins over a name."""
    path = Path(name)
    if path.is_file():
        return path, name
    if "/" in name or (path.suffix in (".yaml", ".yml") and path.stem not in library.workflow_paths):
        raise WorkflowError(f"there is no file {name}{_like(path, library)}")
    if name not in library.workflow_paths and Path(f"{name}.yaml").is_file():
        raise WorkflowError(f"there is no workflow {name!r}; did you mean the file '{name}.yaml'?")
    found = library.workflow(name)
    here = Path.cwd().resolve()
    return found, str(found.relative_to(here)) if found.is_relative_to(here) else str(found)


def _like(path: Path, library: Library) -> str:
    """The nearest spelling: of a file in that folder, else of a workflow in a collection."""
    beside = [str(path.parent / found.name) for found in path.parent.glob("*.y*ml") if found.is_file()] if path.parent.is_dir() else []
    return nearest(str(path), beside) or nearest(path.stem, library.workflow_paths)


# ------------------------------------------------------------------------------------------------ checks


def _check_experiment(merged: Merged, library: Library) -> Iterator[Problem]:
    """What the schema cannot know: names, options, and keys that do not go together. Tolerates wrong types: those are told already."""
    model = yield from _check_model(merged.node.get("model"), library)
    for entry in _children(merged.node, "methods"):
        yield from _check_method(entry, merged, library)
    yield from _check_kind(merged)
    yield from _check_devices(merged)
    yield from _check_training(merged.node.get("training"))
    yield from _check_search(merged, model)
    data = merged.node.get("data")
    folder = str(data.value).partition("imagefolder:")[2] if data is not None else ""
    if folder and merged.node.get("skip") is None and not Path(folder).expanduser().is_dir():
        yield Problem(data.mark, f"data: there is no directory {folder}")
    if model and model.card.input.kind == "tokens" and data is not None and data.value != "synthetic":
        yield Problem(data.mark, f"data: {shown(plain(data))} does not go with {model.name}, which reads tokens; allowed: synthetic")


def _children(node: Node, key: str) -> list[Node]:
    child = node.get(key)
    return child.items() if child is not None else []


def _check_model(node: Node | None, library: Library) -> Any:
    name = node.get("name") or node if node is not None else None
    if name is not None and (isinstance(name.value, dict) or name is not node and name.value is None):
        yield Problem(name.mark, "model: key 'name' is missing")
    if name is None or not isinstance(name.value, str):
        return None
    try:
        model = library.model(name.value)
    except UnknownName as error:
        yield Problem(name.mark, str(error))
        return None
    except InvalidFile as error:
        yield from error.problems
        return None
    options = without(node, "name") if isinstance(node.value, dict) else None
    yield from option_problems(model.card.options, options, f"model {model.name!r}")
    return model


def _check_method(entry: Node, merged: Merged, library: Library) -> Iterator[Problem]:
    name = entry.get("name") or entry
    if not isinstance(name.value, str):
        return
    try:
        method = library.method(name.value)
    except UnknownName as error:
        yield Problem(name.mark, str(error))
        return
    except InvalidFile as error:
        yield from error.problems
        return
    yield from option_problems(method.card.options, entry.get("options"), f"method {method.name!r}")
    given = plain(entry.get("options")) if entry.get("options") is not None else {}
    for option in method.card.required if isinstance(given, dict) else []:
        if option not in given:
            yield Problem(name.mark, f"method {method.name!r} needs the option {option!r}: {method.card.options[option].help}",
                          lacks=frozenset({f"*.{option}", "*.options"}))
    own_budgets = entry.get("budgets")
    if own_budgets is not None and not method.card.takes_budget:
        yield Problem(key_place(own_budgets), f"method {method.name!r} takes no budget; its plan does not depend on one")
    budgets = own_budgets or merged.node.get("budgets")
    if method.card.takes_budget and budgets is None and merged.kind != "max_batch":
        example = "--budget 60%" if isinstance(name.mark.source, Argument) else "budgets: [60%]"
        yield Problem(name.mark, f"method {method.name!r} plans for a budget and none is given; write for example {example}",
                      lacks=_WHERE_IT_MAY_STAND | {"*.budgets"})
    for budget in budgets.items() if budgets is not None and merged.kind == "max_batch" else []:
        if str(budget.value).strip().endswith("%"):
            yield Problem(budget.mark, f"budgets: {shown(budget.value)} is not allowed where the batch is searched, in experiment "
                                       f"{merged.name!r}; give it budgets of its own, a size or auto")


def _check_kind(merged: Merged) -> Iterator[Problem]:
    searches_batch = merged.kind == "max_batch" and _searched(merged) == BATCH
    if not searches_batch and merged.node.get("batch_sizes") is None:
        yield Problem(merged.node.mark, "key 'batch_sizes' is missing", lacks=_WHERE_IT_MAY_STAND | {"*.batch_sizes", "*.search"})
    own_batches = merged.own.get("batch_sizes")
    if searches_batch and own_batches is not None:
        yield Problem(key_place(own_batches), "max_batch searches the batch size; write search: {low: ..., high: ...}")
    for target in _children(merged.node, "targets") if merged.kind == "train" else []:
        if str(target.value).startswith("sim:"):
            yield Problem(target.mark, f"targets: {shown(target.value)} is not allowed for kind train; a simulated device trains nothing")


def _check_devices(merged: Merged) -> Iterator[Problem]:
    """Several devices are simulated, and share the batch of a step."""
    devices = merged.node.get("devices")
    if devices is None:
        return
    if merged.kind != "step":
        yield Problem(key_place(devices), f"devices does not go with kind {merged.kind}; several devices are simulated for kind step")
    for target in _children(merged.node, "targets"):
        if not str(target.value).startswith("sim:"):
            yield Problem(target.mark, f"targets: {shown(target.value)} does not go with devices; allowed: sim:NAME")
    most = max([n for n in (plain(child) for child in devices.items()) if isinstance(n, int)], default=1)
    for batch in _children(merged.node, "batch_sizes"):
        if isinstance(batch.value, int) and batch.value < most:
            yield Problem(batch.mark, f"a batch of {batch.value} is not shared among {most} devices")


def _check_training(node: Node | None) -> Iterator[Problem]:
    values = plain(node) if node is not None else None
    if not isinstance(values, dict):
        return
    optimizer = values.get("optimizer", "sgd")
    for key in ("momentum", "lr", "weight_decay"):
        if values.get(key) and (optimizer == "none" or key == "momentum" and optimizer in ("adam", "adamw")):
            yield Problem(key_place(node.value[key]), f"{key} does not go with optimizer {optimizer!r}")


def _searched(merged: Merged) -> Any:
    """What an experiment searches the largest value of."""
    node = merged.node.get("search")
    over = node.get("over") if node is not None else None
    return BATCH if over is None else plain(over)


def _check_search(merged: Merged, model: Model | None) -> Iterator[Problem]:
    node = merged.node.get("search")
    values = Search().model_dump() | (plain(node) if node and isinstance(node.value, dict) else {})
    low, high, step, over = (values[key] for key in ("low", "high", "step", "over"))
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (low, high, step or 1)):
        return
    if low > high:
        yield Problem(node.mark, f"search: low {low} is above high {high}")
    elif over != BATCH and model is not None:
        whole = [name for name, option in model.card.options.items() if option.type == "int"]
        tiling = model.card.tiles.get(over)
        if over not in whole:
            yield Problem(node.get("over").mark, f"search: over {shown(over)} is no whole-number option of model {model.name!r}"
                                                 f"{offer(str(over), [BATCH, *whole])}")
        elif tiling and step and step % tiling.step:
            yield Problem(node.get("step").mark, f"search: {over} of {model.name!r} goes in steps of {tiling.step}; {step} is no multiple")
        elif not model.card.values_of(over, low, high, step):
            yield Problem(node.mark, f"search: {model.name!r} has no {over} from {low} to {high}")


def _check_nulls(root: Node) -> Iterator[Problem]:
    """A key without a value is an accident: most often the lines below it are not indented."""
    blocks = [root, *own_experiments(root)]
    blocks += [block for platform in PLATFORMS for node in list(blocks) if (block := when_block(node, platform)) is not None]
    for block in blocks:
        for key, node in block.value.items() if isinstance(block.value, dict) else []:
            if node.value is None:
                yield Problem(key_place(node), f"{key}: there is no value (are the lines that belong to it indented?)")


def _check_names(root: Node) -> Iterator[Problem]:
    """Experiments differ in name, and claims name one of them."""
    seen: dict[str, Node] = {}
    for own in own_experiments(root):
        name = own.get("name")
        if name is None or not isinstance(name.value, str):
            continue
        if name.value in seen:
            yield Problem(name.mark, f"experiment {name.value!r} stands here a second time; first at line {seen[name.value].mark.line}")
        seen.setdefault(name.value, name)
    for claim in _children(root, "claims"):
        experiment = claim.get("experiment")
        for named in _names_in(experiment):
            if named.value not in seen:
                yield Problem(named.mark, f"there is no experiment {shown(named.value)}{offer(named.value, seen, 'there are')}",
                              lacks=frozenset({"experiments", "experiments.name"}))
        if experiment is None and len(seen) > 1 and isinstance(claim.value, dict):
            yield Problem(claim.mark, f"key 'experiment' is missing; there are {one_of(seen)}", lacks=frozenset({"*.experiment"}))


def _names_in(node: Node | None) -> list[Node]:
    """Of one name or a list of names, those that are text."""
    named = [] if node is None else node.items() if isinstance(node.value, list) else [node]
    return [name for name in named if isinstance(name.value, str)]


def _check_claims(root: Node, experiments: Mapping[str, Merged], library: Library) -> Iterator[Problem]:
    """A claim's method and baseline are methods of its experiments, called as the workflow calls them, or would be if those were spelt
    right."""
    for claim in _children(root, "claims"):
        named = _names_in(claim.get("experiment"))
        of_claim = [experiments[n.value] for n in named if n.value in experiments] if named else list(experiments.values())[:1]
        for merged in of_claim:
            methods = [names_of(entry)[0] for entry in _children(merged.node, "methods") if names_of(entry)]
            meant = {near(name, library.method_paths) for name in methods if name not in library.method_paths}
            for key in ("method", "baseline"):
                node = claim.get(key)
                if methods and node is not None and isinstance(node.value, str) and node.value not in {*methods, *meant}:
                    yield Problem(node.mark, f"{key}: {shown(node.value)} is no method of experiment {merged.name!r}"
                                             f"{offer(node.value, methods, 'there are')}", lacks=frozenset({"*.methods"}))


def _check_overrides(root: Node, overrides: Sequence[Override]) -> Iterator[Problem]:
    known = sorted(OF_EXPERIMENTS | OF_THE_FILE)
    names = [str(plain(own.get("name"))) for own in own_experiments(root) if own.get("name")]
    for override in overrides:
        first, rest = override.steps[0], override.steps[1:]
        if override.value.value is None and len(rest) == (2 if first == "experiments" else 0):
            yield Problem(override.value.mark, "there is no value")
        if first not in known:
            yield Problem(override.mark, f"unknown key {first!r}{offer(first, known, lister=WorkflowFile.lister)}")
        if first == "experiments" and (len(rest) < 2 or rest[0] not in names):
            yield Problem(override.mark, f"write experiments.NAME.key=value{offer(rest[0] if rest else '', names, 'NAME is one of')}")


# ------------------------------------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class Host:
    """The machine as far as a plan depends on it."""

    auto: str = "cpu"  # what the target `auto` stands for: cpu, cuda:N or sim:NAME
    cuda_devices: int = 0

    @property
    def platform(self) -> str:
        """Which `when` block holds: a simulated device is a GPU."""
        return "cpu" if self.auto == "cpu" else "cuda"


@dataclass(frozen=True)
class Cell:
    """One resolved cell: what vramlab.cell runs in a process of its own."""

    cell_id: str
    config: Mapping[str, Any]
    label: str  # how the workflow calls the method

    @property
    def title(self) -> str:
        """`resnet50 b16 delta 60% on cpu`: how messages name it."""
        return name_of(self.config, self.label)


def name_of(config: Mapping[str, Any], label: str | None = None) -> str:
    """A resolved cell in a few words; `label` instead of its method's name."""
    batch = f" b{config['batch_size']}" if config["batch_size"] is not None else ""
    batch += f" largest {config['search']['over']}" if "search" in config else ""
    budget = f" {config['budget']}" if config["budget"] is not None else ""
    devices = f" x {config['devices']}" if "devices" in config else ""
    return f"{config['model']}{batch} {label or config['method']}{budget} on {config['target']}{devices}"


@dataclass(frozen=True)
class LeftOut:
    """An experiment's target that cannot run on this machine."""

    experiment: str
    target: str | None
    reason: str


@dataclass(frozen=True)
class Plan:
    """A workflow bound to a machine."""

    workflow: Workflow
    host: Host
    title: str
    description: str
    label: str | None
    expected: Expected
    cells: tuple[Cell, ...]
    left_out: tuple[LeftOut, ...]

    @cached_property
    def run_id(self) -> str:
        """The same cells of the same workflow are the same run."""
        return hash_config({"workflow": self.workflow.name, "cells": sorted(cell.cell_id for cell in self.cells)})[:10]

    def untestable_claims(self) -> list[tuple[str, str]]:
        """Claims whose experiments have no cell here, and those that the workflow itself gives up, each with the reason."""
        covered = {cell.config["experiment"] for cell in self.cells}
        reasons = {out.experiment: out.reason for out in self.left_out}
        found = [(claim.id, next((reasons[e] for e in claim.experiments if e in reasons), "nothing of it can run here"))
                 for claim in self.workflow.claims if covered.isdisjoint(claim.experiments)]
        return found + [(name, given_up.reason) for given_up in self.workflow.untestable for name in given_up.claims]

    def is_expected(self, kind: str, outcome: Outcome) -> bool:
        """Whether a cell may come to this without the run having failed."""
        if self.expected.outcomes is not None:
            return str(outcome) in self.expected.outcomes
        return outcome in EXPECTED_OUTCOMES or (kind == "max_batch" and outcome is Outcome.OOM)


def expand(workflow: Workflow, host: Host) -> Plan:
    """Every experiment's model x target x batch x method x budget as resolved cells; eager first in each batch."""
    file = file_for(workflow.root, host.platform)
    overrides = [override for override in workflow.overrides if override.steps[0] in OF_EXPERIMENTS | {"experiments"}]
    merged, _ = merge_experiments(workflow.root, host.platform, overrides)
    cells: dict[str, Cell] = {}
    left_out: list[LeftOut] = []
    for experiment in merged:
        complete, problems = validate(CompleteExperiment, experiment.node)
        raise_problems(problems)
        for target in _targets(complete, host):
            reason = _why_not(complete, target, host) or _why_unbounded(complete, target, workflow.library)
            if reason:
                left_out.append(LeftOut(complete.name, target, reason))
            else:
                cells |= {cell.cell_id: cell for cell in _cells(complete, target, workflow.library)}
    label, expected = (file.get(key) for key in ("label", "expected"))
    return Plan(
        workflow, host, title=plain(file.value["title"]), description=plain(file.value["description"]) if file.get("description") else "",
        label=plain(label) if label else None, expected=Expected(**(plain(expected) or {})) if expected else Expected(),
        cells=tuple(cells.values()), left_out=tuple(left_out),
    )


def _targets(experiment: CompleteExperiment, host: Host) -> list[str]:
    named = experiment.targets or ["auto"]
    return list(dict.fromkeys(host.auto if target == "auto" else target for target in named))


def _why_not(experiment: CompleteExperiment, target: str, host: Host) -> str | None:
    """Why this machine cannot run an experiment's target; None when it can."""
    if experiment.skip:
        return experiment.skip
    if target.startswith("sim:") and experiment.kind == "train":
        return "a simulated device trains nothing"
    if experiment.devices and not target.startswith("sim:"):
        return "several devices are simulated only; give it targets: [sim:NAME]"
    if target == f"sim:{THIS}" and not is_calibrated():
        return "this machine has not been measured; `calibrate` does it"
    if target.startswith("cuda:") and int(target[5:]) >= host.cuda_devices:
        return "this machine has no NVIDIA GPU" if not host.cuda_devices else f"this machine has {host.cuda_devices} NVIDIA GPU(s)"
    folder = (experiment.data or "").partition("imagefolder:")[2]
    if folder and not Path(folder).expanduser().is_dir():
        return f"there is no directory {folder}"
    return None


def _why_unbounded(experiment: CompleteExperiment, target: str, library: Library) -> str | None:
    """Why a search cannot be measured on a CPU: its memory has no edge that a trial could run into before the machine does."""
    if experiment.kind != "max_batch" or target != "cpu":
        return None
    budgets = [budget for entry in experiment.methods for budget in _budgets(experiment, entry, library.method(entry.name))]
    return "on a CPU a search needs a cap in bytes: budgets: [2GiB]" if "auto" in budgets else None


def _cells(experiment: CompleteExperiment, target: str, library: Library) -> Iterator[Cell]:
    model = library.model(experiment.model.name)
    batches = [None] if experiment.kind == "max_batch" and _search_of(experiment).over == BATCH else experiment.batch_sizes
    entries = [(entry, library.method(entry.name)) for entry in experiment.methods]
    entries.sort(key=lambda pair: pair[1].name != "eager")  # eager's peak is what others' percentages are taken of
    for batch_size in batches:
        for entry, method in entries:
            for budget in _budgets(experiment, entry, method):
                config = _config(experiment, model, batch_size, entry, method, budget, target)
                for shared in [{"devices": devices} for devices in experiment.devices or ()] or [{}]:
                    yield Cell(hash_config(config | shared), config | shared, entry.label or method.name)


def _search_of(experiment: CompleteExperiment) -> Search:
    return experiment.search or Search()


def _budgets(experiment: CompleteExperiment, entry: MethodEntry, method: Method) -> list[str | None]:
    """A search bounds every method alike: what fits within the experiment's budgets. Otherwise only some methods take one."""
    if not method.card.takes_budget:
        return experiment.budgets or ["auto"] if experiment.kind == "max_batch" else [None]
    return entry.budgets or experiment.budgets or ["auto"]


def _config(experiment: CompleteExperiment, model: Model, batch_size: int | None, entry: MethodEntry, method: Method,
            budget: str | None, target: str) -> dict[str, Any]:
    options = resolve_options(method.card.options, entry.options, f"method {method.name!r}")
    files = files_of_options(method.card.options, options)
    config = {
        "experiment": experiment.name,
        "kind": experiment.kind,
        "model": model.name,
        "model_options": resolve_options(model.card.options, experiment.model.model_extra, f"model {model.name!r}"),
        "batch_size": batch_size,
        "training": _training(experiment),
        "data": experiment.data or "synthetic",
        "method": method.name,
        "options": options,
        "budget": budget,
        "target": target,
        "measure": (experiment.measure or Measure()).model_dump(),
        "sources": {"method": method.sha256, "model": model.sha256, "harness": __version__} | ({"files": files} if files else {}),
    }
    if target == f"sim:{THIS}":
        config["profile"] = read_calibration().profile.to_json()  # in the config: other numbers are another cell
    if experiment.kind == "max_batch":
        search = _search_of(experiment)
        values = (range(search.low, search.high + 1, search.step or 1) if search.over == BATCH
                  else model.card.values_of(search.over, search.low, search.high, search.step))
        config["search"] = search.model_dump() | {"low": values[0], "high": values[-1], "step": values.step}
        config["model_options"].pop(search.over, None)
    return config


def _training(experiment: CompleteExperiment) -> dict[str, Any]:
    """All values filled in. Steps belong to kind train: elsewhere they are 0, so that they do not rename a cell."""
    values = (experiment.training or Training()).model_dump()
    optimizer = values["optimizer"]
    values["lr"] = _LEARNING_RATE[optimizer] if values["lr"] is None else values["lr"]
    values["momentum"] = _MOMENTUM.get(optimizer, 0.0) if values["momentum"] is None else values["momentum"]
    return values if experiment.kind == "train" else values | {"steps": 0, "eval_every": 0}


def single_cell(library: Library, settings: Mapping[str, Any], overrides: Iterable[str], host: Host,
                options: Mapping[str, str] | None = None) -> Plan:
    """The plan of a workflow that is written nowhere: `settings` are the file's keys, and `options` the command line's names for them, of
    which errors speak. For `plan step`."""
    body = {"schema": 1, "name": "plan", "title": "plan step", **settings}
    parsed = parse_overrides(overrides)
    marks = {key: Mark(Argument((options or {}).get(key, "arguments")), 1, 1) for key in body}
    root = Node({key: replace(node_from(value, marks[key]), key_mark=marks[key]) for key, value in body.items()}, marks["schema"])
    raise_problems(_check_overrides(root, parsed))
    digest = hashlib.sha256(repr(sorted(body.items())).encode()).hexdigest()
    return expand(check_workflow(root, "arguments", digest, library, parsed), host)
