"""Counted nouns, as a reader would write them by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vramlab.counted import all_of, count_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("number", "noun", "said"), [
    (0, "error", "0 errors"), (1, "warning", "1 warning"), (2, "note", "2 notes"), (1.0, "minute", "1 minute"),
    (2.5, "minute", "2.5 minutes"), (12000, "decision", "12,000 decisions"),
])
def test_a_noun_goes_with_its_number(number, noun, said):
    assert count_of(number, noun) == said


def test_a_plural_of_its_own_and_all_of_them():
    assert (count_of(1, "box", "boxes"), count_of(2, "box", "boxes")) == ("1 box", "2 boxes")
    assert (all_of(1, "cell"), all_of(3, "cell")) == ("1 cell", "all 3 cells")


# `{len(cells)} cells` says "1 cells" one day.
UNCOUNTED = re.compile(r"\{len\([^{}]*\)(?::,)?\} [a-z]+s\b")
NEVER_ONE = ("bytes", "{len(fields)} fields", "{len(names)} cells", "{len(sizes)} passes", "{len(found)} passes", "{len(match[1])} digits",
             "{len(machines)} machines", "{len(samples)} samples", "{len(met)} cases", "{len(text)} characters")


def uncounted(text: str) -> list[str]:
    """Texts such as `{len(cells)} cells`, whose number may be one."""
    return [found[0] for found in UNCOUNTED.finditer(text) if not found[0].endswith(NEVER_ONE)]


def test_no_text_of_the_engine_counts_by_hand():
    pages = ROOT / "vramlab" / "crowd" / "server"
    found = {str(path.relative_to(ROOT)): told for path in (ROOT / "vramlab").rglob("*.py")
             if pages not in path.parents and (told := uncounted(path.read_text()))}
    assert found == {}


def test_a_text_that_counts_by_hand_is_found():
    assert uncounted('print(f"{len(cells)} cells, {len(x):,} bytes")') == ["{len(cells)} cells"]
