"""YAML with places: every key and value knows its file, line and column, so that an error can point at it.

PyYAML composes the nodes; scalars are read by the YAML 1.2 core schema: `1e-3` is a number, `no` is text, `017` is 17.
Duplicate keys, tags, merge keys and files beyond the caps are errors.

    text -> compose -> Node tree -> plain() -> dict, list, str, int, float, bool, None
                            '-> place_of(root, ("measure", "steps")) -> Mark
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Iterable, Iterator, TypeAlias

import yaml

from vramlab.errors import WorkflowError

MAX_BYTES = 2**20
MAX_NODES = 50_000  # after aliases are expanded: a few lines of nested aliases can otherwise mean billions of values
MAX_ALIASES = 1_000
FEW, MANY = 6, 20  # names in a message that also says how to list all; in one that does not

Scalar: TypeAlias = "str | int | float | bool | None"
Loc: TypeAlias = "tuple[str | int, ...]"

_INT = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Scalar] = {"": None, "~": None} | {
    form: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for form in (word, word.capitalize(), word.upper())
}
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class Argument(str):
    """What came by the command line: an option's name, or `key=value` in quotes. It is one line, and named without a place in it."""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A place: line and column count from 1."""

    source: str  # the file's path as given, or an Argument
    line: int
    column: int

    def __str__(self) -> str:
        return str(self.source) if isinstance(self.source, Argument) else f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing wrong at one place; its text is one line."""

    mark: Mark
    what: str
    offers: str | None = field(default=None, compare=False)  # of an unknown key: the path of the one spelt nearest, or ""
    lacks: frozenset[str] = field(default=frozenset(), compare=False)  # keys of which any mends this; `*.budgets`: wherever it stands

    def __str__(self) -> str:
        is_option = str(self.mark).startswith("--")  # whose name says the key
        return f"{self.mark}: {re.sub('^[a-z_]+: ', '', self.what) if is_option else self.what}"


@dataclass(frozen=True, slots=True)
class Node:
    """A value with its place. `value` is a scalar, a list of Nodes or a dict of Nodes."""

    value: Scalar | list[Node] | dict[str, Node]
    mark: Mark
    key_mark: Mark | None = None  # where the key stands that leads here, None in a list and at the root

    def get(self, key: str) -> Node | None:
        """The child under `key`; None when this is no mapping or has no such key."""
        return self.value.get(key) if isinstance(self.value, dict) else None

    def items(self) -> list[Node]:
        """The children of a list; none when this is something else."""
        return self.value if isinstance(self.value, list) else []


class InvalidFile(WorkflowError):
    """A file or argument with problems, in file order, causes before what may follow from them; the text has one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(_causes_first(set(problems)))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def _causes_first(problems: Iterable[Problem]) -> list[Problem]:
    """In file order. What follows from a misspelt key is left out; where a key is unknown and like none, what is missing comes last."""
    paths = {problem.offers for problem in problems if problem.offers is not None}
    offered = paths | {f"*.{path.rpartition('.')[2]}" for path in paths if path}
    kept = [problem for problem in problems if not problem.lacks & offered]
    return sorted(kept, key=lambda problem: ("" in offered and bool(problem.lacks), problem))


