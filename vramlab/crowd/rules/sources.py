"""Third round, second part: what this vramlab knows of the methods and models that a record names, by the hash of their source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from vramlab.collection import Library, Method, Model, built_in_collection, resolve_options
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.errors import WorkflowError
from vramlab.record import Outcome, RunRecord
from vramlab.runs import SCHEDULE_FILE, TAPE_FILE


@cache
def known_methods() -> Mapping[str, Method]:
    """The methods of the built-in collection, by the hash of their source."""
    library = Library([built_in_collection()])
    return {method.sha256: method for method in map(library.method, library.method_paths)}


@cache
def known_models() -> Mapping[str, Model]:
    """The models of the built-in collection, by the hash of their source."""
    library = Library([built_in_collection()])
    return {model.sha256: model for model in map(library.model, library.model_paths)}


def method_of(record: RunRecord) -> Method | None:
    """The method whose source this vramlab has, too; None of a user's own, of another version and of what was changed."""
    return known_methods().get(record.config["sources"]["method"])


@rule(Round.DERIVATION, "known-source", "a source that this vramlab has goes under no other of its names, and takes the options")
def _known_source(e: Examination) -> Iterator[Fault]:
    """Under a name that is not ours it is a user's copy. Of another source its own vramlab knows the options."""
    ours = {"method": {m.name for m in known_methods().values()}, "model": {m.name for m in known_models().values()}}
    for name, record in e.contents.records.items():
        config = record.config
        asked = ("method", "options", method_of(record)), ("model", "model_options", known_models().get(config["sources"].get("model")))
        for what, options, source in asked:
            if source is None:
                continue
            e.count()
            if config[what] != source.name and config[what] in ours[what]:
                yield f"{name}:config.{what}", f"{config[what]!r}; its source is that of {source.name}"
                continue
            try:
                resolve_options(source.card.options, config[options], f"{what} {source.name!r}")
            except WorkflowError as error:
                yield f"{name}:config.{options}", str(error)


@rule(Round.DERIVATION, "planned", "what a planner of this vramlab made run has its tape and its schedule")
def _planned(e: Examination) -> Iterator[Fault]:
    """Without them nothing would hold its peak. A native method has none, and of another source it cannot be known what it is."""
    for name, record in e.contents.records.items():
        method = method_of(record)
        if method is None or method.card.kind == "native" or record.kind != "step" or record.outcome is not Outcome.OK:
            continue
        e.count()
        if missing := [file for file in (TAPE_FILE, SCHEDULE_FILE) if file not in record.files]:
            yield f"{name}:files", f"{method.name} plans, and there is no {' and no '.join(missing)}"
