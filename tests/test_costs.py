"""Measured and roofline costs on small captured steps and on ops whose workspace is known."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vramlab import costs
from vramlab.calibration import LINK_MODEL, measure_profile
from vramlab.capture import capture
from vramlab.costs import CostError, OpMismatch, measure_costs, roofline_costs, signature
from vramlab.device import load_profile
from vramlab.errors import EnvironmentUnable, Unsupported
from vramlab.store import device_store
from vramlab.tape import Op, Phase, Role, Storage, Tape, Tensor

FLOAT = 4
LIBRARY = torch.library.Library("vramlab_test", "DEF")
LIBRARY.define("scratch(Tensor x, int elements) -> Tensor")
LIBRARY.define("slow(Tensor x, float seconds) -> Tensor")
LIBRARY.define("never(Tensor x) -> Tensor")
LIBRARY.define("turned(Tensor x) -> Tensor")
LIBRARY.define("wide(Tensor x) -> Tensor")


@torch.library.impl(LIBRARY, "scratch", "CompositeExplicitAutograd")
def scratch(x: torch.Tensor, elements: int) -> torch.Tensor:
    """Holds `elements` floats while it works."""
    inside = torch.empty(elements, device=x.device)
    result = x.relu()
    assert inside.numel() == elements
    return result


@torch.library.impl(LIBRARY, "slow", "CompositeExplicitAutograd")
def slow(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x.clone()


@torch.library.impl(LIBRARY, "never", "CompositeExplicitAutograd")
def never(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not by itself")


@torch.library.impl(LIBRARY, "turned", "CompositeExplicitAutograd")
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.clone().t()


@torch.library.impl(LIBRARY, "wide", "CompositeExplicitAutograd")
def wide(x: torch.Tensor) -> torch.Tensor:
    """The right form over twice the bytes."""
    return torch.empty(2 * len(x), x.shape[1])[: len(x)].copy_(x)


def one_op(target: str, *extra, shape=(8, 8), takeover: bool = False) -> Tape:
    """A tape of one op: float tensor 0 -> tensor 1 of the same form."""
    tensors = tuple(Tensor(id=i, storage=i, dtype="float32", shape=shape, strides=(shape[1], 1), offset=0) for i in range(2))
    storages = tuple(Storage(id=i, nbytes=FLOAT * shape[0] * shape[1], role=Role.INPUT if i == 0 else Role.TEMPORARY, name=f"%{i}",
                             at_start=i == 0, at_end=True) for i in range(2))
    op = Op(id=0, target=target, args=[{"tensor": 0}, *extra], kwargs={}, inputs=(0,), outputs=(1,), phase=Phase.FORWARD, layer="",
            takeover=(1, 0) if takeover else None)
    return Tape(ops=(op,), tensors=tensors, storages=storages, loss=1, device_type="cpu", batch_size=8)


def step_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5),
                         nn.Flatten(), nn.Linear(8 * 8 * 8, 10))


def cnn_tape(optimizer=None, model=None) -> Tape:
    return capture(model or small_cnn(), step_loss, (torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])), optimizer=optimizer).tape


def op_of(tape: Tape, target: str) -> Op:
    return next(op for op in tape.ops if op.target == target)


# --- workspaces -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("elements", [0, 1000, 123_457])
def test_workspace_is_what_the_op_holds_inside(tmp_path, elements):
    tape = measure_costs(one_op("vramlab_test.scratch.default", elements), "cpu", cache_dir=tmp_path)
    assert tape.ops[0].workspace_bytes == elements * FLOAT


@pytest.mark.gpu
def test_workspace_and_seconds_on_a_gpu(tmp_path):
    def on_gpu(target: str, *extra) -> Op:
        return measure_costs(replace(one_op(target, *extra), device_type="cuda"), "cuda", cache_dir=tmp_path).ops[0]

    assert on_gpu("vramlab_test.scratch.default", 123_457).workspace_bytes == 123_457 * FLOAT
    assert on_gpu("aten.relu.default").workspace_bytes == 0
    assert 0 < on_gpu("aten.exp.default").seconds < 0.01


@pytest.mark.gpu
def test_profile_of_a_gpu(tmp_path):
    profile = measure_profile("cuda", cache_dir=tmp_path)
    assert 1e9 < profile.h2d_bytes_per_second < 1e12 and 1e9 < profile.d2h_bytes_per_second < 1e12
    assert profile.memory_bytes_per_second > 2 * profile.h2d_bytes_per_second and profile.flops_per_second > 1e12
    assert 0 < profile.copy_latency_seconds < 1e-3 and 0 < profile.launch_seconds < 1e-3


def test_ops_without_workspace(tmp_path):
    for tape in (one_op("aten.relu.default"), one_op("aten.relu.default", takeover=True), one_op("aten.relu_.default", takeover=True)):
        assert measure_costs(tape, "cpu", cache_dir=tmp_path).ops[0].workspace_bytes == 0


def test_memory_that_an_op_fills_is_no_workspace(tmp_path):
    """Dropout's `bernoulli_` gets memory that the tape counts as created."""
    tape = measure_costs(cnn_tape(), "cpu", cache_dir=tmp_path)
    op = op_of(tape, "aten.bernoulli_.float")
    assert tape.creates[op.id] and op.workspace_bytes == 0