class _Loader(yaml.SafeLoader):
    """Leaves plain scalars unresolved: they come out with the tag "plain", so that an explicit tag shows."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.aliases = 0

    def resolve(self, kind: type, value: str | None, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return "plain" if implicit[0] else "quoted"
        return "list" if kind is yaml.SequenceNode else "mapping"

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MAX_ALIASES:
                raise yaml.composer.ComposerError(None, None, f"more than {MAX_ALIASES} aliases", self.peek_event().start_mark)
        return super().compose_node(parent, index)


def read_yaml(path: Path, shown: str | None = None) -> Node:
    """Parse a file. WorkflowError lists every problem as `file:line:column: what`; `shown` is the path to print."""
    source = shown or str(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _invalid(source, 1, 1, f"cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise _invalid(source, 1, 1, f"the file has {len(raw):,} bytes; at most {MAX_BYTES:,} are read")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        readable = raw[: error.start].decode("utf-8-sig")
        what = f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise _invalid(source, *_line_and_column(readable, len(readable)), what) from None
    return parse_yaml(text, source)


def parse_yaml(text: str, source: str) -> Node:
    """Parse one document. WorkflowError lists every problem, one a line."""
    try:
        root = _compose(text)
        if root is None:
            raise _invalid(source, 1, 1, "the file is empty")
        converter = _Converter(source)
        node = converter.convert(root, None, ())
    except yaml.reader.ReaderError as error:
        raise _invalid(source, *_line_and_column(text, error.position), error.reason) from None
    except yaml.MarkedYAMLError as error:
        raise InvalidFile([_syntax_problem(error, source, text)]) from None
    except RecursionError:
        raise _invalid(source, 1, 1, "the values are nested too deep") from None
    if converter.problems:
        raise InvalidFile(converter.problems)
    return node


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _invalid(source: str, line: int, column: int, what: str) -> InvalidFile:
    return InvalidFile([Problem(Mark(source, line, column), what)])


def _line_and_column(text: str, position: int) -> tuple[int, int]:
    return text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)


_OPENED = {"while parsing a flow sequence": "the bracket [ that opens here is not closed, or a comma is missing",
           "while parsing a flow mapping": "the brace { that opens here is not closed, or a comma is missing",
           "while scanning a quoted scalar": "the quotation mark that opens here is not closed",
           "while parsing a flow node": "what opens here is not closed"}


def _syntax_problem(error: yaml.MarkedYAMLError, source: str, text: str) -> Problem:
    """At the place where PyYAML noticed it; for what was opened and never closed, where it was opened."""
    noticed, opened = error.problem_mark or error.context_mark, error.context_mark
    if error.context == "while parsing a flow node":  # its mark is not of the bracket
        opened = _last_open(text) if "<stream end>" in error.problem else None
    if error.context in _OPENED and opened and noticed:
        told = f"{_OPENED[error.context]}; noticed at {_place_in_words(noticed, source)}: {error.problem}"
        at = f" at {_place_in_words(opened, source)}" if isinstance(source, Argument) else ""
        return Problem(_mark_of(opened, source), f"not YAML{at}: {told}")
    context = f" ({error.context})" if error.context else ""
    return Problem(_mark_of(noticed, source), f"not YAML: {error.problem}{context}")


def _last_open(text: str) -> yaml.Mark | None:
    """Where the innermost bracket or brace opens that the text's end leaves open."""
    opened: list[yaml.Mark] = []
    for token in yaml.scan(text):
        if isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken):
            opened.append(token.start_mark)
        elif opened and isinstance(token, yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken):
            opened.pop()
    return opened[-1] if opened else None


def _mark_of(at: yaml.Mark | None, source: str) -> Mark:
    return Mark(source, at.line + 1, at.column + 1) if at else Mark(source, 1, 1)


def _place_in_words(at: yaml.Mark, source: str) -> str:
    return f"column {at.column + 1}" if isinstance(source, Argument) else f"line {at.line + 1}, column {at.column + 1}"


