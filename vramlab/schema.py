"""Pydantic's verdict on a Node tree, said as Problems: the place, the value, what is allowed, the nearest spelling."""

from __future__ import annotations

import re
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from vramlab.yaml_nodes import Node, Problem, dotted, find, key_place, near, offer, plain


class Strict(BaseModel):
    """Base of everything read from YAML: unknown keys are errors and nothing is coerced, so "12" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    lister: ClassVar[str] = ""  # the command that lists the keys of the whole file


def spelt(pattern: str, words: str) -> AfterValidator:
    """Text must match all of `pattern`; `words` say what that is: `must be 16 digits of 0-9 and a-f`."""
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(words)
        return value

    return AfterValidator(check)


def validate(model: type[BaseModel], node: Node) -> tuple[BaseModel | None, list[Problem]]:
    """The model's instance and no problems, or None and all of them."""
    try:
        return model.model_validate(plain(node)), []
    except ValidationError as error:
        return None, [_problem(model, node, detail) for detail in error.errors(include_url=False)]


def _problem(model: type[BaseModel], root: Node, detail: dict[str, Any]) -> Problem:
    loc = tuple(detail["loc"])
    node, is_exact = find(root, loc)
    kind, context = detail["type"], detail.get("ctx", {})
    key = next((step for step in reversed(loc) if isinstance(step, str)), "")
    if kind == "missing":
        return Problem(node.mark, f"key {key!r} is missing", lacks=frozenset({dotted(loc)}))
    if kind == "extra_forbidden":
        allowed = _field_names(model, loc[:-1])
        meant = near(key, allowed)
        return Problem(key_place(node), f"unknown key {key!r}{offer(key, allowed, lister=model.lister)}",
                       offers=meant and dotted((*loc[:-1], meant)))
    if is_exact and node.value is None:
        return Problem(node.mark, f"{key}: there is no value; {_demand(detail)}")
    where = f"{key}: " if key else ""
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
        return Problem(node.mark, f"{where}{shown(detail['input'])} is not allowed{offer(str(detail['input']), allowed)}")
    return Problem(node.mark, f"{where}{shown(detail['input'])} is not allowed; {_demand(detail)}")


def shown(value: Any, limit: int = 60) -> str:
    """`repr` of a value, cut to one short line, for messages."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


_DEMANDS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text; put it in quotes",
    "list_type": "must be a list",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
}


def _demand(detail: dict[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "list_type" and isinstance(detail["input"], str | int | float) and not isinstance(detail["input"], bool):
        return f"must be a list: [{detail['input']}]"
    known = _DEMANDS.get(kind)
    return known or detail["msg"].replace("Input should be", "must be").replace("should", "must").rstrip(".")


def _field_names(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """The keys that the model at `loc` below `model` knows."""
    current: Any = model
    for step in loc:
        current = _model_in(current.model_fields[step].annotation) if isinstance(step, str) and step in current.model_fields else current
    return [field.alias or name for name, field in current.model_fields.items()]


def _model_in(annotation: Any) -> Any:
    """The model class inside `list[Model]`, `Model | None`, `Annotated[Model, ...]`, `dict[str, Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, dict, tuple, Union, UnionType, Annotated):
        for inner in get_args(annotation):
            found = _model_in(inner)
            if found is not None:
                return found
    return None
