"""What RGO costs, as ratios to plain SGD: one process, one thread, interleaved, median of many.

    python performance/step.py            prints a table and writes performance/step.json

Every configuration trains its own copy of the MLP of the paper (784-256-256-10, batch 10, SGD) on Permuted MNIST, after
two tasks of 1000 steps, so that P is one that training made. Rounds alternate between the configurations; each round
times `STEPS` steps of each.
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import rgo
from rgo.benchmarks import batches, permuted_mnist
from rgo.models import mlp

ROUNDS, STEPS = 60, 50
CONFIGURATIONS: dict[str, Callable[[nn.Module], rgo.RGO | None]] = {
    "SGD": lambda model: None,
    "RGO": lambda model: rgo.RGO(model),
    "RGO without FEL": lambda model: rgo.RGO(model, encode=False),
    "RGO, P in bfloat16": lambda model: rgo.RGO(model, dtype=torch.bfloat16),
    "FEL alone": lambda model: rgo.RGO(model, project=False),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    tasks = permuted_mnist(tasks=3)
    stream = [list(batches(task, batch_size=10, steps=1000, seed=0)) for task in tasks]
    ready: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    end_task: dict[str, float] = {}
    memory: dict[str, int] = {}
    for name, attach in CONFIGURATIONS.items():
        model = mlp(init="torch", seed=0)
        optimizer, learner = torch.optim.SGD(model.parameters(), lr=0.1), attach(model)
        for k in range(2):
            if learner:
                learner.begin_task(k)
            train(model, optimizer, stream[k])
            start = time.perf_counter()
            if learner:
                learner.end_task(stream[k])
            end_task[name] = time.perf_counter() - start
        if learner:
            learner.begin_task(2)
        memory[name] = learner.memory() if learner else 0
        ready[name] = model, optimizer
        print(f"{name}: two tasks learned", file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for i in range(ROUNDS):
        part = stream[2][i * STEPS % 1000 : i * STEPS % 1000 + STEPS]
        for name, (model, optimizer) in ready.items():
            start = time.perf_counter()
            train(model, optimizer, part)
            seconds[name].append((time.perf_counter() - start) / STEPS)
    sgd = statistics.median(seconds["SGD"])
    result = {
        name: {
            "step_ms": round(1000 * statistics.median(times), 4),
            "step_ratio": round(statistics.median(t / s for t, s in zip(times, seconds["SGD"])), 3),
            "end_task_share_of_1000_sgd_steps": round(end_task[name] / (1000 * sgd), 3),
            "bytes_kept": memory[name],
        }
        for name, times in seconds.items()
    }
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    record = {
        "model": "mlp 784-256-256-10, batch 10, torch initialisation",
        "rounds": ROUNDS,
        "steps_per_round": STEPS,
        "environment": {
            "processor": cpu[0] if cpu else platform.processor(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": 1,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "result": result,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    for name, row in result.items():
        print(f"{name:22}", *(f"{key} {value:<10}" for key, value in row.items()))


if __name__ == "__main__":
    main()
