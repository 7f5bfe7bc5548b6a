"""Layers and cuts: toys by hand, cuts against a search of all paths, and PyTorch's own modules as the judge of real networks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torchvision
from hypothesis import given, settings
from tapes import MAP, TOYS, buffer_writer, chain, diamond, inplace, multi_output, random_tapes, skip, tied

from vramlab.capture import capture
from vramlab.errors import Unsupported
from vramlab.layers import Layer, articulation_points, basic_layers, check_needs, cuts_of, feature_extraction, is_chain, layers_of
from vramlab.tape import Phase, Role, Tape


def named(tape: Tape, name: str) -> Layer:
    return next(layer for layer in layers_of(tape) if layer.name == name)


def storage(tape: Tape, name: str) -> int:
    return next(s.id for s in tape.storages if s.name == name)


def made(tape: Tape, op: int) -> tuple[int, ...]:
    return tape.creates[op]


def test_chain_by_hand():
    """conv0, conv1, mean | ones, div | conv1 backward, accumulate | conv0 backward, accumulate."""
    tape = chain(2, workspace_bytes=7)
    conv0, conv1, mean = layers_of(tape)
    (x0,), (x1,), (loss,) = made(tape, 0), made(tape, 1), made(tape, 2)
    dx0, dx1 = tape.tensors[tape.ops[5].outputs[0]].storage, made(tape, 4)[0]
    assert conv0 == Layer(
        id=0, name="conv0", kind="convolution", forward_ops=(0,), backward_ops=(7, 8), inputs=(storage(tape, "x"),), x=x0, auxiliary=(),
        dx=dx0, W=(storage(tape, "conv0.weight"),), dW=(storage(tape, "conv0.weight.grad"),), workspace_bytes=7,
        consumers=(1,), shares_input=False)
    assert conv1 == Layer(
        id=1, name="conv1", kind="convolution", forward_ops=(1,), backward_ops=(5, 6), inputs=(x0,), x=x1, auxiliary=(),
        dx=dx1, W=(storage(tape, "conv1.weight"),), dW=(storage(tape, "conv1.weight.grad"),), workspace_bytes=7,
        consumers=(2,), shares_input=False)
    assert (mean.kind, mean.x, mean.dx, mean.backward_ops, mean.consumers) == ("pooling", loss, None, (3, 4), ())


def test_basic_layers_count_forks():
    """A diamond: stem, two branches, their sum and the loss's; the stem's map forks. A chain has no fork."""
    assert basic_layers(chain(2)) == 3
    tape = diamond()
    assert basic_layers(tape) == len(layers_of(tape)) + 1


def test_the_feature_extraction_ends_behind_the_last_convolution():
    model = torchvision.models.alexnet(num_classes=3).eval()
    captured = capture(model, lambda m, x: m(x).sum(), [torch.zeros(2, 3, 64, 64)])
    layers = layers_of(captured.tape)
    found = feature_extraction(layers)
    assert found == layers[:len(found)] and [x.kind for x in found[-3:]] == ["activation", "pooling", "pooling"]
    assert sum(x.kind == "convolution" for x in found) == 5 and not any(x.kind == "linear" for x in found)
    assert feature_extraction(tuple(x for x in layers if x.kind == "linear")) == ()


def test_batch_norm_has_its_counter_and_its_statistics():
    tape = buffer_writer()
    bn = named(tape, "bn1")
    assert [tape.ops[op].target for op in bn.forward_ops] == ["aten.add_.Tensor", "aten.native_batch_norm.default"]
    assert bn.kind == "normalization" and len(bn.auxiliary) == 2 and all(tape.storages[s].nbytes == 20 for s in bn.auxiliary)
    assert [tape.ops[op].target for op in bn.backward_ops] == ["aten.native_batch_norm_backward.default", "vramlab.accumulate_grad"]
    assert [tape.storages[w].name for w in (*bn.W, *bn.dW)] == ["bn1.weight", "bn1.weight.grad"]


def test_inplace_activation_shares_its_input():
    tape = inplace()
    assert [layer.shares_input for layer in layers_of(tape)] == [False, True] * 3 + [False]
    relu = named(tape, "relu1")
    assert [tape.ops[op].target for op in relu.backward_ops] == ["aten.threshold_backward.default"]
    assert tape.storages[relu.dx].nbytes == MAP


def test_a_threshold_is_an_activation_and_has_its_backward():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Threshold(0.0, 0.0), torch.nn.Linear(3, 2))
    tape = capture(net, lambda m, x: m(x).sum(), [torch.zeros(4, 3)]).tape
    layer = next(layer for layer in layers_of(tape) if layer.name == "1")
    assert layer.kind == "activation" and [tape.ops[op].target for op in layer.backward_ops] == ["aten.threshold_backward.default"]


def test_pooling_keeps_indices_beside_its_map():
    pool = named(multi_output(), "pool1")
    assert pool.kind == "pooling" and len(pool.auxiliary) == 1


def test_an_addition_has_no_backward_of_its_own():
    tape = diamond()
    add = next(layer for layer in layers_of(tape) if layer.kind == "add")
    assert add.backward_ops == () and add.dx is None and len(add.inputs) == 2


def test_the_gradient_of_a_map_read_twice_is_the_sum():
    tape = diamond()
    stem = layers_of(tape)[0]
    total = next(op for op in tape.ops if op.phase is Phase.BACKWARD and op.target == "aten.add.Tensor")
    assert (stem.dx,) == made(tape, total.id) and stem.consumers == (1, 2)


def test_a_shared_weight_belongs_to_both_layers():
    first, second = (layer for layer in layers_of(tied()) if layer.kind == "convolution")
    assert first.W == second.W and first.dW == second.dW and len(first.dW) == 1


# --- cuts ------------------------------------------------------------------------------------------------------------
def crossing(tape: Tape, op: int) -> set[int]:
    """From scratch: made by a forward op up to this one, read by a later forward op."""
    forward = [o.id for o in tape.ops if o.phase is Phase.FORWARD]
    before = {s for o in forward if o <= op for s in tape.creates[o]}
    return before & {s for o in forward if o > op for s in tape.reads[o]}


@settings(max_examples=60, deadline=None)
@given(random_tapes(12))
def test_cuts_hold_all_that_crosses(tape):
    cuts = {cut.op: cut for cut in cuts_of(tape)}
    overwritten = {op.takeover[1] for op in tape.ops if op.phase is Phase.FORWARD and op.is_eager_inplace and op.takeover}
    for op in tape.ops:
        expected = crossing(tape, op.id) if op.phase is Phase.FORWARD and tape.creates[op.id] else set()
        is_cut = bool(expected) and not expected & overwritten
        assert (op.id in cuts) == is_cut
        if is_cut:
            assert set(cuts[op.id].storages) == expected and cuts[op.id].nbytes == sum(tape.storages[s].nbytes for s in expected)


def bottlenecks(tape: Tape) -> set[int]:
    """Storages that every path from the step's input to the loss goes through: without them the loss is out of reach."""
    loss = tape.tensors[tape.loss].storage
    forward = [op for op in tape.ops if op.phase is Phase.FORWARD]

    def reaches_loss(removed: int) -> bool:
        reached = {s.id for s in tape.storages if s.role is Role.INPUT}
        for op in forward:
            if reached & set(tape.reads[op.id]):
                reached |= set(tape.creates[op.id]) - {removed}
        return loss in reached

    return {s for op in forward for s in tape.creates[op.id] if s != loss and not reaches_loss(s)}


