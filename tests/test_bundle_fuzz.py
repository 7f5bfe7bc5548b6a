"""Random changes to a genuine bundle: bytes, JSON fields, whole files, archives. Whoever changes what means something is refused.

A change that is accepted must mean nothing: the files are the same, the number is the same to nine digits, or the field is one of FREE,
which says only what nobody can derive, such as a sentence or how long planning took. No change may make a rule fail: that would be our
mistake. `--full` asks 10,000 cases, fewest of those kinds that take longest: a field that is signed again is checked by every rule.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from forging import Members, at, drop, forge, leaves, members_of, put, write
from genuine import genuine_bundle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vramlab.crowd import check
from vramlab.crowd.archive import pack, unpack
from vramlab.crowd.signing import make_key
from vramlab.errors import BundleRefused

KEY = make_key()
FEW, MANY = 60, {"bytes": 2500, "archive": 4500, "field": 1500, "files": 1500}
# What a machine or a person says and nothing else follows from. Everything else has to be refused.
FREE = re.compile(r"""
      record\.json:(?: message | missing\..* | environment\.(?!system\.host_hash$|system$).*
                     | provenance\.(?:started|ended|seconds|written_by)
                     | measured\.(?:capture_seconds|plan_seconds|cold_peak_bytes|persistent_bytes|library_bytes)
                     | predicted\.least_step_seconds  # between limits that are derived
                     | predicted\.device\.(?:device_link_bytes_per_second|memory_bytes|memory_bytes_per_second|flops_per_second
                                            |flops_efficiency|launch_seconds|devices|is_full_duplex)  # of a machine: its ops are timed
                     | truth_detail\.(?:note|variants(?:\..*)?) )
    | run\.json:(?: environment(?:\..*)? | overrides.* | left_out.* | auto | platform | started
                  | workflow\.(?:description|expected.*|untestable.*|claims\.0\..*)
                  | cells\.\d+\.(?:title|label) )
    | [0-9a-f]{16}\.json:peaks\.(?:cold_peak_bytes|persistent_bytes|library_bytes)
