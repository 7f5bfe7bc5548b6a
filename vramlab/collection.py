"""Collections: directories with methods/, models/, workflows/ and reports/. Found, read, checked and loaded by path.

The repository's own directories are the first collection (in a wheel: vramlab/builtin/), the current directory is one
when it has that shape, and `--collection DIR` names more. Nothing is registered anywhere: a folder that is dropped there
is known by its name. One name in two collections is an error that names both paths.

    Library(find_collections()) -> .method("delta") -> Method -> .build(budget=...) -> planner
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import math
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Iterable, Literal, Mapping, Sequence

from pydantic import BeforeValidator, Field, model_validator

from vramlab.errors import WorkflowError
from vramlab.planner import parse_bytes
from vramlab.schema import Strict, shown, spelt, validate
from vramlab.yaml_nodes import Node, Problem, find, key_place, near, offer, plain, raise_problems, read_yaml

SHELVES = ("methods", "models", "workflows", "reports")
ARTIFACT_FILE = "artifact.yaml"  # the authors' answers to checklists, beside the workflows
_PACKAGE = Path(__file__).resolve().parent
_NAME = re.compile(r"[a-z0-9]+([-_.][a-z0-9]+)*")
_NOT_SOURCE = {"__pycache__"}

LOSSES = ("cross_entropy", "cross_entropy_auxiliary", "pixel_cross_entropy", "masked_token_cross_entropy", "next_token_cross_entropy")
OptionType = Literal["bool", "int", "float", "str", "file", "bytes", "list[int]", "list[float]", "list[str]"]
_KINDS: Mapping[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "file": (str,)}
_SAID = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "file": "the path of a file",
         "bytes": "a size such as 512MiB"}


class UnknownName(WorkflowError):
    """No collection, or more than one, has what was named. The text has no place: the caller knows where it was written."""


class Option(Strict):
    """One option of a method or a model, as its card declares it."""

    default: Any
    type: OptionType
    choices: list[Any] | None = None
    min: float | None = None
    max: float | None = None
    help: str
    symbol: str | None = None  # what the paper calls it
    required: bool = False  # there is no default: who names the method gives a value

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value, in words that follow it; None when nothing is. None is legal where it is the default."""
        if value is None:
            return None if self.default is None and not self.required else f"there is no value; must be {self._said}"
        if self.type.startswith("list["):
            inner = self.type[5:-1]
            if not (isinstance(value, list) and all(_is_of(inner, item) for item in value)):
                return f"{shown(value)} is not allowed; must be {self._said}"
        elif not _is_of(self.type, value):
            return f"{shown(value)} is not allowed; must be {self._said}"
        return self._out_of_range(value)

    def _out_of_range(self, value: Any) -> str | None:
        if self.choices is not None and value not in self.choices:
            return f"{shown(value)} is not allowed{offer(str(value), map(str, self.choices))}"
        number = parse_bytes(value) if self.type == "bytes" else value
        for item in number if isinstance(number, list) else [number]:
            if isinstance(item, float) and not math.isfinite(item):
                return f"{shown(value)} is not allowed; must be a finite number"
            if self.min is not None and item < self.min or self.max is not None and item > self.max:
                low = f"at least {self.min:g}" if self.min is not None else ""
                high = f"at most {self.max:g}" if self.max is not None else ""
                return f"{shown(value)} is not allowed; must be {' and '.join(filter(None, [low, high]))}"
        return None

    def read(self, value: Any) -> Any:
        """The value as code gets it: sizes in bytes, `1` as 1.0 where a float is meant."""
        if value is None:
            return None
        if self.type == "bytes":
            return parse_bytes(value)
        if self.type == "float":
            return float(value)
        return [float(item) for item in value] if self.type == "list[float]" else value

    @property
    def _said(self) -> str:
        return f"a list, each {_SAID[self.type[5:-1]]}" if self.type.startswith("list[") else _SAID[self.type]

    @model_validator(mode="after")
    def _default_is_legal(self) -> Option:
        if self.required and self.default is not None:
            raise ValueError("an option that is required has the default null")
        fault = None if self.required else self.fault(self.default)
        if fault:
            raise ValueError(f"its own default breaks it: {fault}")
        return self


def _is_of(kind: str, value: Any) -> bool:
    if kind == "bytes":
        try:
            return parse_bytes(value) > 0
        except ValueError:
            return False
    return isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))


Text = Annotated[str, Field(min_length=1)]
Uid = Annotated[str, spelt("[0-9a-f]{16}", "must be 16 digits of 0-9 and a-f, in quotes")]
VersionText = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)]


