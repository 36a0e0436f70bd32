"""A method of your own beside two of the laboratory's: python examples/own_method.py  (a few seconds, offline).

The method here pulls the weights to where the last task left them: cross-entropy + strength / 2 |theta - theta*|^2.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

from torch import Tensor, nn

from rgo.benchmarks import Task
from rgo.experiment import experiment
from rgo.methods import METHODS, Method, Recipe
from rgo.methods.method import Batches, cross_entropy
from rgo.metrics import average_accuracy, backward_transfer
from rgo.runner import run


@final
class Anchor(Method):
    remembers = constant = ("anchor",)  # saved and counted as memory; does not change inside a task

    def __init__(self, model: nn.Module, *, lr: float = 0.1, encode: bool = False, strength: float = 0.02) -> None:
        super().__init__(model, lr=lr, encode=encode)
        self.strength = strength
        self.anchor: list[Tensor] = []  # theta*, empty until a task has ended

    def observe(self, x: Tensor, y: Tensor, task: Task) -> Tensor:
        loss = cross_entropy(self.model(x), y, task)
        for p, old in zip(self.model.parameters(), self.anchor):
            loss = loss + self.strength / 2 * (p - old).square().sum()
        return self.step(loss)

    def end_task(self, task: Task, batches: Batches) -> None:
        self.anchor = [p.detach().clone() for p in self.model.parameters()]
        super().end_task(task, batches)


METHODS["anchor"] = Recipe(Anchor)

if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        for method in ("sgd", "anchor", "rgo"):
            R = run(experiment("digits", method, seed=0, kind="permuted", steps=200), Path(folder))["accuracy"]
            print(f"{method:7} ACC {average_accuracy(R):5.1f} %   BWT {backward_transfer(R):6.1f}")
