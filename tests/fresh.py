"""Tests that need a process of their own: an AllocatorMeter is misled by blocks that an earlier meter of its process saw and lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from vramlab.isolate import Call, Settings, run_isolated
from vramlab.record import Outcome

ROOT = Path(__file__).resolve().parents[1]


def in_fresh_process(test: Callable) -> Callable:
    """Decorator: the test's body runs in a new process, and its failure is this test's failure. Arguments must be picklable."""

    @functools.wraps(test)
    def call(**arguments):
        module = ".".join(Path(test.__code__.co_filename).relative_to(ROOT).with_suffix("").parts)
        result = run_isolated(Call(function="tests.fresh.run", args=(module, test.__name__, arguments)),
                              settings=Settings(is_forked=True))
        assert result.outcome is Outcome.OK, result.traceback or result

    return call


def run(module: str, name: str, arguments: dict) -> None:
    """What the new process does: the body of the test `name` of `module`."""
    getattr(import_module(module), name).__wrapped__(**arguments)
