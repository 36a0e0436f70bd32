"""Single-task learning: a fresh model for every task, the reference that cannot forget."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import final

import torch
from torch import Tensor, nn

from ..benchmarks import Task
from .method import Batches, Method, cross_entropy, masked


@final
class STL(Method):
    """One model per task, each trained alone and kept.

    `fresh(k)` makes the model of the k-th task (from 0); its weights are copied into `model` in place, so optimizer
    and captured steps stay valid.
    """

    remembers = constant = ("finished",)

    def __init__(
        self, model: nn.Module, *, fresh: Callable[[int], nn.Module], lr: float = 0.1, encode: bool = False
    ) -> None:
        super().__init__(model, lr=lr, encode=encode)
        self.fresh = fresh
        self.finished: dict[int | str, dict[str, Tensor]] = {}  # the weights and buffers each task ended with

    def begin_task(self, task: Task, steps: int, seed: int) -> None:
        super().begin_task(task, steps, seed)
        self.finished.pop(task.id, None)  # met again: learned anew
        self.model.load_state_dict(self.fresh(len(self.seen) - 1).state_dict())

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        return self.step(cross_entropy(self.model(x), y, task))

    def end_task(self, task: Task, batches: Batches) -> None:
        self.finished[task.id] = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
        super().end_task(task, batches)

    def predict(self, x: Tensor, task: Task) -> Tensor:
        if task.id not in self.finished:  # the one in training
            return super().predict(x, task)
        with self.wiring.task(task.id) if self.wiring is not None else nullcontext():
            return masked(torch.func.functional_call(self.model, self.finished[task.id], (x,)), task)

    def memory(self) -> int:
        """Bytes of the finished models, less the one that `model` still is: k models after k tasks, with it."""
        return sum(t.nbytes for i, kept in self.finished.items() if i != self.seen[-1].id for t in kept.values())