# --- seconds --------------------------------------------------------------------------------------------------------------
def test_seconds_of_an_op_that_takes_a_known_time(tmp_path):
    op = measure_costs(one_op("vramlab_test.slow.default", 0.02), "cpu", cache_dir=tmp_path).ops[0]
    assert 0.02 <= op.seconds < 0.08


def test_a_whole_step_has_costs_and_flops(tmp_path):
    model = small_cnn()
    optimizer = torch.optim.Adam(model.parameters())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    tape = measure_costs(cnn_tape(optimizer, model), "cpu", optimizer=optimizer, cache_dir=tmp_path)
    for op in tape.ops:
        is_taken = op.target == "vramlab.accumulate_grad" and op.takeover is not None
        assert (op.seconds > 0, op.flops > 0) == (not is_taken, not is_taken), op
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and not optimizer.state


def test_generators_are_left_alone(tmp_path):
    tape, before = cnn_tape(), torch.get_rng_state()
    measure_costs(tape, "cpu", cache_dir=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_optimizer_workspace(tmp_path):
    """foreach temporaries of every parameter at once, against none in the loop over parameters: weights of 3 * 10,000 elements."""
    model = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(3)])
    batch = (torch.randn(2, 100), torch.tensor([0, 1]))

    def workspace(foreach: bool) -> int:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, foreach=foreach)
        tape = capture(model, step_loss, batch, optimizer=optimizer).tape
        return op_of(measure_costs(tape, "cpu", optimizer=optimizer, cache_dir=tmp_path), "vramlab.optimizer_step").workspace_bytes

    weight = 100 * 100 * FLOAT
    assert workspace(foreach=True) >= 3 * weight
    assert weight <= workspace(foreach=False) < 2 * weight


def test_an_optimizer_step_needs_its_optimizer(tmp_path):
    model = small_cnn()
    tape = cnn_tape(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match="pass the optimizer"):
        measure_costs(tape, "cpu", cache_dir=tmp_path)


