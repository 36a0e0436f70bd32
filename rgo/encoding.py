"""The virtual Feature Encoding Layer (FEL): which permutation a task reads its features through.

A task's permutation depends on its id and on the width alone, by a recipe written out in `permutation`.
Nothing is stored: whoever knows the id of a task knows its wiring.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

TaskId = int | str
Encode = bool | Literal["after-first"] | Callable[[TaskId, str, int], Any]

RECIPE = 1  # version of `permutation`; saved with every state, because another recipe is another network


def task_id(task: object) -> TaskId:
    """A task's id as a plain int or str; anything else is refused.

    Examples:
        >>> task_id(3), task_id("spam")
        (3, 'spam')
    """
    if isinstance(task, str):
        return str.__str__(task)  # a subclass (numpy's, an enum's) as the text it equals
    is_index = task.dim() == 0 and task.dtype != torch.bool if isinstance(task, Tensor) else not isinstance(task, bool)
    if is_index:
        try:
            return int(operator.index(task))  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"a task id is an int or a str, got {task!r} ({type(task).__name__})")


def task_ids(tasks: Any) -> tuple[TaskId, ...]:
    """The ids of a mixed batch, one per row.

    Examples:
        >>> task_ids(torch.tensor([0, 2, 2]))
        (0, 2, 2)
    """
    if isinstance(tasks, set | frozenset | dict):
        raise TypeError(f"one task id per row needs an order, got a {type(tasks).__name__}: give a list")
    rows = tasks.tolist() if isinstance(tasks, Tensor | np.ndarray) else list(tasks)
    if not rows:
        raise ValueError("a sequence of task ids holds one id per row of the batch; this one is empty")
    return tuple(task_id(row) for row in rows)


def permutation(task: TaskId, width: int) -> Tensor:
    """The order in which `task` reads `width` features.

    Recipe 1: SHAKE-256 of ``rgo/1/int:3/256`` (or ``rgo/1/str:spam/256``) is read as `width` little-endian
    64-bit words; the permutation is their stable sorting order. It needs no generator, so it is the same
    in every process, on every machine and with every version of torch and numpy.

    Examples:
        >>> permutation(3, 8)
        tensor([4, 7, 2, 1, 3, 5, 0, 6])
    """
    task = task_id(task)
    if width < 1:
        raise ValueError(f"a permutation needs a width of at least 1, got {width}")
    text = f"rgo/{RECIPE}/{type(task).__name__}:{task}/{width}"
    words = np.frombuffer(hashlib.shake_256(text.encode()).digest(8 * width), dtype="<u8")
    return torch.from_numpy(np.argsort(words, kind="stable").astype(np.int64))


class Index(NamedTuple):
    """A permutation on a device, with its inverse for the way back: (width,), or (rows, width) when mixed."""

    forward: Tensor
    inverse: Tensor

    @property
    def mixed(self) -> bool:
        """One permutation a row."""
        return self.forward.dim() == 2

    @staticmethod
    def of(order: Tensor, device: torch.device) -> Index:
        return Index(order.to(device), torch.argsort(order, dim=-1).to(device))


class _Gather(torch.autograd.Function):
    """x[..., index] whose backward gathers by the inverse: no atomics, deterministic, differentiable again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, axis: int) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.axis = axis
        if index.dim() == 1:
            if axis == -1 and x.dim() > 2:  # as a matrix: index_select is slow on the last of three dimensions
                return x.reshape(-1, len(index)).index_select(1, index).view(x.shape)
            return x.index_select(axis, index)
        shape = [1] * x.dim()
        shape[0], shape[axis] = index.shape
        return x.gather(axis, index.view(shape).expand_as(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        index, inverse = ctx.saved_tensors
        grad = _Gather.apply(grad, inverse, index, ctx.axis)  # type: ignore[no-untyped-call]
        return grad, None, None, None


def check_width(x: Tensor, index: Index, axis: int, name: str) -> None:
    """Raise unless `axis` of `x` (counted from the end) can be read through `index`; `name` is the layer's."""
    width = index.forward.shape[-1]
    if x.dim() < -axis or x.shape[axis] != width:
        raise ValueError(
            f"layer {name!r} expects {width} features or channels in dimension {axis} of its input, "
            f"got an input of shape {tuple(x.shape)}"
        )
    if index.mixed and (x.dim() == -axis or x.shape[0] != len(index.forward)):
        raise ValueError(
            f"task(ids) was given {len(index.forward)} task ids, one per row, but the input of layer {name!r} has "
            f"shape {tuple(x.shape)}: its first dimension is not the batch. Answer such a model one task at a time."
        )


def gather(x: Tensor, index: Index, axis: int, name: str) -> Tensor:
    """`x` with its `axis` (counted from the end) read through `index`; `name` is the layer's, for errors."""
    check_width(x, index, axis, name)
    return gathered(x, index, axis)


def gathered(x: Tensor, index: Index, axis: int) -> Tensor:
    """`gather` of what has been checked."""
    return _Gather.apply(x, index.forward, index.inverse, axis)  # type: ignore[no-any-return,no-untyped-call]


def checked_order(order: Any, task: TaskId, name: str, width: int) -> Tensor | None:
    """What a user's `encode` function returned, as a permutation; None stands for the identity."""
    if order is None:
        return None
    wrong = ValueError(
        f"encode({task!r}, {name!r}, {width}) must return a permutation of range({width}) or None, got {order!r}"
    )
    try:
        result = torch.as_tensor(np.asarray(order) if isinstance(order, Sequence) else order).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise wrong from None
    integers = not result.is_floating_point() and result.dtype != torch.bool
    if not integers or result.shape != (width,) or not torch.equal(result.long().sort().values, torch.arange(width)):
        raise wrong
    return result.long()


class Encoding:
    """What `encode=` means: the permutation of each (task, layer), None where a task reads features as they are."""

    def __init__(self, encode: Encode) -> None:
        if not (encode is True or encode is False or encode == "after-first" or callable(encode)):
            raise ValueError(
                'encode is True, False, "after-first" or a function (task, layer name, width) -> permutation, '
                f"got {encode!r}"
            )
        self.encode = encode
        self._cache: dict[tuple[TaskId, bool, str, int, torch.device], Index | None] = {}

    @property
    def setting(self) -> str | bool:
        """The choice as a state can hold it: a function is only known by being one."""
        return self.encode if isinstance(self.encode, bool | str) else "function"

    def order(self, task: TaskId, name: str, width: int, first: TaskId | None) -> Tensor | None:
        """The permutation through which layer `name` reads `width` features in `task`."""
        if callable(self.encode):
            return checked_order(self.encode(task, name, width), task, name, width)
        if self.encode is False or width == 1 or (self.encode == "after-first" and task == first):
            return None
        return permutation(task, width)

    def index(self, task: TaskId, name: str, width: int, first: TaskId | None, device: torch.device) -> Index | None:
        """`order` on `device`. Kept for reuse; the cache is emptied before it grows with the number of tasks."""
        key = (task, task == first, name if callable(self.encode) else "", width, device)
        found = self._cache.get(key, self)
        if found is self:
            if len(self._cache) >= 512:
                self._cache = {}
            with torch.inference_mode(False):  # what serving caches, training may save for its backward
                order = self.order(task, name, width, first)
                found = self._cache[key] = None if order is None else Index.of(order, device)
        return cast("Index | None", found)
