"""Algorithms of a convolution on a device that is not at hand: a model of cuDNN's, from recalled descriptions of them.

A convolution runs in up to three passes: forward, filter (the gradient of W) and data (the gradient of x). Each knows these algorithms:

    implicit_gemm          no workspace; computes where an element lies again at each load, and is slower for it
    implicit_precomp_gemm  offsets kept in a small table; as fast as dense kernels are: the library's own choice
    gemm                   the matrix of all patches (im2col) written out and multiplied
    fft                    products of spectra, all of which are kept; stride 1, no dilation
    winograd               F(2x2, 3x3): 16 products instead of 36; kernels of 3x3 at stride 1, no dilation

`aten.convolution_backward` runs a filter and a data pass in one op: its variants are pairs, `filter+data`, of which only those stand that
no other beats in both time and workspace, and the library's own. Passes follow each other, so the larger workspace of the two counts.

The op's plain cost stays what it was, a roofline of dense kernels, and belongs to implicit_precomp_gemm; so tapes with and without variants
have the same seconds, and each other algorithm is told by its difference. No number here is fitted to a result of a paper.

Whence. Implicit GEMM and lowering are the ideas of cuDNN (arXiv 1410.0759), FFT convolution of arXiv 1312.5851 and 1412.7580, Winograd of
arXiv 1509.09308. None of these was at hand: what is said of them is recalled, and each constant below is an assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2, prod
from typing import Any

from vramlab.device import DeviceProfile
from vramlab.tape import Op, Tape, Variant

CONVOLUTION, CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
LIBRARY = "implicit_precomp_gemm"

# Share of the dense rate. Assumption: for each element that it loads, implicit GEMM takes a linear index apart into image, channel, row
# and column again, two divisions by multiplication and about as many additions; integer and floating-point instructions share the issue
# slots on the boards of the papers. That it is slower than with precomputed offsets is recalled; by how much is not known.
IMPLICIT_RATE = 0.6
# Share of the dense rate. Assumption: complex products of matrices reach half the rate of real ones, as operands are twice as large.
COMPLEX_RATE = 0.5
OFFSET_BYTES = 4  # a 32-bit offset for each element of one filter
COMPLEX_BYTES = 8  # complex64, also for half precision
SPECTRUM_PASSES = 4  # Assumption: transform, transpose (read and write), product.
# Additions to transform a tile of the input, of a filter, and back: 32 and 24 follow from the matrices of F(2x2, 3x3), 28 is recalled, not
# looked up. Assumption: a block of the fused kernel computes 32 filters, and transforms its input tiles anew.
INPUT_ADDS, FILTER_ADDS, OUTPUT_ADDS, FUSED_FILTERS = 32, 28, 24, 32
_TILE, _PRODUCTS = 2, 16  # outputs of a tile along a side; products of a tile
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A convolution of x [batch, channels, *space] with W [filters, channels / groups, *kernel] into y [batch, filters, *places]."""

    batch: int
    channels: int
    filters: int
    groups: int
    space: tuple[int, ...]
    places: tuple[int, ...]
    kernel: tuple[int, ...]
    padding: tuple[int, ...]
    is_unit: bool  # stride 1 and no dilation
    is_transposed: bool
    item_bytes: int

    @property
    def flops(self) -> int:
        """Of one pass, a multiply-add counted as two."""
        places = self.space if self.is_transposed else self.places
        return 2 * self.batch * prod(places) * prod(self.kernel) * self.channels * self.filters // self.groups

    @property
    def x_bytes(self) -> int:
        return self.batch * self.channels * prod(self.space) * self.item_bytes

    @property
    def y_bytes(self) -> int:
        return self.batch * self.filters * prod(self.places) * self.item_bytes

    @property
    def w_bytes(self) -> int:
        return self.filters * self.channels // self.groups * prod(self.kernel) * self.item_bytes

    @property
    def moved_bytes(self) -> int:
        """Each pass reads two of the three and writes the third."""
        return self.x_bytes + self.y_bytes + self.w_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one pass by one algorithm."""

    seconds: float
    workspace_bytes: int


def with_variants(tape: Tape, device: DeviceProfile) -> Tape:
    """The tape with the variants of its convolutions on `device`; costs must be there already, a roofline of the same device.

    The plain workspace becomes that of the library's own choice where it is less.
    """
    found = [variants_of(tape, op, device) for op in tape.ops]
    ops = [replace(op, workspace_bytes=max(op.workspace_bytes, _library(variants).workspace_bytes)) if variants else op
           for op, variants in zip(tape.ops, found)]
    return replace(tape, ops=tuple(ops)).with_variants(found)


def fastest(op: Op, without: str = "-") -> Variant:
    """The performance-optimal algorithm, the library's own choice among them (its name is ""); the leaner one of equals.

    Variants with `without` in their name are left out: "winograd" for a library that has none.
    """
    return min(_choices(op, without), key=lambda v: (v.seconds, v.workspace_bytes))


def leanest(op: Op, without: str = "-") -> Variant:
    """The memory-optimal algorithm; the faster one of equals."""
    return min(_choices(op, without), key=lambda v: (v.workspace_bytes, v.seconds))


def next_leaner(op: Op, than: Variant, without: str = "-") -> Variant | None:
    """The fastest of those with a smaller workspace than `than`; None when there is none."""
    leaner = [v for v in _choices(op, without) if v.workspace_bytes < than.workspace_bytes]
    return min(leaner, key=lambda v: (v.seconds, v.workspace_bytes), default=None)


def _choices(op: Op, without: str) -> list[Variant]:
    return [op.variant(None), *(v for v in op.variants if without not in v.name)]


def variants_of(tape: Tape, op: Op, device: DeviceProfile) -> tuple[Variant, ...]:
    """The algorithms of one op, the library's own among them; none where it is no convolution."""
    geometry = geometry_of(tape, op)
    if geometry is None:
        return ()
    passes = [costs_of_pass(name, geometry, device) for name in _passes(op)]
    library = sum(costs[LIBRARY].seconds for costs in passes)

    def variant(names: Sequence[str]) -> Variant:
        costs = [of_pass[name] for of_pass, name in zip(passes, names)]
        seconds = op.seconds + sum(c.seconds for c in costs) - library if set(names) != {LIBRARY} else op.seconds
        return Variant("+".join(names), seconds, max(c.workspace_bytes for c in costs))

    if len(passes) == 1:
        return tuple(variant([name]) for name in passes[0])
    pairs = [variant([a, b]) for a in passes[0] for b in passes[1]]
    return tuple(v for v in pairs if v.name == f"{LIBRARY}+{LIBRARY}" or not any(_beats(other, v) for other in pairs))


