"""Batches. The oracles are scikit-learn's own arrays, images painted here, and statistics done by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from vramlab import data
from vramlab.data import IGNORED, Sample, Target
from vramlab.errors import WorkflowError

IMAGES = Sample(target=Target.CLASS, classes=10, channels=3, image_size=8)
PIXELS = Sample(target=Target.PIXELS, classes=4, channels=1, image_size=8)
MASKED = Sample(target=Target.MASKED, classes=50, sequence_length=40)
NEXT = Sample(target=Target.NEXT, classes=50, sequence_length=40)
ALL = pytest.mark.parametrize("sample", [IMAGES, PIXELS, MASKED, NEXT], ids=lambda s: str(s.target))


def equal(a: data.Batch, b: data.Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------ synthetic


@ALL
def test_synthetic_batches_follow_from_the_seed_alone(sample):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = data.synthetic(sample, 3, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert equal(first, data.synthetic(sample, 3, seed=1))
    assert not equal(first, data.synthetic(sample, 3, seed=2))
    assert all(tensor.is_contiguous() for tensor in first)

    source = data.open_data("synthetic", sample, seed=1)
    batches = list(source.batches(3, 4))
    assert equal(first, batches[0])
    assert not any(equal(a, b) for a, b in itertools.combinations(batches, 2))
    assert list(source.test_batches(3)) == []


@ALL
def test_synthetic_labels_lie_within_the_classes(sample):
    *inputs, labels = data.synthetic(sample, 64, seed=1)
    kept = labels[labels != IGNORED]
    assert kept.min() >= 0 and kept.max() < sample.classes
    assert kept.unique().numel() >= sample.classes - 1  # the mask token is nobody's label
    if not inputs[0].is_floating_point():
        assert inputs[0].min() >= 0 and inputs[0].max() < sample.classes


def test_shapes():
    assert [tuple(t.shape) for t in data.synthetic(IMAGES, 5, 0)] == [(5, 3, 8, 8), (5,)]
    assert [tuple(t.shape) for t in data.synthetic(PIXELS, 5, 0)] == [(5, 1, 8, 8), (5, 8, 8)]
    assert [tuple(t.shape) for t in data.synthetic(MASKED, 5, 0)] == [(5, 40), (5, 40), (5, 40)]
    assert [tuple(t.shape) for t in data.synthetic(NEXT, 5, 0)] == [(5, 40), (5, 40)]


def test_synthetic_images_are_standard_normal():
    images, _ = data.synthetic(Sample(target=Target.CLASS, classes=2, channels=3, image_size=64), 16, 0)
    assert abs(images.mean()) < 0.01 and abs(images.std() - 1) < 0.01


def test_the_next_token_is_the_label():
    tokens, labels = data.synthetic(NEXT, 5, 0)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_fifteen_percent_of_the_tokens_are_masked():
    tokens, segments, labels = data.synthetic(MASKED, 5, 0)
    is_masked = labels != IGNORED
    assert is_masked.sum(dim=1).tolist() == [6] * 5  # 15 % of 40
    assert (tokens[is_masked] == 49).all() and (tokens[~is_masked] < 49).all()
    assert segments.tolist() == [[0] * 20 + [1] * 20] * 5


def test_even_the_shortest_sequence_has_a_masked_token():
    *_, labels = data.synthetic(Sample(target=Target.MASKED, classes=5, sequence_length=2), 9, 0)
    assert ((labels != IGNORED).sum(dim=1) == 1).all()


# ------------------------------------------------------------------------------------------------ digits


def all_test(source: data.Data) -> data.Batch:
    return tuple(torch.cat(parts) for parts in zip(*source.test_batches(100), strict=True))


def epoch(source: data.Data, batch_size: int, steps: int, skip: int = 0) -> data.Batch:
    batches = itertools.islice(source.batches(batch_size, skip + steps), skip, None)
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def numbers_of(batch: data.Batch) -> list[int]:
    """Which of scikit-learn's samples these are: an affine map of the pixels is undone, then rows are looked up."""
    found = load_digits()
    order = {row.astype(int).tobytes(): i for i, row in enumerate(found.data)}
    images, labels = batch
    grey = images[:, 0]
    step = (grey.max() - grey.min()) / 16
    pixels = ((grey - grey.min()) / step).round().to(torch.int64).numpy()
    numbers = [order[row.tobytes()] for row in pixels.reshape(len(pixels), -1)]
    assert labels.tolist() == found.target[numbers].tolist()
    return numbers


