"""Model cards and the training steps made of them. Parameter counts are published numbers, written here as literals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F

from vramlab import collection, workload
from vramlab.capture import capture
from vramlab.check import check_schedule
from vramlab.errors import WorkflowError
from vramlab.liveness import replay_schedule

MODELS = Path(__file__).parents[1] / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.yaml"))

# torchvision's documentation, for 1,000 classes. GoogLeNet is documented without its auxiliary classifiers: see below.
TORCHVISION_PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg11": 132_863_336, "vgg11-bn": 132_868_840, "vgg13": 133_047_848, "vgg13-bn": 133_053_736,
    "vgg16": 138_357_544, "vgg16-bn": 138_365_992, "vgg19": 143_667_240, "vgg19-bn": 143_678_248,
    "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160, "resnet152": 60_192_808,
    "densenet121": 7_978_856, "densenet161": 28_681_000, "densenet169": 14_149_480, "densenet201": 20_013_928,
    "inception-v3": 27_161_264,
    "mobilenet-v2": 3_504_872, "mobilenet-v3-small": 2_542_856, "mobilenet-v3-large": 5_483_032,
    "vit-b-16": 86_567_656,
}
# Counts of public implementations: GoogLeNet with both auxiliary classifiers; U-Net for one channel and two classes;
# bert-base-uncased with its masked-language-model head (tied, without pooler); gpt2 (tied head); the CIFAR ResNet-1202.
OTHER_PARAMETERS = {
    "googlenet": 13_004_888, "unet": 31_030_658, "bert-base": 109_514_298, "gpt2-small": 124_439_808, "resnet1202": 19_421_274,
    # stem, three stages of one block, classifier, each with its BatchNorm
    # OverFeat: layer by layer from its paper's table 1; deep VGG: VGG-16 and 80 convolutions more in each group; ResNet-2500: torchvision's
    # ResNet-152 with 3, 24, 752 and 3 blocks more; ResNet-1001, DenseNet-BC-100, DenseNet-264, Inception-v4: public implementations.
    "overfeat": 34_944 + 614_656 + 1_180_160 + 4_719_616 + 9_438_208 + 113_249_280 + 12_587_008 + 4_097_000,
    "vgg-deep": 138_357_544 + 80 * (36_928 + 147_584 + 590_080 + 2 * 2_359_808),
    "resnet-deep": 60_192_808 + 3 * 70_400 + 24 * 280_064 + 752 * 1_117_184 + 3 * 4_462_592,
    "resnet1001": 10_327_706, "densenet-bc-100": 769_162, "densenet264": 33_337_704, "inception-v4": 42_679_816,
    "bert-large": 335_174_458, "gpt2-large": 774_030_080,
    # torch.nn.LSTM(50, 1024, 4), the embedding and the head
    # layer by layer: 3x3 convolutions without bias, two numbers a channel of BatchNorm, a 1x1 head; 17,262,977 with one class
    "unet-bilinear": 17_262_977 + 64 + 1,
    "lstm": 29_597_696 + 5_000 * 50 + 1_024 * 5_000 + 5_000,
    "resnet8-digits": (432 + 32) + (2 * 2_304 + 64) + (4_608 + 9_216 + 128) + (18_432 + 36_864 + 256) + 650,
}
PARAMETERS = TORCHVISION_PARAMETERS | OTHER_PARAMETERS

# What makes each model small enough for a test; torchvision's widths are fixed, so only their images shrink.
TINY = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 61, "sequence_length": 16, "width": 4}
SHALLOW = {
    "resnet1202": {"depth": 14}, "resnet1001": {"depth": 20}, "vgg-deep": {"depth": 21},
    "resnet-deep": {"depth": 14, "n1": 1, "n2": 1, "n4": 1},
    "densenet-bc-100": {"depth": 10}, "inception-v4": {"a_modules": 1, "b_modules": 1, "c_modules": 1}, "lstm": {"inputs": 8},
    "densenet264": {"growth_rate": 4, "image_size": 64}, "unet-bilinear": {"image_width": 48},
}
BATCH_SIZE = 2
# Made by the same class and initialised alike; vgg11-bn is built twice for all of them, at a second of 130 million random numbers each.
ALIKE = {"vgg11", "vgg13", "vgg13-bn", "vgg16", "vgg16-bn", "vgg19", "vgg19-bn"}


def read(name: str) -> collection.Model:
    return collection.read_model(MODELS / f"{name}.yaml")


def options_of(name: str, **given: Any) -> dict[str, Any]:
    """All options, at their defaults but for those given."""
    return collection.resolve_options(read(name).card.options, given, name)


def tiny_options(name: str, **given: Any) -> dict[str, Any]:
    declared = read(name).card.options
    small = {key: value for key, value in TINY.items() if key in declared}
    if "image_size" in declared:
        small["image_size"] = max(32, int(declared["image_size"].min or 0))
    if name == "mobilenet-v2":
        small["image_size"] = 64  # at 32 px BatchNorm sees two values a channel, and its gradient vanishes
    small |= SHALLOW.get(name, {})
    return options_of(name, **(small | given))


def config_of(options: dict[str, Any], *, data: str = "synthetic", target: str = "cpu", batch_size: int = BATCH_SIZE,
              **training: Any) -> dict[str, Any]:
    defaults = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "autocast": None,
                "channels_last": False, "seed": 1, "steps": 1, "eval_every": 1}
    return {"model_options": options, "batch_size": batch_size, "training": defaults | training, "data": data, "target": target}


def build(name: str, *, data: str = "synthetic", target: str = "cpu", **given: Any) -> workload.TrainingStep:
    return workload.build(read(name), config_of(tiny_options(name, **given), data=data, target=target))


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(name: str, **given: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return workload.make_model(read(name), options_of(name, **given))


def same_bits(a: workload.TrainingStep, b: workload.TrainingStep) -> bool:
    states = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in states) and all(torch.equal(x, y) for x, y in zip(a.batch, b.batch, strict=True))


def test_the_model_of_a_simulated_step_is_made_when_it_is_asked_for_and_once(monkeypatch):
    made = []
    monkeypatch.setattr(workload, "make_model", lambda *args, make=workload.make_model: made.append(1) or make(*args))
    simulated = build("resnet18", target="sim:v100-32gb")
    assert not made and len(simulated.batch) == 2
    assert simulated.model is simulated.model
    assert simulated.make_optimizer().param_groups[0]["params"][0] is next(simulated.model.parameters())
    assert len(made) == 1
    measured = build("resnet18")
    assert len(made) == 2, "a step that runs has its model at once, before any meter starts"
    assert all(torch.equal(a, b) for a, b in zip(simulated.model.parameters(), measured.model.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------ every card


def test_every_card_has_a_published_count():
    assert sorted(PARAMETERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_as_published(name):
    assert count(on_meta(name)) == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,} parameters" in read(name).card.notes


@pytest.mark.parametrize("name", NAMES)
def test_step_from_a_seed(name):
    """Shape, finite loss, a gradient on every parameter; the same seed gives the same bits and touches no global generator."""
    generator = torch.get_rng_state()
    step = build(name)
    if name not in ALIKE:
        assert same_bits(step, build(name))
    assert torch.equal(generator, torch.get_rng_state())
    assert all(module.training for module in step.model.modules())

    seen = []
    step.model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    loss = step.loss_fn(step.model, *step.batch)
    loss.backward()
    logits = seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]
    assert logits.shape == expected_shape(read(name), step)
    assert loss.shape == () and loss.isfinite()
    without = [n for n, p in step.model.named_parameters() if p.grad is None or p.grad.shape != p.shape or not p.grad.isfinite().all()]
    assert without == []
    is_zero = {n for n, p in step.model.named_parameters() if not p.grad.any()}
    before_a_zero_head = {n for n, _ in step.model.named_parameters() if name == "vit-b-16" and not n.startswith("heads.")}
    assert is_zero == before_a_zero_head


def expected_shape(model: collection.Model, step: workload.TrainingStep) -> tuple[int, ...]:
    if model.card.input.kind == "tokens":
        return (BATCH_SIZE, TINY["sequence_length"], step.classes)
    size = step.batch[0].shape[-2:]
    return (BATCH_SIZE, step.classes, *(size if model.card.loss == "pixel_cross_entropy" else ()))


@pytest.mark.parametrize("name", ["resnet18", "unet", "bert-base", "gpt2-small"])
def test_another_seed_is_another_step(name):
    config = config_of(tiny_options(name))
    other = {**config, "training": config["training"] | {"seed": 2}}
    assert not same_bits(workload.build(read(name), config), workload.build(read(name), other))


def test_the_losses_of_cards_are_those_of_the_workload():
    assert set(collection.LOSSES) == set(workload.TARGETS)


# ------------------------------------------------------------------------------------------------ families


def test_googlenet_without_its_auxiliary_classifiers_is_as_documented():
    model = on_meta("googlenet")
    assert count(model) - count(model.aux1) - count(model.aux2) == 6_624_904


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)])
def test_cifar_resnets_are_as_published(depth, parameters):
    assert count(on_meta("resnet8-digits", depth=depth)) == parameters


# One map of each stage of ResNet-14: 2 samples of 16, 32 and 64 channels at 32, 16 and 8 px, four bytes a number.
STAGE_MAPS = (2 * 16 * 32 * 32 * 4, 2 * 32 * 16 * 16 * 4, 2 * 64 * 8 * 8 * 4)
# The stem has one ReLU, each of two blocks a stage two. Nothing but a ReLU in place keeps the last one's result: one map either way.
KEPT_BY_RELU = STAGE_MAPS[0] + 4 * sum(STAGE_MAPS) - STAGE_MAPS[2]


def kept_bytes(model: torch.nn.Module, images: torch.Tensor) -> int:
    """Bytes of all regions that autograd keeps for the backward."""
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images)
    return sum(storage.nbytes() for storage in kept.values())


def relu_twins() -> list[torch.nn.Module]:
    """ResNet-14 with ReLU in place, and with the option off: equal weights."""
    card = read("resnet1202")
    twins = [workload.make_model(card, options_of("resnet1202", depth=14, in_place=in_place)) for in_place in (True, False)]
    twins[1].load_state_dict(twins[0].state_dict())
    return twins


def test_a_relu_that_is_not_in_place_keeps_its_input_and_changes_no_bit():
    images, twins = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), relu_twins()
    over, kept = (kept_bytes(twin, images) for twin in twins)
    assert kept - over == KEPT_BY_RELU
    losses = [F.cross_entropy(twin(images), torch.tensor([1, 2])) for twin in twins]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True))


def test_a_plain_relu_keeps_no_more_than_one_in_place():
    images, twins = torch.randn(2, 3, 32, 32), relu_twins()
    plain = twins[0]
    over = kept_bytes(plain, images)
    for module in plain.modules():
        if isinstance(module, torch.nn.ReLU):
            module.inplace = False
    assert kept_bytes(plain, images) == over < kept_bytes(twins[1], images)


def test_the_peak_of_a_step_sees_whether_relu_keeps_its_input():
    peaks = []
    for twin in relu_twins():
        batch = [torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)]
        tape = capture(twin, workload.cross_entropy, batch).tape
        peaks.append(check_schedule(tape, replay_schedule(tape)).peak_bytes)
    assert peaks[1] - peaks[0] == pytest.approx(KEPT_BY_RELU, abs=2 * STAGE_MAPS[0])  # less what is dead at the peak


@pytest.mark.parametrize(("name", "options", "parameters"), [
    ("vgg-deep", {"depth": 16}, 138_357_544),  # torchvision's VGG-16
    ("vgg-deep", {"depth": 116}, 138_357_544 + 20 * (36_928 + 147_584 + 590_080 + 2 * 2_359_808)),
    ("resnet-deep", {"depth": 50, "n1": 3, "n2": 4, "n4": 3}, 25_557_032),  # torchvision's ResNet-50 and 101
    ("resnet-deep", {"depth": 101, "n1": 3, "n2": 4, "n4": 3}, 44_549_160),
    ("resnet1001", {"depth": 164}, 1_703_258),  # the pre-activation ResNet-164 of public implementations
    ("densenet264", {"growth_rate": 48}, 72_686_632),  # "73M"
])
def test_families_hold_what_is_published_at_other_depths(name, options, parameters):
    assert count(on_meta(name, **options)) == parameters


@pytest.mark.parametrize(("name", "depth", "told"), [
    ("vgg-deep", 100, "16 [+] 5m"), ("resnet-deep", 2500, "write 137, 140, 143"), ("resnet1001", 1000, "9n [+] 2"),
    ("densenet-bc-100", 99, "6n [+] 4"),
])
def test_a_depth_that_the_family_does_not_have_is_refused(name, depth, told):
    with pytest.raises(WorkflowError, match=told):
        on_meta(name, depth=depth)


def test_small_densenet_and_inception_v4_halve_the_image_as_published():
    """8 x 8 behind DenseNet-BC's three blocks; 35, 17 and 8 pixels behind Inception-v4's stem and reductions."""
    sides = {}
    for name, parts in (("densenet-bc-100", ("features",)), ("inception-v4", ("stem", "reduction_a", "reduction_b"))):
        model = on_meta(name)
        for part in parts:
            module = model.get_submodule(part)
            module.register_forward_hook(lambda module, inputs, output, part=part: sides.update({part: tuple(output.shape[1:])}))
        model.eval()(torch.zeros(1, 3, *[read(name).card.input.image_size] * 2, device="meta"))
    assert sides == {"features": (342, 8, 8), "stem": (384, 35, 35), "reduction_a": (1024, 17, 17), "reduction_b": (1536, 8, 8)}


def test_the_unrolled_lstm_computes_what_torchs_own_does():
    step = build("lstm", layers=2, hidden=16)
    model, own = step.model, torch.nn.LSTM(8, 16, 2, batch_first=True)
    for layer, cell in enumerate(model.cells):
        for kind, linear in (("ih", cell.from_input), ("hh", cell.from_state)):
            getattr(own, f"weight_{kind}_l{layer}").data.copy_(linear.weight)
            getattr(own, f"bias_{kind}_l{layer}").data.copy_(linear.bias)
    tokens = step.batch[0]
    torch.testing.assert_close(model(tokens), model.head(own(model.tokens(tokens))[0]))


@pytest.mark.parametrize(("name", "layers", "hidden", "heads", "parameters"), [
    ("bert-base", 24, 1024, 16, 335_174_458),  # bert-large-uncased
    ("gpt2-small", 24, 1024, 16, 354_823_168),  # gpt2-medium
    ("gpt2-small", 36, 1280, 20, 774_030_080),  # gpt2-large
    ("gpt2-small", 48, 1600, 25, 1_557_611_200),  # gpt2-xl
])
def test_larger_transformers_are_as_published(name, layers, hidden, heads, parameters):
    assert count(on_meta(name, layers=layers, hidden=hidden, heads=heads)) == parameters


@pytest.mark.parametrize(("name", "weight", "auxiliaries"), [("googlenet", 0.3, 2), ("inception-v3", 0.4, 1)])
def test_auxiliary_classifiers_count_with_their_weight(name, weight, auxiliaries):
    rates = {key: 0.0 for key in ("dropout", "dropout_aux") if key in read(name).card.options}
    step = build(name, **rates)
    images, labels = step.batch
    output = step.model(images)
    assert len(output) == 1 + auxiliaries
    main, *others = (F.cross_entropy(logits, labels) for logits in output)
    loss = step.loss_fn(step.model, images, labels)
    torch.testing.assert_close(loss, main + weight * sum(others))
    assert abs(loss - main) > 0.1

    step.model.eval()
    torch.testing.assert_close(step.loss_fn(step.model, images, labels), F.cross_entropy(step.model(images), labels))


@pytest.mark.parametrize("name", ["alexnet", "densenet121", "googlenet", "mobilenet-v2", "mobilenet-v3-small", "vit-b-16", "unet",
                                  "bert-base", "gpt2-small"])
def test_dropout_is_active_and_can_be_switched_off(name):
    rates = [key for key in read(name).card.options if "dropout" in key]
    active, inactive = build(name, **dict.fromkeys(rates, 0.5)), build(name, **dict.fromkeys(rates, 0.0))
    if name == "vit-b-16":  # its classifier starts at zero and would hide everything
        for step in (active, inactive):
            torch.nn.init.ones_(step.model.heads.head.weight[0])

    def two_losses(step: workload.TrainingStep) -> list[float]:
        torch.manual_seed(0)
        return [step.loss_fn(step.model, *step.batch).item() for _ in range(2)]

    first, second = two_losses(active)
    assert first != second
    first, second = two_losses(inactive)
    assert first == second


@pytest.mark.parametrize("name", ["bert-base", "gpt2-small"])
def test_explicit_attention_equals_the_fused_operator(name):
    explicit, fused = (build(name, attention=kind, dropout=0.0) for kind in ("explicit", "sdpa"))
    *inputs, _ = explicit.batch
    torch.testing.assert_close(explicit.model(*inputs), fused.model(*inputs))


def test_gpt2_sees_the_past_and_bert_both_sides():
    for name, sees_the_future in (("gpt2-small", False), ("bert-base", True)):
        step = build(name, dropout=0.0)
        tokens, *rest = step.batch[:-1]
        changed = tokens.clone()
        changed[:, 9] = (changed[:, 9] + 1) % step.classes
        before, after = step.model(tokens, *rest), step.model(changed, *rest)
        assert torch.equal(before[:, :9], after[:, :9]) is not sees_the_future
        assert not torch.equal(before[:, 9:], after[:, 9:])


def test_heads_are_tied_to_the_token_embedding():
    for name in ("bert-base", "gpt2-small"):
        model = build(name).model
        assert model.head.weight is model.tokens.weight


def test_unet_joins_each_level_with_its_skip_connection():
    model = build("unet").model
    joined = []
    for block in model.up:
        block.conv.register_forward_pre_hook(lambda module, inputs: joined.append(tuple(inputs[0].shape[1:])))
    model(torch.zeros(1, 1, 32, 32))
    assert joined == [(64, 4, 4), (32, 8, 8), (16, 16, 16), (8, 32, 32)]  # width 4: up and skip of equal width, side by side


def test_an_image_may_be_wider_than_high_and_the_deepest_level_is_as_wide_as_the_one_above():
    step = build("unet-bilinear")
    joined = []
    for block in step.model.up:
        block.conv.register_forward_pre_hook(lambda module, inputs: joined.append(tuple(inputs[0].shape[1:])))
    images, labels = step.batch
    assert images.shape == (BATCH_SIZE, 3, 32, 48) and labels.shape == (BATCH_SIZE, 32, 48)
    assert step.model(images).shape == (BATCH_SIZE, 2, 32, 48)
    assert joined == [(64, 4, 6), (32, 8, 12), (16, 16, 24), (8, 32, 48)]  # width 4: twice the skip connection's channels


def test_a_small_resnet_learns_the_digits():
    config = config_of(options_of("resnet8-digits", width=8, image_size=16), data="digits", batch_size=64, lr=0.05)
    card = read("resnet8-digits")
    step = workload.build(card, config)
    optimizer = step.make_optimizer()
    before = workload.accuracy(step.model, workload.evaluation_batches(card, config))
    for batch in workload.train_batches(card, config, 60):
        optimizer.zero_grad()
        step.loss_fn(step.model, *batch).backward()
        optimizer.step()
    after = workload.accuracy(step.model, workload.evaluation_batches(card, config))
    assert before < 0.4 and after > 0.85


# ------------------------------------------------------------------------------------------------ how a cell shapes a step


def test_channels_last_changes_the_layout_alone():
    configs = [config_of(tiny_options("resnet18"), channels_last=flag) for flag in (False, True)]
    plain, last = (workload.build(read("resnet18"), config) for config in configs)
    assert plain.model.conv1.weight.is_contiguous() and plain.batch[0].is_contiguous()
    assert last.model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert last.batch[0].is_contiguous(memory_format=torch.channels_last) and not last.batch[0].is_contiguous()
    assert same_bits(plain, last)
    torch.testing.assert_close(plain.model.eval()(plain.batch[0]), last.model.eval()(last.batch[0]))


def test_autocast_stands_inside_the_loss():
    config = config_of(tiny_options("resnet8-digits"), autocast="bfloat16")
    step = workload.build(read("resnet8-digits"), config)
    seen = []
    step.model.stage3.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    loss = step.loss_fn(step.model, *step.batch)
    loss.backward()
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    assert {p.grad.dtype for p in step.model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("kind", "expected"), [
    ("sgd", (torch.optim.SGD, {"lr": 0.5, "momentum": 0.75, "weight_decay": 0.25})),
    ("adam", (torch.optim.Adam, {"lr": 0.5, "weight_decay": 0.25})),
    ("adamw", (torch.optim.AdamW, {"lr": 0.5, "weight_decay": 0.25})),
])
def test_optimizers_are_pytorchs_own(kind, expected):
    config = config_of(tiny_options("gpt2-small"), optimizer=kind, lr=0.5, momentum=0.75, weight_decay=0.25)
    step = workload.build(read("gpt2-small"), config)
    optimizer = step.make_optimizer()
    assert type(optimizer) is expected[0]
    assert {key: optimizer.defaults[key] for key in expected[1]} == expected[1]
    assert optimizer.defaults["foreach"] is None  # PyTorch decides
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in step.model.parameters()]
    assert step.make_optimizer() is not optimizer


def test_no_optimizer_and_an_unknown_one():
    card = read("gpt2-small")
    assert workload.build(card, config_of(tiny_options("gpt2-small"), optimizer="none")).make_optimizer() is None
    step = workload.build(card, config_of(tiny_options("gpt2-small"), optimizer="lion"))
    with pytest.raises(WorkflowError, match="'lion' is unknown; there are sgd, adam, adamw, none"):
        step.make_optimizer()


def test_the_first_training_batch_is_the_steps_own():
    for data in ("synthetic", "digits"):
        config = config_of(tiny_options("resnet8-digits"), data=data)
        step = workload.build(read("resnet8-digits"), config)
        first, second = workload.train_batches(read("resnet8-digits"), config, 2)
        assert all(torch.equal(a, b) for a, b in zip(step.batch, first, strict=True))
        assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_simulated_step_of_any_size_takes_no_memory(channels_last):
    card, options = read("resnet18"), options_of("resnet18")
    real = workload.build(card, config_of(options, channels_last=channels_last))
    before = psutil.Process().memory_info().rss
    step = workload.build(card, config_of(options, target="sim:v100-32gb", batch_size=4096, channels_last=channels_last))
    grown = psutil.Process().memory_info().rss - before
    assert step.batch[0].shape == (4096, 3, 224, 224) and step.batch[1].shape == (4096,)
    assert [t.dtype for t in step.batch] == [t.dtype for t in real.batch]
    assert [t.stride() for t in step.batch] == [t.stride() for t in real.batch]
    assert grown < 2**28 < step.batch[0].nbytes // 8


class Echo(torch.nn.Module):
    """Its input is its logits; one part is frozen in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.BatchNorm1d(2).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.training
        return x


