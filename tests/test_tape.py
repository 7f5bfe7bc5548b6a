"""The Tape: what it derives, and that it survives JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from tapes import TOYS, TapeBuilder, buffer_writer, chain, random_tape, random_tapes, shared_storage

from vramlab.tape import STATE_ROLES, Phase, Role, Tape, Variant


def small() -> Tape:
    """w, x -> a, statistics; a, w -> b. Storages w 0, x 1, a 2, statistics 3, b 4."""
    tape = TapeBuilder()
    w, x = tape.state("conv.weight", 10), tape.state("x", 100, Role.INPUT)
    a, statistics, b = tape.temporary(200, Role.ACTIVATION), tape.temporary(20), tape.temporary(8, at_end=True)
    rows = tape.view(2, (10, 20))
    tape.call("aten.native_layer_norm.default", [x, w], [a, statistics, None], layer="block.0", flops=7)
    tape.call("aten.mm.default", [rows, a, w], [b], phase=Phase.BACKWARD)
    return tape.build(b)


def test_reads_and_creations():
    tape = small()
    assert tape.reads == ((0, 1), (0, 2))
    assert tape.creates == ((2, 3), (4,))
    assert tape.producer == (None, None, 0, 0, 1)
    assert tape.readers == ((0, 1), (0,), (1,), (), ())


def test_names():
    tape = small()
    assert tape.op_name(0) == "#0 aten.native_layer_norm.default (block.0)"
    assert tape.op_name(1) == "#1 aten.mm.default"
    assert tape.storage_name(0) == "conv.weight"
    assert tape.storage_name(3) == "%3 of #0 aten.native_layer_norm.default (block.0)"


def test_bytes_by_role():
    tape = small()
    assert tape.bytes_of(Role.PARAMETER, Role.INPUT) == 110
    assert tape.bytes_of(Role.ACTIVATION) == 200
    assert tape.bytes_of(Role.BUFFER) == 0
    assert Role.ACTIVATION not in STATE_ROLES and Role.GRADIENT in STATE_ROLES


def test_an_op_does_not_create_what_it_reads_or_overwrites():
    tape = TapeBuilder()
    w, x = tape.state("w", 10), tape.state("x", 10, Role.INPUT)
    y = tape.temporary(10, at_end=True)
    tape.call("aten.out.default", [x], [y, w, x], mutates=[w])
    assert tape.build(y).creates == ((2,),)


def test_versions_count_the_writes_before_a_read():
    tape = TapeBuilder()
    w, v = tape.state("w", 10, Role.BUFFER), tape.state("v", 10)
    outs = [tape.temporary(10) for _ in range(3)]
    tape.call("aten.relu.default", [w, v], [outs[0]])
    tape.call("aten.add_.Tensor", [w, outs[0]], [w], mutates=[w])
    tape.call("aten.relu.default", [w], [outs[1]])
    tape.call("aten.add_.Tensor", [w], [w], mutates=[w])
    tape.call("aten.relu.default", [w], [outs[2]])
    built = tape.build(outs[2])
    assert built.read_versions == (((0, 0),), ((0, 0),), ((0, 1),), ((0, 1),), ((0, 2),))


def test_throwaway_state_binds_later_readers_only():
    tape = buffer_writer()
    norm = next(op for op in tape.ops if op.throwaway_state)
    assert tape.read_versions[norm.id] == ()
    backward = next(op for op in tape.ops if op.layer == norm.layer and op.phase is Phase.BACKWARD)
    assert dict(tape.read_versions[backward.id]) == {s: 1 for s in norm.mutates}


@pytest.mark.parametrize("toy", TOYS)
def test_toys_are_in_single_assignment(toy):
    tape = TOYS[toy]()
    made = [s for of_op in tape.creates for s in of_op]
    assert len(made) == len(set(made))
    there = {s.id for s in tape.storages if s.at_start}
    for op, reads, creates in zip(tape.ops, tape.reads, tape.creates):
        assert there >= {*reads, *op.mutates} and not there & set(creates)
        assert op.takeover is None or (op.takeover[0] in creates and op.takeover[1] in reads)
        there |= set(creates)
    assert {s.id for s in tape.storages if s.at_end} <= there
    grads = [s for s in tape.storages if s.role is Role.GRADIENT]
    assert len(grads) == sum(s.role is Role.PARAMETER for s in tape.storages)
    assert len({op.id for op in tape.ops} - {r for of_storage in tape.readers for r in of_storage}) == 0


def test_a_shared_storage_has_two_tensors():
    tape = shared_storage()
    mm = next(op for op in tape.ops if op.target == "aten.mm.default")
    assert len(mm.inputs) == 2 and len(tape.reads[mm.id]) == 1


# ---------------------------------------------------------------- JSON and digest

@pytest.mark.parametrize("toy", TOYS)
def test_json_round_trip(toy, tmp_path):
    tape = TOYS[toy]()
    assert Tape.from_json(json.loads(json.dumps(tape.to_json()))) == tape
    tape.save(tmp_path / "tape.json.gz")
    loaded = Tape.load(tmp_path / "tape.json.gz")
    assert loaded == tape and loaded.digest == tape.digest


@settings(max_examples=100, deadline=None, derandomize=True)
@given(random_tapes())
def test_json_round_trip_of_random_tapes(tape):
    again = Tape.from_json(json.loads(json.dumps(tape.to_json())))
    assert again == tape
    assert (again.reads, again.creates, again.read_versions, again.digest) == (tape.reads, tape.creates, tape.read_versions, tape.digest)


def test_the_same_tape_is_the_same_file(tmp_path):
    for name in ("a", "b"):
        chain(3).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_json_keeps_every_field_of_an_op():
    tape = TapeBuilder()
    x, y = tape.state("x", 8, Role.INPUT), tape.temporary(8, at_end=True)
    tape.call("aten.relu.default", [x], [y, None], phase=Phase.BACKWARD, layer="a.b", mutates=[x], takeover=(y, x), seconds=0.5, flops=3,
              is_eager_inplace=True, is_random=True, throwaway_state=True, workspace_bytes=9)
    built = tape.build(y)
    assert Tape.from_json(json.loads(json.dumps(built.to_json()))).ops == built.ops
    defaults = [f for f in ("mutates", "takeover", "is_random", "flops") if f in chain(1).to_json()["ops"][0]]
    assert defaults == ["flops"]


def test_another_format_is_refused():
    with pytest.raises(ValueError, match="tape format 99, this vramlab reads 1"):
        Tape.from_json(chain(1).to_json() | {"format": 99})


@pytest.mark.parametrize("where, words", [
    (("tensors", 0, 0), "storage 99; it has"), (("tensors", 0, 0), "storage -1"), (("ops", 0, "inputs", 0), "tensor 99"),
    (("ops", 0, "outputs", 0), "tensor 99"), (("loss",), "tensor 99"), (("ops", 0, "mutates"), "storage"),
    (("ops", 0, "takeover"), "storage"),
])
def test_an_id_that_names_nothing_is_refused(where, words):
    """Compiled loops would read beyond their arrays."""
    body = json.loads(json.dumps(chain(1).to_json()))
    inner = body
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = {"mutates": [99], "takeover": [0, 99]}.get(where[-1], -1 if "-1" in words else 99)
    with pytest.raises(ValueError, match=f"the tape names {words}"):
        Tape.from_json(body)


def test_seconds_do_not_change_the_digest():
    tape = chain(3)
    timed = tape.with_costs([0.125 * i for i in range(len(tape.ops))])
    assert timed.digest == tape.digest
    assert [op.seconds for op in timed.ops[:3]] == [0, 0.125, 0.25] and tape.ops[1].seconds == 1.0
    assert tape.with_costs([1.0] * len(tape.ops), [5] * len(tape.ops)).digest != tape.digest
    with pytest.raises(ValueError):
        tape.with_costs([1.0])


CHANGES = {
    "bytes": lambda t: replace(t, storages=(replace(t.storages[0], nbytes=1), *t.storages[1:])),
    "at_end": lambda t: replace(t, storages=(replace(t.storages[0], at_end=False), *t.storages[1:])),
    "strides": lambda t: replace(t, tensors=(replace(t.tensors[0], strides=(2,)), *t.tensors[1:])),
    "target": lambda t: replace(t, ops=(replace(t.ops[0], target="aten.relu.default"), *t.ops[1:])),
    "arguments": lambda t: replace(t, ops=(replace(t.ops[0], kwargs={"alpha": 2}), *t.ops[1:])),
    "workspace": lambda t: replace(t, ops=(replace(t.ops[0], workspace_bytes=1), *t.ops[1:])),
    "randomness": lambda t: replace(t, ops=(replace(t.ops[0], is_random=True), *t.ops[1:])),
    "loss": lambda t: replace(t, loss=0),
    "device": lambda t: replace(t, device_type="cuda"),
    "batch": lambda t: replace(t, batch_size=2),
}


@pytest.mark.parametrize("what", CHANGES)
def test_all_else_changes_the_digest(what):
    tape = chain(2)
    assert CHANGES[what](tape).digest != tape.digest


def test_the_digest_is_the_same_in_another_process():
    """Python's own hashes differ between processes; the digest must not."""
    script = "from random import Random; from tapes import random_tape; print(random_tape(Random(7), ops=8).digest)"
    here = Path(__file__).parent
    environment = {"PYTHONHASHSEED": "123", "PYTHONPATH": f"{here}:{here.parent}", "PYTHONDONTWRITEBYTECODE": "1"}
    printed = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert printed.stdout.strip() == random_tape(Random(7), ops=8).digest


