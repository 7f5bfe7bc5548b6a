"""The truth gate on plain torch: equal steps pass, and each small lie is caught under its own name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramlab.gate import GROUPS, Side, deterministic, run_gate
from vramlab.record import Truth


class Net(nn.Module):
    """Convolution, BatchNorm, dropout and a buffer outside the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.relu(self.bn(self.conv(x))).mean(dim=(2, 3))
        return self.head(nn.functional.dropout(x, 0.5, self.training))


def nothing(*_) -> None:
    """The step as it is."""


def side(before=nothing, after_backward=nothing, after=nothing, inputs=False, make_optimizer=torch.optim.AdamW,
         dtype=torch.float32) -> Side:
    """A training step with places to put a lie; each gets (model, step number)."""
    model = Net().to(dtype)
    optimizer = make_optimizer(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(4, 3, 8, 8, generator=generator).to(dtype).requires_grad_(inputs) for _ in range(3)]
    y = torch.tensor([0, 1, 2, 3])

    def step(index: int) -> torch.Tensor:
        optimizer.zero_grad()
        before(model, index)
        loss = nn.functional.cross_entropy(model(x[index]), y)
        loss.backward()
        after_backward(model, index)
        optimizer.step()
        after(model, index)
        return loss

    return Side(model=model, step=step, optimizer=optimizer, inputs=x if inputs else ())


def lie(**places):
    return run_gate(side, lambda: side(**places))


def names(result) -> set[str]:
    return {d.name for d in result.differing}


def test_equal_steps_are_exact():
    result = run_gate(side, side)
    assert (result.truth, result.differing, result.steps, result.first_step_that_differs) == (Truth.EXACT, (), 3, None)


def test_another_way_to_the_same_bits_is_exact():
    """Recompute of a segment with its generator state and without a second BatchNorm update, as torch's checkpoint does it for the head."""
    def checkpointed() -> Side:
        tested = side()
        head = tested.model.head.forward
        tested.model.head.forward = lambda x: checkpoint(head, x, use_reentrant=False)
        return tested

    assert run_gate(side, checkpointed).truth is Truth.EXACT


def test_dropout_with_other_randomness():
    result = lie(before=lambda model, index: torch.rand(1) if index == 1 else None)
    assert result.truth is Truth.WRONG and result.first_step_that_differs == 2 and result.steps == 2
    assert {"loss", "gradient head.weight", "generator cpu"} <= names(result)


def test_a_generator_that_advanced_after_the_last_use():
    result = lie(after=lambda model, index: torch.rand(1))
    assert names(result) == {"generator cpu"} and result.first_step_that_differs == 1


def test_batchnorm_statistics_updated_twice():
    """Loss and gradients are right; only the buffers show it."""
    def again(model, index):
        with torch.no_grad():
            model.bn(torch.ones(4, 8, 6, 6))

    result = lie(after_backward=again)
    assert names(result) == {"state bn.running_mean", "state bn.running_var", "state bn.num_batches_tracked"}
    tracked = next(d for d in result.differing if d.name == "state bn.num_batches_tracked")
    assert tracked.max_abs_distance == 1.0


def test_a_gradient_that_silently_is_none():
    def drop(model, index):
        model.conv.bias.grad = None

    result = lie(after_backward=drop)
    missing = next(d for d in result.differing if d.name == "gradient conv.bias")
    assert "nothing" in missing.what and missing.max_abs_distance is None


def test_zeros_are_no_missing_gradient():
    def drop(model, index):
        model.conv.bias.grad = None

    def zero(model, index):
        model.conv.bias.grad = torch.zeros_like(model.conv.bias)

    assert "gradient conv.bias" in names(run_gate(lambda: side(after_backward=drop), lambda: side(after_backward=zero)))


def test_other_strides():
    def restride(model, index):
        model.conv.weight.grad = model.conv.weight.grad.contiguous(memory_format=torch.channels_last)

    result = lie(after_backward=restride)
    assert {"gradient conv.weight"} <= names(result)
    assert "strides" in result.differing[0].what


def test_one_flipped_bit():
    def flip(model, index):
        if index == 2:
            model.head.weight.grad.view(torch.int32)[0, 0] ^= 1

    result = lie(after_backward=flip)
    assert result.first_step_that_differs == 3 and "gradient head.weight" in names(result)
    assert 0 < next(d for d in result.differing if d.name == "gradient head.weight").max_abs_distance < 1e-6