def test_accuracy_counts_and_puts_the_modes_back():
    model = Echo()
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert workload.accuracy(model, [(logits, torch.tensor([0, 1, 0])), (logits[:1], torch.tensor([1]))]) == 2 / 4
    assert model.training and not model.frozen.training
    assert workload.accuracy(model, []) is None


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(("name", "given", "text"), [
    ("vit-b-16", {"image_size": 40}, "model vit-b-16: Input shape indivisible by patch size"),
    ("unet", {"image_size": 40}, "image_size 40 is no multiple of 16"),
    ("unet-bilinear", {"image_width": 40}, "image_width 40 is no multiple of 16"),
    ("resnet8-digits", {"depth": 9}, "depth 9 is not 6n"),
    ("bert-base", {"heads": 5}, "hidden 32 is no multiple of heads 5"),
    ("gpt2-small", {"heads": 5}, "hidden 32 is no multiple of heads 5"),
])
def test_sizes_that_do_not_go_together_are_refused(name, given, text):
    with pytest.raises(WorkflowError, match=text):
        build(name, **given)


@pytest.mark.parametrize("name", ["bert-base", "gpt2-small"])
def test_a_sequence_longer_than_the_position_table_is_refused(name):
    options = tiny_options(name) | {"sequence_length": 1025}
    with pytest.raises(WorkflowError, match="sequence_length 1025 is above the"):
        workload.build(read(name), config_of(options))


def test_an_option_that_the_model_does_not_take_is_refused():
    with pytest.raises(WorkflowError, match="model resnet18: it takes no option dropout"):
        workload.build(read("resnet18"), config_of(tiny_options("resnet18") | {"dropout": 0.1}))


def test_channels_last_of_tokens_is_refused():
    with pytest.raises(WorkflowError, match="reads no images"):
        workload.build(read("gpt2-small"), config_of(tiny_options("gpt2-small"), channels_last=True))


def test_an_untrained_language_model_is_as_good_as_chance():
    for name in ("bert-base", "gpt2-small"):
        step = build(name)
        assert step.loss_fn(step.model, *step.batch).item() == pytest.approx(math.log(TINY["vocabulary"]), rel=0.05)
