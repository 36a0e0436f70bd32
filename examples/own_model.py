"""RGO on a model and a training loop of your own: python examples/own_model.py  (a few seconds, offline).

Five tasks of two digits each. The model has one wide head, of which each task uses two rows.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

import rgo
from rgo.benchmarks import batches, digits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.fc, self.head = nn.Linear(16 * 7 * 7, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = relu(self.stem(x.view(-1, 1, 14, 14)))
        x = relu(x + self.body(x))  # a sum of branches needs nothing special
        return self.head(relu(self.fc(x.flatten(1))))


def learn(**options: bool) -> list[float]:
    torch.manual_seed(0)
    model, tasks = Net(), digits()
    learner = rgo.RGO(model, skip=("head",), **options)  # a row of the head belongs to one task: nothing to protect
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for task in tasks:
        learner.begin_task(task.id)
        for x, y in batches(task, batch_size=10, steps=100, seed=0):
            optimizer.zero_grad()
            cross_entropy(model(x)[:, task.classes], torch.searchsorted(torch.tensor(task.classes), y)).backward()
            optimizer.step()
        learner.end_task([task.train], classes=task.classes)
    accuracies = []
    for task in tasks:
        x, y = task.test
        with learner.task(task.id), torch.no_grad():
            answers = torch.tensor(task.classes)[model(x)[:, task.classes].argmax(1)]
        accuracies.append(100 * (answers == y).float().mean().item())
    return accuracies


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, options in (("plain SGD", {"project": False, "encode": False}), ("RGO", {})):
        accuracies = learn(**options)
        print(f"{name:10}", *(f"{a:6.1f}" for a in accuracies), f"   mean {sum(accuracies) / len(accuracies):.1f} %")
