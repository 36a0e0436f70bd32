"""Orthogonal Weights Modification: gradients leave out what past inputs spanned (Zeng, Chen, Cui and Yu, 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..benchmarks import Task
from ..models import head_name
from .inputs import beside, each, hold, idle_biases, layers_of, watching, without_biases
from .method import Batches, Method, cross_entropy


@final
class OWM(Method):
    """At every step, for every layer: P <- P - P r r^T P / (alpha + r^T P r), then G <- G P; r is the mean input.

    r is the mean over the batch; a convolution takes the patches of the mean image one after another. alpha falls
    from 1 at a task's first step to `decay` at its last: the inputs met while the task is young are hardly closed.
    P starts at the identity and is never reset, so the first task is restrained too, by its own inputs.

    The head is one more layer when the tasks share it; when each task has rows of its own it is trained plainly.
    The authors' networks have no biases: here they are set to zero and stay there, unless `bias=True` makes each
    one more input of its layer. What no P covers (a normalisation's affine map) is held after the first task.
    The authors train with momentum .9 and gradients clipped to a norm of 10; here both are off unless given, so that
    the step is the other methods'. As P closes what the present task shows, steps are short: lr wants to be near 1.

    Args:
        decay: alpha at the end of a task, one number or one per layer. By default the authors': 1e-5 for
            convolutions, and 1e-4, 1e-2 and .1 for the last three linear layers, the head being the last.
    """

    remembers = ("P", "taken", "velocity", "finished")
    constant = ("finished",)

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.1,
        encode: bool = False,
        decay: float | Sequence[float] | None = None,
        momentum: float = 0.0,
        clip: float | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__(model, lr=lr, encode=encode)
        self.decay, self.momentum, self.clip = decay, momentum, clip
        self.layers, self.head = layers_of(model, bias=bias), head_name(model)
        without_biases(self.layers)
        device = self.layers[0].module.weight.device
        # float64: tens of thousands of rank-one updates leave float32's P neither symmetric nor positive.
        eyes = {ly.name: torch.eye(ly.dim, dtype=torch.float64, device=device) for ly in self.layers}
        self.P = {ly.name: eyes[ly.name].repeat(ly.matrix.groups, 1, 1) for ly in self.layers}
        self.taken = torch.zeros((), dtype=torch.float64, device=device)  # steps of this task, on the device
        self.velocity = [torch.zeros_like(p) for p in model.parameters()] if momentum > 0 else []
        self.finished = 0
        self.others = beside(model, self.layers)

    def begin_task(self, task: Task, steps: int, seed: int) -> None:
        super().begin_task(task, steps, seed)
        self.steps = steps
        each(self._decays(), self.layers, "decay")
        for state in (self.taken, *self.velocity):
            state.zero_()

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        layers = [layer for layer in self.layers if task.classes is None or layer.name != self.head]
        met: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
        self.optimizer.zero_grad()
        with watching(layers, lambda layer, x: met[layer.name].append(layer.rows(x.mean(0, keepdim=True)))):
            loss = cross_entropy(self.model(x), y, task)
        loss.backward()
        progress = self.taken / self.steps
        decays = dict(zip((layer.name for layer in self.layers), each(self._decays(), self.layers, "decay")))
        for layer in layers:
            P = self.P[layer.name]
            close(P, torch.cat(met[layer.name]), (progress * math.log(decays[layer.name])).exp())
            layer.set_gradient(layer.gradient @ P.to(layer.module.weight.dtype))
        self.taken += 1
        hold(idle_biases(layers))
        hold(self.others if self.finished > 0 else [])
        self._accelerate()
        self.optimizer.step()
        return loss.detach()

    def end_task(self, task: Task, batches: Batches) -> None:
        self.finished += 1
        super().end_task(task, batches)

    def _accelerate(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for p, v in zip(self.model.parameters(), self.velocity):
            if p.grad is not None:
                p.grad = v.mul_(self.momentum).add_(p.grad)

    def _decays(self) -> float | Sequence[float]:
        if self.decay is not None:
            return self.decay
        linear = [layer for layer in self.layers if not isinstance(layer.module, _ConvNd)]
        last = {layer.name: decay for layer, decay in zip(reversed(linear), (0.1, 1e-2, 1e-4))}
        return [1e-5 if isinstance(ly.module, _ConvNd) else last.get(ly.name, 1e-4) for ly in self.layers]


def close(P: Tensor, R: Tensor, alpha: Tensor) -> None:
    """The rank-one updates of P (groups, dim, dim) by the rows R (rows, groups, dim), all at once and in place.

    One after another they make (P^-1 + R^T R / alpha)^-1 = P - P R^T (alpha + R P R^T)^-1 R P: one small solve.
    """
    R = R.transpose(0, 1).to(P.dtype)
    if R.shape[1] > R.shape[2]:
        R = torch.linalg.qr(R, mode="r").R  # as many rows as dim, with the same R^T R
    K = R @ P
    S = K @ R.mT
    S.diagonal(dim1=-2, dim2=-1).add_(alpha)
    K = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(S).L, K, upper=False)
    P -= K.mT @ K
