"""ER-Ring (Chaudhry et al. 2019, "On Tiny Episodic Memories in Continual Learning")."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..benchmarks import Task
from .method import Batches, Method, cross_entropy
from .ring import Ring


@final
class ERRing(Method):
    """Experience replay: one SGD step on the batch joined with `batch` samples of the old tasks' memory.

    The loss is the mean over new and old samples alike, each masked to its own task's classes. Old samples are drawn
    without replacement from a memory of `per_class` samples per class and task; all of them while they are so few.
    """

    remembers = ("ring", "counter")
    constant = ("ring",)

    def __init__(
        self, model: nn.Module, *, lr: float = 0.1, encode: bool = False, per_class: int = 1, batch: int = 10
    ) -> None:
        super().__init__(model, lr=lr, encode=encode)
        self.ring = Ring(per_class, batch, next(model.parameters()).device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.ring.device)

    def begin_task(self, task: Task, steps: int, seed: int) -> None:
        before = self.seen
        super().begin_task(task, steps, seed)
        self.counter = self.ring.begin(before, self.seen, steps, seed)

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        if not len(self.ring):
            return self.step(cross_entropy(self.model(x), y, task))
        old_x, old_y, slots = self.ring.sample(self.counter)
        now = slots.new_full((len(x),), len(self.seen) - 1)
        logits = self.replayed(torch.cat([x, old_x]), torch.cat([now, slots]))
        return self.step(F.cross_entropy(logits, torch.cat([y, old_y])))

    def end_task(self, task: Task, batches: Batches) -> None:
        self.ring.end(self.seen, batches)
        super().end_task(task, batches)