class Paper(Strict):
    """What is cited."""

    title: Text
    authors: list[str]
    venue: str
    year: int
    doi: str | None = None
    url: str | None = None
    bibtex: str | None = None


class MethodCard(Strict):
    """methods/<name>/card.yaml."""

    uid: Uid
    alias: list[Text] = []
    tags: list[Text] = []
    version: VersionText
    kind: Literal["planner", "native"]
    title: Text
    decides: Text  # one sentence
    paper: Paper | None
    options: dict[str, Option] = {}
    needs: list[Text] = []
    seeds: list[Text] = []  # methods whose schedules the planner begins with, as names
    fitting: dict[str, Any] = {}  # values of options with which it reaches the same budgets sooner, if with a slower step
    takes_budget: bool
    claims: list[Text] = []
    deviations: list[str] = []
    fidelity: Text  # one sentence
    exemptions: dict[str, str] = {}  # contract rule -> reason

    @property
    def required(self) -> list[str]:
        """Options without which the method cannot be built."""
        return [name for name, option in self.options.items() if option.required]

    @model_validator(mode="after")
    def _fitting_is_legal(self) -> MethodCard:
        for name, value in self.fitting.items():
            fault = self.options[name].fault(value) if name in self.options else "there is no such option"
            if fault:
                raise ValueError(f"fitting: {name}: {fault}")
        return self


class ModelInput(Strict):
    """What one sample looks like."""

    kind: Literal["image", "tokens"]
    channels: int | None = None  # of images
    image_size: int | None = None  # pixels, the model's usual one


class Tiling(Strict):
    """Values of an option that add the same blocks again and again: `start`, `start + step`, `start + 2 step`, ..."""

    start: int  # the first value from which a tape is tiled; below it, and off these values, the step is captured
    step: Annotated[int, Field(ge=1)]


class ModelCard(Strict):
    """models/<name>.yaml."""

    name: Text
    uid: Uid | None = None
    alias: list[Text] = []
    family: Text
    title: Text
    source: Annotated[str, spelt(r"torchvision:[A-Za-z0-9_]+|file:[A-Za-z0-9_]+\.py:[A-Za-z0-9_]+",
                                 "must be torchvision:NAME or file:FILE.py:FUNCTION")]
    input: ModelInput
    options: dict[str, Option]
    tiles: dict[str, Tiling] = {}  # option -> where its blocks repeat: vramlab/tile.py makes deep tapes of shallow captures
    loss: Literal[LOSSES]
    tags: list[Text] = []
    paper: Paper | None = None
    notes: str = ""

    def values_of(self, option: str, low: int, high: int, step: int | None = None) -> range:
        """The values of a whole-number option that a search from `low` to `high` may try: those at which blocks are added where they
        repeat, else every `step` from the default on, within what the option allows."""
        known, tiling = self.options[option], self.tiles.get(option)
        step = step or (tiling.step if tiling else 1)
        low = low if known.min is None else max(low, int(known.min))
        high = high if known.max is None else min(high, int(known.max))
        anchor = tiling.start if tiling else low if known.default is None else known.default
        return range(low + (anchor - low) % step, high + 1, step)


@dataclass(frozen=True)
class Method:
    """A method as found: its card and its folder."""

    name: str
    card: MethodCard
    folder: Path

    @cached_property
    def sha256(self) -> str:
        """Over every file of the folder: another source is another measurement."""
        return hash_sources(self.folder, source_files(self.folder))

    def load(self) -> ModuleType:
        """The module method.py. Its neighbours are imported relatively: `from .director import Director`."""
        return load_module(self.folder, "method", f"methods/{self.name}", self.sha256)

    def build(self, **options: Any) -> Any:
        """What `build` of method.py returns for these options, the card's defaults filled in."""
        return self.load().build(**resolve_options(self.card.options, options, f"method {self.name!r}"))


@dataclass(frozen=True)
class Model:
    """A model as found: its card and where it lies."""

    name: str
    card: ModelCard
    path: Path

    @property
    def body(self) -> Mapping[str, Any]:
        """The card as plain data."""
        return self.card.model_dump()

    @property
    def code(self) -> Path | None:
        """The .py file beside the card, None for torchvision's models."""
        kind, _, rest = self.card.source.partition(":")
        return self.path.parent / rest.partition(":")[0] if kind == "file" else None

    @cached_property
    def sha256(self) -> str:
        """Over the card and the .py file beside it, where there is one."""
        return hash_sources(self.path.parent, [self.path, *([self.code] if self.code else [])])

    def load_builder(self) -> Any:
        """The function that a `file:` source names. LookupError for torchvision's models, which have no file here."""
        if self.code is None:
            raise LookupError(f"model {self.name!r} comes from {self.card.source}, not from a file")
        module = load_module(self.path.parent, self.code.stem, f"models/{self.name}", self.sha256)
        return getattr(module, self.card.source.rpartition(":")[2])


