"""FLOP of captured steps against torch's own counter, and by hand where that counter has no formula or a wrong one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torchvision.models import get_model

from vramlab.capture import capture
from vramlab.flops import op_flops, with_flops
from vramlab.tape import Op, Phase, Tape, Tensor


def loss(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    return model(*batch).float().pow(2).mean()


def tape_of(model: nn.Module, *batch: torch.Tensor) -> Tape:
    return with_flops(capture(model, loss, batch).tape)


def by_operator(tape: Tape, names) -> Counter:
    counts: Counter = Counter()
    for op in tape.ops:
        name = op.target.split(".")[1]
        if name in names:
            counts[name] += op.flops
    return counts


def counted_by_torch(model: nn.Module, *batch: torch.Tensor) -> Counter:
    with FlopCounterMode(display=False) as mode:
        loss(model, *batch).backward()
    return Counter({str(packet).split(".")[1]: flops for packet, flops in mode.get_flop_counts()["Global"].items()})


class Attention(nn.Module):
    """Plain matrix products: bmm, addmm and baddbmm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.baddbmm(torch.zeros(1), q, k.transpose(1, 2), beta=0.0).softmax(-1)
        return self.out(scores @ v)


MODELS = {
    "resnet18": lambda: (get_model("resnet18", num_classes=10), torch.randn(2, 3, 64, 64)),
    "vgg11": lambda: (get_model("vgg11", num_classes=10), torch.randn(1, 3, 32, 32)),
    "transposed": lambda: (nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(6, 4, 5, stride=3, output_padding=1)),
                           torch.randn(2, 3, 17, 19)),
    "conv1d": lambda: (nn.Sequential(nn.Conv1d(3, 8, 5, dilation=2), nn.Conv1d(8, 2, 1)), torch.randn(3, 3, 40)),
    "conv3d": lambda: (nn.Conv3d(2, 4, 3, padding=1), torch.randn(1, 2, 5, 6, 7)),
    "attention": lambda: (Attention(), torch.randn(2, 5, 16)),
    "input_gradient": lambda: (nn.Conv2d(3, 8, 3), torch.randn(2, 3, 9, 9, requires_grad=True)),
}


@pytest.mark.parametrize("name", MODELS)
def test_as_torch_counts(name):
    model, *batch = MODELS[name]()
    expected = counted_by_torch(model, *batch)
    assert sum(expected.values()) > 0
    assert by_operator(tape_of(model, *batch), set(expected)) == expected


def test_a_grouped_convolution_costs_its_share():
    """torch's counter forgets the groups in the gradient of the weight; the three products of a grouped convolution are alike."""
    model, x = nn.Conv2d(8, 16, 3, groups=4, bias=False), torch.randn(2, 8, 10, 10, requires_grad=True)
    one = 2 * (2 * 8 * 8 * 16) * (8 // 4) * 9  # multiply-adds of each output element: its group's channels times the window
    assert by_operator(tape_of(model, x), {"convolution", "convolution_backward"}) == {"convolution": one, "convolution_backward": 2 * one}


def test_attention_operators():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q * self.scale, k * self.scale, v * self.scale)

    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    ops = {op.target.split(".")[1]: op.flops for op in tape_of(Head(), q, k, v).ops if "_scaled_dot_product" in op.target}
    forward, backward = sorted(ops, key=len)
    assert ops[forward] == sdpa_flop_count(q.shape, k.shape, v.shape)
    assert ops[backward] == sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)


def test_a_recurrent_layer():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(6, 10)

        def forward(self, x):
            return self.lstm(x)[0]

    ops = {op.target.split(".")[1]: op.flops for op in tape_of(Recurrent(), torch.randn(5, 3, 6)).ops}
    forward = 2 * 5 * 3 * 4 * 10 * (6 + 10)
    assert ops["mkldnn_rnn_layer"] == forward and ops["mkldnn_rnn_layer_backward"] == 2 * forward


def test_any_other_op_counts_its_elements():
    ops = {op.target: op.flops for op in tape_of(nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True)), torch.randn(5, 4)).ops}
    assert ops["aten.relu_.default"] == 5 * 6 and ops["aten.mean.default"] == 1
    assert ops["aten.threshold_backward.default"] == 5 * 6


def op(target: str, inputs: tuple[int, ...], outputs: tuple[int, ...] = (), **fields) -> Op:
    args = [{"tensor": t} for t in inputs]
    return Op(id=0, target=target, args=args, kwargs={}, inputs=inputs, outputs=outputs, phase=Phase.FORWARD, layer="", **fields)


def tensors(*shapes: tuple[int, int]) -> list[Tensor]:
    return [Tensor(id=i, storage=i, dtype="float32", shape=s, strides=(s[1], 1), offset=0) for i, s in enumerate(shapes)]


def test_before_there_is_a_tape():
    """Capture may ask about an op before the tape exists: tensors by id are enough."""
    assert op_flops(op("aten.mm.default", (0, 1), (2,)), tensors((2, 3), (3, 5), (2, 5))) == 2 * 2 * 3 * 5


def test_a_gradient_that_is_taken_costs_nothing_one_that_is_added_its_elements():
    taken = op("vramlab.accumulate_grad", (0,), (1,), takeover=(1, 0))
    copied, added = op("vramlab.accumulate_grad", (0,), (1,)), op("vramlab.accumulate_grad", (0, 1), mutates=(1,))
    assert [op_flops(o, tensors((4, 6), (4, 6))) for o in (taken, copied, added)] == [0, 24, 24]
