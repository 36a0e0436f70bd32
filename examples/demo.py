"""Five tasks one after another: plain SGD forgets, RGO does not. Half a minute on one CPU core.

    python examples/demo.py [--tasks 5] [--steps 1000] [--out demo.png]

Each task is MNIST with its pixels in another order. One network learns them in turn and never trains on an
old task again. `learn` below is all there is to it: a plain training loop and three calls of `learner`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no window: the picture goes to a file

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import rgo
from rgo.benchmarks import Task, batches, permuted_mnist
from rgo.metrics import average_accuracy, backward_transfer
from rgo.models import mlp

METHODS: dict[str, Callable[[nn.Module], rgo.RGO | None]] = {
    "SGD": lambda model: None,
    "RGO without FEL": lambda model: rgo.RGO(model, encode=False),
    "RGO": lambda model: rgo.RGO(model),
}
COLOURS = {"SGD": "#c44e52", "RGO without FEL": "#8c8c8c", "RGO": "#1f5fa8"}


def learn(method: str, tasks: Sequence[Task], steps: int, report: Callable[[int, str], None]) -> list[list[float]]:
    """Row k of the result: the accuracy of each task so far, in percent, after learning task k."""
    model = mlp(seed=0)
    learner = METHODS[method](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_function = nn.CrossEntropyLoss()
    R: list[list[float]] = []
    seen = ""

    for k, task in enumerate(tasks):
        if learner:
            learner.begin_task(k)

        for step, (x, y) in enumerate(batches(task, batch_size=10, steps=steps, seed=0)):
            loss = loss_function(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report(k * steps + step, f"task {k + 1}  loss {loss.item():.2f}  {seen}")

        if learner:
            x, y = task.train
            learner.end_task(zip(x.split(500), y.split(500)))

        R.append([])
        for j, old in enumerate(tasks[: k + 1]):
            x, y = old.test
            with torch.no_grad(), learner.task(j) if learner else nullcontext():
                right = model(x).argmax(1) == y
            R[k].append(100 * right.float().mean().item())
        seen = f"accuracy {average_accuracy(R):.1f} %"
        report((k + 1) * steps, f"task {k + 1}  {seen}")
    return R


def table(results: dict[str, list[list[float]]]) -> Table:
    tasks = len(next(iter(results.values())))
    result = Table(title=f"Accuracy (%) after the last of {tasks} tasks")
    result.add_column("method")
    for name in [*(f"task {k + 1}" for k in range(tasks)), "ACC", "BWT"]:
        result.add_column(name, justify="right", style="bold" if name == "ACC" else "")
    for method, R in results.items():
        numbers = [*R[-1], average_accuracy(R), backward_transfer(R)]
        result.add_row(method, *(f"{number:.1f}" for number in numbers))
    return result


def draw(results: dict[str, list[list[float]]], path: Path) -> None:
    """Left: the mean over the tasks so far. Right: each task from the moment it was learned."""
    tasks = len(next(iter(results.values())))
    lowest = min(min(row) for R in results.values() for row in R)
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.5), wspace=0.03)
    mean = left.subplots()
    single = right.subplots(1, tasks, sharey=True, squeeze=False)[0]

    for method, R in results.items():
        style = {"color": COLOURS[method], "linewidth": 2, "marker": "o", "markersize": 4}
        averages = [average_accuracy(R[: k + 1]) for k in range(tasks)]
        mean.plot(range(1, tasks + 1), averages, label=f"{method}: {averages[-1]:.1f} %", **style)
        for k in range(tasks):
            later = range(k, tasks)
            single[k].plot([j + 1 for j in later], [R[j][k] for j in later], **style)

    left.suptitle("Mean accuracy of the tasks seen so far (%)", weight="bold")
    right.suptitle("Accuracy of each task as later tasks are learned (%)", weight="bold")
    mean.legend(frameon=False, loc="lower left")
    for k, axes in enumerate([mean, *single]):
        axes.set_xlim(0.5, tasks + 0.5)
        axes.set_ylim(lowest - 4, 100)
        axes.set_xticks(range(1, tasks + 1))
        axes.grid(axis="y", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.set_title(f"task {k}" if k else " ", fontsize=10)
    mean.set_xlabel("tasks learned")
    right.supxlabel("tasks learned", fontsize=10)
    figure.savefig(path)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=5, metavar="N")
    parser.add_argument("--steps", type=int, default=1000, help="per task, of 10 samples each", metavar="N")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the picture", metavar="FILE")
    args = parser.parse_args(arguments)

    torch.set_num_threads(1)  # batches of ten are too small to be worth sharing out
    tasks = permuted_mnist(args.tasks)
    results: dict[str, list[list[float]]] = {}
    console = Console()
    columns = TextColumn("{task.description:<15}"), BarColumn(18), TimeElapsedColumn()
    try:
        with Progress(*columns, TextColumn("{task.fields[line]}"), console=console) as progress:
            for method in METHODS:
                bar = progress.add_task(method, total=args.tasks * args.steps, line="")
                results[method] = learn(
                    method,
                    tasks,
                    args.steps,
                    lambda done, line, bar=bar: progress.update(bar, completed=done, line=line),
                )
    except KeyboardInterrupt:
        console.print("Stopped before the end; nothing was written.")
        return 130
    console.print(table(results))
    draw(results, args.out)
    console.print(f"Picture: {args.out.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