class _Converter:
    """PyYAML's nodes -> ours, with the caps held and problems gathered."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.count = 0

    def convert(self, node: yaml.Node, key_mark: Mark | None, above: tuple[int, ...]) -> Node:
        mark = self.mark(node)
        self.count += 1
        if self.count > MAX_NODES:
            raise InvalidFile([Problem(mark, f"more than {MAX_NODES:,} values once aliases are expanded")])
        if id(node) in above:
            raise InvalidFile([Problem(mark, "an alias refers to what it stands in")])
        if node.tag not in ("plain", "quoted", "list", "mapping"):
            self.problems.append(Problem(mark, f"tag {node.tag!r} is not allowed; write the plain value"))
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            return Node(self.mapping(node, above), mark, key_mark)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.convert(child, None, above) for child in node.value], mark, key_mark)
        return Node(self.scalar(node, mark), mark, key_mark)

    def mapping(self, node: yaml.MappingNode, above: tuple[int, ...]) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = self.mark(key_node)
            key = self.key(key_node, where)
            if key in found:
                first = found[key].key_mark
                self.problems.append(Problem(where, f"key {key!r} stands here a second time; first at line {first.line}"))
            child = self.convert(value_node, where, above)
            found.setdefault(key, child)
        return found

    def key(self, node: yaml.Node, where: Mark) -> str:
        if isinstance(node, yaml.ScalarNode) and (node.tag == "quoted" or isinstance(self.scalar(node, where), str)):
            if node.tag == "plain" and node.value == "<<":
                self.problems.append(Problem(where, "merge keys (<<) are not allowed; write the keys out"))
            return self.text(node.value, where)
        text = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        self.problems.append(Problem(where, f"key {text!r} is no text; put it in quotes"))
        return str(text)

    def scalar(self, node: yaml.ScalarNode, mark: Mark) -> Scalar:
        if node.tag != "plain":
            return self.text(node.value, mark)
        if _NOT_FINITE.fullmatch(node.value):
            self.problems.append(Problem(mark, f"{node.value} is not allowed; write a finite number"))
            return None
        value = read_scalar(node.value)
        if isinstance(value, float) and math.isinf(value):
            self.problems.append(Problem(mark, f"{node.value} is beyond what a number can hold; put text in quotes"))
            return None
        return value

    def text(self, value: str, mark: Mark) -> str:
        """JSON writes one character beyond 16 bits as two escapes, which PyYAML keeps apart."""
        try:
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            self.problems.append(Problem(mark, "half a character (a lone surrogate) is not allowed"))
            return ""

    def mark(self, node: yaml.Node) -> Mark:
        return Mark(self.source, node.start_mark.line + 1, node.start_mark.column + 1)


def read_scalar(text: str) -> Scalar:
    """A plain scalar by YAML 1.2's core schema; what is no number, boolean or null is text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text) and len(text) < 300:
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def plain(node: Node) -> Any:
    """The value without places."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def node_from(value: Any, mark: Mark) -> Node:
    """The inverse of `plain`, with everything at one place."""
    if isinstance(value, dict):
        return Node({str(key): replace(node_from(child, mark), key_mark=mark) for key, child in value.items()}, mark)
    if isinstance(value, list | tuple):
        return Node([node_from(child, mark) for child in value], mark)
    return Node(value, mark)


def dotted(loc: Loc) -> str:
    """`experiments.name`: the keys that lead to a place, without the indices of lists."""
    return ".".join(step for step in loc if isinstance(step, str))


def find(root: Node, loc: Loc) -> tuple[Node, bool]:
    """The node at `loc` and True, or the deepest one on the way there and False."""
    node = root
    for step in loc:
        if isinstance(node.value, dict) and step in node.value:
            node = node.value[step]
        elif isinstance(node.value, list) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        else:
            return node, False
    return node, True


def key_place(node: Node) -> Mark:
    """Where the key stands that leads to this node, else the node itself."""
    return node.key_mark or node.mark


def merge(base: Node, over: Node) -> Node:
    """`over` laid on `base`: mappings key by key, everything else replaced. Places come along."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, over.mark, over.key_mark)


def walk(node: Node) -> Iterator[Node]:
    """This node and all below it."""
    yield node
    children = node.value.values() if isinstance(node.value, dict) else node.items()
    for child in children:
        yield from walk(child)


def near(word: str, known: Iterable[str]) -> str:
    """The nearest spelling among `known`, "" when nothing is near."""
    by_folded = {_folded(name): name for name in sorted(known)}
    wanted = _folded(word)
    hits = [name for name in by_folded if len(wanted) > 2 and name.startswith(wanted)] or get_close_matches(wanted, list(by_folded), n=1)
    return by_folded[hits[0]] if hits else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest spelling among `known`, "" when nothing is near."""
    found = near(word, known)
    return f"; did you mean {found!r}?" if found else ""


def offer(word: str, known: Iterable[str], lead: str = "allowed:", lister: str = "", also: Iterable[str] = ()) -> str:
    """What to write instead of `word`: `; did you mean 'x'? Allowed: w, x, y`, the nearest spelling first. `lister` is the command that
    shows all, and stands for those beyond the first few: `; there are a, b, c, d, e, f and 12 more (`list methods` shows all)`. `also`
    may be meant and is not told.
    """
    names = list(known)
    asked = nearest(word, [*names, *also])
    told = one_of(names, FEW if lister else MANY) or "none"
    shown = f" ({lister} shows all)" if lister and len(names) > FEW else ""
    return f"{asked} {lead[0].upper()}{lead[1:]} {told}{shown}" if asked else f"; {lead} {told}{shown}"


def _folded(word: str) -> str:
    return word.lower().replace("_", "-")


def one_of(known: Iterable[str], limit: int = MANY) -> str:
    """`a, b, c` of the allowed words, cut after `limit`."""
    names = list(known)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def raise_problems(problems: Iterable[Problem]) -> None:
    """InvalidFile when there are any."""
    found = list(problems)
    if found:
        raise InvalidFile(found)
