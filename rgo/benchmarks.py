"""Task streams: Permuted MNIST and Rotated MNIST, by the protocol of the paper's Table 1.

Inputs are pixel / 255, flattened to 784 and nothing else. Each task takes 10,000 random images out of the
first 55,000 training images, and all 10,000 test images. One 10-way head is shared by the tasks.

Whatever is random depends on (seed, task) and on what it is for, and never on the global generators: a task
is the same in every process, whichever other tasks were built before it.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rgo.data import mnist

_TRAINING_IMAGES = 55_000  # the first; the protocol leaves the other 5,000 aside for validation
_SIDE = 28


@dataclass(frozen=True, eq=False)
class Task:
    """One task: `train` and `test` are (inputs, labels); `classes` are its own logits, None for all."""

    id: int | str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[int, ...] | None = None


def permuted_mnist(tasks: int = 20, seed: int = 0, samples: int = 10_000) -> Sequence[Task]:
    """MNIST, each task (the first too) with a pixel permutation of its own.

    >>> task = permuted_mnist(tasks=5)[3]
    >>> task.train[0].shape, task.test[0].shape
    (torch.Size([10000, 784]), torch.Size([10000, 784]))
    """
    _check(tasks, samples)
    everywhere = np.ones(_SIDE * _SIDE, dtype=bool)

    def build(k: int) -> Task:
        return _mnist_task(k, _generator(seed, k, "pixels").permutation(_SIDE * _SIDE), everywhere, seed, samples)

    return _Lazy(build, range(tasks))


def rotated_mnist(
    tasks: int = 20, seed: int = 0, samples: int = 10_000, angles: Sequence[float] | None = None
) -> Sequence[Task]:
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

    return _Lazy(build, range(tasks))


def rotation_angles(tasks: int = 20) -> tuple[float, ...]:
    """The angles of Rotated MNIST in degrees: one per bin of 180 / tasks, ascending, the same for every seed.

    >>> [round(angle, 2) for angle in rotation_angles()[:4]]
    [7.6, 17.7, 20.5, 35.51]
    """
    width = 180 / tasks
    return tuple(random.Random(1234 * k).uniform(width * k, width * (k + 1)) for k in range(tasks))


def batches(task: Task, *, batch_size: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches of the task's training samples, a function of (seed, task).

    Every sample is met once before any is met again; each pass is shuffled anew. A batch at the end of a pass
    is filled up from the next one, so all have the same size.

    >>> x, y = next(batches(permuted_mnist()[0], batch_size=10, steps=1000, seed=0))
    >>> x.shape, y.shape
    (torch.Size([10, 784]), torch.Size([10]))
    """
    x, y = task.train
    if not 1 <= batch_size <= len(x):
        raise ValueError(f"batch_size={batch_size}: task {task.id!r} has {len(x)} samples, give 1 to {len(x)}")
    shuffle = _generator(seed, task.id, "order")
    order = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        if len(order) < batch_size:
            order = np.concatenate([order, shuffle.permutation(len(x))])
        chosen, order = torch.from_numpy(order[:batch_size]), order[batch_size:]
        yield x[chosen], y[chosen]


class _Lazy(Sequence[Task]):
    """Tasks built when asked for: twenty tasks of MNIST would be 1.3 GB."""

    def __init__(self, build: Callable[[int], Task], ids: range) -> None:
        self._build, self._ids = build, ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return _Lazy(self._build, self._ids[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}: tasks are counted from 0")
        return self._build(self._ids[index])

    def __iter__(self) -> Iterator[Task]:  # Sequence's own would take an IndexError inside build for the end
        return map(self._build, self._ids)


def _mnist_task(k: int, source: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_], seed: int, samples: int) -> Task:
    """The task whose pixel i is the original's pixel source[i] where inside[i], and zero elsewhere."""
    digits = mnist()

    def inputs(images: Tensor) -> Tensor:
        # numpy's take is several times faster here than indexing in torch
        pixels = images.flatten(1).numpy().take(source, axis=1) * inside
        return torch.from_numpy(pixels).float().div_(255)

    drawn = torch.from_numpy(_generator(seed, k, "samples").permutation(_TRAINING_IMAGES)[:samples])
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


def _generator(seed: int, task: int | str, purpose: str) -> np.random.RandomState:
    """A RandomState, not the newer Generator: numpy promises never to change its numbers."""
    digest = hashlib.sha256(f"{seed}/{task!r}/{purpose}".encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4"))


def _check(tasks: int, samples: int) -> None:
    if tasks < 1:
        raise ValueError(f"tasks={tasks}: a stream has at least one task")
    if not 1 <= samples <= _TRAINING_IMAGES:
        raise ValueError(f"samples={samples}: each task draws 1 to {_TRAINING_IMAGES} of MNIST's training images")
