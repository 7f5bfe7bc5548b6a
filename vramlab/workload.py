"""From a model card and a resolved cell to a training step: model, loss, batch and optimizer, all from one seed.

Weights are never downloaded. Models and batches are made on the CPU and then moved, so that a seed means the same on every device.
"""

from __future__ import annotations

import inspect
import typing
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Callable, Iterable, Iterator, Mapping, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from vramlab.data import Batch, Data, Sample, Target, open_data
from vramlab.errors import WorkflowError
from vramlab.ops import dtype_of

LossFn: TypeAlias = Callable[..., torch.Tensor]  # loss_fn(model, *batch) -> scalar


class Card(Protocol):
    """What this module reads of a `vramlab.collection.Model`."""

    @property
    def name(self) -> str: ...

    @property
    def body(self) -> Mapping[str, Any]:
        """The card as plain data."""
        ...

    def load_builder(self) -> Callable[..., torch.nn.Module]:
        """The function that a `file:` source names."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingStep:
    """One training step of eager PyTorch: `loss_fn(model, *batch).backward()`, then the optimizer's step."""

    make_model: Callable[[], torch.nn.Module]  # the same one at each call: in training mode, on the device
    loss_fn: LossFn
    batch: Batch
    make_optimizer: Callable[[], torch.optim.Optimizer | None]  # None where the cell trains without one
    seed: int
    classes: int

    @property
    def model(self) -> torch.nn.Module:
        """The model of the step; made on first use where the step is only simulated, since a capture that is kept needs none."""
        return self.make_model()


# ------------------------------------------------------------------------------------------------ losses


