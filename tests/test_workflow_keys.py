"""`list keys`: every key that a workflow file may hold, against files that hold it, and what is said of a few by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramlab.workflow_keys import rows
from vramlab.yaml_nodes import Node, read_yaml

ROOT = Path(__file__).resolve().parents[1]
ROWS = {row["key"]: row for row in rows()}
FREE = ("model.", "methods[].options.")  # keys below these are the options of a model's or a method's card


def keys_of(node: Node, above: str = "") -> set[str]:
    """Dotted keys of a file, as `list keys` writes them; what experiments and `when` blocks set for themselves is written as the file's."""
    found: set[str] = set()
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            path = f"{above}{key}"
            found |= {path} | keys_of(child, f"{path}.")
    for child in node.items():
        found |= keys_of(child, f"{above.rstrip('.')}[].")
    return found


def as_listed(key: str) -> str:
    for block in ("experiments[].when.cpu.", "experiments[].when.cuda.", "experiments[].", "when.cpu.", "when.cuda."):
        if key.startswith(block) and key not in ROWS:
            return key.removeprefix(block)
    return key


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "workflows").glob("*.yaml") if path.name != "artifact.yaml"))
def test_every_key_of_the_shipped_workflows_is_listed(name):
    used = {as_listed(key) for key in keys_of(read_yaml(ROOT / "workflows" / name))}
    assert [key for key in sorted(used) if key not in ROWS and not key.startswith(FREE)] == []


@pytest.mark.parametrize(("key", "default", "allowed"), [
    ("schema", "(needed)", "1"), ("name", "(needed)", "text"), ("batch_sizes", "", "a list, each a whole number, at least 1"),
    ("training.optimizer", "sgd", "sgd, adam, adamw, none"), ("training.momentum", "", "a number, at least 0, less than 1"),
    ("measure.time", "true", "true or false"), ("measure.steps", "10", "a whole number, at least 1"),
    ("budgets", "", "a list, each 60% of eager's peak, 6GiB, or auto"),
    ("methods", "", "a list, each a name or a mapping with the keys below"),
    ("claims[].experiment", "", "text or a list, each text"), ("search.low", "1", "a whole number, at least 1"),
])
def test_what_is_said_of_a_key(key, default, allowed):
    assert (ROWS[key]["default"], ROWS[key]["allowed"]) == (default, allowed)


def test_no_key_stands_twice():
    assert len(ROWS) == len(rows()) and "nmae" not in ROWS
