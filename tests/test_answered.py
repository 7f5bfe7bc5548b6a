"""resnet50-delta's checklists, counted from the page and the checklists' own files: every item that evidence is to answer is answered with
a link to it, or listed with the reason why this run's evidence cannot."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from hand_made import write_run

from vramlab.collection import Library
from vramlab.report.page import page
from vramlab.runs import load_run

ROOT = Path(__file__).parent.parent
RUN = ROOT / "docs" / "example-run"
LISTS = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "reports" / "checklists").glob("*.yaml"))]
AUTO = {(found["title"], item["id"]) for found in LISTS for item in found["items"] if item["fill"] == "auto"}
TITLES = {found["id"]: found["title"] for found in LISTS}


class Lists(HTMLParser):
    """The checklists of a page: by (title, item) the row's class, its columns' words and the links of its last column; the list of what
    evidence cannot answer; every id; the words of each summary."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: dict[tuple[str, str], tuple[str, list[str], list[str]]] = {}
        self.beyond: dict[str, str] = {}
        self.ids: set[str] = set()
        self.summaries: list[str] = []
        self._title = self._row = self._words = self._name = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found["id"]} if "id" in found else set()
        if found.get("role") == "region":
            self._title = found["aria-label"]
        elif tag == "tr" and found.get("class") in ("auto", "author", "draft", "open"):
            self._row = (found["class"], [], [])
        elif tag == "td" and self._row:
            self._words = []
            self._row[2].clear()  # links of the last column alone
        elif tag == "a" and self._row and found.get("rel") is None:
            self._row[2].append(found["href"])
        elif tag in ("summary", "dt", "dd"):
            self._words = []

    def handle_endtag(self, tag):
        words = " ".join("".join(self._words or ()).split()).replace("\u00a0", " ")
        if tag == "td" and self._row:
            self._row[1].append(words)
        elif tag == "tr" and self._row:
            self.rows[self._title, self._row[1][0]] = self._row
            self._row = None
        elif tag == "summary":
            self.summaries.append(words)
        elif tag == "dt":
            self._name = words
        elif tag == "dd":
            self.beyond[self._name] = words
        if tag in ("td", "summary", "dt", "dd"):
            self._words = None

    def handle_data(self, data):
        if self._words is not None:
            self._words.append(data)


@pytest.fixture(scope="module")
def text() -> str:
    return page(load_run(RUN), Library([ROOT]))


@pytest.fixture(scope="module")
def found(text) -> Lists:
    return Lists(text)


def leads_somewhere(link: str, lists: Lists, folder: Path) -> bool:
    return link[1:] in lists.ids if link.startswith("#") else (folder / link).is_file()


def unanswered(lists: Lists, folder: Path) -> set[tuple[str, str]]:
    """Items that evidence is to answer and that have neither an answer with links that lead somewhere nor a reason in the list."""
    kept = set()
    for title, item in AUTO:
        basis, words, links = lists.rows[title, item]
        name = f"{next(name for name, t in TITLES.items() if t == title)} {item}"
        is_answered = basis == "auto" and bool(words[2] and words[3] and links) and all(leads_somewhere(x, lists, folder) for x in links)
        is_told = basis != "auto" and len(lists.beyond.get(name, "").partition(": ")[2]) > 5
        kept |= set() if is_answered or is_told else {(title, item)}
    return kept


def test_the_run_is_of_resnet50_delta():
    run = load_run(RUN)
    assert run.workflow["name"] == "resnet50-delta" and len(run.records) == len(run.cells) > 10


def test_every_auto_item_is_answered_with_evidence_or_its_reason_is_listed(found):
    assert len(AUTO) == 70 and AUTO <= set(found.rows)
    assert unanswered(found, RUN) == set()
    answered = [key for key in AUTO if found.rows[key][0] == "auto"]
    assert len(answered) == 59
    names = {f"{found_id} {item}" for found_id, title in TITLES.items() for of, item in AUTO if of == title}
    assert len(names & set(found.beyond)) == len(AUTO) - len(answered)


def test_the_counts_that_are_printed_are_those_of_the_rows(text, found):
    totals = {"auto": 0, "author": 0, "draft": 0, "open": 0}
    for one in LISTS:
        rows = [found.rows[one["title"], item["id"]] for item in one["items"]]
        counts = {basis: sum(row[0] == basis for row in rows) for basis in totals}
        totals = {basis: totals[basis] + counts[basis] for basis in totals}
        (summary,) = [s for s in found.summaries if s.startswith(f"{one['title']} ({one['version']})")]
        assert f": {counts['auto'] + counts['author']} answered, {counts['auto']} from evidence" in summary
        assert f"; {counts['draft'] + counts['open']} open" in summary
    assert sum(totals.values()) == sum(len(one["items"]) for one in LISTS) == 122
    assert (f"122 items in 6 checklists: {totals['auto'] + totals['author']} answered, {totals['auto']} from evidence and "
            f"{totals['author']} by the authors; {totals['draft'] + totals['open']} open") in text.replace("\u00a0", " ")


@pytest.mark.parametrize("spoil", [
    lambda text: text.replace('<a href="#metrics">#metrics</a>', ""), lambda text: text.replace('id="metrics"', 'id="moved"'),
    lambda text: text.replace("<dt>pineau-v2 C2</dt>", "<dt>x</dt>"),
])
def test_an_answer_without_its_evidence_or_reason_would_be_found(text, spoil):
    assert spoil(text) != text and unanswered(Lists(spoil(text)), RUN)


def test_a_run_without_records_answers_nothing_and_lists_every_reason(tmp_path):
    folder = write_run(tmp_path / "run", [], workflow={"name": "resnet50-delta", "claims": []}, environment={})
    lists = Lists(page(load_run(folder), Library([ROOT])))
    assert unanswered(lists, folder) == set()
    assert [item for _, item in AUTO if (lists.rows[_, item][0]) == "auto"] == ["AE-S8"], "how it is installed, which no run tells"