""", re.VERBOSE)


BLOCKS = ("measured", "predicted", "search", "training", "truth_detail", "provenance")  # of a record: an unknown key is a warning there


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> Path:
    return genuine_bundle(tmp_path_factory.mktemp("genuine"), seed=5, key=KEY)


@pytest.fixture(scope="module")
def members(genuine) -> Members:
    return members_of(genuine)


def cases(kind: str, many: bool) -> settings:
    return settings(max_examples=MANY[kind] if many else FEW, deadline=None, derandomize=not many,
                    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large])


COUNTS = [False, pytest.param(True, marks=pytest.mark.slow)]


def is_refused(folder: Path) -> bool:
    """Whether the check refuses a folder, which goes away; never by a rule that failed."""
    report = check(folder)
    shutil.rmtree(folder)
    assert "rule-failed" not in {f.rule for f in report.findings}, report.findings
    return not report.is_accepted


def mutated(data: bytes, draw: st.DataObject) -> bytes:
    """Bytes flipped, cut, doubled or put in."""
    body = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        place = draw.draw(st.integers(0, max(len(body) - 1, 0)))
        how = draw.draw(st.sampled_from(["flip", "cut", "double", "insert", "end", "zero"]))
        if how == "flip" and body:
            body[place] ^= draw.draw(st.integers(1, 255))
        elif how == "cut":
            del body[place:place + draw.draw(st.integers(1, 64))]
        elif how == "double":
            body[place:place] = body[place:place + draw.draw(st.integers(1, 64))]
        elif how == "insert":
            body[place:place] = draw.draw(st.binary(min_size=1, max_size=16))
        elif how == "end":
            body += draw.draw(st.binary(min_size=1, max_size=16))
        elif body:
            body[place] = 0
    return bytes(body)


@pytest.mark.parametrize("many", COUNTS)
def test_changed_bytes_of_a_file_are_refused(genuine, members, many):
    @cases("bytes", many)
    @given(draw=st.data())
    def holds(draw: st.DataObject) -> None:
        name = draw.draw(st.sampled_from(sorted(members)))
        changed = mutated(members[name], draw)
        with tempfile.TemporaryDirectory() as room:
            folder = write(members | {name: changed}, Path(room) / genuine.name)
            assert is_refused(folder) == (changed != members[name])
    holds()


@pytest.mark.parametrize("many", COUNTS)
def test_a_changed_archive_is_refused_or_the_same(genuine, members, many):
    archive = pack(genuine)

    @cases("archive", many)
    @given(draw=st.data())
    def holds(draw: st.DataObject) -> None:
        is_inside = draw.draw(st.booleans())
        body = gzip.compress(mutated(gzip.decompress(archive), draw), compresslevel=1) if is_inside else mutated(archive, draw)
        with tempfile.TemporaryDirectory() as room:
            try:
                folder = unpack(body, Path(room))
            except BundleRefused:
                assert list(Path(room).iterdir()) == []
                return
            same = members_of(folder) == members
            assert is_refused(folder) != same
    holds()


NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63, -2**63, 10**30, 1e-300, 1e300, -0.0, 0.5])
VALUES = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=8), st.just([]), st.just({}), st.just([[]]),
                   st.sampled_from(["exact", "ok", "oom", "reproduced", "cpu", "sim:v100-32gb", "eager", "80%", "../x", "<b>", "0" * 64]))


def other_value(old: Any, draw: st.DataObject) -> Any:
    if isinstance(old, int | float) and not isinstance(old, bool) and draw.draw(st.booleans()):
        factor = draw.draw(st.sampled_from([0.0, -1.0, 0.5, 2.0, 1 + 1e-6, 1 - 1e-6, 1 + 1e-12, 1e9]))
        return type(old)(old * factor) + draw.draw(st.sampled_from([0, 0, 1, -1]))
    return draw.draw(VALUES)


def means_the_same(old: Any, new: Any) -> bool:
    """Equal to nine digits, of the same kind; what holds nothing is nothing."""
    numbers = [isinstance(x, int | float) and not isinstance(x, bool) for x in (old, new)]
    if all(numbers):
        return math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12)
    return type(old) is type(new) and old == new


@pytest.mark.parametrize("many", COUNTS)
def test_a_changed_field_that_is_signed_again_is_refused_unless_nothing_follows_from_it(members, many):
    bodies = {name: json.loads(data) for name, data in members.items() if name.endswith(".json") and name != "manifest.json"}
    places = [(name, path) for name, body in sorted(bodies.items()) for path in leaves(body)]

    @cases("field", many)
    @given(draw=st.data())
    def holds(draw: st.DataObject) -> None:
        name, path = draw.draw(st.sampled_from(places))
        path = path[:draw.draw(st.integers(max(len(path) - 1, 1), len(path)))]
        body = json.loads(members[name])
        old, is_dropped = at(body, path), draw.draw(st.integers(0, 9)) == 0
        if is_dropped:
            drop(body, path)
        else:
            put(body, path, other_value(old, draw))
        file = name.rpartition("/")[2]
        is_free = all(FREE.fullmatch(f"{file}:{place}") for place in unlike(json.loads(members[name]), body))  # of nothing too
        with tempfile.TemporaryDirectory() as room:
            refused = is_refused(forge(members | {name: json.dumps(body).encode()}, Path(room), KEY))
        assert refused or is_free, f"{name}:{path}: {old!r} became {'nothing' if is_dropped else at(body, path)!r}"
    holds()


def blank(body: Any, path: tuple) -> None:
    put(body, path, None)


@pytest.mark.slow
def test_every_field_that_is_dropped_or_null_is_refused_unless_nothing_follows_from_it(members, tmp_path):
    """Each of them once, of a list its first item: a random draw meets one field of a thousand too seldom."""
    accepted = []
    for name, data in sorted(members.items()):
        if not name.endswith(".json") or name == "manifest.json":
            continue
        file, before = name.rpartition("/")[2], json.loads(data)
        for path in (p for p in leaves(before) if not any(isinstance(step, int) and step > 0 for step in p)):
            for how in (drop, blank):
                body = json.loads(data)
                how(body, path)
                if all(FREE.fullmatch(f"{file}:{place}") for place in unlike(before, body)):
                    continue
                if not is_refused(forge(members | {name: json.dumps(body).encode()}, tmp_path, KEY)):
                    accepted.append((name, path, how.__name__))
    assert accepted == []


@pytest.mark.parametrize("many", COUNTS)
def test_changed_files_that_are_signed_again_are_refused(members, many):
    """Packed content changed, files dropped, added, doubled or exchanged: the hashes in the records hold them."""
    names = sorted(set(members) - {"manifest.json"})

    @cases("files", many)
    @given(draw=st.data())
    def holds(draw: st.DataObject) -> None:
        one, other = draw.draw(st.sampled_from(names)), draw.draw(st.sampled_from(names))
        how = draw.draw(st.sampled_from(["drop", "exchange", "copy", "content", "bytes", "move"]))
        new = dict(members)
        if how == "drop":
            del new[one]
        elif how == "exchange":
            new[one], new[other] = new[other], new[one]
        elif how == "copy":
            new[one] = new[other]
        elif how == "content" and one.endswith(".gz"):
            new[one] = gzip.compress(mutated(gzip.decompress(members[one]), draw))
        elif how == "bytes":
            new[one] = mutated(members[one], draw)
        elif how == "move":
            new[draw.draw(st.sampled_from(["a", "cells/x", f"tapes/{'0' * 64}.json.gz", f"cells/{'0' * 16}/record.json"]))] = new.pop(one)
        if new == members:
            return
        with tempfile.TemporaryDirectory() as room:
            refused = is_refused(forge(new, Path(room), KEY))
        assert refused or is_json_alike(members, new), (how, one, other)
    holds()


def is_json_alike(old: Members, new: Members) -> bool:
    """Whether only JSON files differ, in white space, in what is FREE, or by a key of a record's block that no record here knows, which the
    check keeps and tells of.
    """
    if set(old) != set(new):
        return False
    known = {place for name in old if name.endswith("/record.json") for place in keys_of(json.loads(old[name]))}
    for name in old:
        if old[name] == new[name]:
            continue
        if not name.endswith(".json"):
            return False
        try:
            before, after = json.loads(old[name]), json.loads(new[name])
        except ValueError:
            return False
        file = name.rpartition("/")[2]
        unknown = keys_of(after) - known if file == "record.json" else set()
        if not all(place in unknown or FREE.fullmatch(f"{file}:{place}") for place in unlike(before, after)):
            return False
    return True


def keys_of(record: Any) -> set[str]:
    """The keys of a record's blocks, as `provenance.seconds`; nothing of what is no record."""
    blocks = [(b, record[b]) for b in BLOCKS if isinstance(record.get(b), dict)] if isinstance(record, dict) else []
    return {f"{name}.{key}" for name, block in blocks for key in block}


def unlike(before: Any, after: Any, place: str = "") -> list[str]:
    """Dotted places at which two bodies differ in meaning."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return [p for key in keys for p in unlike(before.get(key), after.get(key), f"{place}.{key}".lstrip("."))]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [p for i, (a, b) in enumerate(zip(before, after)) for p in unlike(a, b, f"{place}.{i}")]
    return [] if means_the_same(before, after) else [place]


def test_the_free_fields_are_few_and_hold_no_result():
    """The negative control of FREE: what a leaderboard shows is not in it."""
    for field in ("outcome", "truth", "measured.peak_bytes", "measured.ratio.median", "measured.step_seconds.0", "predicted.peak_bytes",
                  "predicted.step_seconds", "budget_bytes", "eager_peak_bytes", "config.method", "config.batch_size", "config.target",
                  "measured.prediction_error_bytes", "environment.system.host_hash", "provenance.tape_digest", "files.tape.json.gz"):
        assert not FREE.fullmatch(f"record.json:{field}"), field
    assert not FREE.fullmatch("claims.json:0.verdict") and not FREE.fullmatch("run.json:run_id")


def test_full_asks_ten_thousand():
    assert sum(MANY.values()) == 10_000