def built_in_collection() -> Path:
    """The collection that comes with vramlab: the checkout's root, or the copy in the wheel."""
    packaged = _PACKAGE / "builtin"
    return packaged if packaged.is_dir() else _PACKAGE.parent


def is_collection(folder: Path) -> bool:
    """True when one of methods/*/card.yaml, models/*.yaml, workflows/*.yaml is there."""
    return any(any(folder.glob(pattern)) for pattern in ("methods/*/card.yaml", "models/*.yaml", "workflows/*.yaml"))


def find_collections(extra: Iterable[Path | str] = (), here: Path | None = None) -> tuple[Path, ...]:
    """Absolute paths: the built-in collection, the current directory when it is one, then `extra`; none twice."""
    here = here or Path.cwd()
    found = [built_in_collection(), *([here] if is_collection(here) else [])]
    for folder in map(Path, extra):
        if not is_collection(folder):
            raise WorkflowError(f"{folder} is no collection: it has no methods/*/card.yaml, models/*.yaml or workflows/*.yaml")
        found.append(folder)
    return tuple(dict.fromkeys(path.resolve() for path in found))


class Library:
    """All that some collections offer. Cards are read when first asked for, so a broken one spoils only itself."""

    def __init__(self, roots: Sequence[Path | str]) -> None:
        self.roots = tuple(Path(root) for root in roots)
        self._methods: dict[str, Method] = {}
        self._models: dict[str, Model] = {}

    @cached_property
    def method_paths(self) -> dict[str, list[Path]]:
        """Name -> folders with that name."""
        return self._paths("methods/*/card.yaml", lambda path: path.parent.name, lambda path: path.parent)

    @cached_property
    def model_paths(self) -> dict[str, list[Path]]:
        """Name -> cards with that name."""
        return self._paths("models/*.yaml", lambda path: path.stem, lambda path: path)

    @cached_property
    def workflow_paths(self) -> dict[str, list[Path]]:
        """Name -> workflow files with that name."""
        found = self._paths("workflows/*.yaml", lambda path: path.stem, lambda path: path)
        return {name: paths for name, paths in found.items() if f"{name}.yaml" != ARTIFACT_FILE}

    def method(self, name: str) -> Method:
        """By name, alias or uid. UnknownName says what there is; WorkflowError lists what is wrong with its card."""
        if name not in self._methods:
            self._methods[name] = read_method(self._only("method", self.method_paths, name))
        return self._methods[name]

    def model(self, name: str) -> Model:
        """By name, alias or uid. UnknownName says what there is; WorkflowError lists what is wrong with its card."""
        if name not in self._models:
            self._models[name] = read_model(self._only("model", self.model_paths, name))
        return self._models[name]

    def workflow(self, name: str) -> Path:
        """By name, with or without `.yaml`."""
        return self._only("workflow", self.workflow_paths, name.removesuffix(".yaml"))

    def report_files(self, pattern: str) -> list[Path]:
        """Files below reports/ of every collection that match, in order of the collections."""
        return [path for root in self.roots for path in sorted((root / "reports").glob(pattern))]

    def _paths(self, pattern: str, name_of: Any, kept: Any) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for root in self.roots:
            for path in sorted(root.glob(pattern)):
                found.setdefault(name_of(path), []).append(kept(path))
        return dict(sorted(found.items()))

    def _only(self, what: str, paths: Mapping[str, list[Path]], name: str) -> Path:
        hits = paths.get(name) or self._by_alias(what, name)
        if len(hits) > 1:
            raise UnknownName(f"{what} {name!r} stands in more than one collection: {' and '.join(map(str, hits))}; rename one")
        if not hits:
            raise UnknownName(f"there is no {what} {name!r}{offer(name, paths, 'there are', f'`list {what}s`')}")
        return hits[0]

    def _by_alias(self, what: str, name: str) -> list[Path]:
        """Paths of the cards that carry `name` as alias or uid. A card that cannot be read has none."""
        if what == "workflow":
            return []
        shelf = self.method_paths if what == "method" else self.model_paths
        hits = []
        for path in (path for paths in shelf.values() for path in paths):
            try:
                card = (read_method(path) if what == "method" else read_model(path)).card
            except WorkflowError:
                continue  # its problems are told to whoever names it
            if name in (*card.alias, card.uid):
                hits.append(path)
        return hits


