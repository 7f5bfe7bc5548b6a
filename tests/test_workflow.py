"""Workflow files: values, places of every error, what is laid on what, and cells resolved by hand."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shelves import write_method, write_model, write_workflow

from vramlab import __version__
from vramlab.collection import Library
from vramlab.device import DeviceProfile
from vramlab.errors import WorkflowError
from vramlab.planner import parse_bytes
from vramlab.record import hash_config
from vramlab.workflow import Host, expand, load_workflow
from vramlab.workflow_notes import notes
from vramlab.yaml_nodes import MAX_BYTES, nearest, parse_yaml, plain, read_yaml

CPU, CUDA = Host("cpu"), Host("cuda:0", cuda_devices=1)


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Path:
    for name, takes_budget in (("delta", True), ("eager", False), ("checkpoint", True)):
        write_method(tmp_path, name, takes_budget=takes_budget)
    write_model(tmp_path)
    write_model(tmp_path, "other")
    write_model(tmp_path, "words", kind="tokens")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(shelf: Path, text: str, *overrides: str):
    return load_workflow(str(write_workflow(shelf, text).relative_to(shelf)), Library([shelf]), overrides)


def problems(shelf: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(WorkflowError) as error:
        load(shelf, text, *overrides)
    return str(error.value).splitlines()


def titles(plan) -> list[str]:
    return [cell.title for cell in plan.cells]


BASE = """\
schema: 1
name: small
title: A small run
model: toy
batch_sizes: [8]
methods: [delta, eager]
budgets: [60%]
"""


# ------------------------------------------------------------------------------------------------ YAML


def test_scalars_are_read_by_yaml_1_2():
    text = ("a: 1e-3\nb: no\nc: 017\nd: 12:30:00\ne: 60%\nf: ~\ng:\nh: '12'\ni: 1.\nj: 0x1F\nk: 2020-01-01\nl: True\nm: -.5E2\n"
            "n: 0o17\no: '~'\np: +3\n")
    assert plain(parse_yaml(text, "f")) == {
        "a": 0.001, "b": "no", "c": 17, "d": "12:30:00", "e": "60%", "f": None, "g": None, "h": "12", "i": 1.0, "j": 31, "k": "2020-01-01",
        "l": True, "m": -50.0, "n": 15, "o": "~", "p": 3,
    }


def test_every_key_and_value_knows_its_place():
    root = parse_yaml("a: 1\nb:\n  - x\n  - {c:   2}\n", "f.yaml")
    inner = root.value["b"].value[1].value["c"]
    assert (str(inner.key_mark), str(inner.mark)) == ("f.yaml:4:6", "f.yaml:4:11")
    assert str(root.value["b"].value[0].mark) == "f.yaml:3:5"


@pytest.mark.parametrize(("text", "expected"), [
    ("a: 1\na: 2\nb: 1\na: 3\n", [f"f:{line}:1: key 'a' stands here a second time; first at line 1" for line in (2, 4)]),
    ("a: {b: 1, c: 2, b: 3}", ["f:1:17: key 'b' stands here a second time; first at line 1"]),
    ("", ["f:1:1: the file is empty"]), ("# nothing\n", ["f:1:1: the file is empty"]),
    ("a: !!python/object/apply:os.system ['true']",
     ["f:1:4: tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed; write the plain value"]),
    ("a: !!str 1", ["f:1:4: tag 'tag:yaml.org,2002:str' is not allowed; write the plain value"]),
    ("1: x\ntrue: y", ["f:1:1: key '1' is no text; put it in quotes", "f:2:1: key 'true' is no text; put it in quotes"]),
    ("a: &x {b: 1}\nc:\n  <<: *x", ["f:3:3: merge keys (<<) are not allowed; write the keys out"]),
    ("a: .inf\nb: -.NaN", ["f:1:4: .inf is not allowed; write a finite number"]),
    ('a: "\\ud800"', ["f:1:4: half a character (a lone surrogate) is not allowed"]),
    ("a: 1e999", ["f:1:4: 1e999 is beyond what a number can hold; put text in quotes"]),
    ("a: &x [*x]", ["f:1:4: an alias refers to what it stands in"]),
    ("a: 1\n---\nb: 2", ["f:2:1: not YAML: but found another document (expected a single document in the stream)"]),
    ("a:\n\tb: 1", ["f:2:1: not YAML: found character '\\t' that cannot start any token (while scanning for the next token)"]),
])
def test_what_yaml_accepts_and_we_do_not(text, expected):
    with pytest.raises(WorkflowError) as error:
        parse_yaml(text, "f")
    assert str(error.value).splitlines() == expected


def test_caps(tmp_path):
    levels = ["a0: &l0 [x]"] + [f"a{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 10)]
    with pytest.raises(WorkflowError, match="more than 50,000 values once aliases are expanded"):
        parse_yaml("\n".join(levels), "f")
    with pytest.raises(WorkflowError, match="more than 1000 aliases"):
        parse_yaml("a: &x 1\nb: [" + "*x, " * 1001 + "]", "f")
    with pytest.raises(WorkflowError, match="nested too deep"):
        parse_yaml("[" * 5000, "f")
    (tmp_path / "big.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(WorkflowError, match="at most 1,048,576 are read"):
        read_yaml(tmp_path / "big.yaml")
    (tmp_path / "latin.yaml").write_bytes("a: 1\nb: é\n".encode("latin-1"))
    with pytest.raises(WorkflowError, match=r"latin.yaml:2:4: byte 0xe9 is not UTF-8"):
        read_yaml(tmp_path / "latin.yaml")
    with pytest.raises(WorkflowError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=12))
def test_json_means_what_json_means(value):
    """JSON is YAML: Python's own reader is the oracle. Characters that YAML cannot hold are escaped."""
    if isinstance(value, int) and abs(value) >= 10**290:
        return
    text = json.dumps(value)
    if "<<" not in text:
        assert plain(parse_yaml(text, "f")) == json.loads(text)