def geometry_of(tape: Tape, op: Op) -> Geometry | None:
    """What is convolved; None when the op is no convolution, or shows no shapes."""
    if op.target not in (CONVOLUTION, CONVOLUTION_BACKWARD):
        return None
    is_backward = op.target == CONVOLUTION_BACKWARD
    if len(op.args) < (11 if is_backward else 9):
        return None
    x, w = (_shape(tape, a) for a in (op.args[1:3] if is_backward else op.args[:2]))
    y = _shape(tape, op.args[0] if is_backward else {"tensor": op.outputs[0]})
    stride, padding, dilation, is_transposed, _, groups = op.args[4:10] if is_backward else op.args[3:9]
    weight = op.args[2 if is_backward else 1]
    return Geometry(
        batch=x[0], channels=x[1], filters=y[1], groups=groups, space=tuple(x[2:]), places=tuple(y[2:]), kernel=tuple(w[2:]),
        padding=tuple(padding), is_unit=set(stride) == {1} == set(dilation), is_transposed=bool(is_transposed),
        item_bytes=_ITEM_BYTES[tape.tensors[weight["tensor"]].dtype])


def costs_of_pass(name: str, geometry: Geometry, device: DeviceProfile) -> dict[str, Cost]:
    """Algorithm -> cost of the pass `forward`, `filter` or `data`; only the legal ones."""
    return {algorithm: cost(name, geometry, device) for algorithm, (is_legal, cost) in _ALGORITHMS.items() if is_legal(geometry)}


# --- the algorithms -------------------------------------------------------------------------------------------------------
def _implicit_gemm(_name: str, g: Geometry, device: DeviceProfile) -> Cost:
    return Cost(device.op_seconds(round(g.flops / IMPLICIT_RATE), g.moved_bytes), 0)


def _implicit_precomp_gemm(_name: str, g: Geometry, device: DeviceProfile) -> Cost:
    table = OFFSET_BYTES * g.channels // g.groups * prod(g.kernel)
    return Cost(device.op_seconds(g.flops, g.moved_bytes + table), table)


