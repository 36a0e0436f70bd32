"""Permuted MNIST and Rotated MNIST, by the protocol of the paper's Table 1, and a tiny relative of theirs for tests.

Inputs are pixel / 255, flattened to 784 and nothing else. Each task takes 10,000 random images out of the
first 55,000 training images, and all 10,000 test images. One 10-way head is shared by the tasks.
"""

import math
import random
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rgo.benchmarks.task import Benchmark, Lazy, Task, generator
from rgo.data import MNIST, mnist

_TRAINING_IMAGES = 55_000  # the first; the protocol leaves the other 5,000 aside for validation
_SIDE = 28


def permuted_mnist(tasks: int = 20, seed: int = 0, samples: int = 10_000) -> Benchmark:
    """MNIST, each task (the first too) with a pixel permutation of its own.

    >>> task = permuted_mnist(tasks=5)[3]
    >>> task.train[0].shape, task.test[0].shape
    (torch.Size([10000, 784]), torch.Size([10000, 784]))
    """
    _check(tasks, samples)
    everywhere = np.ones(_SIDE * _SIDE, dtype=bool)

    def build(k: int) -> Task:
        return _mnist_task(k, generator(seed, k, "pixels").permutation(_SIDE * _SIDE), everywhere, seed, samples)

    return Lazy(build, range(tasks))


def rotated_mnist(
    tasks: int = 20, seed: int = 0, samples: int = 10_000, angles: Sequence[float] | None = None
) -> Benchmark:
    """MNIST, task k rotated by `angles[k]` degrees; without `angles`, by `rotation_angles(tasks)`.

    Counter-clockwise about the centre of the image, nearest neighbour, zeros from outside. It is always the
    original image that is rotated.

    >>> upright, upside_down = rotated_mnist(tasks=2, angles=[0, 180])
    >>> torch.equal(upright.test[0].flip(1), upside_down.test[0])
    True
    """
    _check(tasks, samples)
    degrees = rotation_angles(tasks) if angles is None else tuple(angles)
    if len(degrees) != tasks:
        raise ValueError(f"{len(degrees)} angles for {tasks} tasks: give one angle per task (tasks={len(degrees)})")

    def build(k: int) -> Task:
        return _mnist_task(k, *_rotation(degrees[k]), seed, samples)

    return Lazy(build, range(tasks))


def rotation_angles(tasks: int = 20) -> tuple[float, ...]:
    """The angles of Rotated MNIST in degrees: one per bin of 180 / tasks, ascending, the same for every seed.

    >>> [round(angle, 2) for angle in rotation_angles()[:4]]
    [7.6, 17.7, 20.5, 35.51]
    """
    width = 180 / tasks
    return tuple(random.Random(1234 * k).uniform(width * k, width * (k + 1)) for k in range(tasks))