def test_the_nearest_spelling():
    assert nearest("detla", ["delta", "eager"]) == "; did you mean 'delta'?"
    assert nearest("Batch-Sizes", ["batch_sizes", "budgets"]) == "; did you mean 'batch_sizes'?"
    assert nearest("v100", ["p100", "v100-32gb"]) == "; did you mean 'v100-32gb'?"
    assert nearest("xyz", ["delta"]) == "" and nearest("", []) == ""


# ------------------------------------------------------------------------------------------------ errors


def test_all_errors_at_once_each_with_place_value_and_what_is_allowed(shelf):
    text = """\
schema: 2
nam: a
title: 3
model: {name: toi, image_size: 64}
batch_sizes: [8, "16", 0]
methods: [delt, {name: delta, options: {acton: 3, action: swaponly}}, {name: eager, budgets: [60%]}]
budgets: [80%, 60x, -3]
targets: [gpu, sim:v100]
training: {optimiser: sgd, lr: fast, autocast: bf16}
when:
  gpu: {label: quick}
experiments:
  - {name: s}
  - {name: s, kind: trian, data: digit}
  - {name: m, kind: max_batch, batch_sizes: [3]}
claims: [{id: x, experiment: n, rule: max_batch_ratios}, {}]
measure:
"""
    found = problems(shelf, text)
    f = "workflows/small.yaml"
    expected = [
        f"{f}:1:9: schema: 2 is not allowed; allowed: 1",
        f"{f}:3:8: title: 3 is not allowed; must be text; put it in quotes",
        f"{f}:4:15: there is no model 'toi'; did you mean 'toy'? There are other, toy, words",
        f"{f}:5:18: batch_sizes: '16' is not allowed; must be a whole number",
        f"{f}:5:24: batch_sizes: 0 is not allowed; must be greater than or equal to 1",
        f"{f}:6:11: there is no method 'delt'; did you mean 'delta'? There are checkpoint, delta, eager",
        f"{f}:6:41: method 'delta' has no option 'acton'; did you mean 'action'? Allowed: action, threshold",
        f"{f}:6:59: action: 'swaponly' is not allowed; did you mean 'swap-only'? Allowed: director, swap-only",
        f"{f}:6:85: method 'eager' takes no budget; its plan does not depend on one",
        f"{f}:7:16: budgets: '60x' is not allowed; must be a share of eager's peak such as 60%, a size such as 6GiB, or auto",
        f"{f}:7:21: budgets: -3 is not allowed; must be a share of eager's peak such as 60%, a size such as 6GiB, or auto",
        f"{f}:8:11: targets: 'gpu' is not allowed; did you mean 'cpu'? Allowed: auto, cpu, cuda:0, sim:NAME",
        f"{f}:9:32: lr: 'fast' is not allowed; must be a number",
        f"{f}:9:48: autocast: 'bf16' is not allowed; did you mean 'bfloat16'? Allowed: bfloat16, float16",
        f"{f}:11:3: unknown key 'gpu'; did you mean 'cpu'? Allowed: cpu, cuda",
        f"{f}:14:12: experiment 's' stands here a second time; first at line 13",
        f"{f}:14:21: kind: 'trian' is not allowed; did you mean 'train'? Allowed: step, train, max_batch",
        f"{f}:14:34: data: 'digit' is not allowed; did you mean 'digits'? Allowed: synthetic, digits, imagefolder:PATH",
        f"{f}:15:32: max_batch searches the batch size; write search: {{low: ..., high: ...}}",
        f"{f}:16:30: there is no experiment 'n'; there are s, m",
        f"{f}:16:58: key 'id' is missing",
        f"{f}:17:1: measure: there is no value (are the lines that belong to it indented?)",
    ]
    assert [line for line in expected if line not in found] == []
    assert any(line.startswith(f"{f}:2:1: unknown key 'nam'; did you mean 'name'? Allowed: ") for line in found)
    assert not any("key 'name' is missing" in line for line in found), "it follows from the misspelt one"
    assert any(line.startswith(f"{f}:9:12: unknown key 'optimiser'; did you mean 'optimizer'? Allowed: optimizer, ") for line in found)
    assert any(line.startswith(f"{f}:8:16: targets: 'sim:v100' is not allowed; there is no device profile 'v100'") for line in found)
    assert len(found) == len(set(found)) and found == sorted(found, key=lambda line: tuple(map(int, line.split(":")[1:3])))


