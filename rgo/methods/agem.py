"""A-GEM (Chaudhry et al. 2019, "Efficient Lifelong Learning with A-GEM")."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from ..benchmarks import Task
from .method import Batches, Method, cross_entropy
from .ring import Ring


@final
class AGEM(Method):
    """Each step solves  min |g~ - g|^2 / 2  such that  g~ . g_ref >= 0  (its equation 10) and descends along g~.

    g is the gradient on the batch, g_ref that of the mean loss on `batch` samples drawn without replacement from the
    memory of all old tasks, each masked to its own task's classes; both over all parameters at once. The defaults are
    those the RGO paper states: one sample per class and task, ten a step. The code behind its table's CIFAR and
    miniImageNet columns defaults to `per_class=13, batch=256`.
    """

    remembers = ("ring", "counter")
    constant = ("ring",)

    def __init__(
        self, model: nn.Module, *, lr: float = 0.1, encode: bool = False, per_class: int = 1, batch: int = 10
    ) -> None:
        super().__init__(model, lr=lr, encode=encode)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.ring = Ring(per_class, batch, self.parameters[0].device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.ring.device)

    def begin_task(self, task: Task, steps: int, seed: int) -> None:
        before = self.seen
        super().begin_task(task, steps, seed)
        self.counter = self.ring.begin(before, self.seen, steps, seed)

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        if not len(self.ring):
            return self.step(cross_entropy(self.model(x), y, task))
        loss = cross_entropy(self.model(x), y, task)
        g = self._gradient(loss)
        x, y, slots = self.ring.sample(self.counter)
        g_ref = self._gradient(F.cross_entropy(self.replayed(x, slots), y))
        for p, part in zip(self.parameters, project(g, g_ref).split([p.numel() for p in self.parameters])):
            p.grad = part.view_as(p)
        self.optimizer.step()
        return loss.detach()

    def end_task(self, task: Task, batches: Batches) -> None:
        self.ring.end(self.seen, batches)
        super().end_task(task, batches)

    def _gradient(self, loss: Tensor) -> Tensor:
        return parameters_to_vector(torch.autograd.grad(loss, self.parameters, materialize_grads=True))


def project(g: Tensor, g_ref: Tensor) -> Tensor:
    """g~ = g - (g . g_ref / g_ref . g_ref) g_ref where g . g_ref < 0, else g (A-GEM's equation 11), in their place."""
    dot = g @ g_ref
    return g.sub_(g_ref.mul_(torch.where(dot < 0, dot / (g_ref @ g_ref), torch.zeros_like(dot))))
