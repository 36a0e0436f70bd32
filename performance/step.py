"""What RGO costs, as ratios to plain SGD: one process, one thread, interleaved, median of many.

    python performance/step.py mlp lenet5 alexnet6 resnet18     measures these and writes performance/step.json
    python performance/step.py mlp --out X                      the others that X already holds stay

The MLP of the paper (784-256-256-10) is measured on Permuted MNIST, the convolutional networks on Split CIFAR-100 with
their split head left out; batch 10, plain SGD. One learner, with everything at its default, learns task after task.
After the numbers of tasks that `NETWORKS` says each configuration gets a copy of the model and a P of the curvature
that training made, and trains the next task: rounds alternate between the configurations. `end_task` is timed on all
of a task's samples in batches of ten.

`multiplications` and `bytes` are what a step cannot do without: of plain SGD the three products of a layer (two where
nothing is trained before it), its weights (read forward and backward, updated by a gradient that is written and read),
its inputs and its outputs (each written or read three times); of RGO the product of the smaller of (rows x inputs) and
(outputs x inputs) with P, which is read once.
"""

import argparse
import copy
import ctypes
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rgo
from rgo import models, results
from rgo.benchmarks import Task, batches, permuted_mnist, split_cifar100
from rgo.collecting import collect
from rgo.methods.method import cross_entropy


class Network(NamedTuple):
    after: tuple[int, ...]  # tasks after which it is measured
    learn: int  # training steps of each task before
    samples: int  # of each of them that end_task sees
    task: int  # steps of a task, of which end_task's time is a share
    rounds: int
    steps: int  # of a round
    rows: int  # of a batch in evaluation
    lr: float


NETWORKS = {
    "mlp": Network((1, 5, 20), 1000, 10_000, 1000, 40, 50, 1000, 0.1),
    "lenet5": Network((1, 5, 20), 250, 2500, 2000, 30, 4, 250, 0.03),
    "alexnet6": Network((1, 5, 20), 250, 2500, 2000, 20, 3, 250, 0.03),
    "resnet18": Network((1, 5), 50, 500, 2000, 7, 2, 50, 0.03),
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "RGO": {},
    "RGO without FEL": {"encode": False},
    "RGO, P in float32": {"dtype": torch.float32},
    "RGO, P in bfloat16": {"dtype": torch.bfloat16},
    "RGO, tolerance 0.1": {"tolerance": 0.1},
    "FEL alone": {"project": False},
}
LEFT_OUT = {"resnet18": ("RGO, P in bfloat16", "RGO, tolerance 0.1")}  # 4608 wide: minutes of eigenvectors
ONCE = 5  # tasks after which end_task and its memory are measured


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]], task: Task) -> None:
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y, task).backward()
        optimizer.step()


