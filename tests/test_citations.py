"""Citations against entries read back by a small reader of BibTeX, and keys that a reader of the papers would expect."""

from __future__ import annotations

import re

import pytest
from shelves import write_method, write_model

from vramlab.citations import citations
from vramlab.collection import Library, built_in_collection

BUILT_IN = Library([built_in_collection()])


def cell(method: str, model: str, data: str = "synthetic") -> dict[str, str]:
    return {"method": method, "model": model, "data": data}


def read(entries: list[str]) -> dict[str, dict[str, str]]:
    """Key -> fields, `%` the comment above. Refuses a key that stands twice and braces that do not close."""
    found: dict[str, dict[str, str]] = {}
    for text in entries:
        comments = [line[2:] for line in text.splitlines() if line.startswith("% ")]
        body = "\n".join(line for line in text.splitlines() if not line.startswith("% "))
        if not body:
            continue
        kind, key = re.match(r"@(\w+)\{([^,\s]+),", body).groups()
        assert key not in found and body.count("{") == body.count("}") and body.endswith("}"), text
        found[key] = {name: value.strip("{}") for name, value in re.findall(r"^\s*(\w+)\s*=\s*(\{.*\}),?$", body, re.MULTILINE)}
        found[key] |= {"%": " ".join(comments), "kind": kind}
    return found


def test_the_reader_refuses_what_is_no_bibliography():
    for wrong in (["@misc{a,\n  title = {x}\n}"] * 2, ["@misc{a,\n  title = {x\n}"]):
        with pytest.raises(AssertionError):
            read(wrong)


def test_a_paper_of_several_models_is_one_entry():
    entries = read(citations([cell("eager", "resnet50"), cell("delta", "resnet101"), cell("delta", "resnet1001")], BUILT_IN))
    assert set(entries) == {"he2016deep", "torchvision2016torchvision", "tang2022delta", "he2016identity"}
    he = entries["he2016deep"]
    assert he["doi"] == "10.1109/CVPR.2016.90" and he["author"] == "Kaiming He and Xiangyu Zhang and Shaoqing Ren and Jian Sun"
    assert he["%"] == "model resnet50, model resnet101" and he["year"] == "2016"


def test_a_model_and_a_method_of_one_paper_share_the_entry_that_a_card_writes_out():
    entries = read(citations([cell("eager", "unet-bilinear"), cell("dtr", "unet-bilinear")], BUILT_IN))
    assert set(entries) == {"kirisame2021dtr"} and entries["kirisame2021dtr"]["kind"] == "inproceedings"
    assert entries["kirisame2021dtr"]["%"] == "model unet-bilinear, method dtr"


def test_the_order_of_cells_does_not_change_a_key():
    cells = [cell(method, model, "digits") for method, model in zip(("vdnn", "delta", "modnn"), BUILT_IN.model_paths)]
    assert set(read(citations(cells, BUILT_IN))) == set(read(citations(cells[::-1], BUILT_IN)))


def test_everything_that_there_is_has_an_entry_or_a_reason():
    methods, models = list(BUILT_IN.method_paths), list(BUILT_IN.model_paths)
    entries = citations([cell(method, "resnet50") for method in methods] + [cell("eager", model) for model in models], BUILT_IN)
    told = " ".join(re.findall(r"^% (.*)", "\n".join(entries), re.MULTILINE))
    assert not [name for name in methods if f"method {name}" not in told] + [name for name in models if f"model {name}" not in told]
    cited = read(entries)
    assert not [key for key, each in cited.items() if not (each.get("title") and each.get("year"))]
    assert [key for key, each in cited.items() if not each.get("author")] == ["dqnmemory2020"]  # whose submission withholds them
    of_models = [each for each in cited.values() if "model " in each["%"]]
    assert not [each for each in of_models if not (each.get("doi") or each.get("url"))]


WHERE = {  # as the papers' own pages have it
    "resnet50": ("he2016deep", "inproceedings", "booktitle", "IEEE Conference on Computer Vision and Pattern Recognition (CVPR)"),
    "unet": ("ronneberger2015u", "inproceedings", "booktitle",
             "International Conference on Medical Image Computing and Computer-Assisted Intervention (MICCAI)"),
    "alexnet": ("krizhevsky2014one", "article", "journal", "arXiv preprint arXiv:1404.5997"),
    "gpt2-small": ("radford2019language", "techreport", "institution", "OpenAI"),
}


@pytest.mark.parametrize("model", WHERE)
def test_an_entry_says_where_the_paper_came_out(model):
    key, kind, field, where = WHERE[model]
    found = read(citations([cell("eager", model)], BUILT_IN))[key]
    assert (found["kind"], found[field]) == (kind, where) and "howpublished" not in found


def test_only_what_is_no_paper_is_misc():
    cells = [cell("eager", model, "digits") for model in BUILT_IN.model_paths]
    entries = read(citations(cells, BUILT_IN))
    assert {key for key, each in entries.items() if each["kind"] == "misc"} == {"torchvision2016torchvision", "alpaydin1998optical"}
    told = entries["pedregosa2011scikit"]
    assert (told["journal"], told["volume"], told["pages"]) == ("Journal of Machine Learning Research", "12", "2825--2830")


def test_data_is_cited_or_told_not_to_be():
    digits = citations([cell("eager", "resnet8-digits", "digits")], BUILT_IN)
    assert {"alpaydin1998optical", "pedregosa2011scikit"} <= set(read(digits))
    own = citations([cell("eager", "resnet8-digits", "imagefolder:/pictures")], BUILT_IN)
    assert any(line.startswith("% data imagefolder:/pictures: a folder of your own") for line in own)
    assert not {"alpaydin1998optical", "pedregosa2011scikit"} & set(read(own))


def test_two_papers_never_share_a_key_and_umlauts_are_spelt_plainly(tmp_path):
    """The third is the second with a comma: one paper."""
    write_method(tmp_path, "toy")
    for i, title in enumerate(("The Memory of Nets", "Memory Nets", "Memory, Nets")):
        card = write_model(tmp_path, f"m{i}")
        card.write_text(card.read_text() + f'paper: {{title: "{title}", authors: ["Ana Mü-Ñez"], venue: v, year: 2020}}\n')
    entries = read(citations([cell("toy", f"m{i}") for i in range(3)], Library([tmp_path])))
    assert {key: each["%"] for key, each in entries.items()} == {"munez2020memory": "model m0", "munez2020memorynets": "model m1, model m2"}
