"""What a workflow does that its writer may not expect; nothing of it is wrong. One line a place, for the command line to print.

    overrides that replace what an experiment or a method has of its own, or an earlier override, and where they do not reach
    budgets above eager's peak
    values and methods that stand in a list twice, and count once
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, TypeVar

from vramlab.collection import Library, resolve_options
from vramlab.finder import BATCH
from vramlab.planner import parse_percent
from vramlab.workflow import Workflow
from vramlab.workflow_layers import Merged, Override, merge_experiments, names_of, own_experiments, sets_budgets, when_block
from vramlab.workflow_schema import OF_EXPERIMENTS, PLATFORMS, MethodEntry
from vramlab.yaml_nodes import Node, Problem, key_place, plain

T = TypeVar("T")
ABOVE_EAGER = "{} is above eager's peak: it binds only a method that would hold more than eager does"


def notes(workflow: Workflow, *platforms: str) -> list[str]:
    """`file:line:column: what`, in file order, each once; for both platforms where none is named."""
    found: set[Problem] = set()
    for platform in platforms or PLATFORMS:
        found |= {*_replaced(workflow, platform)}
        of_experiments = [o for o in workflow.overrides if o.steps[0] in OF_EXPERIMENTS | {"experiments"}]
        for merged in merge_experiments(workflow.root, platform, of_experiments)[0]:
            found |= {*_above_eager(merged), *_out_of_reach(merged, workflow.overrides), *_doubled(merged, workflow.library)}
    found |= {*_replaced_overrides(workflow.overrides)}
    return [str(note) for note in sorted(found)]


def is_above_eager(budget: object) -> bool:
    """Is it a share of more than 100 %?"""
    try:
        share = parse_percent(str(budget))
    except ValueError:
        return False
    return share is not None and share > 1


def _replaced(workflow: Workflow, platform: str) -> Iterator[Problem]:
    """What experiments and methods have of their own, and an override takes the place of."""
    untouched = {merged.name: merged.node for merged in merge_experiments(workflow.root, platform, ())[0]}
    for own in own_experiments(workflow.root):
        name = str(plain(own.get("name")))
        for override in workflow.overrides:
            if len(override.steps) == 1 and override.steps[0] in OF_EXPERIMENTS:
                for node in filter(None, (own.get(override.steps[0]), _of_block(own, platform, override.steps[0]))):
                    what = f"{override.steps[0]} of experiment {name!r}: the override {override.text} stands in their place"
                    yield Problem(key_place(node), what)
            if sets_budgets(override, name):
                yield from _replaced_of_methods(untouched[name], override)


def _of_block(own: Node, platform: str, key: str) -> Node | None:
    block = when_block(own, platform)
    return block.get(key) if block is not None else None


def _replaced_of_methods(experiment: Node, override: Override) -> Iterator[Problem]:
    methods = experiment.get("methods")
    for entry in methods.items() if methods is not None else []:
        if (budgets := entry.get("budgets")) is not None:
            what = f"budgets of method {names_of(entry)[0]!r}: the override {override.text} stands in their place"
            yield Problem(key_place(budgets), what)


def _out_of_reach(merged: Merged, overrides: tuple[Override, ...]) -> Iterator[Problem]:
    search = merged.node.get("search")
    over = search.get("over") if search is not None else None
    if merged.kind == "max_batch" and (over is None or plain(over) == BATCH):
        for override in overrides:
            if override.steps == ("batch_sizes",):
                yield Problem(override.mark, f"does not reach experiment {merged.name!r}, which searches the batch size")


def _replaced_overrides(overrides: tuple[Override, ...]) -> Iterator[Problem]:
    """An override whose key a later one sets, too."""
    last = {override.steps: override for override in overrides}
    for override in overrides:
        if last[override.steps] is not override:
            yield Problem(override.mark, f"the later override {last[override.steps].text} stands in its place")


def _doubled(merged: Merged, library: Library) -> Iterator[Problem]:
    """What a list has twice. A method counts as the same with the same options, whatever its label; at a budget of only one of the two it
    has a cell of its own."""
    methods = merged.node.get("methods")
    holders = [merged.node, *(methods.items() if methods is not None else [])]
    for holder, key in [(merged.node, key) for key in ("batch_sizes", "targets", "devices")] + [(h, "budgets") for h in holders]:
        values = holder.get(key)
        for node, value in _second_times((node, _as_budget(node) if key == "budgets" else plain(node))
                                         for node in (values.items() if values is not None else [])):
            yield Problem(node.mark, f"{key}: {value} stands here a second time; it counts once")
    for node, (name, _) in _second_times((node, _what_it_plans(node, library)) for node in holders[1:]):
        yield Problem(node.mark, f"methods: {name} stands here a second time with the same options; each of its cells counts once")


def _second_times(pairs: Iterable[tuple[Node, T]]) -> Iterator[tuple[Node, T]]:
    seen: list[T] = []
    for node, value in pairs:
        if value in seen:
            yield node, value
        seen.append(value)


def _as_budget(node: Node) -> str:
    """As its cells have it."""
    share = parse_percent(str(node.value))
    return str(node.value) if share is None else f"{share * 100:g}%"


def _what_it_plans(node: Node, library: Library) -> tuple[str, dict[str, Any]]:
    """A method's name and all of its options."""
    entry = MethodEntry(**(plain(node) if isinstance(node.value, dict) else {"name": plain(node)}))
    method = library.method(entry.name)
    return method.name, resolve_options(method.card.options, entry.options, f"method {method.name!r}")


def _above_eager(merged: Merged) -> Iterator[Problem]:
    methods = merged.node.get("methods")
    holders = [merged.node, *(methods.items() if methods is not None else [])]
    for budgets in filter(None, (holder.get("budgets") for holder in holders)):
        for budget in budgets.items():
            if is_above_eager(budget.value):
                yield Problem(budget.mark, f"budgets: {ABOVE_EAGER.format(budget.value)}")
