"""What RGO costs, as ratios to plain SGD: one process, one thread, interleaved, median of many.

    python performance/step.py            prints a table and writes performance/step.json
    python performance/step.py --out X    writes X instead

Every configuration trains its own copy of the MLP of the paper (784-256-256-10, batch 10, SGD) on Permuted MNIST, after
two tasks of 1000 steps, so that P is one that training made. Rounds alternate between the configurations; each round
times `STEPS` steps of each, and every tenth one the pass that `end_task` makes over 10,000 samples in batches of ten.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import rgo
from rgo import results
from rgo.benchmarks import batches, permuted_mnist
from rgo.collecting import collect
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    tasks = permuted_mnist(tasks=3)
    stream = [list(batches(task, batch_size=10, steps=1000, seed=0)) for task in tasks]
    ready: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    learners: dict[str, rgo.RGO] = {}
    end_task: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    for name, attach in CONFIGURATIONS.items():
        model = mlp(init="torch", seed=0)
        optimizer, learner = torch.optim.SGD(model.parameters(), lr=0.1), attach(model)
        for k in range(2):
            if learner:
                learner.begin_task(k)
            train(model, optimizer, stream[k])
            if learner:
                learner.end_task(stream[k])
        if learner:
            learner.begin_task(2)
            if learner.project:
                learners[name], end_task[name] = learner, []
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
            if i % 10 == 9 and name in learners:
                for covered in learners[name]._layers():
                    covered.disarm()
                start = time.perf_counter()
                collect(learners[name], stream[2], None, None)  # all of end_task but putting the new P in force
                end_task[name].append(time.perf_counter() - start)
    sgd = statistics.median(seconds["SGD"])
    result = {
        name: {
            "step_ms": round(1000 * statistics.median(times), 4),
            "step_ratio": round(statistics.median(t / s for t, s in zip(times, seconds["SGD"])), 3),
            "end_task_share_of_1000_sgd_steps": (
                round(statistics.median(end_task[name]) / (1000 * sgd), 3) if name in end_task else 0.0
            ),
            "bytes_kept": memory[name],
        }
        for name, times in seconds.items()
    }
    record = {
        "model": "mlp 784-256-256-10, batch 10, torch initialisation",
        "rounds": ROUNDS,
        "steps_per_round": STEPS,
        "environment": results.environment(1, torch.device("cpu")),
        "commit": results.commit(),
        "result": result,
    }
    out.write_text(json.dumps(record, indent=1) + "\n")
    for name, row in result.items():
        print(f"{name:22}", *(f"{key} {value:<10}" for key, value in row.items()))


if __name__ == "__main__":
    main()
