"""Split CIFAR-100 and Split miniImageNet: twenty tasks of five classes, by the protocol of the paper's Table 1.

A task has all the pictures of its classes: 2,500 train and 500 test. Labels stay 0 to 99: there is one head of 100
logits, and `Task.classes` are the five that belong to the task, in training and in testing.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from rgo.benchmarks.task import Benchmark, Lazy, Task, generator
from rgo.data import CIFAR100, MiniImageNet, cifar100, miniimagenet
from rgo.data.files import Folder

_CLASSES = 100
_SCALINGS = ("mean-image", "channel", "standard", "unit", "bgr")
_BGR = (0.406, 0.456, 0.485), (0.225, 0.224, 0.229)

ClassOrder = Literal["seed", "ordered"] | Sequence[int]
_Load = Callable[[Folder | None], CIFAR100 | MiniImageNet]


def split_cifar100(
    tasks: int = 20,
    seed: int = 0,
    *,
    classes_per_task: int = 5,
    class_order: ClassOrder = "seed",
    normalise: str = "mean-image",
    folder: Folder | None = None,
) -> Benchmark:
    """CIFAR-100, five classes after another; inputs float32 (N, 3, 32, 32).

    Args:
        tasks: a shorter stream is the beginning of the longer one.
        seed: makes the order of the classes.
        classes_per_task: with `tasks`, at most 100 classes in all.
        class_order: "seed" (a permutation by the seed), "ordered" (0, 1, 2, ...) or the classes themselves.
        normalise: what is done to pixel / 255, always with the numbers of the whole training set: "mean-image"
            (minus the mean picture), "standard" (that, and divided by the one standard deviation that is left),
            "channel" (minus the mean and divided by the standard deviation of each channel) or "unit" (nothing).
        folder: where the files are; see `rgo.data.cifar100`.

    >>> tasks = split_cifar100(seed=3)
    >>> len(tasks), tasks[0].classes                        # doctest: +SKIP
    (20, (6, 32, 45, 66, 81))
    """
    return _split(cifar100, tasks, seed, classes_per_task, class_order, normalise, _SCALINGS[:-1], folder)


def split_miniimagenet(
    tasks: int = 20,
    seed: int = 0,
    *,
    classes_per_task: int = 5,
    class_order: ClassOrder = "seed",
    normalise: str = "bgr",
    folder: Folder | None = None,
) -> Benchmark:
    """miniImageNet, five classes after another; inputs float32 (N, 3, 84, 84).

    Arguments as in `split_cifar100`, and normalise="bgr", the default: channels in the order blue, green, red, minus
    (0.406, 0.456, 0.485), divided by (0.225, 0.224, 0.229). A task is 250 MB: keep one at a time.

    >>> len(split_miniimagenet(tasks=17))
    17
    """
    return _split(miniimagenet, tasks, seed, classes_per_task, class_order, normalise, _SCALINGS, folder)


def _split(
    load: _Load,
    tasks: int,
    seed: int,
    classes_per_task: int,
    class_order: ClassOrder,
    normalise: str,
    scalings: tuple[str, ...],
    folder: Folder | None,
) -> Benchmark:
    if tasks < 1 or classes_per_task < 1 or tasks * classes_per_task > _CLASSES:
        expected = f"give at least one of each and at most {_CLASSES} classes in all"
        raise ValueError(f"tasks={tasks} of classes_per_task={classes_per_task}: {expected}")
    if normalise not in scalings:
        raise ValueError(f"normalise={normalise!r} is unknown: give one of {', '.join(map(repr, scalings))}")
    order = _order(class_order, seed, tasks * classes_per_task)

    def build(k: int) -> Task:
        data = load(folder)
        classes = tuple(sorted(order[k * classes_per_task : (k + 1) * classes_per_task]))
        mean, deviation = _scaling(data, normalise)

        def part(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            chosen = torch.isin(labels, torch.tensor(classes)).nonzero().squeeze(1)
            x = images[chosen]
            x = x.flip(1) if normalise == "bgr" else x
            x = x.to(torch.float32, memory_format=torch.contiguous_format)
            return x.div_(255).sub_(mean).div_(deviation), labels[chosen]

        train, test = part(data.train_images, data.train_labels), part(data.test_images, data.test_labels)
        return Task(k, train, test, classes)

    return Lazy(build, range(tasks))


def _order(class_order: ClassOrder, seed: int, needed: int) -> list[int]:
    if isinstance(class_order, str):
        if class_order == "seed":
            return [int(label) for label in generator(seed, "all", "classes").permutation(_CLASSES)]
        if class_order == "ordered":
            return list(range(_CLASSES))
        raise ValueError(f"class_order={class_order!r} is unknown: give 'seed', 'ordered' or a list of classes")
    order = [int(label) for label in class_order]
    if len(order) < needed or len(set(order)) < len(order) or not set(order) <= set(range(_CLASSES)):
        given = f"{len(order)} classes, {len(set(order))} different ({order})"
        raise ValueError(f"class_order: {given}; give at least {needed} different ones from 0 to {_CLASSES - 1}")
    return order


@cache
def _scaling(data: CIFAR100 | MiniImageNet, normalise: str) -> tuple[Tensor, Tensor]:
    """What is subtracted from pixel / 255 and what it is then divided by."""
    if normalise == "unit":
        return torch.zeros(1), torch.ones(1)
    if normalise == "bgr":
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in _BGR)
        return mean, deviation
    # Sums of integers: exact, so the same in any order, on any machine. Those of 250 squares fit float32's 24 bits.
    images = data.train_images
    shape = images.shape[1:]
    total, squares = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for chunk in images.split(250):
        pixels = chunk.float()
        total += pixels.sum(0)
        if normalise != "mean-image":
            squares += pixels.square_().sum(0)
    first, second = total / len(images) / 255, squares / len(images) / 255**2
    if normalise == "mean-image":
        return first.float(), torch.ones(1)
    if normalise == "channel":
        mean = first.mean((1, 2), keepdim=True)
        return mean.float(), (second.mean((1, 2), keepdim=True) - mean**2).sqrt().float()
    return first.float(), (second - first**2).mean().sqrt().float()
