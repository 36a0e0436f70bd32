"""Gradient Projection Memory: no step along what a layer's inputs have spanned (Saha, Garg and Roy, ICLR 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pad_sequence

from ..benchmarks import Task
from ..models import head_name
from .inputs import Layer, beside, each, hold, idle_biases, layers_of, watching, without_biases
from .method import Batches, Method, cross_entropy
from .ring import generator

CHUNK_BYTES = 64 * 2**20  # patches of a convolution unfolded at a time


@final
class GPM(Method):
    """Task 1: plain SGD. Later: G <- G - G M M^T, M an orthonormal basis of the inputs the layer has met.

    The head is one more layer when the tasks share it; when each task has rows of its own it is trained plainly.
    GPM's networks have no biases: here they are set to zero and stay there, unless `bias=True` makes each one more
    input of its layer, projected with the weight. What GPM cannot project (the affine map of a normalisation) is
    learned in the first task and held from then on; BatchNorm uses the batch's statistics, in evaluation too.

    Args:
        threshold: epsilon, the share of a layer's input energy its basis must explain; one number, or one per layer.
            The paper's: .95, .99, .99 on Permuted MNIST, .97 on CIFAR-100, .985 on miniImageNet.
        until: with it, epsilon grows linearly with every task and would be `until` after `tasks` of them.
        samples: random training samples whose inputs are looked at; one number, or one per layer. A convolution
            takes every patch of its samples, so it needs fewer: the paper gives AlexNet 24, 100, 100, 125, 125.
    """

    remembers = ("bases", "finished")
    constant = ("bases", "finished")

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.1,
        encode: bool = False,
        threshold: float | Sequence[float] = 0.97,
        until: float | None = None,
        tasks: int = 20,
        samples: int | Sequence[int] = 300,
        bias: bool = False,
    ) -> None:
        super().__init__(model, lr=lr, encode=encode)
        self.threshold, self.until, self.tasks, self.samples = threshold, until, tasks, samples
        self.layers, self.head = layers_of(model, bias=bias), head_name(model)
        without_biases(self.layers)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
        self.bases = {ly.name: ly.module.weight.new_zeros(ly.matrix.groups, ly.dim, 0) for ly in self.layers}
        self.finished = 0
        self.others = beside(model, self.layers)

    def begin_task(self, task: Task, steps: int, seed: int) -> None:
        super().begin_task(task, steps, seed)
        each(self.threshold, self._projected(task), "threshold")
        each(self.samples, self._projected(task), "samples")
        self.generator = generator(seed, task, "memory")

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), y, task)
        loss.backward()
        layers = self._projected(task)
        for layer in layers:
            M = self.bases[layer.name]
            if M.shape[-1] > 0:
                G = layer.gradient
                layer.set_gradient(G - (G @ M) @ M.mT)  # Eq. 6 and 7
        hold(idle_biases(layers))
        hold(self.others if self.finished > 0 else [])
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def end_task(self, task: Task, batches: Batches) -> None:
        """The second moments R R^T of every layer's inputs R (dim, columns), and from them the new directions."""
        x = torch.cat([x for x, _ in batches])
        layers = self._projected(task)
        samples = {layer.name: int(n) for layer, n in zip(layers, each(self.samples, layers, "samples"))}
        drawn = torch.randperm(len(x), generator=self.generator)[: max(samples.values())].to(x.device)
        moments = {ly.name: x.new_zeros(ly.matrix.groups, ly.dim, ly.dim, dtype=torch.float64) for ly in layers}

        def see(layer: Layer, inputs: Tensor) -> None:
            inputs = inputs[: samples[layer.name]]
            size = layer.matrix.count(inputs[:1]) * layer.matrix.groups * layer.dim * 8
            for part in inputs.split(max(1, CHUNK_BYTES // size)):
                R = layer.rows(part).transpose(0, 1).double()
                moments[layer.name] += R.mT @ R

        with watching(layers, see):
            self.model(x[drawn])
        for layer, epsilon in zip(layers, each(self.threshold, layers, "threshold")):
            if self.until is not None:
                epsilon += (self.until - epsilon) * self.finished / self.tasks
            old, first = self.bases[layer.name], self.finished == 0
            grown = [grow(M[:, M.any(0)], C, epsilon, first) for M, C in zip(old.double(), moments[layer.name])]
            # Groups learn different numbers of directions: zero columns fill up and project nothing.
            self.bases[layer.name] = pad_sequence([M.T for M in grown], batch_first=True).mT.to(old)
        self.finished += 1
        super().end_task(task, batches)

    def _projected(self, task: Task) -> list[Layer]:
        return [layer for layer in self.layers if task.classes is None or layer.name != self.head]


def grow(M: Tensor, C: Tensor, epsilon: float, first: bool) -> Tensor:
    """The basis M (dim, r) with the new directions of inputs R, of which C = R R^T (dim, dim); all in float64.

    Singular vectors and squared singular values of R_hat = R - M M^T R are eigenvectors and eigenvalues of its
    second moments, and those are small where patches are many. Squaring costs half of the digits: in float64
    that leaves energies right to 1e-15 of the total, where the rule asks for 1e-4 at the least.
    """
    free = torch.eye(len(C), dtype=C.dtype, device=C.device) - M @ M.T
    energy, U = torch.linalg.eigh(free @ C @ free)
    energy, U = energy.flip(0).clamp_min(0), U.flip(1)
    share = energy / C.trace()  # of the un-projected inputs' energy
    reached = share.cumsum(0)
    # At first strictly: the direction that crosses epsilon stays free. Later (Eq. 9) it is taken, whatever it adds.
    so_far = reached if first else 1 - share.sum() + reached - share
    r = int(((so_far < epsilon) & (share > len(C) * torch.finfo(C.dtype).eps)).sum())
    new = U[:, :r]
    return torch.cat([M, new - M @ (M.T @ new)], dim=1)[:, : len(C)]
