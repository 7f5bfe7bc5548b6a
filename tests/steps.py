"""Training steps for tests of capture and execution, and the oracle: plain eager PyTorch, bit for bit."""

from __future__ import annotations

import copy
from typing import Any, Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from vramlab.capture import capture
from vramlab.check import check_schedule
from vramlab.execute import Executor
from vramlab.liveness import replay_schedule


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def mean_square(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    out = model(*inputs)
    return sum((o.float() ** 2).mean() for o in (out if isinstance(out, tuple) else (out,)))


class Net(nn.Module):
    """A module from a dict of parts and a forward function."""

    def __init__(self, forward: Callable, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._run = forward

    def forward(self, *inputs: torch.Tensor):
        return self._run(self, *inputs)


def _write_through_view(self, x):
    h = self.a(x)
    h[:, 0] = h[:, 1] * 2
    h.view(-1)[::3].mul_(0.5)
    out = torch.zeros(h.shape[0], 12)
    out[:, :8] = h
    out[:, 8:].copy_(h[:, :4])
    return self.b(out.relu_())


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


def _tied(self, x):
    h = self.embed(x)
    return F.linear(h, self.embed.weight)


def _autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.b(F.gelu(self.a(x))).float() + self.a(x)[:, :4].float()


def _frozen() -> nn.Module:
    net = Net(lambda self, x: self.b(F.relu(self.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 4), unused=nn.Linear(3, 3))
    net.a.weight.requires_grad_(False)
    return net


def _frozen_first_layers() -> nn.Module:
    """The gradient of the input of the first BatchNorm is not wanted."""
    net = _conv_block()
    net[0].requires_grad_(False)
    return net


def _checkpointed(self, x):
    return self.b(torch.utils.checkpoint.checkpoint(lambda v: F.relu(self.a(v)).sin(), x, use_reentrant=False))


def _running_mean(self, x):
    h = self.a(x)
    with torch.no_grad():
        self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - self.mean


def _buffered() -> nn.Module:
    net = Net(_running_mean, a=nn.Linear(6, 8))
    net.register_buffer("mean", torch.zeros(8))
    return net


def _conv_block() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Conv2d(8, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.Dropout(0.5, inplace=True),
        nn.Linear(8, 5),
    )


def _two_heads(self, x):
    h = F.silu(self.a(x), inplace=True)
    return self.b(h), self.c(h + x[:, :1])


def _image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _classes(n: int, k: int) -> torch.Tensor:
    return torch.arange(n) % k


def training_steps() -> dict[str, tuple[Callable[[], nn.Module], Callable, tuple]]:
    """name -> (make a module, loss function, batch)."""
    x = _image(4, 6)
    return {
        "conv-bn-dropout": (_conv_block, cross_entropy, (_image(4, 3, 8, 8), _classes(4, 5))),
        "channels-last": (
            lambda: _conv_block().to(memory_format=torch.channels_last),
            cross_entropy,
            (_image(4, 3, 8, 8).to(memory_format=torch.channels_last), _classes(4, 5)),
        ),
        "write-through-view": (lambda: Net(_write_through_view, a=nn.Linear(6, 8), b=nn.Linear(12, 3)), mean_square, (x,)),
        "custom-function": (lambda: Net(lambda self, x: _Cube.apply(self.a(x)), a=nn.Linear(6, 8)), mean_square, (x,)),
        "tied-weights": (
            lambda: Net(_tied, embed=nn.Embedding(11, 6)),
            lambda m, t: F.cross_entropy(m(t).flatten(0, 1), t.flatten()),
            (_classes(10, 11).view(2, 5),),
        ),
        "shared-module": (lambda: Net(lambda self, x: self.a(torch.tanh(self.a(x))), a=nn.Linear(6, 6)), mean_square, (x,)),
        "frozen-and-unused": (_frozen, mean_square, (x,)),
        "frozen-first-layers": (_frozen_first_layers, cross_entropy, (_image(4, 3, 8, 8), _classes(4, 5))),
        "checkpointed": (lambda: Net(_checkpointed, a=nn.Linear(6, 8), b=nn.Linear(8, 4)), mean_square, (x,)),
        "bfloat16-autocast": (lambda: Net(_autocast, a=nn.Linear(6, 8), b=nn.Linear(8, 4)), mean_square, (x,)),
        "transformer-dropout": (
            lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True),
            mean_square,
            (_image(2, 5, 16),),
        ),
        "transformer-prenorm": (
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, norm_first=True, batch_first=True, activation="gelu"),
                2,
                enable_nested_tensor=False,
            ),
            mean_square,
            (_image(2, 5, 16),),
        ),
        "conv1d": (
            lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.LeakyReLU(0.1, inplace=True), nn.AvgPool1d(2)),
            mean_square,
            (_image(2, 3, 12),),
        ),
        "conv3d": (
            lambda: nn.Sequential(
                nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU6(inplace=True), nn.MaxPool3d(2), nn.ConvTranspose3d(4, 2, 2)
            ),
            mean_square,
            (_image(2, 2, 6, 6, 6),),
        ),
        "group-and-instance-norm": (
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Hardswish(inplace=True), nn.InstanceNorm2d(8, affine=True)),
            mean_square,
            (_image(2, 3, 8, 8),),
        ),
        "lstm": (
            lambda: Net(
                lambda self, x: self.out(self.rnn(x)[0][:, -1]), rnn=nn.LSTM(6, 7, 2, batch_first=True, dropout=0.2), out=nn.Linear(7, 3)
            ),
            mean_square,
            (_image(3, 5, 6),),
        ),
        "gru": (lambda: Net(lambda self, x: self.rnn(x)[0], rnn=nn.GRU(6, 7, batch_first=True)), mean_square, (_image(3, 5, 6),)),
        "buffer-average": (_buffered, mean_square, (x,)),
        "two-heads": (lambda: Net(_two_heads, a=nn.Linear(6, 6), b=nn.Linear(6, 3), c=nn.Linear(6, 2)), mean_square, (x,)),
        "two-inputs": (lambda: nn.Bilinear(6, 4, 3), mean_square, (x, _image(4, 4))),
        "expand-and-sum": (
            lambda: Net(lambda self, x: (self.a(x)[:, None, :].expand(-1, 3, -1) + 1).sum(1), a=nn.Linear(6, 4)),
            lambda m, x: m(x).sum(),
            (x,),
        ),
        "embedding-bag": (
            lambda: Net(lambda self, t: self.bag(t), bag=nn.EmbeddingBag(9, 5, mode="mean")),
            mean_square,
            (_classes(6, 9).view(2, 3),),
        ),
        "pixel-shuffle-upsample": (
            lambda: nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.PixelShuffle(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.PReLU()
            ),
            mean_square,
            (_image(2, 3, 4, 4),),
        ),
        "rrelu": (lambda: nn.Sequential(nn.Linear(6, 5), nn.RReLU()), mean_square, (x,)),
    }


