"""Settings laid on each other, with their places: the file, its `when`, an experiment, its `when`, overrides.

The later wins. Mappings merge key by key; lists and everything else are replaced. An override `key=value` from the command
line holds in every experiment; `experiments.NAME.key=value` in one; items of lists are named: `methods.delta.options.x=1`.
`budgets=[60%]` holds for methods with budgets of their own, too. vramlab/workflow_notes.py says what an override replaces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Iterable, Sequence

from vramlab.workflow_schema import OF_EXPERIMENTS
from vramlab.yaml_nodes import Argument, InvalidFile, Mark, Node, Problem, merge, offer, parse_yaml, plain, raise_problems


@dataclass(frozen=True)
class Override:
    """`key=value` from the command line: the text, the dotted key's steps, the value as YAML."""

    text: str
    steps: tuple[str, ...]
    value: Node

    @property
    def mark(self) -> Mark:
        """The text in quotes: it is named as a whole."""
        return Mark(Argument(repr(self.text)), 1, 1)


def parse_override(text: str) -> Override:
    """WorkflowError when it is not `key=value` or the value is not YAML."""
    source, (key, equals, value) = Argument(repr(text)), text.partition("=")
    steps = tuple(key.strip().split("."))
    if not equals or not all(steps):
        raise InvalidFile([Problem(Mark(source, 1, 1), "is no override; write key=value, for example batch_sizes=[8,16]")])
    mark = Mark(source, 1, len(key) + 2)
    node = parse_yaml(" " * (len(key) + 1) + value, source) if value.strip() else Node(None, mark)
    return Override(text, steps, replace(node, key_mark=Mark(source, 1, 1)))


class _NoSuchItem(Exception):
    """A step of an override names a list item that is not there."""


def _set(node: Node, steps: Sequence[str], value: Node) -> Node:
    """`node` with `value` at `steps`. Items of a list are named by their name, label, id or index."""
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    if isinstance(node.value, str):  # `delta` is short for `{name: delta}`
        node = Node({"name": Node(node.value, node.mark)}, node.mark, node.key_mark)
    if isinstance(node.value, list):
        items = list(node.value)
        index = _index_of(items, step)
        items[index] = _set(items[index], rest, value)
        return Node(items, node.mark, node.key_mark)
    children = dict(node.value) if isinstance(node.value, dict) else {}
    child = children.get(step) or Node({}, value.mark, value.key_mark)
    children[step] = _set(child, rest, value)
    return Node(children, node.mark, node.key_mark)


def _index_of(items: Sequence[Node], step: str) -> int:
    names = [names_of(item) for item in items]
    for index, found in enumerate(names):
        if step in found or step == str(index):
            return index
    known = [name for found in names for name in found]
    raise _NoSuchItem(f"there is no item {step!r}{offer(step, known, 'there are')}")


def names_of(item: Node) -> list[str]:
    """How an item of a list may be called: its label before its name before its id."""
    if isinstance(item.value, str):
        return [item.value]
    named = (item.get(key) for key in ("label", "name", "id"))
    return [node.value for node in named if node is not None and isinstance(node.value, str)]


def parse_overrides(texts: Iterable[str]) -> tuple[Override, ...]:
    parsed, problems = [], []
    for text in texts:
        try:
            parsed.append(parse_override(text))
        except InvalidFile as error:
            problems += error.problems
    raise_problems(problems)
    return tuple(parsed)


def set_in_file(root: Node, override: Override) -> Node:
    try:
        return _set(root, override.steps, override.value)
    except _NoSuchItem as error:
        raise InvalidFile([Problem(override.mark, str(error))]) from None


@dataclass(frozen=True)
class Merged:
    """One experiment with everything laid on it, for one platform."""

    name: str
    own: Node  # as the file has it
    node: Node
    kind: str


def _lay(base: Node, over: Node | None) -> Node:
    """`merge`, except that another model brings its own options and `model: x` is short for `model: {name: x}`."""
    if over is None or not isinstance(over.value, dict):
        return base
    old, new = base.get("model"), over.get("model")
    merged = merge(base, over)
    if old is not None and new is not None and isinstance(old.value, str) and isinstance(new.value, dict):
        merged.value["model"] = merge(Node({"name": old}, old.mark, old.key_mark), new)
    if new is not None and new.get("name") is not None:
        merged.value["model"] = new
    return replace(merged, mark=base.mark, key_mark=base.key_mark)


def without(node: Node, *keys: str) -> Node:
    return Node({key: child for key, child in node.value.items() if key not in keys}, node.mark, node.key_mark)


def when_block(node: Node, platform: str) -> Node | None:
    block = node.get("when")
    return block.get(platform) if block is not None else None


def file_for(root: Node, platform: str) -> Node:
    """The file with its `when` block laid on it."""
    return _lay(without(root, "when"), when_block(root, platform))


def own_experiments(root: Node) -> list[Node]:
    """The experiments that the file writes; without any, one named main."""
    written = root.get("experiments")
    if written is None:
        return [Node({"name": Node("main", root.mark), "kind": Node("step", root.mark)}, root.mark)]
    return [node for node in written.items() if isinstance(node.value, dict)]


def merge_experiments(root: Node, platform: str, overrides: Sequence[Override]) -> tuple[list[Merged], list[Problem]]:
    """Every experiment for one platform. An override must find its place in at least one of them; one of budgets holds for every
    method of its experiments, whatever the file gives a method of its own."""
    file = file_for(root, platform)
    base = Node({key: child for key, child in file.value.items() if key in OF_EXPERIMENTS}, root.mark)
    merged: list[Merged] = []
    lost: list[list[str]] = [[] for _ in overrides]
    for own in own_experiments(root):
        name = own.get("name")
        node = _lay(_lay(base, without(own, "when")), when_block(own, platform))
        node = replace(node, mark=own.mark, key_mark=own.key_mark)
        if any(sets_budgets(override, plain(name) if name else None) for override in overrides):
            node = _without_own_budgets(node)
        for override, said in zip(overrides, lost):
            try:
                node = _apply(node, override, plain(name) if name else None)
            except _NoSuchItem as error:
                said.append(str(error))
        kind = node.get("kind")
        merged.append(Merged(str(plain(name)) if name else "", own, node, plain(kind) if kind else "step"))
    problems = [Problem(override.mark, said[0]) for override, said in zip(overrides, lost) if said and len(said) == len(merged)]
    return merged, problems


def sets_budgets(override: Override, experiment: Any) -> bool:
    """Does it give an experiment as a whole its budgets?"""
    return override.steps in (("budgets",), ("experiments", experiment, "budgets"))


def _without_own_budgets(experiment: Node) -> Node:
    methods = experiment.get("methods")
    if methods is None or not isinstance(methods.value, list):
        return experiment
    entries = [without(entry, "budgets") if isinstance(entry.value, dict) else entry for entry in methods.value]
    return replace(experiment, value=experiment.value | {"methods": replace(methods, value=entries)})


def _apply(node: Node, override: Override, experiment: Any) -> Node:
    if override.steps[0] != "experiments":
        return _set(node, override.steps, override.value)
    if len(override.steps) > 2 and override.steps[1] == experiment:
        return _set(node, override.steps[2:], override.value)
    return node