# --- models with indices, attention, recurrence -----------------------------------------------------------------------------
class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(11, 8, padding_idx=0), nn.LSTM(8, 8, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lstm(self.embed(x))[0]
        return self.head(self.encoder(x).gather(1, torch.ones(2, 1, 8, dtype=torch.int64)).squeeze(1))


def test_every_op_of_a_text_model_runs_by_itself(tmp_path):
    tape = capture(Text(), step_loss, (torch.randint(11, (2, 6)), torch.tensor([0, 4]))).tape
    assert all(op.seconds > 0 for op in measure_costs(tape, "cpu", cache_dir=tmp_path).ops if not op.target.startswith("vramlab"))


def test_indices_are_valid_and_spread(monkeypatch, tmp_path):
    """A pooling's backward writes all over its planes, not always to their first element."""
    seen, make = [], costs._Bench._input
    monkeypatch.setattr(costs._Bench, "_input", lambda *args: seen.append(make(*args)) or seen[-1])
    measure_costs(cnn_tape(), "cpu", cache_dir=tmp_path)
    indices = next(t for t in seen if t.dtype == torch.int64 and t.dim() == 4)
    assert indices.min() == 0 and 200 <= indices.max() < 16 * 16 and len(indices.unique()) == 64


# --- the cache ------------------------------------------------------------------------------------------------------------
def test_each_signature_is_measured_once(monkeypatch, tmp_path):
    tape, measured = cnn_tape(), []
    real = costs._measure

    def spy(tape, ops, *rest):
        measured.append([op.id for op in ops])
        return real(tape, ops, *rest)

    monkeypatch.setattr(costs, "_measure", spy)
    first = measure_costs(tape, "cpu", cache_dir=tmp_path)
    assert len(measured[0]) == len({signature(tape, op) for op in tape.ops}) < len(tape.ops)
    assert measure_costs(tape, "cpu", cache_dir=tmp_path) == first and measured[1] == []


def test_the_user_cache_folder_is_respected(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure_costs(one_op("aten.relu.default"), "cpu")
    (path,) = tmp_path.rglob("*.json")
    assert path == device_store("costs", torch.device("cpu")).path and torch.__version__.replace("+", "-") in path.name
    assert not list(tmp_path.rglob(".*.json*"))  # nothing half-written is left


def test_stores_merge(tmp_path):
    store = device_store("costs", torch.device("cpu"), tmp_path)
    store.add({"a": 1})
    device_store("costs", torch.device("cpu"), tmp_path).add({"b": 2})
    assert store.read() == {"a": 1, "b": 2}


def test_a_damaged_store_is_named(tmp_path):
    store = device_store("costs", torch.device("cpu"), tmp_path)
    store.add({"a": 1})
    store.path.write_text("{")
    with pytest.raises(EnvironmentUnable, match="delete it"):
        measure_costs(one_op("aten.relu.default"), "cpu", cache_dir=tmp_path)


def test_a_cache_that_cannot_be_written_keeps_for_this_process_and_says_so(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("where a folder should be")
    tape, folder = one_op("aten.relu.default"), tmp_path / "file" / "cache"
    with pytest.warns(UserWarning, match="cannot be written .*XDG_CACHE_HOME"):
        first = measure_costs(tape, "cpu", cache_dir=folder)
    monkeypatch.setattr(costs, "_measure", lambda tape, ops, *rest: [None] * len(ops))  # whatever is measured anew has no cost
    assert measure_costs(tape, "cpu", cache_dir=folder) == first


def test_signatures_tell_apart_what_costs_differently():
    base = one_op("aten.relu.default")
    others = [one_op("aten.neg.default"), one_op("aten.relu.default", shape=(8, 9)), one_op("aten.relu.default", takeover=True),
              replace(base, tensors=(replace(base.tensors[0], strides=(1, 8)), base.tensors[1])),
              replace(base, tensors=(replace(base.tensors[0], dtype="float64"), base.tensors[1])), one_op("aten.relu.default", 3)]
    assert len({signature(t, t.ops[0]) for t in [base, *others]}) == 1 + len(others)
    moved = replace(base, tensors=(replace(base.tensors[0], offset=5), base.tensors[1]), ops=(replace(base.ops[0], layer="a.b"),))
    assert signature(moved, moved.ops[0]) == signature(base, base.ops[0])


# --- refusals -------------------------------------------------------------------------------------------------------------
def test_an_op_that_does_not_run_is_named(tmp_path):
    with pytest.raises(CostError, match=r"#0 vramlab_test.never.default .*not by itself"):
        measure_costs(one_op("vramlab_test.never.default"), "cpu", cache_dir=tmp_path)


def test_an_op_that_makes_something_else_is_named(tmp_path):
    """The tape says contiguous; the op returns the transpose."""
    for target in ("vramlab_test.turned.default", "vramlab_test.wide.default"):
        with pytest.raises(OpMismatch, match=f"#0 {target}"):
            measure_costs(one_op(target), "cpu", cache_dir=tmp_path)
    base = one_op("vramlab_test.turned.default")
    true = replace(base, tensors=(base.tensors[0], replace(base.tensors[1], strides=(1, 8))))
    assert measure_costs(true, "cpu", cache_dir=tmp_path).ops[0].seconds > 0


def test_a_tape_of_another_device_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="captured on cuda"):
        measure_costs(replace(one_op("aten.relu.default"), device_type="cuda"), "cpu", cache_dir=tmp_path)


# --- roofline -------------------------------------------------------------------------------------------------------------
def test_roofline_by_hand():
    profile = load_profile(LINK_MODEL)
    tape = roofline_costs(cnn_tape(), profile)
    conv = op_of(tape, "aten.convolution.default")
    arithmetic = 2 * 4 * 16 * 16 * 8 * 3 * 9 / (profile.flops_per_second * profile.flops_efficiency)
    moved = FLOAT * (4 * 3 * 16 * 16 + 8 * 3 * 9 + 8 + 4 * 8 * 16 * 16) / profile.memory_bytes_per_second
    assert conv.seconds == pytest.approx(max(arithmetic, moved, profile.launch_seconds))
    taken = [op.seconds for op in tape.ops if op.target == "vramlab.accumulate_grad"]
    assert taken and set(taken) == {0.0}


def test_roofline_is_bound_by_memory_or_by_arithmetic():
    profile = replace(load_profile(LINK_MODEL), launch_seconds=0.0)
    relu = roofline_costs(one_op("aten.relu.default", shape=(1000, 1000)), profile).ops[0]
    assert relu.seconds == pytest.approx(2 * 4e6 / profile.memory_bytes_per_second)
    slow_chip = replace(profile, flops_per_second=1e6, flops_efficiency=0.5)
    assert roofline_costs(one_op("aten.relu.default", shape=(1000, 1000)), slow_chip).ops[0].seconds == pytest.approx(1e6 / 5e5)


def test_an_expanded_input_is_read_once():
    base = one_op("aten.relu.default", shape=(1000, 1000))
    tensors, storages = list(base.tensors), list(base.storages)
    tensors[0], storages[0] = replace(tensors[0], strides=(0, 0)), replace(storages[0], nbytes=FLOAT)
    profile = replace(load_profile(LINK_MODEL), launch_seconds=0.0)
    tape = roofline_costs(replace(base, tensors=tuple(tensors), storages=tuple(storages)), profile)
    assert tape.ops[0].seconds == pytest.approx((4e6 + 4) / profile.memory_bytes_per_second)


# --- the profile of this machine --------------------------------------------------------------------------------------------
def test_profile_keeps_the_ratio_of_compute_to_link(tmp_path):
    profile, model = measure_profile("cpu", cache_dir=tmp_path), load_profile(LINK_MODEL)
    ratio = model.h2d_bytes_per_second / (model.flops_per_second * model.flops_efficiency)
    assert profile.h2d_bytes_per_second / profile.flops_per_second == pytest.approx(ratio)
    assert profile.copy_latency_seconds * profile.flops_per_second == pytest.approx(
        model.copy_latency_seconds * model.flops_per_second * model.flops_efficiency)
    assert 1e8 < profile.flops_per_second < 1e14 and 1e8 < profile.memory_bytes_per_second < 1e13 and 0 < profile.launch_seconds < 1e-2
    rates = {"flops_per_second", "flops_efficiency", "memory_bytes_per_second", "h2d_bytes_per_second", "d2h_bytes_per_second",
             "copy_latency_seconds", "launch_seconds", "memory_bytes", "is_full_duplex"}
    assert rates <= set(profile.sources)


def test_profile_comes_from_the_cache_until_refreshed(tmp_path):
    measured = measure_profile("cpu", cache_dir=tmp_path)
    path = device_store("profile", torch.device("cpu"), tmp_path).path
    path.write_text(json.dumps(measured.to_json() | {"flops_per_second": 1.0}))
    assert measure_profile("cpu", cache_dir=tmp_path).flops_per_second == 1.0
    assert measure_profile("cpu", cache_dir=tmp_path, refresh=True).flops_per_second > 1e8
    assert measure_profile("cpu", cache_dir=tmp_path).flops_per_second > 1e8


def test_the_seeds_of_an_attention_stand_on_the_host_wherever_the_op_is_measured():
    """The kernel reads them there; a GPU's address would end the process."""
    shapes = [(1, 1, 8, 8)] * 3 + [(1,), (1, 1, 8, 8), (1, 1, 32), (), ()]
    places = [0, 1, 2, 4, 5, 6, 7, 8]
    args = [{"tensor": places.index(i)} if i in places else None for i in range(9)] + [0.1, [True, True, True, False]]
    args[3] = {"tensor": 2}
    dtypes = ["float32"] * 6 + ["int64"] * 2
    tensors = tuple(Tensor(id=i, storage=i, dtype=d, shape=s, strides=tuple(torch.empty(s).stride()), offset=0)
                    for i, (s, d) in enumerate(zip(shapes, dtypes)))
    storages = tuple(Storage(id=i, nbytes=1024, role=Role.ACTIVATION, name=f"%{i}", at_start=True, at_end=False) for i in range(8))
    op = Op(id=0, target="aten._scaled_dot_product_efficient_attention_backward.default", args=args, kwargs={}, inputs=tuple(range(8)),
            outputs=(), phase=Phase.BACKWARD, layer="")
    tape = Tape(ops=(op,), tensors=tensors, storages=storages, loss=0, device_type="cuda", batch_size=1)
    bench = costs._Bench(tape, torch.device("meta"), None)
    assert [bench._input(op, t).device.type for t in range(8)] == ["meta"] * 6 + ["cpu"] * 2
