"""The Python values around a training step: those that it reads beside its tensors, and those that it must not change.

A replay runs no Python. What a step reads there is part of what a capture is valid for; what it changes there would be missed. Both are
found by reading code objects, never by running them: closure cells, defaults, the globals that the code names, the objects found in these
and those of their attributes that the code names. Not seen is what code reaches by a name that it makes up (`getattr`), and what changes
in place inside a container of more than a hundred elements.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdRef

NUMBERS = frozenset({bool, int, float, complex})
PLAIN = NUMBERS | {type(None), str, bytes, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
_HASHED_AS_THEY_ARE = frozenset({types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type})
_CONTAINERS = (dict, list, set, collections.deque)
_LONG = 100  # what holds more elements is data, and is told from another by identity
_DEEP = 4
_LIBRARIES = frozenset({"builtins", "numpy", "torch", "torchvision"})  # and Python's own: their code holds no values of the user's
_CALLED_UNNAMED = frozenset({"__call__", "forward", "backward", "setup_context"})
_LOADS_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_FOLLOWS_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})  # of a recurrent layer


@dataclass(frozen=True)
class Slot:
    """One place that code reads by name: an entry of a dict, an element of a tuple, or an attribute."""

    label: str
    holder: Any = field(repr=False)
    key: Any

    def read(self) -> Any:
        """The value there now, None where there is none."""
        if isinstance(self.holder, dict):
            return self.holder.get(self.key)
        if isinstance(self.holder, tuple):
            return self.holder[self.key]
        try:
            return getattr(self.holder, self.key)
        except (AttributeError, ValueError):  # ValueError: a closure cell that is empty
            return None

    def write(self, value: Any) -> None:
        """Put a value back."""
        if isinstance(self.holder, dict):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


@dataclass(frozen=True)
class Watched:
    """Something that a step may write: the attributes of an object, or the contents of a container."""

    label: str
    module: str  # path of the module that it belongs to, "" for none
    container: Any = field(repr=False)
    is_attributes: bool


class Scope:
    """Everything of Python that `loss_fn` and the forwards of `model` may read by name."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable) -> None:
        self._inside = {module: name for name, module in model.named_modules()}
        self._names: set[str] = set()  # attributes that some code names
        known = -1
        while known != len(self._names):  # a function found late may name an attribute of an object found early
            known = len(self._names)
            self._walk(loss_fn)
        del self._seen
        self.slots = tuple(self._slots.values())
        self.watched = tuple(self._watched.values())
        self.caches = tuple(self._caches)  # functions that remember their results
        self.modules = tuple(self._outside)  # modules that are no part of the model

    def values(self) -> tuple:
        """What the slots hold now, hashable."""
        return tuple([comparable(slot.read()) for slot in self.slots])

    # --- the walk -------------------------------------------------------------------------------------------------------
    def _walk(self, loss_fn: Callable) -> None:
        self._slots: dict[tuple, Slot] = {}
        self._watched: dict[int, Watched] = {}
        self._caches: list[functools._lru_cache_wrapper] = []
        self._outside: list[torch.nn.Module] = []
        self._seen = {id(module): module for module in self._inside}  # by identity, and alive so that no address is met twice
        for module, name in self._inside.items():
            self._visit_module(module, name)
        self._visit(loss_fn, "loss_fn")

    def _visit(self, value: Any, label: str) -> None:
        kind = type(value)
        if kind in PLAIN or isinstance(value, torch.Tensor) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            for name, module in value.named_modules(memo={*self._inside, *self._outside}):
                self._outside.append(module)
                self._visit_module(module, name)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, label)
            self._visit(value.__func__, label)
        elif isinstance(value, types.FunctionType):
            if not _is_library(value.__module__):
                self._visit_function(value, "loss_fn" if label == "loss_fn" else value.__qualname__)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._caches.append(value)
            self._visit(value.__wrapped__, label)
        elif isinstance(value, functools.partial):
            self._visit(value.func, label)
            for holder, keys in ((value.args, range(len(value.args))), (value.keywords, value.keywords)):
                for key in keys:
                    self._add(Slot(f"argument {key!r} of {label}", holder, key))
        elif isinstance(value, (tuple, *_CONTAINERS)):
            self._visit_container(value, label)
        elif isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                self._add_named(vars(value), vars(value), f"module {value.__name__}")
        elif isinstance(value, type):
            if not _is_library(value.__module__):
                self._visit_class(value, _CALLED_UNNAMED | {"__init__"})
        elif not _is_library(kind.__module__) or kind.__module__.startswith("torch."):
            self._visit_object(value)

    def _visit_function(self, function: types.FunctionType, label: str) -> None:
        globals_named, attributes = _names_in(function.__code__)
        self._names |= attributes
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._add(Slot(f"variable '{name}' of {label}", cell, "cell_contents"))
        for name in sorted(globals_named & function.__globals__.keys()):
            self._add(Slot(f"global '{name}'", function.__globals__, name))
        for place in range(len(function.__defaults__ or ())):
            self._add(Slot(f"a default of {label}", function.__defaults__, place))
        for name in function.__kwdefaults__ or ():
            self._add(Slot(f"default '{name}' of {label}", function.__kwdefaults__, name))

    def _visit_container(self, container: Any, label: str, module: str = "") -> None:
        if isinstance(container, _CONTAINERS):
            self._watched[id(container)] = Watched(f"the contents of {label}", module, container, False)
        if len(container) <= _LONG:
            for element in list(container.values()) if isinstance(container, dict) else list(container):
                self._visit(element, label)

    def _visit_object(self, value: Any) -> None:
        label, kind = f"a {type(value).__name__}", type(value)
        if hasattr(value, "__dict__"):
            of_classes = (name for k in _own_classes(kind) for name in vars(k))  # an attribute of the object may come to hide them
            self._watched[id(vars(value))] = Watched(label, "", vars(value), True)
            self._add_named(vars(value), {*vars(value), *of_classes}, label)
        self._add_named(value, getattr(kind, "__slots__", ()), label)
        self._visit_class(kind)

    def _visit_module(self, module: torch.nn.Module, path: str) -> None:
        self._watched[id(vars(module))] = Watched(f"module '{path}'", path, vars(module), True)
        for name, value in vars(module).items():
            label = f"attribute '{name}' of module '{path}'"
            if isinstance(value, _CONTAINERS) and name not in _FOLLOWS_PARAMETERS:
                self._visit_container(value, label, path)
            elif not isinstance(value, _CONTAINERS):
                self._visit(value, label)
        if not _is_library(type(module).__module__):
            self._visit_class(type(module))

    def _visit_class(self, kind: type, called_unnamed: frozenset[str] = _CALLED_UNNAMED) -> None:
        """Attributes and methods that some code names."""
        for own in _own_classes(kind):
            self._add_named(own, vars(own), f"class {own.__name__}")
        for name in sorted(self._names | called_unnamed):
            found = inspect.getattr_static(kind, name, None)
            found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
            if isinstance(found, types.FunctionType) and _is_library(kind.__module__):  # of an object that the code holds: a scaler, say
                if id(found) not in self._seen:
                    self._seen[id(found)] = found
                    self._visit_function(found, found.__qualname__)
            else:
                self._visit(found, name)

    def _add_named(self, holder: Any, names: Iterable[str], label: str) -> None:
        """Those of these names that some code names."""
        for name in sorted(self._names.intersection(names)):
            self._add(Slot(f"attribute '{name}' of {label}", holder, name))

    def _add(self, slot: Slot) -> None:
        self._slots[id(slot.holder), slot.key] = slot
        self._visit(slot.read(), slot.label)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """(globals, attributes that are read) that a code object and those inside it name."""
    globals_named, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if "GLOBAL" in instruction.opname:
            globals_named.add(instruction.argval)
        elif instruction.opname in _LOADS_ATTRIBUTE:
            attributes.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more_globals, more_attributes = _names_in(inner)
            globals_named |= more_globals
            attributes |= more_attributes
    return frozenset(globals_named), frozenset(attributes)