@pytest.mark.parametrize(("change", "expected"), [
    ({"model: toy\n": ""}, "1:1: key 'model' is missing"),
    ({"model: toy\n": "model: {image_size: 8}\n"}, "4:8: model: key 'name' is missing"),
    ({"batch_sizes: [8]\n": ""}, "1:1: key 'batch_sizes' is missing"),
    ({"budgets: [60%]\n": ""}, "6:11: method 'delta' plans for a budget and none is given; write for example budgets: [60%]"),
    ({"methods: [delta, eager]": "methods: delta"}, "6:10: methods: 'delta' is not allowed; must be a list: [delta]"),
    ({"methods: [delta, eager]": "methods: []"}, "6:10: methods: [] is not allowed; must not be empty"),
    ({"model: toy": "model: words\ndata: digits"}, "5:7: data: 'digits' does not go with words, which reads tokens; allowed: synthetic"),
    ({"model: toy": "model: {name: toy, image_size: 7}"}, "4:32: image_size: 7 is not allowed; must be at least 8"),
    ({"title: A": "training: {optimizer: adam, momentum: 0.9}\ntitle: A"}, "3:29: momentum does not go with optimizer 'adam'"),
    ({"title: A": "search: {low: 9, high: 8}\ntitle: A"}, "3:9: search: low 9 is above high 8"),
    ({"title: A": "experiments: [{name: t, kind: train, targets: [cpu, 'sim:h100']}]\ntitle: A"},
     "3:53: targets: 'sim:h100' is not allowed for kind train; a simulated device trains nothing"),
    ({"title: A": "experiments: [{name: b, kind: max_batch, budgets: [60%]}]\ntitle: A"},
     "3:52: budgets: '60%' is not allowed where the batch is searched, in experiment 'b'; give it budgets of its own, a size or auto"),
    ({"title: A": "claims: [{id: x, rule: training_equal, method: detla}]\ntitle: A"},
     "3:48: method: 'detla' is no method of experiment 'main'; did you mean 'delta'? There are delta, eager"),
    ({"title: A": "when: {cuda: {batch_sizes: [x]}}\ntitle: A"}, "3:29: batch_sizes: 'x' is not allowed; must be a whole number"),
])
def test_what_does_not_go_together(shelf, change, expected):
    text = BASE
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    assert f"workflows/small.yaml:{expected}" in problems(shelf, text)


def test_a_broken_card_is_told_where_it_is_broken(shelf):
    card = shelf / "methods" / "delta" / "card.yaml"
    card.write_text(card.read_text().replace("kind: planner", "kind: planer"))
    assert problems(shelf, BASE) == [f"{card}:5:7: kind: 'planer' is not allowed; did you mean 'planner'? Allowed: planner, native"]


def test_a_file_that_is_not_there(shelf):
    write_workflow(shelf, BASE)
    library = Library([shelf])
    with pytest.raises(WorkflowError, match=r"no workflow 'smal'; did you mean 'small'\? There are small"):
        load_workflow("smal", library)
    (shelf / "mine.yaml").write_text(BASE)
    with pytest.raises(WorkflowError, match="there is no workflow 'mine'; did you mean the file 'mine.yaml'?"):
        load_workflow("mine", Library([shelf]))
    (shelf / "gone.yaml").symlink_to("nowhere")
    with pytest.raises(WorkflowError, match=r"there is no file .*gone.yaml(?!.*gone)"):
        load_workflow(str(shelf / "gone.yaml"), Library([shelf]))
    with pytest.raises(WorkflowError, match="there is no file nowhere/x.yaml"):
        load_workflow("nowhere/x.yaml", library)
    assert load_workflow("small.yaml", library).path == load_workflow("small", library).path == "workflows/small.yaml"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_edit_of_a_file_makes_anything_but_a_workflow_error(shelf, data):
    """Values of a sound file are replaced and keys dropped at random: it is valid, or every line of the error has a place in it."""
    body = {
        "schema": 1, "name": "small", "title": "t", "model": {"name": "toy", "classes": 3}, "batch_sizes": [4, 8],
        "methods": ["eager", {"name": "delta", "options": {"action": "swap-only"}, "budgets": ["50%"], "label": "d"}], "budgets": ["60%"],
        "targets": ["auto", "sim:h100"], "training": {"optimizer": "sgd", "momentum": 0.5}, "measure": {"steps": 3}, "data": "synthetic",
        "experiments": [{"name": "a"}, {"name": "b", "kind": "max_batch", "budgets": ["auto"], "search": {"high": 9},
                                        "when": {"cpu": {"skip": "no"}}}],
        "claims": [{"id": "c", "experiment": "a", "rule": "training_equal", "method": "d"}],
        "when": {"cpu": {"label": "quick", "model": {"image_size": 8}}}, "expected": {"minutes": 1},
    }
    junk = st.sampled_from([None, True, -1, 0, 1.5, "", "x", "delta", [], {}, [1], ["x", {"name": "delta"}], {"name": 3}, {"a": {"b": 1}},
                            [[1]]])
    for _ in range(data.draw(st.integers(1, 3))):
        node = body
        while isinstance(node, dict | list) and node:
            key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
            if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.integers(0, 2)) == 0:
                if isinstance(node, dict) and data.draw(st.booleans()):
                    del node[key]
                else:
                    node[key] = deepcopy(data.draw(junk))
                break
            node = node[key]
    text = json.dumps(body, indent=1)
    try:
        workflow = load(shelf, text)
    except WorkflowError as error:
        lines = str(error).splitlines()
        assert lines and all(line.startswith("workflows/small.yaml:") for line in lines)
        assert all(1 <= int(line.split(":")[1]) <= text.count("\n") + 1 for line in lines)
    else:
        for host in (CPU, CUDA, Host("sim:h100")):
            assert all(cell.cell_id == hash_config(cell.config) for cell in expand(workflow, host).cells)


