"""Collections found, read and loaded: expected values are the files that the test wrote."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shelves import write_method, write_model

from vramlab.collection import (
    Library, Option, UnknownName, built_in_collection, find_collections, files_of_options, hash_sources, read_method, read_model,
    resolve_options, source_files,
)
from vramlab.errors import WorkflowError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def shelf(tmp_path) -> Path:
    write_method(tmp_path, "delta", takes_budget=True, alias="old-delta")
    write_method(tmp_path, "eager")
    write_model(tmp_path)
    return tmp_path


def test_the_checkout_the_current_directory_and_named_ones_each_once(shelf, tmp_path, monkeypatch):
    other = tmp_path / "other"
    write_method(other, "mine")
    monkeypatch.chdir(shelf)
    assert find_collections([other, other, ROOT]) == (ROOT, shelf, other)
    monkeypatch.chdir(ROOT)
    assert find_collections() == (ROOT,) and built_in_collection() == ROOT


def test_a_directory_of_another_shape_is_no_collection(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights.bin").touch()
    monkeypatch.chdir(tmp_path)
    assert find_collections() == (ROOT,)
    with pytest.raises(WorkflowError, match="is no collection"):
        find_collections([tmp_path])


def test_a_dropped_folder_is_known_by_name_alias_and_uid(shelf):
    folder = write_method(shelf, "new-idea", alias="idea", uid="00112233445566ff")
    library = Library([shelf])
    for name in ("new-idea", "idea", "00112233445566ff"):
        assert library.method(name).folder == folder
    assert list(library.method_paths) == ["delta", "eager", "new-idea"]


def test_an_unknown_name_lists_what_there_is_and_the_nearest(shelf):
    with pytest.raises(UnknownName, match=r"no method 'detla'; did you mean 'delta'\? There are delta, eager"):
        Library([shelf]).method("detla")
    with pytest.raises(UnknownName, match="no workflow 'x'; there are none"):
        Library([shelf]).workflow("x.yaml")


def test_one_name_in_two_collections_names_both_paths_and_spoils_no_other(shelf, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(shelf / "methods", other / "methods", dirs_exist_ok=True)
    shutil.rmtree(other / "methods" / "eager")
    library = Library([shelf, other])
    with pytest.raises(UnknownName) as error:
        library.method("delta")
    assert str(shelf / "methods" / "delta") in str(error.value) and str(other / "methods" / "delta") in str(error.value)
    assert library.method("eager").name == "eager"


def test_two_methods_of_one_name_are_two_modules(shelf, tmp_path):
    other = tmp_path / "other"
    write_method(other, "delta", code="from .words import WORD\n\n\ndef build(**options):\n    return 'other', WORD\n")
    ours, theirs = Library([shelf]).method("delta"), Library([other]).method("delta")
    assert ours.build(action="swap-only") == ("delta", "swap-only", 1.0)
    assert theirs.build() == ("other", "delta")
    names = [ours.load().__name__, theirs.load().__name__]
    assert len(set(names)) == 2 and all(sys.modules[name] is module for name, module in zip(names, (ours.load(), theirs.load())))


def test_an_edited_source_is_loaded_anew_under_another_hash(shelf):
    before = read_method(shelf / "methods" / "delta")
    assert before.build()[0] == "delta"
    (shelf / "methods" / "delta" / "words.py").write_text("WORD = 'edited, and of another length'\n")
    after = read_method(shelf / "methods" / "delta")
    assert after.build()[0] == "edited, and of another length" and after.sha256 != before.sha256


def test_the_source_hash_is_over_names_and_bytes_and_nothing_else(tmp_path):
    folder = tmp_path / "m"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "b.py").write_bytes(b"two")
    (folder / "a.py").write_bytes(b"one")
    expected = hashlib.sha256(b"a.py\x003\x00one" + b"b.py\x003\x00two").hexdigest()
    assert hash_sources(folder, source_files(folder)) == expected
    (folder / "__pycache__" / "a.pyc").write_bytes(b"cache")
    (folder / ".swp").write_bytes(b"editor")
    assert hash_sources(folder, source_files(folder)) == expected
    (folder / "b.py").rename(folder / "c.py")
    assert hash_sources(folder, source_files(folder)) != expected
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    (moved / "c.py").rename(moved / "b.py")
    assert hash_sources(moved, source_files(moved)) == expected


def test_a_card_with_faults_names_all_of_them_with_their_places(shelf):
    card = shelf / "methods" / "delta" / "card.yaml"
    text = card.read_text().replace("kind: planner", "kind: plannar").replace("takes_budget: true", "takes_budgets: yes")
    card.write_text(text.replace("default: director", "default: directer"))
    with pytest.raises(WorkflowError) as error:
        read_method(card.parent)
    lines = str(error.value).splitlines()
    numbered = list(enumerate(card.read_text().splitlines(), 1))
    number = {word: next(i for i, line in numbered if word in line) for word in ("plannar", "directer", "takes_budgets")}
    assert f"{card}:{number['plannar']}:7: kind: 'plannar' is not allowed; did you mean 'planner'? Allowed: planner, native" in lines
    assert any(line.startswith(f"{card}:{number['directer']}:") and "director" in line for line in lines)
    assert any(line.startswith(f"{card}:{number['takes_budgets']}:1: unknown key 'takes_budgets'") for line in lines)
    assert not any("is missing" in line for line in lines), "the misspelt key was meant for it"


def test_a_model_card_is_called_as_its_file_and_its_code_lies_beside_it(shelf):
    assert read_model(shelf / "models" / "toy.yaml").load_builder()(8, 2) == ("toy", 8, 2)
    (shelf / "models" / "toy.yaml").rename(shelf / "models" / "tyo.yaml")
    (shelf / "models" / "toy.py").unlink()
    with pytest.raises(WorkflowError) as error:
        read_model(shelf / "models" / "tyo.yaml")
    assert "1:7: name: 'toy' is not allowed; must be 'tyo'" in str(error.value) and "there is no toy.py beside the card" in str(error.value)


@pytest.mark.parametrize(("kind", "good", "bad"), [
    ("int", [3, -1], [3.0, "3", True]), ("float", [3, 0.5], ["x", True, [1.0], float("nan"), float("inf")]), ("bool", [True], [1, "yes"]),
    ("str", ["x"], [3]),
    ("bytes", ["6GiB", 1024, "1.5 GB"], ["6 Gigs", 0, True]), ("list[int]", [[], [1, 2]], [[1.5], 3, [True]]),
    ("list[float]", [[1, 2.5]], [["1"], [float("nan")]]), ("list[str]", [["a"]], ["a"]),
])
def test_options_take_their_type_only(kind, good, bad):
    default = good[0]
    option = Option(default=default, type=kind, help="x")
    assert [option.fault(value) for value in good] == [None] * len(good)
    assert all(option.fault(value) for value in bad)
    assert option.fault(None) is not None and Option(default=None, type=kind, help="x").fault(None) is None


def test_what_an_option_names_is_known_by_its_content(tmp_path):
    """Of a file, of a folder of files, and of nothing."""
    declared = {"weights": Option(default=None, type="file", help="x")}
    (tmp_path / "a").mkdir()

    def found(path):
        return files_of_options(declared, {"weights": path})

    (tmp_path / "a" / "one.json").write_text("1")
    before = found(str(tmp_path / "a"))["weights"], found(str(tmp_path / "a" / "one.json"))["weights"]
    assert before[1] == hashlib.sha256(b"1").hexdigest() != before[0] is not None
    (tmp_path / "a" / "one.json").write_text("2")
    assert found(str(tmp_path / "a"))["weights"] not in (None, before[0])
    assert found(None) == {} and found("") == found(str(tmp_path / "b")) == {"weights": None}


def test_options_are_filled_in_and_read():
    declared = {"a": Option(default=1, type="float", help="x", min=0, max=8), "b": Option(default="1KiB", type="bytes", help="x")}
    assert resolve_options(declared, {"a": 2}, "method 'm'") == {"a": 2.0, "b": 1024}
    wrong = [({"c": 1}, "has no option 'c'; allowed: a, b"), ({"a": 9}, "at least 0 and at most 8"), ({"b": "huge"}, "a size")]
    for given, message in wrong:
        with pytest.raises(WorkflowError, match=message):
            resolve_options(declared, given, "method 'm'")


def test_every_card_of_this_collection_is_sound():
    library = Library([ROOT])
    assert len(library.model_paths) > 20
    for name in library.model_paths:
        assert library.model(name).card.options
    for name in library.method_paths:
        assert library.method(name).card.title


def test_nothing_of_torch_is_imported():
    code = ("import sys, vramlab.collection, vramlab.workflow, vramlab.runner, vramlab.doctor\n"
            "print({'torch', 'pandas', 'plotly'} & set(sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "set()"