@functools.cache
def _is_library(module: str | None) -> bool:
    """By name, and Python's own modules by where they lie too: a user's file may be called `test` or `code`."""
    top = (module or "").partition(".")[0]
    if top not in sys.stdlib_module_names:
        return top in _LIBRARIES
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or Path(file).is_relative_to(Path(dis.__file__).parent)


def _own_classes(kind: type) -> list[type]:
    """A class and its bases, without those of libraries."""
    return [k for k in kind.__mro__ if not _is_library(k.__module__)]


# --- comparing ------------------------------------------------------------------------------------------------------------
class _Same:
    """Equal to itself alone; what it holds stays alive, so that no other object gets its address."""

    __slots__ = ("it",)

    def __init__(self, it: Any) -> None:
        self.it = it

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.it is other.it


def comparable(value: Any, depth: int = 0) -> Any:
    """A hashable stand-in: numbers (with their type) and texts by value, small containers by content, all else by identity."""
    kind = type(value)
    if kind in NUMBERS:
        return kind, value
    if kind in PLAIN or kind in _HASHED_AS_THEY_ARE:
        return value
    if isinstance(value, torch.Tensor):
        return WeakIdRef(value)
    if isinstance(value, (tuple, frozenset, *_CONTAINERS)) and len(value) <= _LONG and depth < _DEEP:
        elements = [comparable(e, depth + 1) for e in (value.items() if isinstance(value, dict) else value)]
        return kind, frozenset(elements) if isinstance(value, set | frozenset) else tuple(elements)
    return _Same(value), len(value) if isinstance(value, _CONTAINERS) else None


