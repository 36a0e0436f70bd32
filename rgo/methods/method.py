"""The contract of the laboratory: a learner that meets tasks one after another and answers for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..benchmarks import Task
from ..curvature import require
from ..rgo import RGO

Batches = Iterable[tuple[Tensor, Tensor]]
NOTHING = (torch.empty(0), torch.empty(0))


class Method(ABC):
    """A learner of tasks. Constructor arguments are its hyper-parameters.

    `observe` owns forward, loss, backward and step, so that each method reads like its paper. On CUDA it is captured
    in a graph once per task and replayed, so it never waits for the host: no `.item()`, no `if` on a tensor, randomness
    from index tensors drawn in `begin_task`, state changed in place.
    """

    remembers: ClassVar[tuple[str, ...]] = ()
    """Attributes that outlive a task (tensors; lists or dicts of them; objects with a state_dict): saved, loaded, and
    counted as the method's memory."""
    constant: ClassVar[tuple[str, ...]] = ()
    """Those of them that do not change inside a task: a checkpoint taken there leaves them out."""

    def __init__(self, model: nn.Module, *, lr: float = 0.1, encode: bool = False) -> None:
        require(encode in (True, False), f"encode is True or False, got {encode!r}")
        self.model, self.lr = model, lr
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.wiring = RGO(model, project=False) if encode else None  # FEL without projection, for any baseline
        self.seen: list[Task] = []  # the tasks so far, the one in training last; their data are not kept

    def begin_task(self, task: Task, steps: int, seed: int) -> None:
        """Prepare for `steps` calls of `observe` on this task; whatever is drawn at random comes from (seed, task).

        Methods that override this call it first.
        """
        if self.wiring is not None:
            self.wiring.begin_task(task.id)
        self.seen = [t for t in self.seen if t.id != task.id] + [replace(task, train=NOTHING, test=NOTHING)]

    @abstractmethod
    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        """One training step on one batch; returns its loss, detached, on the device."""

    def end_task(self, task: Task, batches: Batches) -> None:
        """Learn from one pass over the task's training data what must be kept of it.

        Methods that override this call it last.
        """
        if self.wiring is not None:
            self.wiring.end_task(batches)

    def predict(self, x: Tensor, task: Task) -> Tensor:
        """The logits of `task` for a batch, -inf outside its classes; the model is in eval mode, without gradients."""
        with self.wiring.task(task.id) if self.wiring is not None else nullcontext():
            return masked(self.model(x), task)

    def replayed(self, x: Tensor, slots: Tensor) -> Tensor:
        """Logits of samples of earlier tasks, each under its own task's wiring and masked to its own classes.

        `slots` (rows,) are positions in `self.seen`, on the device.
        """
        with self.wiring.rows([t.id for t in self.seen], slots) if self.wiring is not None else nullcontext():
            logits: Tensor = self.model(x)
        if all(t.classes is None for t in self.seen):
            return logits
        table = class_table(tuple(t.classes for t in self.seen), logits)
        return logits.masked_fill(~table[slots], -torch.inf)

    def state_dict(self, inside: bool = False) -> dict[str, Any]:
        """Everything in `remembers`, as tensors and plain types; inside a task, only what changes there."""
        state = {name: _plain(getattr(self, name)) for name in self.remembers if not (inside and name in self.constant)}
        if not inside:
            state["seen"] = [[t.id, None if t.classes is None else list(t.classes)] for t in self.seen]
            if self.wiring is not None:
                state["wiring"] = self.wiring.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], inside: bool = False) -> None:
        expected = self.state_dict(inside).keys()
        if state.keys() != expected:
            raise ValueError(f"{type(self).__name__} remembers {sorted(expected)}, the state has {sorted(state)}")
        for name, value in state.items():
            held = getattr(self, name)
            if name == "seen":
                self.seen = [Task(i, NOTHING, NOTHING, None if c is None else tuple(c)) for i, c in value]
            elif hasattr(held, "load_state_dict"):
                held.load_state_dict(value)
            else:
                setattr(self, name, value)

    def memory(self) -> int:
        """Bytes of what it remembers, besides the one model."""
        return sum(_bytes(getattr(self, name)) for name in self.remembers)

    def step(self, loss: Tensor) -> Tensor:
        """Plain SGD on one loss."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def masked(logits: Tensor, task: Task) -> Tensor:
    """Logits with -inf outside the task's classes."""
    if task.classes is None:
        return logits
    return logits.masked_fill(~class_table((task.classes,), logits)[0], -torch.inf)


def class_table(tasks: tuple[tuple[int, ...] | None, ...], logits: Tensor) -> Tensor:
    """The classes of each task as booleans, (tasks, C), on the logits' device.

    Made once: a captured step must not copy from the host. Only the latest few are kept.
    """
    key = (tasks, logits.shape[1], logits.device)
    if key not in _tables:
        table = torch.zeros(len(tasks), logits.shape[1], dtype=torch.bool)
        for row, classes in zip(table, tasks):
            row[list(range(len(row)) if classes is None else classes)] = True
        if len(_tables) >= 64:
            _tables.clear()
        _tables[key] = table.to(logits.device)
    return _tables[key]


_tables: dict[tuple[tuple[tuple[int, ...] | None, ...], int, torch.device], Tensor] = {}


def cross_entropy(logits: Tensor, y: Tensor, task: Task) -> Tensor:
    """Mean cross-entropy over the task's own classes."""
    return F.cross_entropy(masked(logits, task), y)


def _plain(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if hasattr(value, "memory"):
        return int(value.memory())
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 0
