"""The recursive least loss as a penalty: what RGO's curvature does when it is added to the loss instead."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from ..benchmarks import Task
from ..collecting import collect
from ..gradient import Covered
from ..rgo import RGO
from .method import Batches, Method, cross_entropy


@final
class RLL(Method):
    """L_k + strength F_k^RLL,  F_k^RLL = 1/2 (theta - theta*)^T (sum_{j<k} H_j) (theta - theta*)  (the paper's eq. 4).

    H_j is made by RGO's pass over task j's data, layer by layer and shared by a layer's extractors (the rows w of its
    weight, bias included), so F^RLL is the sum over layers and extractors of 1/2 (w - w*)^T H (w - w*). It is divided
    by the number of samples: L_j is a mean, so its Hessian is one, and `strength=1` is the sum of the old tasks'
    quadratic losses. theta* is where the last task ended. The curvature comes from an `rgo.RGO` that projects nothing.

    `split_head` names a head whose rows belong to one task each: it is left out of H and out of feature encoding, as
    in `RGOMethod`. Other options are those of `rgo.RGO`.
    """

    remembers = constant = ("H", "anchor")

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.1,
        encode: bool = False,
        strength: float = 1.0,
        split_head: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, lr=lr)
        skip = () if split_head is None else (split_head,)
        self.curvature = RGO(model, encode=encode, project=False, skip=skip, **options)
        self.wiring = self.curvature
        self.strength = strength
        self.H: dict[str, Tensor] = {}  # of each layer (g, d, d), summed over the tasks
        self.anchor: dict[str, Tensor] = {}  # theta* (g, o, d)

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        loss = cross_entropy(self.model(x), y, task)
        if self.H:
            loss = loss + self.strength * self.forgetting()
        return self.step(loss)

    def forgetting(self) -> Tensor:
        """F^RLL at the present weights."""
        layers = [layer for layer in self.curvature._layers() if layer.name in self.H]
        away = [extractors(layer) - self.anchor[layer.name] for layer in layers]
        # D . (D H) has the value 2 F; with D H held constant, its gradient D H is that of F. One product, not three.
        twice = torch.stack([(D * (D.detach() @ self.H[layer.name])).sum() for layer, D in zip(layers, away)]).sum()
        return twice - 0.5 * twice.detach()

    def end_task(self, task: Task, batches: Batches) -> None:
        samples = 0

        def counted() -> Batches:
            nonlocal samples
            for x, y in batches:
                samples += len(x)
                yield x, y

        # The projections of an RGO that does not project stay empty, so what comes back is alpha I + H_j.
        for layer, projection in collect(self.curvature, counted(), task.classes, None).items():
            ridge = self.curvature.alpha * torch.eye(projection.dim).to(projection.H)
            H_j = ((projection.H - ridge) / samples).to(layer.weight)
            self.H[layer.name] = self.H[layer.name] + H_j if layer.name in self.H else H_j
            self.anchor[layer.name] = extractors(layer).detach().clone()
        super().end_task(task, batches)


def extractors(layer: Covered) -> Tensor:
    """The rows w of a layer's weight, each with its bias as the last element: (groups, outputs, d)."""
    W = layer.matrix.to_matrix(layer.weight)
    if layer.bias is None:
        return W
    return torch.cat([W, layer.bias.reshape(layer.matrix.groups, layer.matrix.outputs, 1)], dim=2)
