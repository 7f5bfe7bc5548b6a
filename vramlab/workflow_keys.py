"""Every key of a workflow file with what it may be, read off the schema: `list keys`.

    measure.steps    10         a whole number, at least 1
    methods[].name   (needed)   text
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Iterator, Literal, Mapping, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from vramlab.workflow_schema import (
    OF_EXPERIMENTS, SPELT, Experiment, ExperimentWhen, FileWhen, MethodEntry, ModelEntry, Settings, WorkflowFile,
)
from vramlab.yaml_nodes import one_of

_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "nothing"}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_NO_BOUND = 2**31 - 1  # the largest count: a guard, not worth a word
_SETTINGS = f"and again {one_of(Settings.model_fields)}"


def rows() -> list[dict[str, str]]:
    """`key`, `default` and `allowed` of each key, those of the whole file first; a key of a list's items is written `list[].key`."""
    return [{"key": key, "default": default, "allowed": allowed} for key, default, allowed in _of_model(WorkflowFile, "")]


def _of_model(model: type[BaseModel], above: str) -> Iterator[tuple[str, str, str]]:
    for name, field in sorted(model.model_fields.items(), key=lambda pair: model is WorkflowFile and pair[0] in OF_EXPERIMENTS):
        if model in (Experiment, ExperimentWhen, FileWhen) and name in OF_EXPERIMENTS:
            continue  # once for the file is enough
        key = f"{above}{field.alias or name}"
        inner, is_list = _model_in(field.annotation)
        yield key, _default(field), _allowed(field, inner, is_list)
        if inner is not None:
            yield from _of_model(inner, f"{key}[]." if is_list else f"{key}.")


def _allowed(field: FieldInfo, inner: type[BaseModel] | None, is_list: bool) -> str:
    if inner is None:
        return _in_words(field.annotation, field.metadata)
    also = f", {_SETTINGS}" if issubclass(inner, Settings) else ""
    what = "a name or a mapping with" if inner in (ModelEntry, MethodEntry) else "with" if is_list else "a mapping with"
    return f"{'a list, each ' if is_list else ''}{what} the keys below{also}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(needed)"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value in (None, [], {}, "") else str(value)


def _model_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that a key holds, and whether it holds a list of them; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if get_origin(annotation) in (list, Union, UnionType, Annotated):
        for part in get_args(annotation):
            found, is_list = _model_in(part)
            if found is not None:
                return found, is_list or get_origin(annotation) is list
    return None, False


def _in_words(annotation: Any, metadata: tuple[Any, ...] | list[Any] = ()) -> str:
    """`a whole number, at least 1`, `sgd, adam, adamw, none`, `a list, each 60%, 6GiB or auto`."""
    for check in metadata:
        if isinstance(check, AfterValidator) and check.func in SPELT:
            return SPELT[check.func]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _in_words(parts[0], parts[1:])
    if origin in (Union, UnionType):
        return " or ".join(_in_words(part) for part in parts if part is not NoneType)
    if origin is Literal:
        return one_of(map(str, parts), len(parts))
    if origin is list:
        return f"a list, each {_in_words(parts[0])}"
    kind = "a mapping" if origin in (dict, Mapping) else _KINDS.get(annotation, "any value")
    return ", ".join([kind, *_bounds(metadata)])


def _bounds(metadata: tuple[Any, ...] | list[Any]) -> Iterator[str]:
    for check in metadata:
        for inside in getattr(check, "metadata", [check]):  # Field(ge=1) holds its own list
            yield from (f"{words} {getattr(inside, name):g}" for name, words in _BOUNDS.items()
                        if getattr(inside, name, _NO_BOUND) < _NO_BOUND)