def test_minus_zero_is_not_zero_and_nan_is_itself():
    def set_to(value):
        def after(model, index):
            model.calls.fill_(value)
        return lambda: side(after=after)

    assert names(run_gate(set_to(0.0), set_to(-0.0))) == {"state calls"}
    assert run_gate(set_to(float("nan")), set_to(float("nan"))).truth is Truth.EXACT
    against_nan = run_gate(set_to(0.0), set_to(float("nan")))
    assert against_nan.differing[0].max_abs_distance == float("inf")


def test_a_buffer_outside_the_state_dict_counts():
    def advance(model, index):
        model.calls += 1

    assert names(lie(after=advance)) == {"state calls"}


def test_another_dtype_is_a_difference():
    def widen(model, index):
        model.calls = model.calls.double()

    assert "float64" in lie(after=widen).differing[0].what


def test_optimizer_state_counts():
    def momentum(model, index):
        tested[0].optimizer.state[model.conv.weight]["exp_avg"].add_(1.0)

    tested: list[Side] = []

    def build() -> Side:
        tested[:] = [side(after=momentum)]
        return tested[0]

    assert names(run_gate(side, build)) == {"optimizer state.0.exp_avg"}


def test_an_optimizer_on_one_side_only():
    result = run_gate(side, lambda: side(make_optimizer=torch.optim.SGD))
    assert result.first_step_that_differs == 0 and any(n.startswith("optimizer param_groups") for n in names(result))


def test_gradients_of_inputs_count():
    built: list[Side] = []

    def double(model, index):
        built[0].inputs[index].grad.mul_(2)

    def build() -> Side:
        built[:] = [side(after_backward=double, inputs=True)]
        return built[0]

    assert names(run_gate(lambda: side(inputs=True), build)) == {"gradient input.0"}


def test_sides_that_start_apart():
    def other() -> Side:
        tested = side()
        with torch.no_grad():
            tested.model.head.bias[0] += 1
        return tested

    result = run_gate(side, other)
    assert (result.first_step_that_differs, result.steps) == (0, 0)
    assert names(result) == {"state head.bias"}


def test_the_caller_is_left_as_it_was():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_gate(side, side)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_mode_is_on_inside_and_restored_after_an_error():
    with pytest.raises(ZeroDivisionError), deterministic():
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_error_of_a_side_passes_through():
    def fail(model, index):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        lie(before=fail)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_result_is_json():
    body = lie(after=lambda model, index: torch.rand(1)).to_json()
    assert body == {"truth": "wrong", "steps": 1, "first_step_that_differs": 1,
                    "differing": [{"name": "generator cpu", "what": "the generator is in another state", "max_abs_distance": None}]}


def other_kernels(**places):
    """A step whose roundings are not eager's: the convolution as a product of unfolded patches."""
    def build() -> Side:
        tested = side(**places)
        conv = tested.model.conv
        conv.forward = lambda x: (nn.functional.unfold(x, 3).transpose(1, 2) @ conv.weight.flatten(1).T + conv.bias).transpose(
            1, 2).unflatten(2, (6, 6))
        return tested

    return build


def in_float64() -> Side:
    return side(dtype=torch.float64)


def test_other_kernels_are_within_noise_of_float64_where_that_is_allowed():
    result = run_gate(side, other_kernels(), in_float64=in_float64)
    assert result.truth is Truth.WITHIN_NOISE and result.steps == len(result.noise) == 3 and result.differing
    for step in result.noise:
        assert 0 < step.tested["gradients"] <= 2 * max(step.eager["gradients"], 2.0**-23) < 1e-5
    assert run_gate(side, other_kernels()).truth is Truth.WRONG
    assert run_gate(side, side, in_float64=in_float64).truth is Truth.EXACT


@pytest.mark.parametrize("names", [("conv.weight", "conv.bias", "bn.weight", "bn.bias", "head.weight", "head.bias"), ("head.weight",)])
@pytest.mark.parametrize("step", [0, 2])
def test_a_gradient_off_by_a_thousandth_is_wrong(names, step):
    def stretch(model, index):
        if index == step:
            for name in names:
                model.get_parameter(name).grad.mul_(1.001)

    result = run_gate(side, other_kernels(after_backward=stretch), in_float64=in_float64)
    assert result.truth is Truth.WRONG and result.first_step_that_differs == step + 1
    assert {d.name for d in result.differing} >= {f"gradient {name}" for name in names}


