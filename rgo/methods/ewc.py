"""Elastic Weight Consolidation (Kirkpatrick et al. 2017), as the paper's table ran it and by the book."""

from __future__ import annotations

from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from ..benchmarks import Task
from .method import Batches, Method, cross_entropy, masked
from .ring import generator


@final
class EWC(Method):
    """Cross-entropy plus a quadratic pull of every parameter towards where old tasks left it, by its importance F.

    `fisher="batch"` is what the table's numbers come from, the code published with ORTHOG-SUBSPACE: squares of the
    *batch's* gradient are summed over `every` steps (10 on MNIST, 50 on CIFAR) and enter a running average with weight
    0.9, which goes on from task to task. A task's end scales it to [0, 1] over all parameters at once, so that
    `strength` means what it means there only:  loss = CE + strength sum_i F_i (theta_i - theta*_i)^2, without 1/2 and
    for the latest theta* and F alone.

    `fisher="sample"` is the textbook:  loss = CE + strength / 2 sum_k sum_i F_ki (theta_i - theta*_ki)^2  with F_k
    the diagonal of the Fisher information after task k, the mean over its samples of (d log p(y|x) / d theta)^2, one
    y a sample drawn from the model's own softmax (true labels would give the empirical Fisher, which vanishes with
    the loss). One backward per sample: slow. The sum over tasks is kept as one quadratic, F = sum_k F_k around the
    mean of theta*_k weighted by F_k; the constant between the two is left out of the loss.
    """

    remembers = ("importance", "anchor", "running", "pending", "counter")
    constant = ("importance", "anchor")

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.1,
        encode: bool = False,
        fisher: Literal["batch", "sample"] = "batch",
        strength: float = 10.0,
        every: int = 10,
    ) -> None:
        super().__init__(model, lr=lr, encode=encode)
        if fisher not in ("batch", "sample"):
            raise ValueError(f'fisher is "batch" or "sample", got {fisher!r}')
        if every < 1:
            raise ValueError(f"every is a number of steps, at least 1, got {every}")
        self.fisher, self.every, self.seed = fisher, every, 0
        self.factor = strength if fisher == "batch" else strength / 2
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.anchor = parameters_to_vector(self.parameters).detach().clone()  # theta*
        self.importance = torch.zeros_like(self.anchor)  # F; zero until a task has ended
        # Of "batch" alone: the running average, the squares since it was last updated, and the step.
        self.running = torch.zeros_like(self.anchor[: None if fisher == "batch" else 0])
        self.pending = torch.zeros_like(self.running)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.anchor.device)

    def begin_task(self, task: Task, steps: int, seed: int) -> None:
        super().begin_task(task, steps, seed)
        self.seed = seed
        self.pending.zero_()
        self.counter.zero_()

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        loss = cross_entropy(self.model(x), y, task)
        g = self._gradient(loss)  # of the plain cross-entropy: the penalty is no part of F
        if self.fisher == "batch":
            self._average(g)
        with torch.no_grad():
            away = parameters_to_vector(self.parameters).sub_(self.anchor)
            pull = self.importance * away
            g.add_(pull, alpha=2 * self.factor)
            for p, part in zip(self.parameters, g.split([p.numel() for p in self.parameters])):
                p.grad = part.view_as(p)
            self.optimizer.step()
            return loss.detach() + self.factor * (pull @ away)

    def end_task(self, task: Task, batches: Batches) -> None:
        theta = parameters_to_vector(self.parameters).detach().clone()
        if self.fisher == "batch":
            low, high = self.running.min(), self.running.max()
            self.importance, self.anchor = (self.running - low) / (high - low + 1e-32), theta
        else:
            F_k = self._sample_fisher(task, batches)
            self.importance = self.importance + F_k
            weight = F_k / self.importance.clamp_min(torch.finfo(F_k.dtype).tiny)
            self.anchor = self.anchor + weight * (theta - self.anchor)
        super().end_task(task, batches)

    def _average(self, g: Tensor) -> None:
        """F_pending += g^2; every u steps F_running <- 0.1 F_running + 0.9 F_pending / u."""
        self.pending.addcmul_(g, g)
        self.counter.add_(1)
        due = torch.where(self.counter % self.every == 0, torch.ones_like(g[:1]), torch.zeros_like(g[:1]))  # 1 or 0
        self.running.mul_(1 - 0.9 * due).addcmul_(self.pending, due, value=0.9 / self.every)
        self.pending.mul_(1 - due)

    def _sample_fisher(self, task: Task, batches: Batches) -> Tensor:
        total, count, source = torch.zeros_like(self.anchor), 0, generator(self.seed, task, "fisher")
        with torch.enable_grad():
            for x, _ in batches:
                for one in x.split(1):
                    log_p = F.log_softmax(masked(self.model(one.to(total.device)), task), dim=1)
                    drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=source)
                    total += self._gradient(log_p[0, int(drawn)]).square()
                    count += 1
        if count == 0:
            raise ValueError(f"end_task was given no batches: the Fisher information of task {task.id!r} is unknown")
        return total / count

    def _gradient(self, output: Tensor) -> Tensor:
        return parameters_to_vector(torch.autograd.grad(output, self.parameters, materialize_grads=True))