# ------------------------------------------------------------------------------------------------ cells


def test_a_cell_is_resolved_to_the_last_value(shelf):
    text = BASE.replace("model: toy", "model: {name: toy, image_size: 64}").replace(
        "methods: [delta, eager]", "methods: [{name: delta, options: {threshold: 2}}]") + "training: {lr: 1}\nmeasure: {steps: 3}\n"
    library = Library([shelf])
    (cell,) = expand(load(shelf, text), CPU).cells
    assert cell.config == {
        "experiment": "main", "kind": "step", "model": "toy", "model_options": {"image_size": 64, "classes": 10}, "batch_size": 8,
        "training": {"optimizer": "sgd", "lr": 1.0, "momentum": 0.9, "weight_decay": 0.0, "autocast": None, "channels_last": False,
                     "seed": 0, "steps": 0, "eval_every": 0},
        "data": "synthetic", "method": "delta", "options": {"action": "director", "threshold": 2.0}, "budget": "60%", "target": "cpu",
        "measure": {"warmup": 2, "steps": 3, "gate_steps": 3, "gate_batch_size": None, "time": True, "peak": True, "timeout_seconds": 1800,
                    "plan_timeout_seconds": 600, "sensitivity": False},
        "sources": {"method": library.method("delta").sha256, "model": library.model("toy").sha256, "harness": __version__},
    }
    assert cell.cell_id == hash_config(json.loads(json.dumps(cell.config)))


def test_the_product_with_eager_first_in_each_batch(shelf):
    text = BASE.replace("[8]", "[8, 16]").replace("budgets: [60%]", "budgets: [80 %, 6GiB, 1024, auto]").replace(
        "methods: [delta, eager]", "methods: [{name: delta, budgets: [50.0%], label: swap}, checkpoint, eager]")
    assert titles(expand(load(shelf, text), CPU)) == [
        f"toy b{batch} {method} on cpu" for batch in (8, 16)
        for method in ("eager", "swap 50%", "checkpoint 80%", "checkpoint 6GiB", "checkpoint 1024", "checkpoint auto")
    ]


def test_equal_cells_are_one(shelf):
    assert len(expand(load(shelf, BASE.replace("[8]", "[8, 8]") + "targets: [auto, cpu]\n"), CPU).cells) == 2


LAYERED = BASE + """\
measure: {warmup: 1, steps: 1}
when:
  cpu: {batch_sizes: [2], label: quick, measure: {steps: 2}, expected: {minutes: 3}}
experiments:
  - name: plain
  - name: own
    batch_sizes: [3]
    measure: {steps: 3}
  - name: own-when
    batch_sizes: [3]
    when: {cpu: {batch_sizes: [4], measure: {gate_steps: 4}}}
expected: {minutes: 30}
"""


def test_later_layers_win_and_mappings_merge(shelf):
    def seen(host, *overrides):
        plan = expand(load(shelf, LAYERED, *overrides), host)
        measures = ("warmup", "steps", "gate_steps")
        return {cell.config["experiment"]: (cell.config["batch_size"], *(cell.config["measure"][key] for key in measures))
                for cell in plan.cells}

    assert seen(CPU) == {"plain": (2, 1, 2, 3), "own": (3, 1, 3, 3), "own-when": (4, 1, 2, 4)}
    assert seen(CUDA) == {"plain": (8, 1, 1, 3), "own": (3, 1, 3, 3), "own-when": (3, 1, 1, 3)}
    assert seen(CPU, "batch_sizes=[5]", "measure.steps=9") == {"plain": (5, 1, 9, 3), "own": (5, 1, 9, 3), "own-when": (5, 1, 9, 4)}
    assert seen(CPU, "experiments.own.batch_sizes=[5]") == {"plain": (2, 1, 2, 3), "own": (5, 1, 3, 3), "own-when": (4, 1, 2, 4)}
    assert seen(CPU, "when.cpu.batch_sizes=[6]") == {"plain": (6, 1, 2, 3), "own": (3, 1, 3, 3), "own-when": (4, 1, 2, 4)}
    cpu, cuda = (expand(load(shelf, LAYERED), host) for host in (CPU, CUDA))
    assert (cpu.label, cpu.expected.minutes, cuda.label, cuda.expected.minutes) == ("quick", 3, None, 30)


