"""The ring memory of A-GEM and ER-Ring: the last few samples per class of every finished task."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..benchmarks import Task
from .method import Batches


class Ring:
    """`per_class` samples of each class of each finished task; every step replays `batch` of them.

    The papers fill it while a task trains, each sample overwriting the oldest of its class. Batches are shuffled, so
    what is left at the end is a uniform choice without replacement; `end` makes that choice directly, in its pass
    over the task's data: the same distribution, whatever the order of the data, and nothing to do in a step.

    x (n, ...), y (n,), slots (n,): samples, labels, and whose they are, as positions in the method's `seen`.
    draws (steps, m): which samples each step of the task replays, m = min(n, batch), without replacement.
    """

    _tensors = ("x", "y", "slots", "draws")

    def __init__(self, per_class: int, batch: int, device: torch.device) -> None:
        if per_class < 1 or batch < 1:
            raise ValueError(f"per_class and batch are at least 1, got per_class={per_class}, batch={batch}")
        self.per_class, self.batch, self.device, self.seed = per_class, batch, device, 0
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self.x, self.y, self.slots, self.draws = nothing, nothing, nothing, nothing

    def __len__(self) -> int:
        return len(self.y)

    def begin(self, before: list[Task], seen: list[Task], steps: int, seed: int) -> Tensor:
        """Draw what each of the next `steps` steps replays; returns the counter (1,) of these steps, at 0.

        `before` is `seen` as it was before this task.
        """
        if len(self):  # a task that is met again has moved to the end of `seen`
            ids = [t.id for t in seen]
            self.slots = torch.tensor([ids.index(t.id) for t in before], device=self.device)[self.slots]
        self.seed, source = seed, generator(seed, seen[-1], "memory")
        drawn = [torch.randperm(len(self), generator=source)[: self.batch] for _ in range(steps)]
        self.draws = torch.stack(drawn).to(self.device)
        return torch.zeros(1, dtype=torch.int64, device=self.device)

    def sample(self, counter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This step's (x, y, slots); moves the counter on, without waiting for the host."""
        chosen = self.draws.index_select(0, counter).squeeze(0)
        counter.add_(1)
        return self.x.index_select(0, chosen), self.y.index_select(0, chosen), self.slots.index_select(0, chosen)

    def end(self, seen: list[Task], batches: Batches) -> None:
        """Keep `per_class` samples per class of the last task of `seen`, in place of any it had before."""
        source, held = generator(self.seed, seen[-1], "ring"), list[Tensor]()
        for x, y in batches:
            lots = torch.rand(len(y), generator=source, dtype=torch.float64).to(y.device)
            held = [torch.cat(pair) for pair in zip(held, (x, y, lots))] if held else [x, y, lots]
            order = held[2].argsort()
            ranks = F.one_hot(held[1][order]).cumsum(0).gather(1, held[1][order, None]).squeeze(1)
            held = [t[order[ranks <= self.per_class]] for t in held]  # of each class, those with the lowest lots
        if not held:
            raise ValueError(f"end_task was given no batches: nothing of task {seen[-1].id!r} can be kept")
        slot, (x, y) = len(seen) - 1, (t.to(self.device) for t in held[:2])
        old = self.slots != slot
        self.slots = torch.cat([self.slots[old], torch.full_like(y, slot)])
        self.x, self.y = torch.cat([self.x[old], x]) if len(self) else x, torch.cat([self.y[old], y])
        self.draws = self.draws[:0]

    def memory(self) -> int:
        """Bytes of the samples, their labels and owners; not the draws, which could be drawn again at any time."""
        return self.x.nbytes + self.y.nbytes + self.slots.nbytes

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._tensors:
            setattr(self, name, state[name].to(self.device, copy=True))


def generator(seed: int, task: Task, purpose: str) -> torch.Generator:
    """Random numbers that depend on these three alone."""
    digest = hashlib.sha256(f"{seed}/{task.id!r}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
