"""requirements.lock: exact, complete, and what is installed here."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)")


def read_lock() -> dict[str, str]:
    """Name -> version. Each line is a comment or one exact version: no URLs, no options, no ranges."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and not line.startswith("#")]
    pins = [PIN.fullmatch(line) for line in lines]
    assert all(pins), [line for line, pin in zip(lines, pins) if not pin]
    assert len({canonicalize_name(pin[1]) for pin in pins}) == len(pins)
    return {canonicalize_name(pin[1]): pin[2] for pin in pins}


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, the server's and the tests' own packages included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(text) for text in [*project["dependencies"], *extras["server"], *extras["tests"]]]


def follow(roots: list[Requirement], lock: dict[str, str]) -> tuple[set[str], list[str]]:
    """All that the roots lead to by the metadata of what is installed; and what the lock lacks or pins to a version not allowed."""
    reached: set[tuple[str, str]] = set()
    bad, queue = [], list(roots)
    for r in queue:
        name = canonicalize_name(r.name)
        if not r.specifier.contains(lock.get(name, ""), prereleases=True):
            bad.append(str(r))
            continue
        for extra in {"", *r.extras} - {extra for known, extra in reached if known == name}:
            reached.add((name, extra))
            needs = [Requirement(text) for text in metadata.requires(name) or []]
            queue += [n for n in needs if (n.marker is None and not extra) or (n.marker and _applies(n, extra))]
    return {name for name, _ in reached}, bad


def _applies(requirement: Requirement, extra: str) -> bool:
    """With this extra, but not without one: what always applies is followed once."""
    return requirement.marker.evaluate({"extra": extra}) and (not extra or not requirement.marker.evaluate({"extra": ""}))


def test_the_lock_holds_all_that_is_needed_and_nothing_else():
    lock = read_lock()
    reached, bad = follow(declared(), lock)
    assert bad == []
    assert set(lock) - reached == set()


def test_what_is_installed_is_what_is_pinned():
    assert {name: metadata.version(name) for name in read_lock()} == read_lock()


def test_a_missing_and_a_wrong_pin_are_caught():
    lock = read_lock()
    without = {name: version for name, version in lock.items() if name not in {"nvidia-cublas", "setuptools"}}
    assert {Requirement(text).name for text in follow(declared(), without)[1]} == {"nvidia-cublas", "setuptools"}
    assert follow(declared(), lock | {"torch": "2.8.0"})[1][0] == "torch>=2.9"
    assert "surplus" in set(lock | {"surplus": "1"}) - follow(declared(), lock)[0]