def test_digits_are_all_of_scikit_learns_samples_once():
    source = data.open_data("digits", IMAGES, seed=3)
    train, test = numbers_of(epoch(source, 1, 1438)), numbers_of(all_test(source))
    assert len(test) == 359 and sorted(train + test) == list(range(1797))
    assert train != sorted(train) and test != sorted(test)


def test_digits_are_normalised_and_repeated_over_the_channels():
    images, _ = epoch(data.open_data("digits", IMAGES, seed=3), 1, 1438)
    assert images.shape == (1438, 3, 8, 8) and images.is_contiguous()
    assert abs(images.mean()) < 1e-5 and abs(images.std() - 1) < 1e-5
    assert torch.equal(images[:, 0], images[:, 1]) and torch.equal(images[:, 0], images[:, 2])


def test_digits_of_another_size_are_the_same_pictures():
    small, large = (data.open_data("digits", Sample(target=Target.CLASS, classes=10, channels=1, image_size=size), 3) for size in (8, 32))
    a, b = all_test(small), all_test(large)
    assert b[0].shape == (359, 1, 32, 32) and torch.equal(a[1], b[1])
    # Bilinear at factor 4 with pixel centres: sample 4i + 1 lies 1/8 of a pixel before centre i, so the mean of 4i + 1 and 4i + 2
    # is 7/8 of pixel i and 1/16 of each neighbour, in each direction.
    kernel = torch.tensor([1 / 16, 7 / 8, 1 / 16])
    expected = torch.nn.functional.conv2d(a[0], (kernel[:, None] * kernel)[None, None])
    middle = b[0][:, :, 4:-4, 4:-4].unflatten(2, (6, 4)).unflatten(4, (6, 4))[:, :, :, 1:3, :, 1:3].mean(dim=(3, 5))
    torch.testing.assert_close(middle, expected)


def test_digits_follow_from_the_seed():
    first, again, other = (data.open_data("digits", IMAGES, seed=seed) for seed in (3, 3, 4))
    assert all(equal(a, b) for a, b in zip(first.batches(64, 30), again.batches(64, 30), strict=True))
    assert numbers_of(all_test(first)) == numbers_of(all_test(again)) != numbers_of(all_test(other))


def test_each_epoch_has_an_order_of_its_own():
    source = data.open_data("digits", IMAGES, seed=3)
    steps = 1438 // 64  # 30 samples do not fill a batch and are left out, others each time
    first, second = (numbers_of(epoch(source, 64, steps, skip)) for skip in (0, steps))
    for numbers in (first, second):
        assert len(set(numbers)) == len(numbers) == steps * 64
    assert first != second and set(first) != set(second)
    assert not set(first) & set(numbers_of(all_test(source)))


def test_labels_belong_to_their_images():
    """The nearest class mean, computed here, reads most of the test digits: images and labels are not shuffled apart."""
    source = data.open_data("digits", IMAGES, seed=3)
    (images, labels), (test_images, test_labels) = epoch(source, 1, 1438), all_test(source)
    means = torch.stack([images[labels == digit].mean(dim=0).flatten() for digit in range(10)])
    right = torch.cdist(test_images.flatten(1), means).argmin(dim=1) == test_labels
    assert right.float().mean() > 0.85


# ------------------------------------------------------------------------------------------------ image folders


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 12)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), colour, np.uint8)).save(path)


def folder(root: Path, images: int = 5) -> Path:
    """Two classes; the red channel of each image is its number, the green one its class."""
    for i in range(images):
        paint(root / "cat" / f"{i}.png", (10 * i, 0, 0))
        paint(root / "dog" / f"{i}.png", (10 * i, 255, 0))
    return root


TWO = Sample(target=Target.CLASS, classes=2, channels=3, image_size=8)


def colours(batch: data.Batch) -> list[tuple[int, int]]:
    """(number, label) of each image; ImageNet's normalisation undone by hand, green checked against the label."""
    images, labels = batch
    assert images.shape[1:] == (3, 8, 8)
    red = (images[:, 0] * 0.229 + 0.485) * 255
    green = (images[:, 1] * 0.224 + 0.456) * 255
    assert (green.amin(dim=(1, 2)).round() == 255 * labels).all()
    assert torch.allclose(red, red[:, :1, :1].expand_as(red), atol=1e-3)
    return list(zip((red[:, 0, 0] / 10).round().int().tolist(), labels.tolist(), strict=True))