def samples(task: Task, count: int) -> list[tuple[Tensor, Tensor]]:
    return list(batches(task, batch_size=10, steps=count // 10, seed=0))


def necessary(model: nn.Module, x: Tensor, skip: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Multiplications and bytes of a step of plain SGD, and what P adds; in millions."""
    learner = rgo.RGO(model, skip=skip)
    made = dict(learner.projections)
    learner.detach()
    sgd, added = {"multiplications": 0, "bytes": 0}, {"multiplications": 0, "bytes": 0}
    first = True

    def met(name: str, layer: nn.Module, x: Tensor, y: Tensor) -> None:
        nonlocal first
        matrix = rgo.layers.describe(layer)
        assert matrix is not None
        rows, n, o, g = matrix.count(x), matrix.inputs, matrix.outputs, matrix.groups
        sgd["multiplications"] += (2 if first else 3) * rows * n * o * g
        sgd["bytes"] += 4 * (5 * n * o * g + 3 * x.numel() + 3 * y.numel())
        first = False
        if name in made:
            added["multiplications"] += min(rows, o) * n * n * g
            added["bytes"] += n * n * g * made[name].dtype.itemsize

    handles = [
        layer.register_forward_hook(lambda layer, x, y, name=name: met(name, layer, x[0], y))
        for name, layer in model.named_modules()
        if rgo.layers.describe(layer) is not None
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    rounded = {who: {k: round(v / 1e6, 3) for k, v in what.items()} for who, what in (("SGD", sgd), ("P", added))}
    return rounded


def configured(model: nn.Module, learner: rgo.RGO, skip: tuple[str, ...], options: dict[str, Any]) -> rgo.RGO:
    """A learner on `model` whose P is of the curvature that `learner` knows."""
    new = rgo.RGO(model, skip=skip, **options)
    for site in new._sites.values():
        site.raw = learner._sites[site.name].raw
    if new.project:
        for covered in new._layers():
            p = covered.projection
            saved = {k: v for k, v in learner.projections[covered.name].state_dict().items() if k != "applied"}
            covered.projection = p.restored(saved).updated(p.collect())
    return new


def resident(field: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def measured_end(learner: rgo.RGO, data: list[tuple[Tensor, Tensor]], task: Task) -> tuple[float, int]:
    """Seconds and additional bytes of the pass: all of end_task but putting the new P in force."""
    for covered in learner._layers():
        covered.disarm()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not held
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, start = resident("VmRSS"), time.thread_time()
    collect(learner, data, task.classes, None)
    return time.thread_time() - start, resident("VmHWM") - before


def measure(name: str, model: nn.Module, learner: rgo.RGO, k: int, task: Task, skip: tuple[str, ...]) -> dict[str, Any]:
    """Every configuration on the task after `k` learned ones."""
    spec = NETWORKS[name]
    ready: dict[str, tuple[nn.Module, torch.optim.Optimizer, rgo.RGO | None]] = {}
    for who, options in {"SGD": None, **CONFIGURATIONS}.items():
        if who not in LEFT_OUT.get(name, ()):
            own = copied(name, model)
            own_learner = None if options is None else configured(own, learner, skip, options)
            if own_learner:
                own_learner.begin_task(k)
            ready[who] = own, torch.optim.SGD(own.parameters(), lr=spec.lr), own_learner
    data = list(batches(task, batch_size=10, steps=spec.rounds * spec.steps, seed=0))
    steps: dict[str, list[float]] = {who: [] for who in ready}
    answers: dict[str, list[float]] = {who: [] for who in ready}
    test = task.test[0][: spec.rows]
    for i in range(spec.rounds):
        part = data[i * spec.steps : (i + 1) * spec.steps]
        for who, (own, optimizer, _) in ready.items():
            start = time.thread_time()
            train(own, optimizer, part, task)
            steps[who].append((time.thread_time() - start) / spec.steps)
    for _ in range(spec.rounds):
        for who, (own, _, _) in ready.items():
            with torch.no_grad():
                start = time.thread_time()
                own(test)
                answers[who].append(time.thread_time() - start)
    sgd = statistics.median(steps["SGD"])
    found: dict[str, Any] = {}
    for who, (_, _, own_learner) in ready.items():
        row = found[who] = {
            "step_ms": round(1000 * statistics.median(steps[who]), 4),
            "step_ratio": round(statistics.median(a / b for a, b in zip(steps[who], steps["SGD"])), 3),
            "evaluation_ratio": round(statistics.median(a / b for a, b in zip(answers[who], answers["SGD"])), 3),
        }
        if own_learner and own_learner.project:
            applied = [p.applied for p in own_learner.projections.values()]
            row["bytes_P"] = sum(a.bytes() for a in applied if a is not None)
            row["bytes_H"] = own_learner.memory() - row["bytes_P"]
            if k == ONCE and who in ("RGO", "RGO without FEL", "RGO, tolerance 0.1"):
                seconds, more = measured_end(own_learner, samples(task, len(task.train[0])), task)
                row["end_task_share"] = round(seconds / (spec.task * sgd), 3)
                row["end_task_peak_bytes"] = more
        ranks = {} if own_learner is None else {n: p.rank for n, p in own_learner.projections.items() if p.rank}
        if ranks:
            row["ranks"] = ranks
    return found


def copied(name: str, model: nn.Module) -> nn.Module:
    """A plain model of the same weights."""
    new = fresh(name)
    new.load_state_dict(copy.deepcopy(model.state_dict()))
    return new


def fresh(name: str) -> nn.Module:
    return models.mlp(init="torch", seed=0) if name == "mlp" else getattr(models, name)(seed=0)  # type: ignore[no-any-return]


def network(name: str) -> dict[str, Any]:
    spec = NETWORKS[name]
    tasks = permuted_mnist(tasks=max(spec.after) + 1) if name == "mlp" else split_cifar100(tasks=20)
    skip = () if name == "mlp" else ("head",)
    model = fresh(name)
    learner, optimizer = rgo.RGO(model, skip=skip), torch.optim.SGD(model.parameters(), lr=spec.lr)
    result: dict[str, Any] = {
        "setting": spec._asdict(),
        "millions": necessary(fresh(name), tasks[0].test[0][:10], skip),
    }
    for k in range(max(spec.after)):
        task = tasks[k]
        learner.begin_task(k)
        train(model, optimizer, list(batches(task, batch_size=10, steps=spec.learn, seed=0)), task)
        learner.end_task(samples(task, min(spec.samples, len(task.train[0]))), classes=task.classes)
        print(f"{name}: {k + 1} tasks learned", file=sys.stderr, flush=True)
        if k + 1 in spec.after:
            result[f"after {k + 1}"] = measure(name, model, learner, k + 1, tasks[min(k + 1, len(tasks) - 1)], skip)
            for who, row in result[f"after {k + 1}"].items():
                print(f"{name:9}{k + 1:3} {who:20}", *(f"{a} {b}" for a, b in row.items()), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="network")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.networks:
        found = network(name)
        record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        record = {
            "environment": results.environment(1, torch.device("cpu")),
            "commit": results.commit(),
            "networks": {**record.get("networks", {}), name: found},
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