OF_THEIR_OWN = """\
schema: 1
name: small
title: A small run
model: toy
batch_sizes: [8]
methods:
  - {name: delta, budgets: [50%]}
  - eager
budgets: [60%]
experiments:
  - name: plain
  - name: own
    budgets: [70%]
  - {name: largest, kind: max_batch, budgets: [2MiB], methods: [delta], search: {high: 4}}
"""


def test_an_override_of_budgets_wins_over_those_of_methods_and_experiments(shelf):
    def seen(*overrides):
        cells = expand(load(shelf, OF_THEIR_OWN, *overrides), CPU).cells
        return [(c.config["experiment"], c.config["budget"]) for c in cells if c.config["method"] == "delta"]

    own = ("largest", "2MiB")
    assert seen() == [("plain", "50%"), ("own", "50%"), own]
    assert seen("budgets=[1GiB]") == [("plain", "1GiB"), ("own", "1GiB"), ("largest", "1GiB")]
    assert seen("experiments.plain.budgets=[30%]") == [("plain", "30%"), ("own", "50%"), own]
    by_hand = [("plain", "20%"), ("own", "20%"), own]
    assert seen("methods.delta.budgets=[20%]", "experiments.own.budgets=[30%]", "experiments.largest.methods=[delta]") == by_hand
    assert problems(shelf, OF_THEIR_OWN, "budgets=[30%]") == [
        "'budgets=[30%]': budgets: '30%' is not allowed where the batch is searched, in experiment 'largest'; "
        "give it budgets of its own, a size or auto"]


def test_what_an_override_replaces_is_said_with_its_place(shelf):
    def said(*overrides):
        return notes(load(shelf, OF_THEIR_OWN, *overrides), "cpu")

    assert said() == said("measure.steps=3") == []
    assert said("budgets=[1GiB]", "batch_sizes=[4]") == [
        "'batch_sizes=[4]': does not reach experiment 'largest', which searches the batch size",
        "workflows/small.yaml:7:19: budgets of method 'delta': the override budgets=[1GiB] stands in their place",
        "workflows/small.yaml:13:5: budgets of experiment 'own': the override budgets=[1GiB] stands in their place",
        "workflows/small.yaml:14:38: budgets of experiment 'largest': the override budgets=[1GiB] stands in their place",
    ]
    assert said("experiments.own.budgets=[30%]") == [
        "workflows/small.yaml:7:19: budgets of method 'delta': the override experiments.own.budgets=[30%] stands in their place"]


def test_a_budget_above_eagers_peak_is_told_once(shelf):
    text = BASE.replace("[60%]", "[100%, 150%]").replace("[delta, eager]", "[{name: delta, budgets: [1000%, 2GiB]}, checkpoint]")
    assert notes(load(shelf, text)) == [
        "workflows/small.yaml:6:35: budgets: 1000% is above eager's peak: it binds only a method that would hold more than eager does",
        "workflows/small.yaml:7:17: budgets: 150% is above eager's peak: it binds only a method that would hold more than eager does",
    ]
    assert notes(load(shelf, BASE)) == []
    assert "'1001%' is not allowed" in problems(shelf, BASE.replace("60%", "1001%"))[0]


def test_another_model_brings_its_own_options(shelf):
    text = BASE.replace("model: toy", "model: {name: toy, image_size: 64, classes: 3}") + """\
when: {cpu: {model: {image_size: 16}}}
experiments: [{name: a}, {name: b, model: other}, {name: c, model: {name: other, classes: 4}}, {name: d, model: {classes: 5}}]
"""
    configs = [cell.config for cell in expand(load(shelf, text), CPU).cells]
    found = {config["experiment"]: (config["model"], *config["model_options"].values()) for config in configs}
    assert found == {"a": ("toy", 16, 3), "b": ("other", 32, 10), "c": ("other", 32, 4), "d": ("toy", 16, 5)}
    short = expand(load(shelf, BASE, "model.image_size=48"), CPU).cells[0]
    assert (short.config["model"], short.config["model_options"]["image_size"]) == ("toy", 48)