def test_an_image_folder_is_split_by_the_seed(tmp_path):
    name = f"imagefolder:{folder(tmp_path)}"
    source = data.open_data(name, TWO, seed=1)
    train, test = colours(epoch(source, 4, 2)), colours(all_test(source))
    assert len(test) == 2 and sorted(train + test) == [(i, label) for i in range(5) for label in range(2)]
    again = data.open_data(name, TWO, seed=1)
    assert colours(epoch(again, 4, 2)) == train and colours(all_test(again)) == test
    assert any(colours(epoch(data.open_data(name, TWO, seed=s), 4, 2)) != train for s in (2, 3))


def test_an_imagenet_style_folder_brings_its_test_set(tmp_path):
    folder(tmp_path / "train", images=4), folder(tmp_path / "val", images=2)
    source = data.open_data(f"imagefolder:{tmp_path}", TWO, seed=1)
    assert sorted(colours(epoch(source, 8, 1))) == [(i, label) for i in range(4) for label in range(2)]
    assert colours(all_test(source)) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert next(source.batches(8, 1))[0].dtype == torch.float32


def test_a_folder_without_val_has_no_test_set(tmp_path):
    folder(tmp_path / "train")
    source = data.open_data(f"imagefolder:{tmp_path}", TWO, seed=1)
    assert list(source.test_batches(4)) == [] and len(colours(epoch(source, 10, 1))) == 10


def test_a_folder_below_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder(tmp_path / "pictures")
    assert next(data.open_data("imagefolder:~/pictures", TWO, seed=1).batches(4, 1))[1].shape == (4,)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", ["mnist", "imagefolder", "imagefolder:", "digits:x", ""])
def test_unknown_data(name):
    with pytest.raises(WorkflowError, match="is unknown; write synthetic, digits or imagefolder:PATH"):
        data.open_data(name, IMAGES, seed=1)


@pytest.mark.parametrize("sample", [PIXELS, MASKED, NEXT], ids=lambda s: str(s.target))
@pytest.mark.parametrize("name", ["digits", "imagefolder:somewhere"])
def test_labels_of_another_kind(name, sample):
    with pytest.raises(WorkflowError, match="which this model does not learn; write synthetic"):
        data.open_data(name, sample, seed=1)


def test_too_few_outputs_for_the_digits():
    with pytest.raises(WorkflowError, match="data 'digits' has 10 classes and the model 9; write classes: 10"):
        data.open_data("digits", Sample(target=Target.CLASS, classes=9, channels=3, image_size=8), seed=1)


def test_a_batch_larger_than_the_data():
    with pytest.raises(WorkflowError, match="batch size 1439 is above the 1438 training samples"):
        data.open_data("digits", IMAGES, seed=1).batches(1439, 1)


def refusal(path: Path, sample: Sample = TWO) -> str:
    with pytest.raises(WorkflowError) as caught:
        data.open_data(f"imagefolder:{path}", sample, seed=1)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_folders_that_are_none(tmp_path):
    assert "there is no such directory" in refusal(tmp_path / "nowhere")
    assert "must hold one folder of images a class" in refusal(tmp_path)
    (tmp_path / "cat").mkdir()
    assert "must hold one folder of images a class" in refusal(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    assert "cat" in refusal(tmp_path)


@pytest.mark.parametrize("classes", [3, 1000])
def test_fewer_classes_than_outputs(tmp_path, classes):
    sample = Sample(target=Target.CLASS, classes=classes, channels=3, image_size=8)
    assert f"it has 2 classes and the model {classes}; write classes: 2" in refusal(folder(tmp_path), sample)


def test_more_classes_than_outputs(tmp_path):
    paint(folder(tmp_path) / "bird" / "0.png", (0, 0, 0))
    assert "it has 3 classes and the model 2; write classes: 3" in refusal(tmp_path)


def test_train_and_val_of_different_classes(tmp_path):
    folder(tmp_path / "train"), folder(tmp_path / "val")
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "wolf")
    assert "train/ and val/ hold different classes" in refusal(tmp_path)


def test_a_model_of_grey_images(tmp_path):
    assert "the model reads 1 channels" in refusal(folder(tmp_path), Sample(target=Target.CLASS, classes=2, channels=1, image_size=8))


def test_a_file_that_is_no_image_is_named(tmp_path):
    folder(tmp_path / "train")
    broken = tmp_path / "train" / "cat" / "9.png"
    broken.write_bytes(b"no image")
    source = data.open_data(f"imagefolder:{tmp_path}", TWO, seed=1)
    with pytest.raises(WorkflowError, match=str(broken)):
        list(source.batches(11, 1))
