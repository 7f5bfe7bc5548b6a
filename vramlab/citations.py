"""BibTeX of what a run used: the papers of its methods and models, its data, and the libraries that these come from.

A paper is one entry, however many methods and models cite it, under one key: that of the entry that a card writes out, else the first
author's last name, the year and the title's first word that says something, so that the same paper has the same key in every run. The
type of a made entry follows from the card's venue: a conference, a journal, arXiv, an institution's technical report, or else misc.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vramlab.collection import Library, Paper, UnknownName

_SAYS_NOTHING = frozenset({"a", "an", "the", "on", "of", "for", "in", "to", "and", "with"})

# As scikit-learn's own description of the data names its creator and date, and UCI's its two sources.
DIGITS = Paper(title="Optical Recognition of Handwritten Digits", authors=["E. Alpaydin", "C. Kaynak"], year=1998,
               venue="UCI Machine Learning Repository", url="https://archive.ics.uci.edu/ml/datasets/Optical+Recognition+of+Handwritten+Digits")
SCIKIT_LEARN = Paper(
    title="Scikit-learn: Machine Learning in Python", venue="Journal of Machine Learning Research 12, 2825-2830", year=2011,
    url="https://jmlr.org/papers/v12/pedregosa11a.html",
    authors=["Fabian Pedregosa", "Gael Varoquaux", "Alexandre Gramfort", "Vincent Michel", "Bertrand Thirion", "Olivier Grisel",
             "Mathieu Blondel", "Peter Prettenhofer", "Ron Weiss", "Vincent Dubourg", "Jake Vanderplas", "Alexandre Passos",
             "David Cournapeau", "Matthieu Brucher", "Matthieu Perrot", "Edouard Duchesnay"])
TORCHVISION = Paper(title="TorchVision: PyTorch's Computer Vision library", authors=["{TorchVision maintainers and contributors}"],
                    venue="GitHub repository", year=2016, url="https://github.com/pytorch/vision")  # as its own README asks
CONFERENCES = {
    "AAAI": "AAAI Conference on Artificial Intelligence",
    "ASPLOS": "International Conference on Architectural Support for Programming Languages and Operating Systems",
    "CVPR": "IEEE Conference on Computer Vision and Pattern Recognition",
    "ECCV": "European Conference on Computer Vision",
    "ICCV": "IEEE International Conference on Computer Vision",
    "ICLR": "International Conference on Learning Representations",
    "ICML": "International Conference on Machine Learning",
    "MICCAI": "International Conference on Medical Image Computing and Computer-Assisted Intervention",
    "MICRO": "IEEE/ACM International Symposium on Microarchitecture",
    "MLSys": "Conference on Machine Learning and Systems",
    "NAACL-HLT": "Conference of the North American Chapter of the Association for Computational Linguistics: Human Language Technologies",
    "NeurIPS": "Advances in Neural Information Processing Systems",
    "PPoPP": "ACM SIGPLAN Symposium on Principles and Practice of Parallel Programming",
}
DATA = {"digits": (DIGITS, SCIKIT_LEARN), "synthetic": ()}


def citations(configs: Iterable[Mapping[str, Any]], library: Library) -> list[str]:
    """BibTeX entries, each behind a comment that says what it is cited for; then a comment with the reason for each thing that has none."""
    cited: dict[str, Paper] = {}
    uses: dict[str, dict[str, None]] = {}
    without: dict[str, None] = {}
    for use, papers, why in (found for config in configs for found in _uses(config, library)):
        for paper in papers:
            name = paper_identity(paper)
            uses.setdefault(name, {})[use] = None
            if name not in cited or paper.bibtex and not cited[name].bibtex:
                cited[name] = paper
        if not papers:
            without[f"% {use}: {why}"] = None
    keys = citation_keys(list(cited.values()))
    return [f"% {', '.join(uses[name])}\n{bibtex_entry(paper, key)}" for (name, paper), key in zip(cited.items(), keys)] + list(without)


def _uses(config: Mapping[str, Any], library: Library) -> Iterator[tuple[str, Sequence[Paper], str]]:
    """(what is used, its papers, why there is none) of a cell."""
    for what, find in (("method", library.method), ("model", library.model)):
        use = f"{what} {config[what]}"
        try:
            card = find(config[what]).card
        except UnknownName:
            yield use, (), "it is in no collection here"
            continue
        source = [TORCHVISION] if getattr(card, "source", "").startswith("torchvision:") else []
        yield use, [*([card.paper] if card.paper else []), *source], "its card names no paper"
    data = str(config.get("data", "synthetic"))
    why = "made from a seed; nothing to cite" if data == "synthetic" else "a folder of your own; its card, if it has one, is not known here"
    yield f"data {data}", DATA.get(data, ()), why


def paper_identity(paper: Paper) -> str:
    """Equal for two mentions of one paper."""
    return (paper.doi or re.sub(r"\W+", " ", paper.title)).strip().lower()


def citation_keys(papers: Sequence[Paper]) -> list[str]:
    """One key a paper. Where two made ones are equal, the later title gives another word of its own."""
    written = [re.match(r"@\w+\{([^,\s]+)", paper.bibtex.strip()) if paper.bibtex else None for paper in papers]
    taken = {found[1] for found in written if found}
    keys = []
    for paper, found in zip(papers, written):
        key = found[1] if found else next(key for key in _candidates(paper) if key not in taken)
        taken.add(key)
        keys.append(key)
    return keys


def _candidates(paper: Paper) -> Iterator[str]:
    """`he2016deep`, `he2016deepresidual`, ...; in the end with numbers."""
    last_name = paper.authors[0].strip("{}").split()[0 if paper.authors[0].startswith("{") else -1] if paper.authors else "anonymous"
    words = [_ascii(word) for word in re.findall(r"[^\W_]+", paper.title) if word.lower() not in _SAYS_NOTHING] or ["untitled"]
    base = f"{_ascii(last_name)}{paper.year}"
    yield from (base + "".join(words[:count]) for count in range(1, len(words) + 1))
    number = 2
    while True:
        yield f"{base}{''.join(words)}{number}"
        number += 1


def _ascii(word: str) -> str:
    plain = unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]", "", plain.lower())


def bibtex_entry(paper: Paper, key: str) -> str:
    """The entry that a card writes out, links added; else one made of its fields."""
    if paper.bibtex:
        return _with_links(paper.bibtex.strip(), paper)
    kind, published = _published(paper)
    fields = {"title": "{" + paper.title + "}", "author": " and ".join(paper.authors), **published, "year": str(paper.year),
              "doi": paper.doi, "url": paper.url}
    lines = [f"  {name} = {{{value}}}" for name, value in fields.items() if value]
    return f"@{kind}{{{key},\n" + ",\n".join(lines) + "\n}"


def _published(paper: Paper) -> tuple[str, dict[str, str]]:
    """The type of the entry, and the field that says where the paper came out."""
    venue = paper.venue
    if venue in CONFERENCES:
        return "inproceedings", {"booktitle": f"{CONFERENCES[venue]} ({venue})"}
    if number := re.fullmatch(r"arXiv:?\s*(\S*)", venue):
        found = number[1] or (paper.doi or "").rpartition("arXiv.")[2]
        return "article", {"journal": f"arXiv preprint arXiv:{found}" if found else "arXiv preprint"}
    if journal := re.fullmatch(r"(.*\b(?:Journal|Transactions)\b.*?)(?: (\d+), (\d+)-(\d+))?", venue):
        name, volume, first, last = journal.groups()
        return "article", {"journal": name} | ({"volume": volume, "pages": f"{first}--{last}"} if volume else {})
    if report := re.fullmatch(r"(.+) technical report", venue):
        return "techreport", {"institution": report[1]}
    return "misc", {"howpublished": venue}


def _with_links(entry: str, paper: Paper) -> str:
    """A written entry with the DOI and the address of its card, where it has none."""
    absent = [(name, value) for name, value in (("doi", paper.doi), ("url", paper.url)) if value and not re.search(rf"\b{name}\s*=", entry)]
    if not absent or not entry.endswith("}"):
        return entry
    more = "".join(f",\n  {name} = {{{value}}}" for name, value in absent)
    return f"{entry[:-1].rstrip().rstrip(',')}{more}\n}}"
