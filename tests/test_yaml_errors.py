"""What a workflow's error says first: the likely cause, at the place where it was made, with the nearest spelling before any list."""

from __future__ import annotations

from pathlib import Path

import pytest
from shelves import write_method, write_model, write_workflow

from vramlab.collection import Library
from vramlab.errors import WorkflowError
from vramlab.workflow import Host, load_workflow, single_cell
from vramlab.workflow_notes import notes
from vramlab.yaml_nodes import offer, parse_yaml

BASE = """\
schema: 1
name: small
title: A small run
model: toy
batch_sizes: [8]
methods: [delta, eager]
budgets: [60%]
"""


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Path:
    for name, takes_budget in (("delta", True), ("eager", False), ("checkpoint", True)):
        write_method(tmp_path, name, takes_budget=takes_budget)
    write_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(shelf: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error, without the file's path."""
    with pytest.raises(WorkflowError) as error:
        load_workflow(str(write_workflow(shelf, text).relative_to(shelf)), Library([shelf]), overrides)
    return [line.removeprefix("workflows/small.yaml:") for line in str(error.value).splitlines()]


# ------------------------------------------------------------------------------------------------ the nearest spelling first


@pytest.mark.parametrize(("word", "known", "lister", "said"), [
    ("detla", ["delta", "eager"], "", "; did you mean 'delta'? Allowed: delta, eager"),
    ("xyz", ["delta", "eager"], "", "; allowed: delta, eager"),
    ("xyz", [], "", "; allowed: none"),
    ("a9", [f"a{i}" for i in range(9)], "`list all`", "; allowed: a0, a1, a2, a3, a4, a5 and 3 more (`list all` shows all)"),
    ("a9", [f"a{i}" for i in range(6)], "`list all`", "; allowed: a0, a1, a2, a3, a4, a5"),
    ("name7", [f"name{i}" for i in range(8)], "`l`", "; did you mean 'name7'? Allowed: name0, name1, name2, name3, name4, name5 and 2 more "
                                                     "(`l` shows all)"),
])
def test_the_nearest_spelling_stands_before_a_short_list(word, known, lister, said):
    assert offer(word, known, lister=lister) == said


def test_what_may_be_meant_is_not_always_told():
    assert offer("smok", ["smoke/ab12"], "there are", also=["smoke"]) == "; did you mean 'smoke'? There are smoke/ab12"


# ------------------------------------------------------------------------------------------------ causes before consequences


@pytest.mark.parametrize(("change", "cause"), [
    (("budgets: [60%]", "budgtes: [60%]"), "7:1: unknown key 'budgtes'; did you mean 'budgets'?"),
    (("batch_sizes:", "batch_size:"), "5:1: unknown key 'batch_size'; did you mean 'batch_sizes'?"),
    (("model:", "modle:"), "4:1: unknown key 'modle'; did you mean 'model'?"),
    (("name:", "nmae:"), "2:1: unknown key 'nmae'; did you mean 'name'?"),
    (("batch_sizes: [8]", "experimnts: [{name: a, batch_sizes: [8]}]\nclaims: [{id: x, rule: fits, experiment: a}]"),
     "5:1: unknown key 'experimnts'; did you mean 'experiments'?"),
    (("batch_sizes: [8]", "experiments: [{nmae: a, batch_sizes: [8]}]\nclaims: [{id: x, rule: fits, experiment: a}]"),
     "5:16: unknown key 'nmae'; did you mean 'name'?"),
    (("[delta, eager]", "[detla, eager]\nclaims: [{id: x, rule: fits, method: delta}]"),
     "6:11: there is no method 'detla'; did you mean 'delta'?"),
])
def test_a_misspelt_word_is_the_only_thing_that_is_said(shelf, change, cause):
    assert change[0] in BASE
    (line,) = problems(shelf, BASE.replace(*change))
    assert line.startswith(cause)


def test_where_the_cause_is_not_known_what_is_missing_comes_last(shelf):
    """`how_much` is like no key: it may or may not have been meant for budgets, whose lack is told at an earlier line."""
    lines = problems(shelf, BASE.replace("budgets: [60%]", "how_much: [60%]"))
    assert [line.partition(";")[0] for line in lines] == [
        "7:1: unknown key 'how_much'", "6:11: method 'delta' plans for a budget and none is given"]


def test_what_does_not_follow_from_the_misspelt_key_is_still_said(shelf):
    lines = problems(shelf, BASE.replace("budgets: [60%]", "budgtes: [60%]").replace("[8]", "[0]").replace("title: A small run\n", ""))
    assert [line.partition(";")[0] for line in lines] == [
        "1:1: key 'title' is missing", "4:15: batch_sizes: 0 is not allowed", "6:1: unknown key 'budgtes'"]


# ------------------------------------------------------------------------------------------------ places


@pytest.mark.parametrize(("text", "place", "what"), [
    ("a: [1, 2\nb: [3]\nc: 4\n", "1:4", "the bracket ["),
    ("a: [1, 2\nb: x\n", "1:4", "the bracket ["),
    ("a: [1,\n", "1:4", "what opens here"),
    ("a: [1, [2, 3]\n", "1:4", "the bracket ["),  # the outer one: the inner is closed
    ("a: [1, [2, 3\n", "1:8", "the bracket ["),
    ("x: 1\na: {b: 1, c: 2\nd: 3\n", "2:4", "the brace {"),
    ("a:\n  - {b: [1]\n  - c\n", "2:5", "the brace {"),
    ("a: [1, {b: 2]\n", "1:8", "the brace {"),
    ('a: "one\nb: two\n', "1:4", "the quotation mark"),
    ("a: 'one\nb: two\n", "1:4", "the quotation mark"),
])
def test_what_is_never_closed_is_told_where_it_opens(text, place, what):
    with pytest.raises(WorkflowError) as error:
        parse_yaml(text, "f")
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"f:{place}: not YAML: {what} that opens here is not closed" if what != "what opens here" else
                           f"f:{place}: not YAML: {what} is not closed") and "noticed at line " in line


