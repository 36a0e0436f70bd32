"""Recursive Gradient Optimization, with its two halves taken apart: projection, and feature encoding."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from ..benchmarks import Task
from ..curvature import require
from ..encoding import permutation
from ..rgo import RGO
from .method import Batches, Method, cross_entropy, masked


@final
class RGOMethod(Method):
    """The paper's Algorithm 1. `encode=False` is its RGO-2; `project=False` is feature encoding alone.

    The head of a split benchmark is one wide layer whose rows belong to one task each: it is left to plain training.
    `permute_logits` is the paper's literal FEL, on the logits too. `projection_dtype` names the precision of the P that
    is multiplied: by default the weights' own, at least float32, so that a result does not depend on what a processor
    has; "auto" is what `rgo.RGO` would choose. Other options are those of `rgo.RGO`.
    """

    remembers = ("learner",)
    constant = ("learner",)  # P does not change inside a task

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.1,
        split_head: str | None = None,
        permute_logits: bool = False,
        projection_dtype: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, lr=lr)
        for name, given in (("permute_logits", permute_logits), ("project", options.get("project", True))):
            require(isinstance(given, bool), f"{name} is True or False, got {given!r}")
        dtype: Any = None
        if projection_dtype is None:
            dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        elif projection_dtype != "auto":
            dtype = getattr(torch, projection_dtype, projection_dtype)
        self.learner = RGO(model, skip=() if split_head is None else (split_head,), dtype=dtype, **options)
        self.permute_logits = permute_logits

    def begin_task(self, task: Task, steps: int, seed: int) -> None:
        super().begin_task(task, steps, seed)
        self.learner.begin_task(task.id)

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        return self.step(cross_entropy(self._logits(x, task), y, task))

    def end_task(self, task: Task, batches: Batches) -> None:
        self.learner.end_task(batches, classes=task.classes, forward=lambda b: (self._logits(b[0], task), b[1]))

    def predict(self, x: Tensor, task: Task) -> Tensor:
        with self.learner.task(task.id):
            return masked(self._logits(x, task), task)

    def _logits(self, x: Tensor, task: Task) -> Tensor:
        logits: Tensor = self.model(x)
        if self.permute_logits:
            order = permutation(task.id, logits.shape[1]).to(logits.device)
            logits = torch.index_select(logits, 1, order)
        return logits