def replay(model: nn.Module, loss_fn: Callable, batch: tuple, **options: Any) -> Executor:
    """The executor with no method."""
    captured = capture(model, loss_fn, batch, **options)
    return Executor(captured, check_schedule(captured.tape, replay_schedule(captured.tape)), model)


def differences(
    make_model: Callable[[], nn.Module],
    loss_fn: Callable,
    batch: tuple,
    make_step: Callable[[nn.Module], Callable],
    steps: int = 3,
    lr: float = 0.05,
) -> list[str]:
    """Names of all that differs from eager after each of `steps` optimizer steps; empty when every bit is equal."""
    torch.manual_seed(0)
    reference = make_model()
    tested = copy.deepcopy(reference)
    step = make_step(tested)
    optimizers = [torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9) for m in (reference, tested)]
    found: list[str] = []
    for i in range(steps):
        torch.manual_seed(100 + i)
        loss = loss_fn(reference, *batch)
        loss.backward()
        random_eager = torch.get_rng_state()
        torch.manual_seed(100 + i)
        loss_tested = step(*batch)
        random_tested = torch.get_rng_state()
        pairs = {"loss": (loss.detach(), loss_tested), "generator": (random_eager, random_tested)}
        pairs |= {f"{n}.grad": (p.grad, q.grad) for (n, p), q in zip(reference.named_parameters(), tested.parameters())}
        pairs |= {n: (v, tested.state_dict()[n]) for n, v in reference.state_dict().items()}
        found += [f"step {i}: {name}" for name, (a, b) in pairs.items() if not _same(a, b)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
        if a.dim()
        else (a.dtype == b.dtype and a.reshape(1).view(torch.uint8).equal(b.reshape(1).view(torch.uint8)))
    )
