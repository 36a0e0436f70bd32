"""A stream of your own DataLoaders, learned with RGO: python examples/own_stream.py  (a few seconds, offline).

Five tasks about the same four groups of points, each seen through a rotation of its own. With `rgo.RGO(model,
project=False, encode=False)`, which is plain SGD, the same script ends near 50 %.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rgo
from rgo.benchmarks import batches
from rgo.metrics import average_accuracy, backward_transfer

torch.manual_seed(0)
torch.set_num_threads(1)
centres = 0.7 * torch.randn(4, 30)


def loader(rotation: torch.Tensor, samples: int) -> DataLoader:
    y = torch.randint(4, (samples,))
    x = (centres[y] + torch.randn(samples, 30)) @ rotation
    return DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)


rotations = [torch.linalg.qr(torch.randn(30, 30)).Q for _ in range(5)]
tasks = rgo.stream(
    [(loader(rotation, 1000), loader(rotation, 500)) for rotation in rotations],  # (train, test) of each
    ids=["monday", "tuesday", "wednesday", "thursday", "friday"],
)

model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
learner = rgo.RGO(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
R: list[list[float]] = []
for k, task in enumerate(tasks):
    learner.begin_task(task.id)
    for x, y in batches(task, batch_size=10, steps=200, seed=0):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    learner.end_task([task.train])
    R.append([])
    for old in tasks[: k + 1]:
        with learner.task(old.id), torch.no_grad():
            R[k].append(100 * (model(old.test[0]).argmax(1) == old.test[1]).float().mean().item())
    print(f"after {task.id:10}", *(f"{accuracy:6.1f}" for accuracy in R[k]))
print(f"ACC {average_accuracy(R):.1f} %, BWT {backward_transfer(R):.1f}")