@pytest.mark.parametrize("toy", TOYS)
def test_articulation_points_are_the_bottlenecks_of_all_paths(toy):
    """Save those that eager overwrites in place: the map that takes their region stands for them."""
    tape = TOYS[toy]()
    overwritten = {op.takeover[1] for op in tape.ops if op.is_eager_inplace}
    assert {cut.storages[0] for cut in articulation_points(tape)} == bottlenecks(tape) - overwritten


def test_needs():
    tape = chain(3)
    check_needs(tape, ["timings", "backward", "chain"], "any")
    lacking = {"timings": tape.with_costs([0.0] * len(tape.ops)), "chain": skip(),
               "backward": replace(tape, ops=tuple(replace(op, phase=Phase.FORWARD) for op in tape.ops))}
    for need, other in lacking.items():
        with pytest.raises(Unsupported, match=need):
            check_needs(other, ["timings", "backward", "chain"], "any")


@pytest.mark.parametrize("toy", TOYS)
def test_chains(toy):
    has_branches = {"diamond", "skip"}
    assert is_chain(TOYS[toy]()) == (toy not in has_branches)


# --- real networks: the modules say what the layers are -----------------------------------------------------------------
KINDS = {torch.nn.Conv2d: "convolution", torch.nn.BatchNorm2d: "normalization", torch.nn.LayerNorm: "normalization",
         torch.nn.Linear: "linear", torch.nn.MaxPool2d: "pooling", torch.nn.GELU: "activation"}
BACKWARDS = {"convolution": {"aten.convolution_backward.default"}, "linear": {"aten.mm.default", "aten.sum.dim_IntList"},
             "activation": {"aten.gelu_backward.default"}, "pooling": {"aten.max_pool2d_with_indices_backward.default"},
             "normalization": {"aten.native_batch_norm_backward.default", "aten.native_layer_norm_backward.default"}}


@pytest.fixture(scope="module", params=["resnet18", "vgg11_bn", "densenet121", "vit_b_16"])
def network(request) -> tuple[torch.nn.Module, Tape]:
    model = getattr(torchvision.models, request.param)()
    loss = torch.nn.functional.cross_entropy
    batch = [torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.long)]
    return model, capture(model, lambda m, x, y: loss(m(x), y), batch).tape


def test_every_module_is_one_layer_with_its_parameters(network):
    model, tape = network
    layers = layers_of(tape)
    for name, module in model.named_modules():
        kind = KINDS.get(type(module))
        if kind is None or "out_proj" in name:  # attention calls the functional form, under its own name
            continue
        (layer,) = [layer for layer in layers if layer.name == name and layer.kind == kind]
        weights = {f"{name}.{key}" for key, _ in module.named_parameters()}
        assert {tape.storages[w].name for w in layer.W} == weights
        assert {tape.storages[g].name for g in layer.dW} == {f"{w}.grad" for w in weights}
        assert {tape.ops[op].target for op in layer.backward_ops} & BACKWARDS[kind]


def test_every_backward_op_has_one_layer_and_every_weight_gradient_is_its_layers(network):
    _, tape = network
    owned = [op for layer in layers_of(tape) for op in layer.backward_ops]
    assert sorted(owned) == [op.id for op in tape.ops if op.phase is Phase.BACKWARD]
    for layer in layers_of(tape):
        for op in layer.backward_ops:
            if tape.ops[op].target == "vramlab.accumulate_grad":
                assert set(tape.creates[op]) <= set(layer.dW)


def test_a_gradient_has_the_bytes_of_its_map(network):
    """A convolution without a gradient of its own gets a slice of a larger one: that of a concatenation."""
    _, tape = network
    for layer in layers_of(tape):
        if layer.dx is not None:
            assert tape.storages[layer.dx].nbytes == tape.storages[layer.x].nbytes
        elif layer.kind == "convolution":
            gradient = tape.tensors[tape.ops[layer.backward_ops[0]].inputs[0]].storage
            assert tape.storages[gradient].nbytes > tape.storages[layer.x].nbytes
