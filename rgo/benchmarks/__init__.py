"""Task streams: the paper's four protocols, a tiny one for tests, and streams of the user's own.

Whatever is random depends on (seed, task) and on what it is for, and never on the global generators: a task
is the same in every process, whichever other tasks were built before it.
"""

from collections.abc import Callable
from typing import Any

from rgo.benchmarks.mnist import digits, permuted_mnist, rotated_mnist, rotation_angles
from rgo.benchmarks.split import split_cifar100, split_miniimagenet
from rgo.benchmarks.task import Benchmark, Task, batches, order
from rgo.benchmarks.user import folders, stream

BENCHMARKS: dict[str, Callable[..., Benchmark]] = {
    "permuted-mnist": permuted_mnist,
    "rotated-mnist": rotated_mnist,
    "split-cifar100": split_cifar100,
    "split-miniimagenet": split_miniimagenet,
    "digits": digits,
}

_MLP = {"model": "mlp", "arguments": {}, "steps": 1000, "batch_size": 10, "lr": 0.1}
_RESNET = {"model": "resnet18", "arguments": {"classes": 100}, "steps": 2000, "batch_size": 10, "lr": 0.03}

# How the paper trains on each (Table 1): the model of rgo.models with its arguments, and a task's training.
PROTOCOLS: dict[str, dict[str, Any]] = {
    "permuted-mnist": _MLP,
    "rotated-mnist": _MLP,
    "split-cifar100": _RESNET,
    "split-miniimagenet": _RESNET | {"arguments": {"classes": 100, "image": 84}},
    "digits": _MLP | {"arguments": {"inputs": 196, "hidden": (64, 64)}, "steps": 100},
}

__all__ = [
    "BENCHMARKS",
    "PROTOCOLS",
    "Benchmark",
    "Task",
    "batches",
    "digits",
    "folders",
    "order",
    "permuted_mnist",
    "rotated_mnist",
    "rotation_angles",
    "split_cifar100",
    "split_miniimagenet",
    "stream",
]
