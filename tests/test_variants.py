"""The model of convolution algorithms: counts by hand, what is legal, and that it leaves the plain cost alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from vramlab.device import DeviceProfile, load_profile
from vramlab.tape import Op, Phase, Role, Storage, Tape, Tensor, Variant
from vramlab.variants import costs_of_pass, fastest, geometry_of, leanest, next_leaner, variants_of, with_variants

TITAN_X = load_profile("titan-x-maxwell")


def device(**fields: float) -> DeviceProfile:
    """One FLOP a second, memory too fast to matter."""
    rates = {"flops_per_second": 1, "memory_bytes_per_second": 1e30, **fields}
    return DeviceProfile(name="by hand", memory_bytes=10**6, flops_efficiency=1, h2d_bytes_per_second=1, d2h_bytes_per_second=1,
                         copy_latency_seconds=0, **rates)


ARITHMETIC, MEMORY = device(), device(flops_per_second=1e30, memory_bytes_per_second=1)


def step(x=(2, 4, 6, 6), w=(8, 4, 3, 3), y=(2, 8, 6, 6), *, stride=1, padding=1, dilation=1, groups=1, transposed=False,
         wanted=(True, True, False), seconds=(0.0, 0.0), form_only=False) -> Tape:
    """One convolution and its backward: x, W -> y; dy, x, W -> dx, dW. 4 to 8 channels, 3x3, padded, on two maps of 6x6."""
    shapes = [x, w, y, y, x, w]
    tensors = tuple(Tensor(id=i, storage=i, dtype="float32", shape=s, strides=(1,) * len(s), offset=0) for i, s in enumerate(shapes))
    storages = tuple(Storage(id=i, nbytes=4, role=Role.ACTIVATION, name=f"%{i}", at_start=i in (0, 1, 3), at_end=False) for i in range(6))
    space = len(w) - 2
    how = [[stride] * space, [padding] * space, [dilation] * space, transposed, [0] * space, groups]
    tensor = [{"tensor": i} for i in range(6)]
    seen = {"form": {"dtype": "float32", "shape": list(x), "strides": []}} if form_only else tensor[0]
    forward = Op(id=0, target="aten.convolution.default", args=[tensor[0], tensor[1], None, *how], kwargs={}, inputs=(0, 1), outputs=(2,),
                 phase=Phase.FORWARD, layer="conv", seconds=seconds[0])
    backward = Op(id=1, target="aten.convolution_backward.default", args=[tensor[3], seen, tensor[1], None, *how, list(wanted)], kwargs={},
                  inputs=(0, 1, 3), outputs=(4, 5, None), phase=Phase.BACKWARD, layer="conv", seconds=seconds[1])
    return Tape(ops=(forward, backward), tensors=tensors, storages=storages, loss=2, device_type="cpu", batch_size=2)


def costs(name: str, profile: DeviceProfile, **fields) -> dict[str, tuple[float, int]]:
    tape = step(**fields)
    found = costs_of_pass(name, geometry_of(tape, tape.ops[0]), profile)
    return {algorithm: (cost.seconds, cost.workspace_bytes) for algorithm, cost in found.items()}


# ---------------------------------------------------------------- counts by hand
# x 2*4*36 floats = 1152 bytes, W 8*4*9 = 1152 bytes, y 2*8*36 = 2304 bytes; a pass is 2 * (2*36) * 9 * 4 * 8 = 41472 FLOP.

def test_arithmetic_and_workspace_by_hand():
    """FFT: padded 8x8, 8*5 frequencies, 2*4 + 2*8 + 8*4 = 56 spectra of 8 bytes an element; 8 FLOP for each of 2*8*4*40 products,
    at half the rate; 2.5 * 64 * 6 FLOP a transform. Winograd: 2*3*3 tiles of 16 products with 8*4 filters; additions 32 a tile and
    channel, 24 a tile and filter, 28 a filter and channel; the transformed filters are 16 floats each."""
    assert costs("forward", ARITHMETIC) == {
        "implicit_gemm": (41472 / 0.6, 0),
        "implicit_precomp_gemm": (41472, 4 * 4 * 9),
        "gemm": (41472, 2 * 4 * 9 * 36 * 4),
        "fft": (2 * 8 * 2 * 8 * 4 * 40 + 960 * 56, 8 * 40 * 56),
        "winograd": (2 * 16 * 18 * 32 + 18 * (32 * 4 + 24 * 8) + 28 * 32, 16 * 4 * 32),
    }


def test_traffic_by_hand():
    """Each byte of x, W and y once; the patches written and read; spectra four times; what winograd transforms, twice."""
    moved = 1152 + 1152 + 2304
    assert {name: seconds for name, (seconds, _) in costs("forward", MEMORY).items()} == {
        "implicit_gemm": moved, "implicit_precomp_gemm": moved + 144, "gemm": moved + 2 * 10368, "fft": moved + 4 * 17920,
        "winograd": moved + 2 * 2048,
    }


def test_winograd_of_the_other_passes():
    """The data pass reads 8 channels and makes 4; the filter pass keeps the transformed maps of both sides, 16 floats a tile."""
    assert costs("data", ARITHMETIC)["winograd"] == (2 * 16 * 18 * 32 + 18 * (32 * 8 + 24 * 4) + 28 * 32, 16 * 4 * 32)
    assert costs("filter", ARITHMETIC)["winograd"] == (2 * 16 * 18 * 32 + 18 * (32 * 4 + 24 * 8) + 28 * 32, 16 * 4 * (18 * (4 + 8) + 32))


def test_a_fused_block_has_32_filters():
    """64 filters: two blocks, each of which transforms the input tiles."""
    few, many = (costs("forward", ARITHMETIC, w=(k, 4, 3, 3), y=(2, k, 6, 6))["winograd"][0] for k in (32, 64))
    per_filter = 2 * 16 * 18 * 4 + 18 * 24 + 28 * 4
    assert (few, many) == (32 * per_filter + 18 * 32 * 4, 64 * per_filter + 2 * 18 * 32 * 4)


def test_groups_share_out_channels():
    full, grouped = costs("forward", ARITHMETIC), costs("forward", ARITHMETIC, w=(8, 2, 3, 3), groups=2)
    assert grouped["implicit_precomp_gemm"] == (full["implicit_precomp_gemm"][0] / 2, 4 * 2 * 9)


# ---------------------------------------------------------------- what is legal

@pytest.mark.parametrize("fields, missing", [
    ({}, set()), ({"stride": 2, "y": (2, 8, 3, 3)}, {"fft", "winograd"}), ({"dilation": 2, "padding": 2}, {"fft", "winograd"}),
    ({"w": (8, 4, 5, 5), "padding": 2}, {"winograd"}), ({"w": (8, 4, 1, 1), "padding": 0}, {"winograd"}),
    ({"transposed": True, "w": (4, 8, 3, 3)}, {"gemm", "fft", "winograd"}),
    ({"x": (2, 4, 6), "w": (8, 4, 3), "y": (2, 8, 6)}, {"winograd"}),
], ids=["3x3", "strided", "dilated", "5x5", "1x1", "transposed", "one dimension"])
def test_legality(fields, missing):
    everything = {"implicit_gemm", "implicit_precomp_gemm", "gemm", "fft", "winograd"}
    assert set(costs("forward", TITAN_X, **fields)) == everything - missing


def test_what_is_no_convolution_or_shows_no_shapes_has_none():
    tape = step()
    assert variants_of(tape, replace(tape.ops[0], target="aten.relu.default"), TITAN_X) == ()
    assert variants_of(tape, replace(tape.ops[0], args=tape.ops[0].args[:2]), TITAN_X) == ()


# ---------------------------------------------------------------- variants of an op

def test_the_library_s_own_choice_keeps_the_plain_cost():
    tape = with_variants(step(seconds=(3.0, 7.0)), TITAN_X)
    assert [op.seconds for op in tape.ops] == [3.0, 7.0]
    for op, name in zip(tape.ops, ("implicit_precomp_gemm", "implicit_precomp_gemm+implicit_precomp_gemm")):
        assert op.variant(name) == Variant(name, op.seconds, op.workspace_bytes) and op.workspace_bytes == 144


def test_a_larger_plain_workspace_stays():
    tape = step()
    tape = replace(tape, ops=tuple(replace(op, workspace_bytes=1000) for op in tape.ops))
    assert [op.workspace_bytes for op in with_variants(tape, TITAN_X).ops] == [1000, 1000]


def test_other_algorithms_differ_from_the_plain_cost_as_their_passes_do():
    tape = step(seconds=(41472.0, 2 * 41472.0))
    forward, backward = variants_of(tape, tape.ops[0], ARITHMETIC), variants_of(tape, tape.ops[1], ARITHMETIC)
    assert {v.name: v.seconds for v in forward}["implicit_gemm"] == pytest.approx(41472 / 0.6)
    assert {v.name: v.seconds for v in backward}["implicit_gemm+implicit_gemm"] == pytest.approx(2 * 41472 / 0.6)


def test_pairs_are_those_that_no_other_beats_and_the_library_s():
    tape = step(x=(8, 64, 56, 56), w=(64, 64, 3, 3), y=(8, 64, 56, 56))
    g = geometry_of(tape, tape.ops[1])
    passes = [costs_of_pass(name, g, TITAN_X) for name in ("filter", "data")]
    everything = {(f"{a}+{b}", ca.seconds + cb.seconds, max(ca.workspace_bytes, cb.workspace_bytes))
                  for (a, ca), (b, cb) in product(*(p.items() for p in passes))}
    found = {v.name for v in variants_of(tape, tape.ops[1], TITAN_X)}
    for name, seconds, workspace in everything:
        is_beaten = any(s <= seconds and n <= workspace and (s < seconds * (1 - 1e-12) or n < workspace) for _, s, n in everything)
        assert name.count("implicit_precomp_gemm") == 2 or not (name in found and is_beaten)
    assert {"implicit_gemm+implicit_gemm", "implicit_precomp_gemm+implicit_precomp_gemm"} <= found and len(found) <= 8


@pytest.mark.parametrize("wanted, name", [((True, False, False), "data"), ((False, True, True), "filter")])
def test_a_half_of_the_backward_names_one_algorithm(wanted, name):
    tape = step(wanted=wanted, form_only=name == "data")
    found = variants_of(tape, tape.ops[1], ARITHMETIC)
    expected = costs(name, ARITHMETIC)
    assert {v.name: v.workspace_bytes for v in found} == {k: n for k, (_, n) in expected.items()}


def test_the_tape_still_survives_json():
    tape = with_variants(step(), TITAN_X)
    assert Tape.from_json(tape.to_json()) == tape


# ---------------------------------------------------------------- choosing

def test_choices():
    op = replace(step().ops[0], seconds=4.0, workspace_bytes=10, variants=(
        Variant("direct", 6.0, 0), Variant("slow and lean", 9.0, 0), Variant("winograd", 2.0, 50), Variant("greedy", 2.0, 60),
        Variant("fft", 3.0, 80)))
    assert (fastest(op).name, leanest(op).name) == ("winograd", "direct")
    assert fastest(op, without="winograd").name == "greedy"
    walk, found = fastest(op), []
    while walk is not None:
        found.append(walk.name)
        walk = next_leaner(op, walk)
    assert found == ["winograd", "", "direct"], "the library's own choice stands between them"