def _gemm(_name: str, g: Geometry, device: DeviceProfile) -> Cost:
    """The matrix has a column an output place, of all the elements that its filter sees; it is written by one kernel, read by another."""
    matrix = g.batch * g.channels * prod(g.kernel) * prod(g.places) * g.item_bytes
    lowering = device.op_seconds(0, g.x_bytes + matrix)
    return Cost(lowering + device.op_seconds(g.flops, matrix + g.y_bytes + g.w_bytes), matrix)


def _fft(_name: str, g: Geometry, device: DeviceProfile) -> Cost:
    """Two spectra in, one out, each of the padded map's size, half of it for real numbers; a product of matrices at each frequency."""
    padded = [n + 2 * p for n, p in zip(g.space, g.padding)]
    maps = g.batch * (g.channels + g.filters) + g.filters * g.channels // g.groups
    frequencies = prod(padded[:-1]) * (padded[-1] // 2 + 1)
    spectra = COMPLEX_BYTES * frequencies * maps
    products = 8 * g.batch * g.filters * g.channels // g.groups * frequencies
    transforms = round(2.5 * prod(padded) * log2(max(2, prod(padded)))) * maps
    arithmetic = round(products / COMPLEX_RATE) + transforms
    return Cost(device.op_seconds(arithmetic, SPECTRUM_PASSES * spectra + g.moved_bytes), spectra)


def _winograd(name: str, g: Geometry, device: DeviceProfile) -> Cost:
    """Forward and data by the fused kernel, whose workspace is the transformed filters; the filter pass keeps transformed maps too."""
    made, read = (g.channels, g.filters) if name == "data" else (g.filters, g.channels)
    tiles = g.batch * prod(-(-n // _TILE) for n in (g.space if name == "data" else g.places))
    filters = g.filters * g.channels // g.groups
    products = 2 * _PRODUCTS * tiles * filters
    if name == "filter":
        workspace = _PRODUCTS * g.item_bytes * (tiles * (g.channels + g.filters) + filters)
        adds = tiles * (INPUT_ADDS * g.channels + OUTPUT_ADDS * g.filters) + FILTER_ADDS * filters
        return Cost(device.op_seconds(products + adds, 2 * workspace + g.moved_bytes), workspace)
    workspace = _PRODUCTS * g.item_bytes * filters
    blocks = -(-made // g.groups // FUSED_FILTERS)
    adds = tiles * (INPUT_ADDS * read * blocks + OUTPUT_ADDS * made) + FILTER_ADDS * filters
    return Cost(device.op_seconds(products + adds, 2 * workspace + g.moved_bytes), workspace)


def _is_plain(g: Geometry) -> bool:
    return not g.is_transposed


_ALGORITHMS: Mapping[str, tuple[Callable[[Geometry], bool], Callable[[str, Geometry, DeviceProfile], Cost]]] = {
    "implicit_gemm": (lambda g: True, _implicit_gemm),
    LIBRARY: (lambda g: True, _implicit_precomp_gemm),
    "gemm": (_is_plain, _gemm),
    "fft": (lambda g: _is_plain(g) and g.is_unit, _fft),
    "winograd": (lambda g: _is_plain(g) and g.is_unit and g.kernel == (3, 3), _winograd),
}


# --- what an op runs ------------------------------------------------------------------------------------------------------
def _passes(op: Op) -> tuple[str, ...]:
    if op.target == CONVOLUTION:
        return ("forward",)
    wants_data, wants_filter, _ = op.args[10]
    return tuple(_wanted(wants_filter, wants_data)) or ("filter",)  # of a bias alone: a sum, which the filter pass bounds


def _wanted(wants_filter: bool, wants_data: bool) -> Iterator[str]:
    if wants_filter:
        yield "filter"
    if wants_data:
        yield "data"


def _shape(tape: Tape, value: Any) -> Sequence[int]:
    """Of a tensor, or of the form of one that is not read."""
    return tape.tensors[value["tensor"]].shape if "tensor" in value else value["form"]["shape"]


def _library(variants: Sequence[Variant]) -> Variant:
    return next(v for v in variants if set(v.name.split("+")) == {LIBRARY})


def _beats(a: Variant, b: Variant) -> bool:
    """Nowhere worse, and better somewhere or named first."""
    costs = (a.seconds, a.workspace_bytes), (b.seconds, b.workspace_bytes)
    return a.seconds <= b.seconds and a.workspace_bytes <= b.workspace_bytes and (costs[0] != costs[1] or a.name < b.name)
