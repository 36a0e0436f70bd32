"""Low-rank Orthogonal Subspaces: each task has coordinates of its own (Chaudhry, Khan, Dokania and Torr, 2020)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import pad_sequence

from ..benchmarks import Task
from ..models import head_name
from .inputs import Layer, layers_of
from .method import Batches, Method, cross_entropy
from .ring import generator

NOBODY = -100  # the label of a filled-up memory slot, which the loss leaves out


@final
class LOS(Method):
    """Task t reads its last hidden features through P_t: r = floor(d / tasks) coordinates that no other task has.

    "subspace", the default for networks without convolutions, is that and plain SGD. "stiefel" adds to it, at every
    step, the `memory` samples per class of one earlier task, drawn uniformly, under that task's P_j, and divides both
    losses by the number of the task; and the kernels of convolutions stay orthonormal, by an approximate Cayley
    step. They begin orthonormal: drawn anew from a generator seeded by the weights the model comes with.

    The masked features are the head's input. The paper masks before the last ReLU, which is the same.
    """

    remembers = ("x", "y", "taken")
    constant = ("x", "y")

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.1,
        encode: bool = False,
        variant: Literal["subspace", "stiefel"] | None = None,
        tasks: int = 20,
        memory: int = 1,
    ) -> None:
        super().__init__(model, lr=lr, encode=encode)
        layers = layers_of(model, bias=False)
        convolutions = [layer for layer in layers if isinstance(layer.module, _ConvNd)]
        self.variant = variant or ("stiefel" if convolutions else "subspace")
        if self.variant not in ("subspace", "stiefel"):
            raise ValueError(f'variant is "subspace" or "stiefel", got {variant!r}')
        self.head = cast(nn.Linear, model.get_submodule(head_name(model)))
        self.tasks, self.samples = tasks, memory
        self.rank = self.head.in_features // tasks
        if self.rank < 1:
            raise ValueError(f"{self.head.in_features} features cannot be divided among {tasks} tasks: fewer tasks")
        blocks = torch.eye(tasks).repeat_interleave(self.rank, dim=1)  # row t: the diagonal of P_t
        self.masks = F.pad(blocks, (0, self.head.in_features - self.rank * tasks)).to(self.head.weight)
        self.kernels = convolutions if self.variant == "stiefel" else []
        _draw_orthonormal(model, self.kernels)
        self.taken = torch.zeros(1, dtype=torch.int64, device=self.head.weight.device)
        self.x, self.y = self.head.weight.new_empty(0), self.taken.new_empty(0)  # (tasks, samples, ...) kept

    def begin_task(self, task: Task, steps: int, seed: int) -> None:
        if task.id in [t.id for t in self.seen[:-1]]:
            raise ValueError(f"task {task.id!r} has been learned: LOS meets its tasks once, one after another")
        super().begin_task(task, steps, seed)
        if len(self.seen) > self.tasks:
            raise ValueError(f"task {task.id!r} is one too many: the features are divided among tasks={self.tasks}")
        self.seed = seed
        draws = torch.randint(2**60, (steps,), generator=generator(seed, task, "replay"))
        self.draws = draws.to(self.taken.device)  # modulo the number of old tasks: which one is replayed
        self.taken.zero_()

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        t = self._place(task)
        with self._reading(self.masks[t]):
            loss = cross_entropy(self.model(x), y, task)
        if self.variant == "subspace" or t == 0:
            return self._descend(loss)
        j = self.draws[self.taken] % t
        self.taken += 1
        labels = self.y[j][0]
        with self._reading(self.masks[j]):
            logits = self.replayed(self.x[j][0], j.expand(len(labels)))
        return self._descend((loss + F.cross_entropy(logits, labels, ignore_index=NOBODY)) / (t + 1))

    def end_task(self, task: Task, batches: Batches) -> None:
        if self.variant == "stiefel" and len(self.y) < len(self.seen):
            x, y = (torch.cat(parts) for parts in zip(*batches))
            shuffled = torch.randperm(len(y), generator=generator(self.seed, task, "memory")).to(y.device)
            kept = torch.cat([shuffled[y[shuffled] == c][: self.samples] for c in y.unique()])
            # Tasks with fewer classes than others are filled up with samples of nobody.
            self.x = pad_sequence([*self.x, x[kept]], batch_first=True)
            self.y = pad_sequence([*self.y, y[kept]], batch_first=True, padding_value=NOBODY)
        super().end_task(task, batches)

    def predict(self, x: Tensor, task: Task) -> Tensor:
        with self._reading(self.masks[self._place(task)]):
            return super().predict(x, task)

    def _place(self, task: Task) -> int:
        return [t.id for t in self.seen].index(task.id)

    @contextmanager
    def _reading(self, mask: Tensor) -> Iterator[None]:
        """The head reads its input times `mask` (d,) or (1, d)."""
        handle = self.head.register_forward_pre_hook(lambda head, inputs: (inputs[0] * mask, *inputs[1:]))
        try:
            yield
        finally:
            handle.remove()

    def _descend(self, loss: Tensor) -> Tensor:
        """Plain SGD, but for the kernels, which move along the Stiefel manifold."""
        self.optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for layer in self.kernels:
                weight: Any = layer.module.weight
                W = layer.matrix.to_matrix(weight).mT  # (groups, k^2 C_in, C_out), as in the paper
                weight.copy_(layer.matrix.to_weight(cayley(W, layer.gradient.mT, self.lr).mT, weight))
                weight.grad = None
        self.optimizer.step()
        return loss.detach()


def cayley(W: Tensor, G: Tensor, lr: float) -> Tensor:
    """One approximate Cayley step from W (groups, n, p) against the gradient G: W^T W stays, nearly, what it is.

    Ahat = G W^T - W (W^T G W^T) / 2, A = Ahat - Ahat^T, alpha = min(lr, 1 / (||A||_1 + 1e-8)); Y = W - alpha A W,
    then twice Y <- W - alpha A (W + Y) / 2. A is n x n, up to 4608 x 4608, and is never formed: A = U W^T - W U^T
    with U = G - W (W^T G) / 2; only its largest column sum meets it, some rows at a time.
    """
    U = G - W @ (W.mT @ G) / 2
    left, right = torch.cat([U, -W], dim=-1), torch.cat([W, U], dim=-1)
    # A's rows are minus its columns.
    sums = [torch.linalg.vector_norm(part @ right.mT, 1, dim=-1).amax(-1) for part in left.split(512, dim=-2)]
    alpha = (1 / (torch.stack(sums).amax(0) + 1e-8)).clamp(max=lr)[:, None, None]
    Y = W - alpha * (left @ (right.mT @ W))
    for _ in range(2):
        Y = W - alpha / 2 * (left @ (right.mT @ (W + Y)))
    return Y


def _draw_orthonormal(model: nn.Module, kernels: list[Layer]) -> None:
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().cpu().float().numpy().tobytes())
    drawn = torch.Generator().manual_seed(int.from_bytes(digest.digest()[:8], "little") >> 1)
    with torch.no_grad():
        for layer in kernels:
            shape = (layer.matrix.groups, layer.matrix.outputs, layer.matrix.inputs)
            each = [nn.init.orthogonal_(torch.empty(shape[1:]), generator=drawn) for _ in range(shape[0])]
            layer.module.weight.copy_(layer.matrix.to_weight(torch.stack(each), layer.module.weight))