def cross_entropy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over images, or over the pixels of all images."""
    return F.cross_entropy(model(images), labels)


def cross_entropy_auxiliary(weight: float) -> LossFn:
    """The main classifier's loss plus `weight` times that of each auxiliary classifier (absent in evaluation mode)."""

    def loss_fn(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output = model(images)
        logits, *auxiliary = (output,) if isinstance(output, torch.Tensor) else output
        loss = F.cross_entropy(logits, labels)
        for other in auxiliary:
            loss = loss + weight * F.cross_entropy(other, labels)
        return loss

    return loss_fn


def token_cross_entropy(model: torch.nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    """Mean over the positions that have a label; the labels are the last of the batch."""
    *inputs, labels = batch
    return F.cross_entropy(model(*inputs).flatten(0, 1), labels.flatten())


# name in a card -> what the model is asked for
TARGETS: Mapping[str, Target] = {
    "cross_entropy": Target.CLASS,
    "cross_entropy_auxiliary": Target.CLASS,
    "pixel_cross_entropy": Target.PIXELS,
    "masked_token_cross_entropy": Target.MASKED,
    "next_token_cross_entropy": Target.NEXT,
}


def _target(card: Card) -> Target:
    name = card.body["loss"]
    if name not in TARGETS:
        raise WorkflowError(f"model {card.name}: loss {name!r} is unknown; there are {', '.join(TARGETS)}")
    return TARGETS[name]


def _loss_fn(card: Card, config: Mapping[str, Any]) -> LossFn:
    if card.body["loss"] == "cross_entropy_auxiliary":
        loss_fn = cross_entropy_auxiliary(config["model_options"]["auxiliary_weight"])
    elif _target(card) in (Target.MASKED, Target.NEXT):
        loss_fn = token_cross_entropy
    else:
        loss_fn = cross_entropy
    autocast = config["training"]["autocast"]
    return loss_fn if autocast is None else _under_autocast(loss_fn, dtype_of(autocast))


def _under_autocast(loss_fn: LossFn, dtype: torch.dtype) -> LossFn:
    def autocast_loss(model: torch.nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(batch[0].device.type, dtype=dtype):
            return loss_fn(model, *batch)

    return autocast_loss


# ------------------------------------------------------------------------------------------------ models

_OPTION_OF = {"num_classes": "classes", "drop_rate": "dropout"}  # torchvision's argument -> the option's name here
_NO_ARGUMENTS = {"image_size", "image_width", "sequence_length", "auxiliary_weight"}  # may be read by the batch and the loss alone


def make_model(card: Card, options: Mapping[str, Any]) -> torch.nn.Module:
    """The model with fresh weights from torch's default generator, on the default device (`meta` makes it free).

    WorkflowError when the card's source or an option does not fit.
    """
    kind, _, name = card.body["source"].partition(":")
    offered = {**options, "channels": card.body["input"].get("channels"), "init_weights": True}
    try:
        make, accepted = _torchvision(name) if kind == "torchvision" else _own(card.load_builder())
        arguments = {a: offered[_OPTION_OF.get(a, a)] for a in accepted if _OPTION_OF.get(a, a) in offered}
        unused = set(options) - _NO_ARGUMENTS - {_OPTION_OF.get(a, a) for a in arguments}
        if unused:
            raise ValueError(f"it takes no option {', '.join(sorted(unused))}")
        return make(**arguments)
    except (ValueError, AssertionError) as error:  # what models raise on sizes that do not go together
        raise WorkflowError(f"model {card.name}: {error}") from error


def _own(build: Callable[..., torch.nn.Module]) -> tuple[Callable[..., torch.nn.Module], list[str]]:
    return build, list(inspect.signature(build).parameters)


def _torchvision(name: str) -> tuple[Callable[..., torch.nn.Module], list[str]]:
    """Builder without weights, and the arguments that the class behind it takes. ValueError on an unknown name."""
    from torchvision import models

    builder = models.get_model_builder(name)
    kind = typing.get_type_hints(inspect.unwrap(builder))["return"]
    return partial(builder, weights=None), list(inspect.signature(kind).parameters)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The CPU's default generator starts at `seed` inside and is put back after; no other generator is touched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


# ------------------------------------------------------------------------------------------------ data


def open_card_data(card: Card, config: Mapping[str, Any]) -> Data:
    """The cell's data in the shape that the model reads; batches on the CPU, contiguous."""
    options = config["model_options"]
    sample = Sample(target=_target(card), classes=_classes(options), channels=card.body["input"].get("channels") or 0,
                    image_size=options.get("image_size", 0), image_width=options.get("image_width"),
                    sequence_length=options.get("sequence_length", 0))
    return open_data(config["data"], sample, config["training"]["seed"])


def train_batches(card: Card, config: Mapping[str, Any], steps: int) -> Iterator[Batch]:
    """`steps` training batches on the cell's device and in its layout; the first is `build(card, config).batch`."""
    return _placed(open_card_data(card, config).batches(config["batch_size"], steps), config)


def evaluation_batches(card: Card, config: Mapping[str, Any]) -> Iterator[Batch]:
    """The test set once, placed likewise; empty where the data has none."""
    return _placed(open_card_data(card, config).test_batches(config["batch_size"]), config)


def _placed(batches: Iterator[Batch], config: Mapping[str, Any]) -> Iterator[Batch]:
    device, channels_last = device_of(config["target"]), config["training"]["channels_last"]
    return (tuple(_place(tensor, device, channels_last) for tensor in batch) for batch in batches)


def _place(tensor: torch.Tensor, device: torch.device, channels_last: bool) -> torch.Tensor:
    is_images = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.to(device, memory_format=torch.channels_last if channels_last and is_images else torch.preserve_format)


def device_of(target: str) -> torch.device:
    """`cpu` or `cuda:N`; a simulated target is captured on the CPU."""
    return torch.device("cpu" if _is_simulated(target) else target)


def _is_simulated(target: str) -> bool:
    return target.startswith("sim:")


def example_batch(card: Card, config: Mapping[str, Any]) -> Batch:
    """The step's batch. A simulated step is only captured, at any size: its batch is zeros that no page of memory backs."""
    if not _is_simulated(config["target"]):
        return next(train_batches(card, config, 1))
    one = next(train_batches(card, {**config, "batch_size": 1}, 1))
    return tuple(_unbacked_zeros(tensor, config["batch_size"], config["training"]["channels_last"]) for tensor in one)


def _unbacked_zeros(one: torch.Tensor, batch_size: int, channels_last: bool) -> torch.Tensor:
    shape = torch.empty((batch_size, *one.shape[1:]), dtype=one.dtype, device="meta")
    strides = _place(shape, shape.device, channels_last).stride()
    return torch.from_numpy(np.zeros(shape.numel(), one.numpy().dtype)).as_strided(shape.shape, strides)


def _classes(options: Mapping[str, Any]) -> int:
    return options["classes"] if "classes" in options else options["vocabulary"]


# ------------------------------------------------------------------------------------------------ the step


def build(card: Card, config: Mapping[str, Any]) -> TrainingStep:
    """The training step of a resolved cell; two calls give equal bits. torch's global generators stay as they are.

    Reads `model_options`, `batch_size`, `training`, `data` and `target`. WorkflowError when they do not fit the model.
    """
    training = config["training"]
    if training["channels_last"] and card.body["input"]["kind"] != "image":
        raise WorkflowError(f"model {card.name} reads no images, so channels_last does not apply")

    @cache
    def model() -> torch.nn.Module:
        with _seeded(training["seed"]):
            made = make_model(card, config["model_options"]).train()
        return made.to(device_of(config["target"])).to(memory_format=layout)

    layout = torch.channels_last if training["channels_last"] else torch.preserve_format
    if not _is_simulated(config["target"]):
        model()
    return TrainingStep(make_model=model, loss_fn=_loss_fn(card, config), batch=example_batch(card, config), seed=training["seed"],
                        make_optimizer=lambda: _make_optimizer(model(), training), classes=_classes(config["model_options"]))


def _make_optimizer(model: torch.nn.Module, training: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    kind, parameters = training["optimizer"], list(model.parameters())
    rates = {"lr": training["lr"], "weight_decay": training["weight_decay"]}
    if kind == "none":
        return None
    if kind == "sgd":
        return torch.optim.SGD(parameters, momentum=training["momentum"], **rates)
    if kind == "adam":
        return torch.optim.Adam(parameters, **rates)
    if kind == "adamw":
        return torch.optim.AdamW(parameters, **rates)
    raise WorkflowError(f"optimizer {kind!r} is unknown; there are sgd, adam, adamw, none")


@torch.no_grad()
def accuracy(model: torch.nn.Module, batches: Iterable[Batch]) -> float | None:
    """Share of images that the model classes rightly, in evaluation mode; None without a test set.

    Every module's mode is put back, and evaluation changes neither buffers nor generators.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    right = total = 0
    for images, labels in batches:
        right += int((model(images).argmax(dim=1) == labels).sum())
        total += len(labels)
    for module, mode in modes:
        module.training = mode
    return right / total if total else None
