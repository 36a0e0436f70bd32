"""What a task is, and the order in which its samples are met."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Task:
    """One task: `train` and `test` are (inputs, labels); `classes` are its own logits, None for all."""

    id: int | str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[int, ...] | None = None


Benchmark = Sequence[Task]


def order(task_id: int | str, samples: int, batch_size: int, steps: int, seed: int) -> Tensor:
    """The samples of every training step, int64 (steps, batch_size), a function of (seed, task).

    Every sample is met once before any is met again; each pass is shuffled anew. A batch at the end of a pass
    is filled up from the next one, so all have the same size.

    >>> order(task_id=0, samples=4, batch_size=2, steps=4, seed=0)
    tensor([[0, 2],
            [3, 1],
            [2, 0],
            [1, 3]])
    """
    if not 1 <= batch_size <= samples:
        raise ValueError(f"batch_size={batch_size}: task {task_id!r} has {samples} samples, give 1 to {samples}")
    shuffle = generator(seed, task_id, "order")
    passes = [shuffle.permutation(samples) for _ in range(-(-steps * batch_size // samples))]
    indices = np.concatenate([np.empty(0, dtype=np.int64), *passes])
    return torch.from_numpy(indices[: steps * batch_size]).view(steps, batch_size)


def batches(task: Task, *, batch_size: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches of the task's training samples, in `order`.

    >>> from rgo.benchmarks import permuted_mnist
    >>> x, y = next(batches(permuted_mnist()[0], batch_size=10, steps=1000, seed=0))
    >>> x.shape, y.shape
    (torch.Size([10, 784]), torch.Size([10]))
    """
    x, y = task.train
    for chosen in order(task.id, len(x), batch_size, steps, seed):
        yield x[chosen], y[chosen]


class Lazy(Sequence[Task]):
    """Tasks built when asked for: twenty tasks of MNIST would be 1.3 GB."""

    def __init__(self, build: Callable[[int], Task], ids: range) -> None:
        self._build, self._ids = build, ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Benchmark: ...
    def __getitem__(self, index: int | slice) -> Task | Benchmark:
        if isinstance(index, slice):
            return Lazy(self._build, self._ids[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}: tasks are counted from 0")
        return self._build(self._ids[index])

    def __iter__(self) -> Iterator[Task]:  # Sequence's own would take an IndexError inside build for the end
        return map(self._build, self._ids)


def generator(seed: int, task: int | str, purpose: str) -> np.random.RandomState:
    """A RandomState, not the newer Generator: numpy promises never to change its numbers."""
    digest = hashlib.sha256(f"{seed}/{task!r}/{purpose}".encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4"))
