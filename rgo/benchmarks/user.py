"""Streams of the user's own: tensors, DataLoaders, or folders of pictures."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from rgo.benchmarks.task import Benchmark, Task, generator
from rgo.data.files import DataError, Folder
from rgo.data.images import pictures, read_image, subfolders

Samples = tuple[Tensor, Tensor]


def stream(items: Iterable[Any], ids: Sequence[int | str] | None = None, *, masked: bool | None = None) -> Benchmark:
    """A benchmark of your own data, read into memory and checked.

    Args:
        items: one per task: (X, y), or a DataLoader of (x, y) batches, or a tuple of two of those, the second for
            testing. Without it a task is tested on the data it was trained on. Labels are integers from 0, numbered
            for all tasks together.
        ids: the tasks' names; 0, 1, 2, ... by default.
        masked: whether a task chooses among its own classes only. By default it does when no two tasks share a class.

    >>> import torch, rgo
    >>> def task(first):
    ...     return torch.randn(20, 4), torch.randint(first, first + 2, (20,))
    >>> tasks = rgo.stream([(task(0), task(0)), (task(2), task(2))], ids=["animals", "tools"])
    >>> tasks[1].id, tasks[1].train[0].shape, tasks[1].classes
    ('tools', torch.Size([20, 4]), (2, 3))
    """
    items = list(items)
    names = list(range(len(items))) if ids is None else list(ids)
    if masked not in (None, True, False):
        raise ValueError(f"masked={masked!r}: give True, False or None")
    if not all(isinstance(name, int | str) for name in names):
        raise ValueError(f"ids {names}: give an integer or a text to each task")
    if not items or len(names) != len(items) or len(set(names)) < len(names):
        raise ValueError(f"{len(items)} tasks with ids {names}: give at least one task and an id of its own to each")
    tasks = []
    for name, item in zip(names, items):
        if isinstance(item, list) and not _is_samples(item):
            expected = "a tuple (train, test) or, of batches, their iter(...)"
            raise ValueError(f"task {name!r}: a list, which could be train and test or batches; give {expected}")
        parts = [item] if _is_samples(item) or not isinstance(item, tuple) else list(item)
        if len(parts) not in (1, 2):
            expected = "(X, y), a DataLoader, or (train, test) of those"
            raise ValueError(f"task {name!r}: {len(parts)} parts where {expected} is expected")
        read = [_read(part, f"task {name!r}, {kind}") for part, kind in zip(parts, ("train", "test"))]
        tasks.append(Task(name, read[0], read[-1]))
    kinds = {_kind(x): task.id for task in reversed(tasks) for x, _ in (task.test, task.train)}
    if len(kinds) > 1:
        listed = "; ".join(f"task {name!r} has {kind}" for kind, name in reversed(kinds.items()))
        raise ValueError(f"inputs differ: {listed}; one model answers for all tasks, give all the same shape and dtype")
    classes = [tuple(sorted({*task.train[1].tolist(), *task.test[1].tolist()})) for task in tasks]
    if masked is None:
        masked = len(tasks) > 1 and len(set().union(*classes)) == sum(map(len, classes))
    return [Task(t.id, t.train, t.test, own if masked else None) for t, own in zip(tasks, classes)]


def folders(
    path: Folder,
    *,
    size: tuple[int, int] | None = None,
    test: float = 0.2,
    seed: int = 0,
    masked: bool | None = None,
) -> Benchmark:
    """A benchmark from a folder of tasks, each a folder of classes, each a folder of pictures (JPEG or PNG).

    Tasks come in the order of their names (task2 before task10), and have them as ids. Labels number the names of all
    classes. Inputs are pixel / 255, float32 (N, 3, height, width) in RGB.

    Args:
        size: the (height, width) that all pictures must have; by default, that of the first.
        test: the part of each class that is kept for testing, drawn by `seed`; 0 tests on the training data.
        masked: as in `stream`.

    >>> [task.id for task in folders("pictures")]           # doctest: +SKIP
    ['1-animals', '2-tools']
    """
    root = Path(path).expanduser()
    if size is not None and not (isinstance(size, tuple | list) and len(size) == 2):
        raise ValueError(f"size={size!r}: give (height, width)")
    if not 0 <= test < 1:
        raise ValueError(f"test={test}: give the part of each class that is for testing, at least 0 and below 1")
    remedy = "give a folder of tasks, each a folder of classes, each a folder of .jpg or .png pictures"
    if not root.is_dir():
        raise DataError(root, "a folder of tasks", "no such folder", remedy)
    tree: dict[str, dict[str, list[Path]]] = {}
    for task in sorted(subfolders(root), key=_natural):
        tree[task.name] = {folder.name: pictures(folder) for folder in subfolders(task)}
        for name, files in tree[task.name].items():
            if not files:
                raise DataError(task / name, "pictures (.jpg, .jpeg, .png)", "none", remedy)
        if not tree[task.name]:
            raise DataError(task, "a folder for each class", "none", remedy)
    if not tree:
        raise DataError(root, "a folder for each task", "none", remedy)

    labels = {name: k for k, name in enumerate(sorted({name for task in tree.values() for name in task}))}
    items = []
    for task_name, classes in tree.items():
        parts: tuple[list[tuple[Path, int]], ...] = [], []
        for name, files in classes.items():
            held = min(max(round(test * len(files)), 1), len(files) - 1) if test else 0
            drawn = generator(seed, task_name, f"test {name}").permutation(len(files))[:held]
            for k, file in enumerate(files):
                parts[k in drawn].append((file, labels[name]))
        read: list[Samples] = []
        for part in filter(None, parts):
            images = []
            for file, _ in part:
                images.append(read_image(file, size))
                size = size or images[0].shape[:2]
            x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
            pixels = x.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
            read.append((pixels, torch.tensor([label for _, label in part])))
        items.append(read)
    return stream([tuple(read) for read in items], list(tree), masked=masked)


def _is_samples(item: Any) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(a, Tensor | np.ndarray) for a in item)


def _read(part: Any, where: str) -> Samples:
    if _is_samples(part):
        x, y = (_tensor(a, where) for a in part)
    elif isinstance(part, Iterable) and not isinstance(part, tuple | list | Tensor | np.ndarray | str | dict):
        pairs = []
        for batch in _in_order(part):
            if not _is_samples(batch):
                raise ValueError(
                    f"{where}: a batch of type {type(batch).__name__} where a pair of tensors (x, y) is expected"
                )
            pairs.append([_tensor(a, where) for a in batch])
            if not all(a.ndim for a in pairs[-1]):
                raise ValueError(f"{where}: a single sample where a batch is expected; give the loader a batch_size")
        if not pairs:
            raise ValueError(f"{where}: no batches; give a loader with data that can be read more than once")
        if len({(_kind(x), y.dtype) for x, y in pairs}) > 1:
            listed = "; ".join(sorted({_kind(x) for x, _ in pairs}))
            raise ValueError(f"{where}: batches differ ({listed}): give all the same shape and dtype")
        x, y = (torch.cat(tensors) for tensors in zip(*pairs))
    else:
        expected = "a pair of tensors or arrays (X, y), or a DataLoader"
        raise ValueError(f"{where}: {type(part).__name__} where {expected} is expected")
    if x.ndim < 1 or len(x) == 0:
        raise ValueError(f"{where}: no samples; give at least one")
    if y.shape != (len(x),):
        expected = f"one per sample, shape ({len(x)},)"
        raise ValueError(f"{where}: labels of shape {tuple(y.shape)} for {len(x)} samples; give {expected}")
    if y.dtype == torch.bool or y.is_floating_point() or y.is_complex():
        raise ValueError(f"{where}: labels are {y.dtype}; give the numbers of the classes, as integers")
    y = y.long()
    if y.min() < 0:
        raise ValueError(f"{where}: label {int(y.min())}; give the numbers of the classes, from 0")
    if lost := int((~x.isfinite()).flatten(1).any(1).sum()) if x.is_floating_point() else 0:
        raise ValueError(
            f"{where}: inputs of {lost} samples are not finite (nan or inf); leave them out or fill them in"
        )
    return x, y


def _tensor(array: Tensor | np.ndarray[Any, Any], where: str) -> Tensor:
    if isinstance(array, Tensor):
        return array
    try:  # a copy, in this machine's order of bytes: it may be read-only
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    except TypeError:
        raise ValueError(f"{where}: an array of {array.dtype} where numbers are expected") from None


def _in_order(loader: Iterable[Any]) -> Iterable[Any]:
    """All of a loader's samples in their own order: its shuffling and dropping belong to training, not to the data."""
    if (
        isinstance(loader, DataLoader)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) in (RandomSampler, SequentialSampler)
    ):
        plain = torch.Generator()  # so that iterating draws nothing from the global one
        return DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn, generator=plain)
    return loader


def _kind(x: Tensor) -> str:
    return f"{x.dtype} of shape (N{''.join(f', {length}' for length in x.shape[1:])})"


def _natural(folder: Path) -> list[tuple[int, str]]:
    """Sorts task2 before task10."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", folder.name)]