def _is_same(one: Any, other: Any) -> bool:
    """One object, or plain values that are equal."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) in PLAIN and one == other


# --- what a step changes ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Change:
    """One value that a step changed: what it is, and the module that it belongs to ("" for none)."""

    label: str
    module: str


class Guard:
    """Remembers what Python holds when it is made. `undo` puts all of it back and says what had changed."""

    def __init__(self, scope: Scope) -> None:
        self._slots = [(slot, slot.read()) for slot in scope.slots if not isinstance(slot.holder, tuple)]
        self._watched = [(watched, _copy(watched.container)) for watched in scope.watched]
        self._caches = [(cache, cache.cache_info().currsize) for cache in scope.caches]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def undo(self) -> list[Change]:
        """All that differs from before."""
        return [*self._undo_watched(), *self._undo_slots(), *self._undo_caches(), *self._undo_random()]

    def _undo_watched(self) -> Iterator[Change]:
        for watched, before in self._watched:
            changed = list(_changed(watched.container, before))
            if changed:
                _put_back(watched.container, before)
            for key in changed:
                yield Change(f"attribute '{key}' of {watched.label}" if watched.is_attributes else watched.label, watched.module)

    def _undo_slots(self) -> Iterator[Change]:
        for slot, before in self._slots:
            if not _is_same(before, slot.read()):
                slot.write(before)
                yield Change(slot.label, "")

    def _undo_caches(self) -> Iterator[Change]:
        for cache, size in self._caches:
            if cache.cache_info().currsize != size:
                cache.cache_clear()  # single entries cannot be taken out
                yield Change(f"what the function '{cache.__name__}' remembers", "")

    def _undo_random(self) -> Iterator[Change]:
        if random.getstate() != self._python:
            random.setstate(self._python)
            yield Change("the state of Python's random module", "")
        if not all(np.array_equal(now, before) for now, before in zip(np.random.get_state(), self._numpy)):
            np.random.set_state(self._numpy)
            yield Change("numpy's random state", "")


@contextlib.contextmanager
def seeding_noticed() -> Iterator[set[str]]:
    """Names of torch's functions that set a generator's state, of those called in this context."""
    called: set[str] = set()

    def noticed(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return function(*args, **kwargs)

        return call

    places = [(module, name) for module in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")]
    places += [(torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all")]
    originals = [(module, name, getattr(module, name)) for module, name in places]
    try:
        for module, name, function in originals:
            setattr(module, name, noticed("manual_seed" if "seed" in name else "set_rng_state", function))
        yield called
    finally:
        for module, name, function in originals:
            setattr(module, name, function)


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else set(container) if isinstance(container, set) else list(container)


def _changed(container: Any, before: Any) -> Iterator[Any]:
    """The keys of a dict whose values changed; of another container one None when anything did."""
    if isinstance(container, dict):
        absent = object()
        keys = [k for k in dict.fromkeys([*before, *container]) if k not in _FOLLOWS_PARAMETERS]
        yield from (k for k in keys if not _is_same(before.get(k, absent), container.get(k, absent)))
    elif isinstance(container, set):
        yield from [None] * (container != before)
    elif len(container) != len(before) or not all(map(_is_same, container, before)):
        yield None


def _put_back(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, dict | set):
        container.update(before)
    else:
        container.extend(before)
