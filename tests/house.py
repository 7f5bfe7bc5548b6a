"""Reads imports without running anything, and says which of them break the floors of the house.

    0  errors device                                       the standard library only
    1  tape schedule trace record liveness check ...       pure: numpy, numba and scipy at most, never torch, however indirectly
    2  capture execute gate ...                            the machine: torch is at home here; whatever is not named below
    3  collection workflow telemetry runner ...            cards, YAML, processes, probes: no torch, however indirectly
    4  report/ crowd/ cli/                                 read records: no torch, however indirectly

methods/ see floors 0 and 1 and their own folder; nobody imports a collection with an import statement.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

GROUND = frozenset({"errors", "device"})
PURE = GROUND | frozenset("""
    tape tile schedule trace record kernels liveness layers check simulate planner player rollout statistics flops
    family finder in_place micro_batches batch_mean split variants prediction at_peak live_bytes effort
    predicted roofline stages bounds program edits gaps occupancy copying residence annealing counted
""".split())
TORCH_FREE = PURE | frozenset("""
    __main__ child citations claiming cli collection crowd doctor environment forks isolate largest machine_lock method_check nvml report
    run_folder runner runs schema seeds telemetry this_machine workflow workflow_layers workflow_notes workflow_schema yaml_nodes
""".split())
SHELVES = frozenset({"methods", "models", "workflows", "reports"})
TORCH = frozenset({"torch", "torchvision"})
NUMERIC = frozenset({"numpy", "numba", "scipy"})


@dataclass(frozen=True)
class Import:
    """One imported module: its absolute dotted name and where the statement stands."""

    name: str
    line: int
    is_deferred: bool  # inside a function, or for type checkers only: importing the file does not run it

    @property
    def top(self) -> str:
        """`torch` of `torch.nn.functional`."""
        return self.name.partition(".")[0]


def imports_of(path: Path, module: str, is_package: bool = False) -> list[Import]:
    """Every import of a file, those inside functions included. `module` is the file's own dotted name."""
    tree = ast.parse(path.read_text(), str(path))
    inner = {id(node) for part in ast.walk(tree) if _is_deferred(part) for node in ast.walk(part)}
    found = []
    for node in ast.walk(tree):
        for name in _names(node, module, is_package):
            found.append(Import(name, node.lineno, id(node) in inner))
    return found


def _is_deferred(node: ast.AST) -> bool:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    return is_function or isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _names(node: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            up = module.split(".")[: len(module.split(".")) - node.level + is_package]
            base = ".".join([*up, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call):  # import_module("torch"), __import__("torch"): an import by another name
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0] if node.args else None
        if called in {"import_module", "__import__"} and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


class House:
    """The modules of one checkout and what they import."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def modules(self) -> Mapping[str, Path]:
        """Dotted name -> file, of the package vramlab."""
        found = {}
        for path in sorted((self.root / "vramlab").rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            if "builtin" not in parts:
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def imports(self) -> Mapping[str, list[Import]]:
        """Dotted name -> imports; `from vramlab.tape import Op` is an import of vramlab.tape."""
        return {name: [Import(self._module_of(i.name), i.line, i.is_deferred) for i in imports_of(path, name, path.stem == "__init__")]
                for name, path in self.modules.items()}

    def _module_of(self, name: str) -> str:
        while name.startswith("vramlab.") and name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    def misplaced(self) -> list[str]:
        """Names in the lists above that no module has."""
        return sorted(name for name in TORCH_FREE if f"vramlab.{name}" not in self.modules)

    @property
    def torch_free(self) -> list[str]:
        """Dotted names of the modules that torch must not be reached from."""
        return [name for name in self.modules if name == "vramlab" or name.split(".")[1] in TORCH_FREE]

    def broken_pure(self) -> list[str]:
        """Imports of the pure floors that are neither the standard library, numpy, numba, scipy nor pure."""
        bad = []
        for name in PURE:
            for i in self.imports.get(f"vramlab.{name}", []):
                inside = i.name == "vramlab" or i.name.removeprefix("vramlab.") in (GROUND if name in GROUND else PURE)
                outside = i.top in sys.stdlib_module_names or (name not in GROUND and i.top in NUMERIC)
                if not inside and not outside:
                    bad.append(f"vramlab/{name}.py:{i.line} imports {i.name}")
        return bad

    def paths_to_torch(self) -> list[str]:
        """For each module of the floors without torch from which it can be reached: the way there."""
        ways = [self._way_to_torch(name) for name in self.torch_free]
        return [" -> ".join(way) for way in ways if way]

    def _way_to_torch(self, start: str) -> list[str] | None:
        came_from: dict[str, str] = {start: ""}
        queue = [start]
        for name in queue:
            for i in self.imports.get(name, []):
                target = i.top if i.top in TORCH else i.name
                if target in came_from:
                    continue
                came_from[target] = name
                if target in TORCH:
                    way = [target]
                    while came_from[way[0]]:
                        way.insert(0, came_from[way[0]])
                    return way
                queue.append(target)
        return None

    def broken_shelves(self) -> list[str]:
        """Imports of a collection by an import statement."""
        return [f"{name}:{i.line} imports {i.name}" for name, found in self.imports.items() for i in found if i.top in SHELVES]

    def broken_methods(self) -> list[str]:
        """Imports of methods that reach beyond the standard library, numpy, the pure floors and their own folder."""
        return [fault for folder in sorted((self.root / "methods").glob("*/")) for fault in self._broken_method(folder)]

    def _broken_method(self, folder: Path) -> Iterator[str]:
        card = folder / "card.yaml"
        is_native = card.is_file() and "kind: native" in card.read_text().splitlines()
        own = f"methods.{folder.name}"
        for path in sorted(folder.rglob("*.py")):
            module = ".".join([own, *path.relative_to(folder).with_suffix("").parts])
            for i in imports_of(path, module):
                name = self._module_of(i.name)
                allowed = (
                    i.top in sys.stdlib_module_names | NUMERIC
                    or name.removeprefix("vramlab.") in PURE
                    or name.startswith(f"{own}.") and len(name) > len(own)
                    or (is_native or path.name == "training.py") and i.top in TORCH and i.is_deferred
                )
                if not allowed:
                    yield f"{path.relative_to(self.root)}:{i.line} imports {i.name}"