def digits(
    tasks: int = 5,
    seed: int = 0,
    *,
    kind: Literal["split", "permuted"] = "split",
    side: Literal[8, 14] = 14,
    samples: int = 1000,
    test_samples: int = 500,
) -> Benchmark:
    """MNIST made small, for tests and first tries: `side` x `side` pixels, flattened, trained in about a second.

    "split" has two classes per task, in an order that depends on the seed, at most five tasks; "permuted" has all
    ten classes and a pixel permutation per task.

    >>> task = digits()[1]
    >>> task.train[0].shape, task.test[0].shape, len(task.classes)
    (torch.Size([1000, 196]), torch.Size([500, 196]), 2)
    """
    if kind not in ("split", "permuted"):
        raise ValueError(f"kind={kind!r} is unknown: give 'split' or 'permuted'")
    if side not in (8, 14):
        raise ValueError(f"side={side} pixels: give 8 or 14")
    if tasks < 1 or (kind == "split" and tasks > 5):
        raise ValueError(f"tasks={tasks}: give at least 1 and, with two of the ten digits in each, at most 5")
    # The rarest two digits together are 9,000 of the training images and 1,850 of the test images.
    if not (1 <= samples <= 9000 and 1 <= test_samples <= 1800):
        expected = "give samples from 1 to 9000 and test_samples from 1 to 1800"
        raise ValueError(f"samples={samples}, test_samples={test_samples}: {expected}")
    order = generator(seed, "all", "classes").permutation(10)

    def build(k: int) -> Task:
        small = _small_mnist(side)
        classes = tuple(sorted(order[2 * k : 2 * k + 2].tolist())) if kind == "split" else None
        pixels = torch.arange(side**2)
        if classes is None:
            pixels = torch.from_numpy(generator(seed, k, "pixels").permutation(side**2))

        def part(images: Tensor, labels: Tensor, count: int, purpose: str) -> tuple[Tensor, Tensor]:
            drawn = torch.from_numpy(generator(seed, k, purpose).permutation(len(images)))
            if classes is not None:
                drawn = drawn[torch.isin(labels[drawn], torch.tensor(classes))]
            return images[drawn[:count]][:, pixels], labels[drawn[:count]]

        train = part(small.train_images[:_TRAINING_IMAGES], small.train_labels, samples, "samples")
        return Task(k, train, part(small.test_images, small.test_labels, test_samples, "test samples"), classes)

    return Lazy(build, range(tasks))


def _mnist_task(k: int, source: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_], seed: int, samples: int) -> Task:
    """The task whose pixel i is the original's pixel source[i] where inside[i], and zero elsewhere."""
    digits = mnist()

    def inputs(images: Tensor) -> Tensor:
        # numpy's take is several times faster here than indexing in torch
        pixels = images.flatten(1).numpy().take(source, axis=1) * inside
        return torch.from_numpy(pixels).float().div_(255)

    drawn = torch.from_numpy(generator(seed, k, "samples").permutation(_TRAINING_IMAGES)[:samples])
    train = inputs(digits.train_images[drawn]), digits.train_labels[drawn]
    return Task(k, train, (inputs(digits.test_images), digits.test_labels))


def _rotation(degrees: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """For each pixel of a rotated image, the pixel of the original it shows, and whether there is one."""
    turn = math.radians(degrees)
    row, column = np.divmod(np.arange(_SIDE * _SIDE), _SIDE)
    x, y = column - (_SIDE - 1) / 2, row - (_SIDE - 1) / 2  # from the image's centre; y points down
    source_column = np.rint(x * math.cos(turn) - y * math.sin(turn) + (_SIDE - 1) / 2).astype(np.int64)
    source_row = np.rint(x * math.sin(turn) + y * math.cos(turn) + (_SIDE - 1) / 2).astype(np.int64)
    inside = (source_row >= 0) & (source_row < _SIDE) & (source_column >= 0) & (source_column < _SIDE)
    return np.where(inside, source_row * _SIDE + source_column, 0), inside


def _check(tasks: int, samples: int) -> None:
    if tasks < 1:
        raise ValueError(f"tasks={tasks}: a stream has at least one task")
    if not 1 <= samples <= _TRAINING_IMAGES:
        raise ValueError(f"samples={samples}: each task draws 1 to {_TRAINING_IMAGES} of MNIST's training images")


@cache
def _small_mnist(side: int) -> MNIST:
    """MNIST averaged over squares of pixels, flattened, from 0 to 1."""

    def shrink(images: Tensor) -> Tensor:
        # Digits lie within the inner 20 x 20 pixels, give or take: for 8 x 8, the outer two rows are left out.
        inner = images if side == 14 else images[:, 2:-2, 2:-2]
        square = inner.shape[1] // side
        sums = inner.to(torch.int32).reshape(-1, side, square, side, square).sum((2, 4))
        return sums.flatten(1).float().div_(255 * square**2)

    digits = mnist()
    return digits._replace(train_images=shrink(digits.train_images), test_images=shrink(digits.test_images))