@pytest.mark.parametrize(("text", "place"), [("a: [1, , 2]\n", "1:8"), ("a: b: c\n", "1:5"), ("a:\n\tb: 1", "2:1")])
def test_other_faults_are_told_where_they_are_noticed(text, place):
    with pytest.raises(WorkflowError) as error:
        parse_yaml(text, "f")
    assert str(error.value).startswith(f"f:{place}: not YAML: ") and "opens here" not in str(error.value)


@pytest.mark.parametrize(("settings", "overrides", "said"), [
    ({"model": "tyo"}, [], "--model: there is no model 'tyo'; did you mean 'toy'? There are toy"),
    ({"methods": ["detla"]}, [], "--method: there is no method 'detla'; did you mean 'delta'? There are checkpoint, delta, eager"),
    ({"budgets": ["60x"]}, [], "--budget: '60x' is not allowed; must be a share of eager's peak such as 60%, a size such as 6GiB, "
                               "or auto"),
    ({}, ["batch_sizes=[8"], "'batch_sizes=[8': not YAML at column 13: the bracket [ that opens here is not closed, or a comma is missing; "
                             "noticed at column 15: expected ',' or ']', but got '<stream end>'"),
    ({}, ["model.clases=3"], "'model.clases=3': model 'toy' has no option 'clases'; did you mean 'classes'? Allowed: image_size, classes"),
])
def test_what_came_by_an_option_is_told_by_its_name(shelf, settings, overrides, said):
    options = {"model": "--model", "batch_sizes": "--batch", "methods": "--method", "budgets": "--budget"}
    with pytest.raises(WorkflowError) as error:
        single_cell(Library([shelf]), {"model": "toy", "batch_sizes": [4], "methods": ["delta"], "budgets": ["60%"], **settings}, overrides,
                    Host("cpu"), options)
    assert str(error.value) == said


@pytest.mark.parametrize(("name", "is_allowed"), [
    ("My Workflow!", False), ("a/b", False), ("-a", False), ("a--b", False), ("a.", False), ("a-b_c.D9", True), ("9", True)])
def test_a_wrong_name_is_told_in_words(shelf, name, is_allowed):
    text = BASE.replace("name: small", f"name: '{name}'")
    if is_allowed:
        assert load_workflow(str(write_workflow(shelf, text)), Library([shelf])).name == name
    else:
        assert problems(shelf, text) == [f"2:7: name: {name!r} is not allowed; must be letters and digits, between them single hyphens, "
                                         "underscores or dots, such as my-run-2"]


# ------------------------------------------------------------------------------------------------ what stands twice


def said(shelf: Path, text: str, *overrides: str) -> list[str]:
    found = notes(load_workflow(str(write_workflow(shelf, text).relative_to(shelf)), Library([shelf]), overrides))
    return [line.removeprefix("workflows/small.yaml:") for line in found]


@pytest.mark.parametrize(("change", "note"), [
    (("[8]", "[8, 16, 8]"), "5:22: batch_sizes: 8 stands here a second time; it counts once"),
    (("[60%]", "[60%, 6GiB, 60.0 %]"), "7:22: budgets: 60% stands here a second time; it counts once"),
    (("[60%]", "[60%]\ntargets: [cpu, cpu]"), "8:16: targets: cpu stands here a second time; it counts once"),
    (("[delta, eager]", "[delta, eager, delta]"), "6:25: methods: delta stands here a second time with the same options; each of its cells "
                                                  "counts once"),
    (("[delta, eager]", "[delta, {name: delta, label: d, options: {threshold: 1}}]"),  # the default
     "6:18: methods: delta stands here a second time with the same options; each of its cells counts once"),
    (("[delta, eager]", "[{name: delta, budgets: [50%, 50%]}]"), "6:40: budgets: 50% stands here a second time; it counts once"),
])
def test_what_stands_in_a_list_twice_is_said(shelf, change, note):
    assert change[0] in BASE and said(shelf, BASE) == []
    assert said(shelf, BASE.replace(*change)) == [note]


def test_what_only_looks_alike_is_not(shelf):
    text = BASE.replace("[8]", "[8, 16]").replace("[60%]", "[60%, 50%, 6GiB]").replace(
        "[delta, eager]", "[delta, checkpoint, {name: delta, options: {threshold: 2}}]")
    assert said(shelf, text) == []


def test_an_override_that_a_later_one_replaces_is_said(shelf):
    assert said(shelf, BASE, "batch_sizes=[3]", "measure.steps=7", "batch_sizes=[4]") == [
        "'batch_sizes=[3]': the later override batch_sizes=[4] stands in its place"]
