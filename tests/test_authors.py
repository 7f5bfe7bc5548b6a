"""artifact.yaml: what is read, each mistake at its place with the nearest spelling; the authors' word is never evidence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hand_made import ENVIRONMENT, measured_step, write_run
from test_checklists import CHECKLISTS, ROOT, evidence_of

from vramlab.collection import Library
from vramlab.errors import WorkflowError
from vramlab.report.authors import answers_of, check_beside, is_address, read_answers
from vramlab.report.checklists import AuthorAnswer, answer_all
from vramlab.report.page import page
from vramlab.runs import load_run

EAGER, DELTA = measured_step("eager", 1000), measured_step("delta", 590, budget="60%")
GOOD = """schema: 1
workflows: [hand-made]
answers:
  neurips:
    N9:
      answer: "Yes"
      why: >-
        We read
        the code of ethics.
      see: [https://example.org/ethics, notes.txt]
    N1: {answer: No, why: no is text here}
"""


def collection(tmp_path: Path, text: str, workflow: str = "hand-made") -> Path:
    """A collection whose workflows/ holds a workflow, a file to point to and this artifact.yaml; the path of that."""
    folder = tmp_path / "mine" / "workflows"
    folder.mkdir(parents=True)
    (folder / f"{workflow}.yaml").write_text("schema: 1\n")
    (folder / "notes.txt").write_text("")
    (folder / "artifact.yaml").write_text(text)
    return folder / "artifact.yaml"


def problems(tmp_path: Path, text: str) -> list[str]:
    """What is wrong, the path left out."""
    path = collection(tmp_path, text)
    with pytest.raises(WorkflowError) as raised:
        read_answers(path, "hand-made", CHECKLISTS)
    return [line.removeprefix(f"{path}:") for line in str(raised.value).splitlines()]


def test_answers_are_read_as_they_stand(tmp_path):
    found = read_answers(collection(tmp_path, GOOD), "hand-made", CHECKLISTS)
    assert found == {
        ("neurips", "N9"): AuthorAnswer(value="Yes", why="We read the code of ethics.", see=("https://example.org/ethics", "notes.txt")),
        ("neurips", "N1"): AuthorAnswer(value="No", why="no is text here"),
    }


def test_a_file_speaks_for_the_workflows_that_it_names(tmp_path):
    path = collection(tmp_path, GOOD)
    assert read_answers(path, "another", CHECKLISTS) == {}
    path.write_text(GOOD.replace("workflows: [hand-made]\n", ""))
    assert len(read_answers(path, "another", CHECKLISTS)) == 2


HEAD = "schema: 1\nanswers:\n"


@pytest.mark.parametrize(("text", "expected"), [
    (HEAD + "  neurisp:\n    N9: {answer: NA, why: w}\n", "3:3: there is no checklist 'neurisp'; did you mean 'neurips'? There are "
     "ctuning-ae, acm-badges, neurips, pineau-v2, sigplan, fair"),
    (HEAD + "  neurips:\n    n9: {answer: NA, why: w}\n", "4:5: checklist neurips has no item 'n9'; did you mean 'N9'?"),
    (HEAD + "  neurips:\n    N9: {answer: yes, why: w}\n", "4:18: answer: 'yes' is not allowed; did you mean 'Yes'? Allowed: Yes, No, NA"),
    (HEAD + "  ctuning-ae:\n    AE-22: {answer: unanswered, why: w}\n",
     "4:21: answer: 'unanswered' is not allowed; allowed: filled, not applicable"),
    (HEAD + "  acm-badges:\n    BA-1: {answer: awarded, why: w}\n",
     "4:20: answer: 'awarded' is not allowed; allowed: evidence present, evidence missing, not claimed"),
    (HEAD + "  neurips:\n    N9: {anwser: NA, why: w}\n", "4:10: unknown key 'anwser'; did you mean 'answer'? Allowed: answer, why, see"),
    (HEAD + "  neurips:\n    N9: {answer: NA}\n", "4:9: key 'why' is missing"),
    (HEAD + "  neurips:\n    N9: {answer: NA, why: ' '}\n", "4:27: why: ' ' is not allowed"),
    (HEAD + "  neurips:\n    N9: {answer: true, why: w}\n", "4:18: answer: True is not allowed; must be text; put it in quotes"),
    (HEAD + "  neurips:\n    N9: {answer: NA, why: w, see: [note.txt]}\n",
     "4:36: see: there is no file note.txt beside this one; did you mean 'notes.txt'?"),
    (HEAD + "  neurips:\n    N9: {answer: NA, why: w, see: ['javascript:alert(1)']}\n",
     "4:36: see: 'javascript:alert(1)' is not allowed; write an address that begins with https:// or a file from this folder"),
    (HEAD + "  neurips:\n    N9: {answer: NA, why: w, see: [/etc/passwd]}\n", "4:36: see: '/etc/passwd' is not allowed"),
    ("schema: 1\nworkflows: [hand-maid]\nanswers: {}\n",
     "2:13: there is no workflow 'hand-maid' beside this file; did you mean 'hand-made'? There are hand-made"),
    ("schema: 2\nanswers: {}\n", "1:9: schema: 2 is not allowed; allowed: 1"),
    ("schema: 1\nanswer: {}\n", "2:1: unknown key 'answer'; did you mean 'answers'? Allowed: schema, workflows, answers"),
    ("[]\n", "1:1: [] is not allowed; must be a mapping of keys to values"),
    ("schema: 1\nanswers: {neurips: [}\n", "2:21: not YAML"),
])
def test_a_mistake_is_told_at_its_place_with_the_nearest_spelling(tmp_path, text, expected):
    found = problems(tmp_path, text)
    assert any(line.startswith(expected) for line in found), found


def test_it_is_found_beside_the_workflow_and_is_no_workflow_itself(tmp_path):
    library = Library([ROOT, collection(tmp_path, GOOD).parent.parent])
    assert "hand-made" in library.workflow_paths and "artifact" not in library.workflow_paths
    run = load_run(write_run(tmp_path / "run", [EAGER, DELTA]))
    assert set(answers_of(run, library)) == {("neurips", "N9"), ("neurips", "N1")}
    assert answers_of(load_run(write_run(tmp_path / "other", [EAGER], workflow={"name": "other"})), library) == {}
    check_beside(library.workflow("hand-made"), "hand-made", library)


def answered(tmp_path: Path, key: tuple[str, str], said: AuthorAnswer | None, records=(EAGER, DELTA), **plan):
    evidence = evidence_of(write_run(tmp_path, records, **{"workflow": {"name": "hand-made", "claims": []}} | plan))
    found = {(c.checklist.id, a.item.id): (c, a) for c in answer_all(CHECKLISTS, evidence, {} if said is None else {key: said})
             for a in c.answers}
    return found[key]


def test_an_authors_word_fills_what_is_open_and_counts_as_theirs(tmp_path):
    whole, answer = answered(tmp_path, ("neurips", "N9"), AuthorAnswer(value="Yes", why="we did"))
    assert (answer.basis, answer.value, answer.justification, answer.evidence) == ("author", "Yes", "we did", ())
    before, _ = answered(tmp_path, ("neurips", "N9"), None)
    assert dict(whole.counts) == {**before.counts, "author": 1, "open": before.counts["open"] - 1}


def test_an_authors_word_on_what_evidence_leaves_open_keeps_the_reason(tmp_path):
    whole, answer = answered(tmp_path, ("pineau-v2", "C2"), AuthorAnswer(value="Yes", why="at example.org"))
    assert (answer.basis, answer.evidence) == ("author", ()) and "not whether that is public" in answer.note
    assert ("C2", answer.note) in [(a.item.id, reason) for a, reason in whole.beyond_evidence], "it is still not answered from evidence"


def test_an_authors_word_never_overrides_evidence(tmp_path):
    dirty = {**ENVIRONMENT, "git": {"commit": "f" * 40, "dirty": True, "changes_sha256": "0" * 64}}
    records = [replace(r, environment=dirty) for r in (EAGER, DELTA)]
    whole, answer = answered(tmp_path / "no", ("neurips", "N4"), AuthorAnswer(value="Yes", why="all is there"), records)
    assert (answer.basis, answer.value, answer.contradiction) == ("auto", "No", "Yes: all is there")
    assert whole.contradictions == (answer,)
    agreed, answer = answered(tmp_path / "yes", ("neurips", "N4"), AuthorAnswer(value="Yes", why="all is there"))
    assert (answer.basis, answer.value, answer.contradiction, agreed.contradictions) == ("auto", "Yes", "", ())


def test_a_draft_that_the_authors_change_is_shown_beside_their_word(tmp_path):
    _, kept = answered(tmp_path / "a", ("neurips", "N3"), AuthorAnswer(value="NA", why="no theorem"))
    _, changed = answered(tmp_path / "b", ("neurips", "N3"), AuthorAnswer(value="Yes", why="in the appendix"))
    assert (kept.basis, kept.note) == ("author", "") and changed.note.startswith("draft: NA: ")


def test_no_rule_can_read_what_the_authors_say():
    source = "".join((ROOT / "vramlab" / "report" / f"{name}.py").read_text() for name in ("rules", "facts", "evidence"))
    assert "author" not in source.replace("its author describes it", "").replace("artifacts", "")


def test_the_page_shows_whose_word_it_is_and_runs_nothing_of_it(tmp_path):
    hostile = "<script>document.title='pwned'</script>"
    text = f'''{HEAD}  neurips:
    N9: {{answer: "Yes", why: "{hostile}", see: ["https://example.org/a?b=1&c=2", notes.txt]}}
    N4: {{answer: "No", why: we think not}}
'''
    library = Library([ROOT, collection(tmp_path, text).parent.parent])
    html = page(load_run(write_run(tmp_path / "run", [EAGER, DELTA])), library)
    assert hostile not in html and "&lt;script&gt;document.title" in html
    assert '<a href="https://example.org/a?b=1&amp;c=2" rel="noreferrer">' in html and "notes.txt</a>" not in html
    for words in ("the authors&#39; word", "1 by the authors", "Authors' answers that evidence contradicts",
                  "the authors say No: we think not"):
        assert words in html, words


@pytest.mark.parametrize(("text", "expected"), [
    ("https://example.org/a", True), ("http://a.b", True), ("notes.txt", False), ("javascript:alert(1)", False),
    ('https://a" onclick="x', False),
])
def test_only_addresses_become_links(text, expected):
    assert is_address(text) is expected


def test_this_repositorys_own_answers_can_be_read_and_award_nothing():
    path = ROOT / "workflows" / "artifact.yaml"
    found = read_answers(path, "resnet50-delta", CHECKLISTS)
    assert found and read_answers(path, "smoke", CHECKLISTS) == {}
    badges = [answer.value for (checklist, _), answer in found.items() if checklist == "acm-badges"]
    assert badges and set(badges) <= {"evidence missing", "not claimed"}
    auto = {(c.id, i.id) for c in CHECKLISTS for i in c.items if i.fill == "auto"}
    assert not auto & set(found), "what evidence answers, nobody needs to say"
