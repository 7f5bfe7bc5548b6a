"""Batches for a training step: synthetic ones, scikit-learn's handwritten digits, and ImageNet-style folders.

Everything follows from a seed, is made on the CPU, and leaves torch's global generators alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Callable, Iterator, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from vramlab.errors import WorkflowError

Batch: TypeAlias = tuple[torch.Tensor, ...]

IGNORED = -100  # label of a position that the loss leaves out: cross_entropy's default ignore_index
TEST_SHARE = 0.2
MASKED_SHARE = 0.15  # of BERT's tokens, after its paper
# Mean and deviation of ImageNet's training pixels in [0, 1], the values that torchvision's reference training uses.
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_SHARE = 0.875  # a 224 px crop of an image resized to 256 px


class Target(StrEnum):
    """What a model is asked for."""

    CLASS = "class"  # image (N, C, H, W) float32 -> one class an image (N,)
    PIXELS = "pixels"  # image (N, C, H, W) float32 -> one class a pixel (N, H, W)
    MASKED = "masked"  # tokens and segments (N, L) -> the token at masked positions (N, L), IGNORED elsewhere
    NEXT = "next"  # tokens (N, L) -> the next token at every position (N, L)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one sample of a model looks like."""

    target: Target
    classes: int  # or vocabulary
    channels: int = 0
    image_size: int = 0  # pixels, height and, unless image_width says another, width
    image_width: int | None = None
    sequence_length: int = 0  # tokens

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image."""
        return self.image_size, self.image_width or self.image_size


class Data(Protocol):
    """A source of batches."""

    def batches(self, batch_size: int, steps: int) -> Iterator[Batch]:
        """`steps` training batches of equal size, the same ones for the same seed."""
        ...

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """The test set once, in a fixed order; the last batch may be smaller. Empty where there is no test set."""
        ...


def open_data(name: str, sample: Sample, seed: int) -> Data:
    """`synthetic`, `digits` or `imagefolder:PATH`. WorkflowError names what does not fit the model or the disk."""
    kind, _, path = name.partition(":")
    if name == "synthetic":
        return SyntheticData(sample, seed)
    if name != "digits" and not (kind == "imagefolder" and path):
        raise WorkflowError(f"data {name!r} is unknown; write synthetic, digits or imagefolder:PATH")
    if sample.target != Target.CLASS:
        raise WorkflowError(f"data {name!r} has one class an image, which this model does not learn; write synthetic")
    return open_digits(sample, seed) if name == "digits" else open_image_folder(Path(path).expanduser(), sample, seed)


def synthetic(sample: Sample, batch_size: int, seed: int) -> Batch:
    """One batch: standard normal images or uniform tokens, with uniform labels."""
    generator = torch.Generator().manual_seed(seed)
    if sample.target in (Target.CLASS, Target.PIXELS):
        images = torch.randn((batch_size, sample.channels, *sample.size), generator=generator)
        labels = (batch_size, *sample.size) if sample.target == Target.PIXELS else (batch_size,)
        return images, torch.randint(sample.classes, labels, generator=generator)
    if sample.target == Target.NEXT:
        tokens = torch.randint(sample.classes, (batch_size, sample.sequence_length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return _masked(sample, batch_size, generator)


def _masked(sample: Sample, batch_size: int, generator: torch.Generator) -> Batch:
    """Two segments of one half each; a fixed number of random positions masked, so that no loss is over nothing."""
    shape = (batch_size, sample.sequence_length)
    mask_token = sample.classes - 1
    words = torch.randint(mask_token, shape, generator=generator)
    order = torch.rand(shape, generator=generator).argsort(dim=1)
    is_masked = order < max(1, round(MASKED_SHARE * sample.sequence_length))
    segments = (torch.arange(sample.sequence_length) >= sample.sequence_length // 2).long().repeat(batch_size, 1)
    return words.masked_fill(is_masked, mask_token), segments, words.masked_fill(~is_masked, IGNORED)


@dataclass(frozen=True)
class SyntheticData:
    """Endless random batches; nothing to be learned, so no test set."""

    sample: Sample
    seed: int

    def batches(self, batch_size: int, steps: int) -> Iterator[Batch]:
        """The first batch is `synthetic(sample, batch_size, seed)`."""
        return (synthetic(self.sample, batch_size, self.seed + step) for step in range(steps))

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """Empty."""
        return iter(())


@dataclass(frozen=True)
class IndexedData:
    """Samples by number: a training set shuffled anew for each epoch, and a test set."""

    load: Callable[[list[int]], Batch]
    train: tuple[int, ...]
    test: tuple[int, ...]
    seed: int

    def batches(self, batch_size: int, steps: int) -> Iterator[Batch]:
        """Epoch after epoch, each leaving out what does not fill a batch. WorkflowError when no batch can be filled."""
        if batch_size > len(self.train):
            raise WorkflowError(f"batch size {batch_size} is above the {len(self.train)} training samples that the data has")
        return (self.load(numbers) for numbers in self._numbers(batch_size, steps))

    def _numbers(self, batch_size: int, steps: int) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        per_epoch = len(self.train) // batch_size
        order: list[int] = []
        for step in range(steps):
            start = step % per_epoch * batch_size
            if start == 0:
                order = torch.randperm(len(self.train), generator=generator).tolist()
            yield [self.train[i] for i in order[start:start + batch_size]]

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """In the order of the split."""
        starts = range(0, len(self.test), batch_size)
        return (self.load(list(self.test[start:start + batch_size])) for start in starts)


def _split(samples: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shuffled numbers of the training and the test samples."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()
    tests = round(TEST_SHARE * samples)
    return tuple(order[tests:]), tuple(order[:tests])


def open_digits(sample: Sample, seed: int) -> IndexedData:
    """1,797 handwritten digits of 8x8 pixels, resized, with the mean and deviation of the training pixels taken out."""
    from sklearn.datasets import load_digits  # takes a second to import

    found = load_digits()
    labels = torch.from_numpy(found.target).long()
    kinds = int(labels.max()) + 1
    if sample.classes < kinds:
        raise WorkflowError(f"data 'digits' has {kinds} classes and the model {sample.classes}; write classes: {kinds}")
    train, test = _split(len(labels), seed)
    pixels = torch.from_numpy(found.images).float().unsqueeze(1)
    seen = pixels[list(train)]
    pixels = (pixels - seen.mean()) / seen.std()

    def load(numbers: list[int]) -> Batch:
        resized = F.interpolate(pixels[numbers], size=sample.size, mode="bilinear", align_corners=False)
        return resized.repeat(1, sample.channels, 1, 1), labels[numbers]

    return IndexedData(load, train, test, seed)


def open_image_folder(path: Path, sample: Sample, seed: int) -> IndexedData:
    """`PATH/train/CLASS/*.jpg` with `PATH/val/CLASS/*.jpg` as test set, or `PATH/CLASS/*.jpg`, split by the seed.

    Images are resized, centre-cropped and normalised; there is no random augmentation, so that a step can be repeated.
    """
    name = f"data 'imagefolder:{path}'"
    if not path.is_dir():
        raise WorkflowError(f"{name}: there is no such directory")
    has_train = (path / "train").is_dir()
    train_set = _image_folder(path / "train" if has_train else path, sample, name)
    if len(train_set.classes) != sample.classes:
        count = len(train_set.classes)
        raise WorkflowError(f"{name}: it has {count} classes and the model {sample.classes}; write classes: {count}")
    if not has_train:
        return IndexedData(_loader([train_set]), *_split(len(train_set), seed), seed)
    if not (path / "val").is_dir():
        return IndexedData(_loader([train_set]), tuple(range(len(train_set))), (), seed)
    test_set = _image_folder(path / "val", sample, name)
    if test_set.classes != train_set.classes:
        raise WorkflowError(f"{name}: train/ and val/ hold different classes")
    total = len(train_set) + len(test_set)
    return IndexedData(_loader([train_set, test_set]), tuple(range(len(train_set))), tuple(range(len(train_set), total)), seed)


def _image_folder(path: Path, sample: Sample, name: str) -> Any:
    from torchvision import datasets, transforms

    if sample.channels != len(IMAGENET_MEAN):
        raise WorkflowError(f"{name}: colour images, but the model reads {sample.channels} channels")
    steps = transforms.Compose([
        transforms.Resize(round(sample.image_size / CROP_SHARE)), transforms.CenterCrop(sample.size),
        transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_DEVIATION)])
    try:
        return datasets.ImageFolder(str(path), transform=steps, loader=_read_image)
    except FileNotFoundError as error:  # no class folder, or one without an image
        raise WorkflowError(f"{name}: {path} must hold one folder of images a class: {error}") from error


def _read_image(path: str) -> Any:
    from torchvision.datasets.folder import default_loader

    try:
        return default_loader(path)
    except OSError as error:  # Pillow's error on a broken or foreign file
        raise WorkflowError(f"{path} cannot be read as an image: {error}") from error


def _loader(parts: list[Any]) -> Callable[[list[int]], Batch]:
    images = torch.utils.data.ConcatDataset(parts)

    def load(numbers: list[int]) -> Batch:
        pixels, labels = zip(*(images[i] for i in numbers), strict=True)
        return torch.stack(pixels), torch.tensor(labels)

    return load