def read_method(folder: Path) -> Method:
    """Read and check methods/<name>/. WorkflowError lists every problem of the card."""
    path = folder / "card.yaml"
    node = read_yaml(path)
    card, problems = validate(MethodCard, node)
    if not _NAME.fullmatch(folder.name):
        problems.append(Problem(node.mark, f"folder name {folder.name!r} is not allowed; use lower case letters, digits and hyphens"))
    if not (folder / "method.py").is_file():
        problems.append(Problem(node.mark, "there is no method.py beside the card"))
    raise_problems(problems)
    return Method(folder.name, card, folder)


def read_model(path: Path) -> Model:
    """Read and check models/<name>.yaml. WorkflowError lists every problem of the card."""
    node = read_yaml(path)
    card, problems = validate(ModelCard, node)
    named, is_there = find(node, ("name",))
    if is_there and named.value != path.stem:
        problems.append(Problem(named.mark, f"name: {shown(named.value)} is not allowed; must be {path.stem!r}, as the file is called"))
    if card:
        problems += _model_problems(card, path, node)
    raise_problems(problems)
    return Model(path.stem, card, path)


def _model_problems(card: ModelCard, path: Path, node: Node) -> list[Problem]:
    problems = []
    kind, _, rest = card.source.partition(":")
    if card.input.kind == "image" and card.input.channels is None:
        problems.append(Problem(node.value["input"].mark, "input: key 'channels' is missing"))
    if kind == "file" and not (path.parent / rest.partition(":")[0]).is_file():
        problems.append(Problem(node.value["source"].mark, f"source: there is no {rest.partition(':')[0]} beside the card"))
    if not {"image_size", "sequence_length"} & set(card.options):
        problems.append(Problem(key_place(node.value["options"]), "options: image_size or sequence_length is missing"))
    return problems


def option_problems(declared: Mapping[str, Option], given: Node | None, owner: str) -> list[Problem]:
    """What is wrong with the options written at `given`, each at its place."""
    if given is None or not isinstance(given.value, dict):
        return []
    problems = []
    for key, node in given.value.items():
        if key not in declared:
            problems.append(Problem(key_place(node), f"{owner} has no option {key!r}{offer(key, declared)}", offers=near(key, declared)))
            continue
        fault = declared[key].fault(plain(node))
        if fault:
            problems.append(Problem(node.mark, f"{key}: {fault}"))
    return problems


def resolve_options(declared: Mapping[str, Option], given: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """All options, defaults filled in. WorkflowError on an unknown option or a value that its card does not allow."""
    for key, value in given.items():
        if key not in declared:
            raise WorkflowError(f"{owner} has no option {key!r}{offer(key, declared)}")
        fault = declared[key].fault(value)
        if fault:
            raise WorkflowError(f"{owner}, option {key}: {fault}")
    for key, option in declared.items():
        if option.required and given.get(key) is None:
            raise WorkflowError(f"{owner} needs the option {key!r}: {option.help}")
    return {key: option.read(given.get(key, option.default)) for key, option in declared.items()}


def files_of_options(declared: Mapping[str, Option], options: Mapping[str, Any]) -> dict[str, str | None]:
    """SHA-256 of each file, or folder of files, that an option names, None where there is none: another content is another cell."""
    found = {}
    for key, option in declared.items():
        if option.type == "file" and options[key] is not None:
            found[key] = _hash_of_path(Path(options[key]).expanduser()) if options[key] else None
    return found


def _hash_of_path(path: Path) -> str | None:
    try:
        if path.is_dir():
            return hash_sources(path, [file for file in path.iterdir() if file.is_file()])
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError:  # it may not be read; whoever needs it will say so
        return None


def source_files(folder: Path) -> list[Path]:
    """Files of a folder that make up its source: no caches, no hidden files."""
    def is_source(path: Path) -> bool:
        parts = path.relative_to(folder).parts
        return path.is_file() and not any(part in _NOT_SOURCE or part.startswith(".") for part in parts)

    return sorted(path for path in folder.rglob("*") if is_source(path))


def hash_sources(root: Path, paths: Iterable[Path]) -> str:
    """SHA-256 over relative paths and bytes: the same wherever the folder lies."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def load_module(folder: Path, stem: str, label: str, source_sha256: str) -> ModuleType:
    """Import folder/stem.py under a name of its own, entered in sys.modules.

    The name carries the folder's path and the hash of the source: equal names in two collections never meet, and an
    edited source is a new module. The folder becomes a package, so that its files can import each other relatively.
    """
    place = hashlib.sha256(f"{folder.resolve()}\0{source_sha256}".encode()).hexdigest()[:12]
    package = f"vramlab_collection_{re.sub(r'[^a-z0-9]', '_', label.lower())}_{place}"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
        importlib.invalidate_caches()
    return importlib.import_module(f"{package}.{stem}")