def test_overrides_name_items_of_lists_and_are_recorded_as_typed(shelf):
    words = ["methods.delta.options={action: swap-only}", "methods.delta.label=swap", "budgets=[40%]", "title=Another", "training.lr=1e-3"]
    workflow = load(shelf, BASE, *words)
    plan = expand(workflow, CPU)
    assert titles(plan) == ["toy b8 eager on cpu", "toy b8 swap 40% on cpu"] and plan.title == "Another"
    assert plan.cells[1].config["options"] == {"action": "swap-only", "threshold": 1.0} and plan.cells[1].config["training"]["lr"] == 0.001
    assert [override.text for override in workflow.overrides] == words


@pytest.mark.parametrize(("override", "expected"), [
    ("batch_size=[8]", "'batch_size=[8]': unknown key 'batch_size'; did you mean 'batch_sizes'? Allowed: "),
    ("batch_sizes=[x", "'batch_sizes=[x': not YAML at column 13: the bracket [ that opens here is not closed, or a comma is missing"),
    ("batch_sizes=[8, x]", "'batch_sizes=[8, x]': batch_sizes: 'x' is not allowed; must be a whole number"),
    ("measure.step=3", "'measure.step=3': unknown key 'step'; did you mean 'steps'? Allowed: warmup, steps,"),
    ("methods.detla.label=x", "'methods.detla.label=x': there is no item 'detla'; did you mean 'delta'? There are delta, eager"),
    ("experiments.z.budgets=[1%]", "'experiments.z.budgets=[1%]': write experiments.NAME.key=value; NAME is one of main"),
    ("budgets=", "'budgets=': there is no value"),
    ("budgets", "'budgets': is no override; write key=value"),
    ("=3", "'=3': is no override"),
    ("model.image_size=big", "'model.image_size=big': image_size: 'big' is not allowed; must be a whole number"),
])
def test_wrong_overrides_point_into_their_own_text(shelf, override, expected):
    (line,) = problems(shelf, BASE, override)
    assert line.startswith(expected)


def test_kinds(shelf):
    text = BASE + """\
experiments:
  - {name: t, kind: train, data: digits, training: {optimizer: adamw, steps: 7, eval_every: 2}, budgets: [60%]}
  - {name: m, kind: max_batch, targets: ["sim:v100-32gb"], budgets: [auto], search: {high: 100}}
"""
    cells = expand(load(shelf, text), CPU).cells
    train, search = cells[0].config, cells[2].config
    assert (train["kind"], train["data"], train["training"]["steps"], train["training"]["eval_every"]) == ("train", "digits", 7, 2)
    assert (train["training"]["lr"], train["training"]["momentum"]) == (0.001, 0.0)
    assert (search["batch_size"], search["target"]) == (None, "sim:v100-32gb")
    assert search["search"] == {"over": "batch", "low": 1, "high": 100, "step": 1, "slowdown": None}
    assert search["budget"] == "auto"  # the same bound for every method
    assert cells[3].config["budget"] == "auto" and "search" not in train
    assert cells[3].title == "toy largest batch delta auto on sim:v100-32gb"


def test_auto_budget_where_the_batch_is_searched_and_none_is_given(shelf):
    text = BASE.replace("budgets: [60%]\n", "") + "experiments: [{name: m, kind: max_batch, targets: ['sim:v100-32gb', cpu]}]\n"
    plan = expand(load(shelf, text), CPU)
    assert [(cell.config["budget"], cell.config["target"]) for cell in plan.cells] == 2 * [("auto", "sim:v100-32gb")]
    assert [(out.target, out.reason) for out in plan.left_out] == [("cpu", "on a CPU a search needs a cap in bytes: budgets: [2GiB]")]


def test_a_search_on_a_cpu_takes_a_cap_in_bytes(shelf):
    plan = expand(load(shelf, BASE + "experiments: [{name: m, kind: max_batch, targets: [cpu], budgets: [2MiB]}]\n"), CPU)
    assert [cell.config["budget"] for cell in plan.cells] == ["2MiB", "2MiB"] and not plan.left_out


@pytest.mark.parametrize(("search", "expected"), [
    ("{over: image_size, low: 30, high: 70, step: 16}", (32, 64, 16)), ("{over: image_size, high: 40}", (8, 40, 1)),
    ("{over: batch, low: 8, step: 8, high: 30}", (8, 24, 8)),
])
def test_what_is_searched_is_resolved_to_values_that_there_are(shelf, search, expected):
    text = BASE + f"experiments: [{{name: m, kind: max_batch, budgets: [2MiB], search: {search}}}]\n"
    config = expand(load(shelf, text), CPU).cells[0].config
    over = config["search"]["over"]
    assert tuple(config["search"][key] for key in ("low", "high", "step")) == expected
    assert (config["batch_size"] is None) == (over == "batch") and over not in config["model_options"]