def test_noise_excuses_no_integer_no_generator_and_no_missing_gradient():
    def count(model, index):
        model.bn.num_batches_tracked += 1

    def drop(model, index):
        model.conv.bias.grad = None

    def draw(model, index):
        torch.rand(1)

    for places, name in (({"after": count}, "state bn.num_batches_tracked"), ({"after": draw}, "generator cpu"),
                         ({"after_backward": drop}, "gradient conv.bias")):
        result = run_gate(side, other_kernels(**places), in_float64=in_float64)
        assert result.truth is Truth.WRONG and name in names(result)


def pointwise(strides=None, dtype=torch.float32) -> Side:
    """A 1x1 convolution; with `strides` its gradient of 4 x 9 x 1 x 1 has those, and another rounding."""
    model = nn.Conv2d(9, 4, 1).to(dtype)
    x = torch.rand(2, 9, 5, 5).to(dtype)

    def step(index: int) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if strides:
            model.weight.grad = torch.empty_strided((4, 9, 1, 1), strides).copy_(model.weight.grad * (1 + 2.0**-23))
        return loss

    return Side(model=model, step=step)


@pytest.mark.parametrize(("strides", "truth"), [((9, 1, 9, 9), Truth.WITHIN_NOISE), ((1, 4, 1, 1), Truth.WRONG)])
def test_other_kernels_choose_the_strides_that_no_address_depends_on_and_no_others(strides, truth):
    assert torch.empty_strided((4, 9, 1, 1), (9, 1, 9, 9)).is_contiguous()
    assert run_gate(pointwise, lambda: pointwise(strides), in_float64=lambda: pointwise(dtype=torch.float64)).truth is truth
    assert run_gate(pointwise, lambda: pointwise(strides)).truth is Truth.WRONG, "where bits are promised, strides are too"


def test_statistics_off_by_a_thousandth_are_wrong():
    def drift(model, index):
        model.bn.running_var *= 1.001

    assert run_gate(side, other_kernels(after=drift), in_float64=in_float64).truth is Truth.WRONG


def test_a_parameter_that_the_optimizer_did_not_leave_there_is_wrong():
    def shift(model, index):
        with torch.no_grad():
            model.head.weight += 1e-3

    assert run_gate(side, other_kernels(after=shift), in_float64=in_float64).truth is Truth.WRONG


def test_nothing_is_excused_where_eager_itself_is_far_from_float64():
    """Dropout that draws otherwise in double precision, say: both sides are far off, which must not make everything near enough."""
    def elsewhere() -> Side:
        return side(before=lambda model, index: torch.rand(3), dtype=torch.float64)

    result = run_gate(side, other_kernels(), in_float64=elsewhere)
    assert result.truth is Truth.NOT_RUN and result.noise[0].drowned == "loss"
    assert "eager itself" in result.reason and result.to_json()["reason"] == result.reason
    firm = run_gate(side, other_kernels(after=lambda model, index: torch.rand(1)), in_float64=elsewhere)
    assert firm.truth is Truth.WRONG and "generator cpu" in names(firm), "what is no rounding is judged there too"


def test_noise_is_json():
    noise = run_gate(side, other_kernels(), steps=1, in_float64=in_float64).to_json()["noise"]
    assert set(noise[0]) == {"eager", "tested"} and all(set(d) == set(GROUPS) for d in noise[0].values())


@pytest.mark.gpu
def test_the_generator_of_a_gpu_counts():
    def on_gpu(**places) -> Side:
        with torch.device("cuda"):
            model = nn.Linear(3, 3)
            x = torch.ones(2, 3)

        def step(index: int) -> torch.Tensor:
            model.zero_grad()
            loss = nn.functional.dropout(model(x), 0.5).sum()
            loss.backward()
            places.get("after", nothing)(model, index)
            return loss

        return Side(model=model, step=step)

    assert run_gate(on_gpu, on_gpu).truth is Truth.EXACT
    drawn = run_gate(on_gpu, lambda: on_gpu(after=lambda model, index: torch.rand(1, device="cuda")))
    assert names(drawn) == {"generator cuda:0"}
