"""Papers as the method and model cards cite them: one entry a paper, however many cards cite it, under its citation key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from vramlab.citations import bibtex_entry, citation_keys, paper_identity
from vramlab.collection import Library, Method, Paper
from vramlab.errors import WorkflowError


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card of a method says beside its paper."""

    name: str
    names: frozenset[str]  # aliases and the uid too: what records may call it
    tags: tuple[str, ...]
    title: str
    version: str
    decides: str
    fidelity: str
    deviations: tuple[str, ...]
    claims: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PaperEntry:
    """A paper with all that the collection has of it."""

    key: str
    paper: Paper
    bibtex: str
    methods: tuple[CardFacts, ...]
    models: tuple[str, ...]
    claims: tuple[str, ...]  # ids of the claims that its methods' cards name

    @property
    def link(self) -> str | None:
        """Where its abstract stands: the card's address, else the DOI's."""
        return self.paper.url or (f"https://doi.org/{self.paper.doi}" if self.paper.doi else None)


def read_catalogue(library: Library) -> Mapping[str, PaperEntry]:
    """Key -> paper, in order of year and title. A card that cannot be read is left out: `vramlab list` names what is wrong with it."""
    papers: dict[str, Paper] = {}
    methods: dict[str, list[CardFacts]] = {}
    models: dict[str, list[str]] = {}
    for name, paper, facts in _cards(library):
        identity = paper_identity(paper)
        if identity not in papers or paper.bibtex and not papers[identity].bibtex:
            papers[identity] = paper
        if facts is None:
            models.setdefault(identity, []).append(name)
        else:
            methods.setdefault(identity, []).append(facts)
    order = sorted(papers, key=lambda identity: (papers[identity].year, papers[identity].title))
    keys = citation_keys([papers[identity] for identity in order])
    return {key: _entry(key, papers[identity], methods.get(identity, []), models.get(identity, [])) for key, identity in zip(keys, order)}


def read_versions(library: Library) -> Iterator[tuple[str, str]]:
    """(SHA-256 of its source, its card's version) of every method."""
    for name in library.method_paths:
        try:
            method = library.method(name)
        except WorkflowError:
            continue
        yield method.sha256, method.card.version


def _entry(key: str, paper: Paper, methods: Iterable[CardFacts], models: Iterable[str]) -> PaperEntry:
    found = tuple(methods)
    claims = tuple(dict.fromkeys(claim for facts in found for claim in facts.claims))
    return PaperEntry(key=key, paper=paper, bibtex=bibtex_entry(paper, key), methods=found, models=tuple(models), claims=claims)


def _cards(library: Library) -> Iterator[tuple[str, Paper, CardFacts | None]]:
    """(name, its paper, facts of a method or None of a model) of every card that cites a paper."""
    for name in library.method_paths:
        try:
            method = library.method(name)
        except WorkflowError:
            continue
        if method.card.paper:
            yield name, method.card.paper, _facts(method)
    for name in library.model_paths:
        try:
            paper = library.model(name).card.paper
        except WorkflowError:
            continue
        if paper:
            yield name, paper, None


def _facts(method: Method) -> CardFacts:
    card = method.card
    return CardFacts(name=method.name, names=frozenset({method.name, card.uid, *card.alias}), tags=tuple(card.tags), title=card.title,
                     version=card.version, decides=card.decides, fidelity=card.fidelity, deviations=tuple(card.deviations),
                     claims=tuple(card.claims))
