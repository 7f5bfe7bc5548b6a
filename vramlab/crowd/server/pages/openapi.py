"""An OpenAPI document as one page can show it: operations and types, read from the document and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

METHODS = ("get", "put", "post", "patch", "delete", "head", "options")


@dataclass(frozen=True, kw_only=True)
class Field:
    """A parameter, or a field of a type."""

    name: str
    type: str
    is_required: bool
    description: str
    where: str = ""  # of a parameter: path, query, header


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path."""

    id: str
    method: str
    path: str
    summary: str
    description: str
    needs_token: bool
    parameters: tuple[Field, ...]
    bodies: tuple[tuple[str, str], ...]  # (content type, type)
    answers: tuple[tuple[str, str, str], ...]  # (status, text, type)


@dataclass(frozen=True, kw_only=True)
class Schema:
    """One named type."""

    name: str
    description: str
    fields: tuple[Field, ...]


def read_operations(document: Mapping[str, Any]) -> tuple[Operation, ...]:
    """Every operation, in the order of the document."""
    return tuple(_operation(path, method, body, item.get("parameters", ()))
                 for path, item in document.get("paths", {}).items() for method, body in item.items() if method in METHODS)


def read_schemas(document: Mapping[str, Any]) -> tuple[Schema, ...]:
    """Every named type, by name."""
    found = document.get("components", {}).get("schemas", {})
    return tuple(Schema(name=name, description=body.get("description", ""), fields=tuple(_fields(body)))
                 for name, body in sorted(found.items()))


def _operation(path: str, method: str, body: Mapping[str, Any], shared: Any) -> Operation:
    content = body.get("requestBody", {}).get("content", {})
    answers = body.get("responses", {}).items()
    return Operation(
        id=body.get("operationId") or f"{method}-{path}", method=method.upper(), path=path, summary=body.get("summary", ""),
        description=body.get("description", ""), needs_token=bool(body.get("security")),
        parameters=tuple(_parameter(found) for found in (*shared, *body.get("parameters", ()))),
        bodies=tuple((kind, type_in_words(found.get("schema", {}))) for kind, found in content.items()),
        answers=tuple((status, found.get("description", ""), _answer_type(found)) for status, found in answers))


def _parameter(body: Mapping[str, Any]) -> Field:
    return Field(name=body["name"], where=body["in"], type=type_in_words(body.get("schema", {})), is_required=bool(body.get("required")),
                 description=body.get("description", "") or body.get("schema", {}).get("description", ""))


def _answer_type(body: Mapping[str, Any]) -> str:
    return ", ".join(dict.fromkeys(filter(None, (type_in_words(found.get("schema", {})) for found in body.get("content", {}).values()))))


def _fields(body: Mapping[str, Any]) -> Iterator[Field]:
    required = body.get("required", ())
    for name, found in body.get("properties", {}).items():
        yield Field(name=name, type=type_in_words(found), is_required=name in required, description=found.get("description", ""))


def type_in_words(schema: Mapping[str, Any]) -> str:
    """`integer`, `list of Finding`, `string or null`, `one of received, checked`; "" where anything goes."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(filter(None, map(type_in_words, schema[key]))))
    kind = schema.get("type", "")
    if kind == "array":
        inner = type_in_words(schema.get("items", {}))
        return f"list of {inner}" if inner else "list"
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {type_in_words(schema['additionalProperties'])}".removesuffix(" of ")
    return f"{kind} ({schema['format']})" if kind and schema.get("format") else kind