@pytest.mark.parametrize(("search", "expected"), [
    ("{over: image_sise}", "search: over 'image_sise' is no whole-number option of model 'toy'; did you mean 'image_size'? Allowed: batch"),
    ("{over: image_size, low: 5, high: 6}", "search: 'toy' has no image_size from 5 to 6"),
    ("{low: 9, high: 5}", "search: low 9 is above high 5"),
])
def test_what_cannot_be_searched(shelf, search, expected):
    found = problems(shelf, BASE + f"experiments: [{{name: m, kind: max_batch, budgets: [auto], search: {search}}}]\n")
    assert any(expected in line for line in found), found


def test_what_cannot_run_here_is_left_out_with_the_reason_and_so_are_its_claims(shelf):
    text = BASE + """\
experiments:
  - {name: here}
  - {name: gpu, targets: ["cuda:0"]}
  - {name: second, targets: ["cuda:1"]}
  - {name: skipped, when: {cpu: {skip: takes a day on a CPU}}}
  - {name: train, kind: train}
claims:
  - {id: a, experiment: here, rule: memory_saved_percent}
  - {id: b, experiment: gpu, rule: memory_saved_percent}
"""
    workflow = load(shelf, text)

    def reasons(host):
        return {out.experiment: out.reason for out in expand(workflow, host).left_out}

    assert reasons(CPU) == {"gpu": "this machine has no NVIDIA GPU", "second": "this machine has no NVIDIA GPU",
                            "skipped": "takes a day on a CPU"}
    assert reasons(CUDA) == {"second": "this machine has 1 NVIDIA GPU(s)"}
    assert reasons(Host("sim:h100"))["train"] == "a simulated device trains nothing"
    assert expand(workflow, CPU).untestable_claims() == [("b", "this machine has no NVIDIA GPU")]


def test_a_claim_over_several_experiments_and_claims_that_are_given_up(shelf):
    text = BASE + """\
experiments:
  - {name: one}
  - {name: two, targets: ["cuda:0"]}
claims:
  - {id: a, experiment: [one, two], rule: memory_saved_percent}
untestable:
  - {claims: [b, c], reason: no board of 2016 is at hand}
"""
    workflow = load(shelf, text)
    assert [claim.experiments for claim in workflow.claims] == [("one", "two")]
    assert expand(workflow, CPU).untestable_claims() == [(name, "no board of 2016 is at hand") for name in "bc"]
    with pytest.raises(WorkflowError, match="there is no experiment 'tow'"):
        load(shelf, text.replace("[one, two]", "[one, tow]"))
    with pytest.raises(WorkflowError, match="is no method of experiment 'one'"):
        load(shelf, text.replace("[one, two],", "[one, two], method: nobody,"))


@pytest.mark.parametrize("line, problem", [
    ("data: imagefolder:nowhere", "8:7: data: there is no directory nowhere"),
    ("schema: true", "1:9: schema: True is not allowed; must be the whole number 1"),
    ("schema: 1.0", "1:9: schema: 1.0 is not allowed; must be the whole number 1"),
    (f"name: {'a' * 101}", "2:7: name: "),
    ("budgets: [1.5]", "7:11: budgets: 1.5 is not allowed; must be a share"),
    ("budgets: ['1.5']", "7:11: budgets: '1.5' is not allowed; must be a share"),
    ("budgets: ['60']", "7:11: budgets: '60' is not allowed; write 60% for a share of eager's peak, 60GiB for a size, or auto"),
])
def test_what_looks_right_and_is_not(shelf, line, problem):
    key = line.partition(":")[0]
    kept = [row for row in BASE.splitlines() if not row.startswith(f"{key}:")]
    at = next((k for k, row in enumerate(BASE.splitlines()) if row.startswith(f"{key}:")), len(kept))
    found = problems(shelf, "\n".join([*kept[:at], line, *kept[at:]]) + "\n")
    assert [row for row in found if row.startswith(f"workflows/small.yaml:{problem}")], found


def test_a_folder_of_images_that_is_there_is_right(shelf):
    (shelf / "pictures").mkdir()
    assert expand(load(shelf, BASE + "data: imagefolder:pictures\n"), CPU).cells


def test_a_run_is_named_by_its_cells(shelf):
    first = expand(load(shelf, BASE), CPU)
    assert expand(load(shelf, BASE.replace("A small run", "Another title")), CPU).run_id == first.run_id
    assert expand(load(shelf, BASE, "title=Other"), CPU).run_id == first.run_id
    others = [expand(load(shelf, BASE, "batch_sizes=[9]"), CPU), expand(load(shelf, BASE), CUDA), expand(load(shelf, BASE, "name=x"), CPU)]
    (shelf / "methods" / "delta" / "words.py").write_text("WORD = 'edited'\n")
    others.append(expand(load(shelf, BASE), CPU))
    assert len({first.run_id, *(plan.run_id for plan in others)}) == 5


def test_every_workflow_of_this_collection_is_valid():
    root = Path(__file__).resolve().parents[1]
    library = Library([root])
    assert {"smoke", "resnet50-delta", "resnet101-delta", "vgg16-checkpoint"} <= set(library.workflow_paths)
    for name in library.workflow_paths:
        workflow = load_workflow(name, library)
        assert workflow.name == name and all(expand(workflow, host).cells for host in (CPU, CUDA))