# ---------------------------------------------------------------- variants

def with_two() -> Tape:
    return small().with_variants([[], [Variant("gemm", 2.0, 64), Variant("fft", 1.0, 512)]])


def test_variants_survive_json():
    tape = Tape.from_json(json.loads(json.dumps(with_two().to_json())))
    assert tape == with_two() and tape.ops[1].variants == (Variant("gemm", 2.0, 64), Variant("fft", 1.0, 512))
    assert "variants" not in small().to_json()["ops"][1], "a tape without variants reads as before"


def test_names_and_workspaces_of_variants_are_in_the_digest_and_seconds_are_not():
    def digest(*variants: Variant) -> str:
        return small().with_variants([[], variants]).digest

    assert digest() == small().digest
    assert digest(Variant("fft", 1.0, 512)) == digest(Variant("fft", 9.0, 512))
    assert len({digest(), digest(Variant("fft", 1.0, 512)), digest(Variant("fft", 1.0, 513)), digest(Variant("gemm", 1.0, 512))}) == 4


def test_a_variant_by_name():
    op = with_two().with_costs([1.0, 5.0], [0, 7]).ops[1]
    assert op.variant("fft") == Variant("fft", 1.0, 512)
    assert (op.variant(None).seconds, op.variant(None).workspace_bytes) == (5.0, 7), "the library's own choice"
    with pytest.raises(KeyError, match="aten.mm.default has no variant 'direct'; it has gemm, fft"):
        op.variant("direct")


def test_two_variants_of_one_name_are_refused():
    with pytest.raises(ValueError, match="#0 .* two variants of one name: fft, fft"):
        small().with_variants([[Variant("fft", 1.0, 0), Variant("fft", 2.0, 0)], []])
