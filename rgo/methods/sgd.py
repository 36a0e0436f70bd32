"""Plain SGD: one model, fine-tuned on one task after another."""

from __future__ import annotations

from typing import final

from torch import Tensor

from ..benchmarks import Task
from .method import Method, cross_entropy


@final
class SGD(Method):
    """theta <- theta - lr grad L_k."""

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        return self.step(cross_entropy(self.model(x), y, task))