# ------------------------------------------------------------------------------------------------ several devices

SHARED = BASE.replace("batch_sizes: [8]", "batch_sizes: [8]\ntargets: ['sim:v100-32gb']\ndevices: [1, 2, 4]")


def test_devices_are_a_dimension_of_simulated_steps(shelf):
    plan = expand(load(shelf, SHARED), CPU)
    assert titles(plan)[3:] == [f"toy b8 delta 60% on sim:v100-32gb x {n}" for n in (1, 2, 4)]
    assert [cell.config["devices"] for cell in plan.cells] == [1, 2, 4] * 2
    assert "devices" not in expand(load(shelf, BASE), CPU).cells[0].config, "cells without them keep their name"


def test_devices_that_cannot_share_are_told(shelf):
    assert "does not go with devices" in problems(shelf, SHARED.replace("sim:v100-32gb", "cpu"))[0]
    assert "a batch of 8 is not shared among 9 devices" in problems(shelf, SHARED.replace("[1, 2, 4]", "[1, 9]"))[0]
    kind = "experiments: [{name: b, kind: train}]\n"
    assert any("devices does not go with kind train" in line for line in problems(shelf, SHARED + kind))
    left_out = expand(load(shelf, SHARED.replace("targets: ['sim:v100-32gb']\n", "")), CPU).left_out
    assert "simulated only" in left_out[0].reason


# ------------------------------------------------------------------------------------------------ device profiles
PROFILE_FIELDS = sorted(f.name for f in fields(DeviceProfile) if f.name not in ("name", "devices"))  # devices: how many share the batch


@pytest.mark.parametrize("field", PROFILE_FIELDS)
def test_no_workflow_overrides_a_number_of_a_profile(shelf, field):
    """Wherever it is written, it is refused with its place."""
    file = BASE + "targets: ['sim:h100']\n"
    assert problems(shelf, file + f"{field}: 1\n")[0].startswith(f"workflows/small.yaml:9:1: unknown key '{field}'")
    inside = "experiments:\n  - name: e\n    targets: ['sim:h100']\n"
    assert problems(shelf, BASE + inside + f"    {field}: 1\n")[0].startswith(f"workflows/small.yaml:11:5: unknown key '{field}'")
    when = f"when: {{cuda: {{{field}: 1}}}}\n"
    assert problems(shelf, BASE + when)[0].startswith(f"workflows/small.yaml:8:15: unknown key '{field}'")
    measure = f"measure: {{{field}: 1}}\n"
    assert problems(shelf, BASE + measure)[0].startswith(f"workflows/small.yaml:8:11: unknown key '{field}'")
    mapping = f"targets: [{{name: 'sim:h100', {field}: 1}}]\n"
    assert problems(shelf, BASE + mapping)[0].startswith("workflows/small.yaml:8:11: targets")
    assert f"unknown key '{field}'" in problems(shelf, BASE, f"{field}=1")[0]


def test_no_workflow_brings_a_profile_of_its_own(shelf):
    (shelf / "mine.json").write_text("{}")
    for name in ("mine", "./mine.json", "../mine", "H100"):
        assert problems(shelf, BASE + f"targets: ['sim:{name}']\n")[0].startswith("workflows/small.yaml:8:11: targets: ")


@pytest.mark.parametrize("size, nbytes", [
    ("9007199254740993", 9007199254740993), ("0.1MiB", 104857), ("1.5GiB", 3 * 2**29), (" 6 GB ", 6 * 10**9), ("1.0", 1),
])
def test_a_size_is_exact(size, nbytes):
    """The first has no float of its own."""
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize("size", ["9" * 39 + "GiB", "9" * 400 + "GiB", "9" * 5000, 2**62, "4194304TiB", "1.0000000000000000001", "0", True])
def test_a_size_that_is_none_is_refused_in_a_short_line(size):
    with pytest.raises(ValueError) as refused:
        parse_bytes(size)
    assert "is no size" in str(refused.value) and len(str(refused.value)) < 200


@pytest.mark.parametrize("line, told", [
    ("model: {name: , width: 8}", "key 'name' is missing"),
    ("measure: {timeout_seconds: 604801}", "604800"),
    ("measure: {steps: 2147483648}", "2147483647"),
])
def test_what_no_cell_could_run_is_refused_at_its_place(shelf, line, told):
    text = "schema: 1\nname: t\ntitle: T\nbatch_sizes: [4]\nmethods: [eager]\n"
    text += line if line.startswith("model") else f"model: {{name: toy}}\n{line}"
    (shelf / "t.yaml").write_text(text + "\n")
    with pytest.raises(WorkflowError) as refused:
        load_workflow("t.yaml", Library([shelf]))
    assert str(refused.value).startswith(f"t.yaml:{text.count(chr(10)) + 1}:") and told in str(refused.value)
