"""RGO and its two halves against plain SGD and separate models: 20 tasks of Permuted and of Rotated MNIST.

    python experiments/core.py --jobs 2                                    all of the paper's MNIST table
    python experiments/core.py --methods rgo --permute-logits              the paper's FEL, on the logits too
    python experiments/core.py --methods rgo rgo-2 --set curvature=softmax another rule, in a folder of its own
    python experiments/core.py --seeds 1 --tasks 3 --steps 100 --out /tmp  a quick look

One run is one (benchmark, method, seed) and one JSON file, written when the run is complete. Runs whose file
exists are skipped: stop the suite whenever you like and start it again.
"""

import argparse
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import rgo
from rgo.benchmarks import Task, batches, permuted_mnist, rotated_mnist
from rgo.metrics import average_accuracy, backward_transfer
from rgo.models import mlp

BENCHMARKS = {"permuted-mnist": permuted_mnist, "rotated-mnist": rotated_mnist}

METHODS: dict[str, dict[str, Any] | None] = {  # arguments of RGO; None is the bare model
    "rgo": {},
    "rgo-2": {"encode": False},
    "fel": {"project": False},
    "sgd": None,
    "stl": None,  # single-task learning: a fresh model for each task
}

PROTOCOL = {
    "tasks": 20,
    "steps": 1000,
    "batch_size": 10,
    "lr": 0.1,
    "samples": 10_000,
    "init": "torch",
    "curvature_batch": 500,
    "permute_logits": False,
}

PAPER = tomllib.loads((Path(__file__).parent / "table1.toml").read_text())  # FEL alone has no row there

Report = Callable[[int, str], None]  # (steps done so far, a line on how it goes)


def learn(benchmark: str, method: str, seed: int, settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """Teach one model the tasks one after another, testing it on all tasks so far after each."""
    tasks = BENCHMARKS[benchmark](settings["tasks"], seed, settings["samples"])
    model = mlp(init=settings["init"], seed=seed)
    arguments = METHODS[method]
    learner = None if arguments is None else rgo.RGO(model, **(arguments | settings.get("options", {})))
    loss_function = nn.CrossEntropyLoss()
    separate = method == "stl"

    accuracy: list[list[float]] = []
    train_diagonal: list[float] = []
    losses: list[list[float]] = []
    timing: dict[str, list[float]] = {"train": [], "end_task": [], "evaluate": []}  # seconds per task

    def task_at(j: int) -> Task:
        return permute_logits(tasks[j]) if settings["permute_logits"] else tasks[j]

    for k in range(len(tasks)):
        if separate:
            model = mlp(init=settings["init"], seed=seed + 1000 * k)
        task = task_at(k)
        optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])
        stream = batches(task, batch_size=settings["batch_size"], steps=settings["steps"], seed=seed)
        step_losses: list[float] = []

        with timed(timing["train"]):
            if learner:
                learner.begin_task(k)
            for step, (x, y) in enumerate(stream, start=1):
                loss = loss_function(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step_losses.append(loss.item())
                if step % 100 == 0:
                    recent = statistics.fmean(step_losses[-100:])
                    report(k * settings["steps"] + step, f"task {k + 1}  loss {recent:.2f}")

        with timed(timing["end_task"]):
            if learner:
                x, y = task.train
                size = settings["curvature_batch"]
                learner.end_task(zip(x.split(size), y.split(size)))

        with timed(timing["evaluate"]):  # building the tasks again is part of it
            answered = [k] if separate else range(k + 1)
            row = [percent_right(model, learner, j, task_at(j).test) for j in answered]
        accuracy.append([*accuracy[-1], *row] if separate and accuracy else row)
        train_diagonal.append(percent_right(model, learner, k, task.train))
        hundreds = [step_losses[i : i + 100] for i in range(0, len(step_losses), 100)]
        losses.append([round(statistics.fmean(hundred), 4) for hundred in hundreds])
        report((k + 1) * settings["steps"], f"task {k + 1}  ACC {average_accuracy(accuracy):.1f}")

    train_final = train_diagonal
    if not separate:
        train_final = [percent_right(model, learner, j, task_at(j).train) for j in range(len(tasks))]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    other_models = len(tasks) - 1 if separate else 0
    return {
        "accuracy": accuracy,
        "train_accuracy": {"diagonal": train_diagonal, "final": train_final},
        "loss": losses,
        "timing": timing,
        "memory": learner.memory() if learner else other_models * parameters * 4,
        "parameters": parameters,
    }


def permute_logits(task: Task) -> Task:
    """The task, its logits permuted by FEL too.

    To gather the logits, `logits[:, p]`, and compare with label y is to compare the logits with label p[y],
    for the loss, the curvature and the accuracy alike: so it is the labels that are renamed.
    """
    p = rgo.permutation(task.id, 10)
    (train_x, train_y), (test_x, test_y) = task.train, task.test
    return Task(task.id, (train_x, p[train_y]), (test_x, p[test_y]))


def percent_right(model: nn.Module, learner: rgo.RGO | None, k: int, data: tuple[Tensor, Tensor]) -> float:
    x, y = data
    with torch.no_grad(), learner.task(k) if learner else nullcontext():
        parts = zip(x.split(1000), y.split(1000))
        right = sum((model(part).argmax(1) == true).sum().item() for part, true in parts)
    return round(100 * right / len(y), 2)


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds.append(round(time.perf_counter() - start, 3))


# One run, one file ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    benchmark: str
    method: str
    seed: int
    settings: dict[str, Any]
    out: Path
    commit: str | None

    @property
    def name(self) -> str:
        special = {"init": self.settings["init"]} if "init" in self.changed else {}
        marks = [f"+{key}={value}" for key, value in (special | self.settings.get("options", {})).items()]
        if self.settings["permute_logits"]:
            marks.append("+permute-logits")
        return f"{self.benchmark}/{self.method}{''.join(marks)}"

    @property
    def path(self) -> Path:
        return self.out / self.name / f"seed-{self.seed}.json"

    @property
    def changed(self) -> dict[str, Any]:
        return {name: value for name, value in self.settings.items() if value != PROTOCOL.get(name)}

    def is_done(self) -> bool:
        if not self.path.exists():
            return False
        there = json.loads(self.path.read_text())["settings"]
        if there != self.settings:
            other = {name: value for name, value in there.items() if value != self.settings.get(name)}
            raise SystemExit(f"{self.path} was made with other settings ({other}): give another --out")
        return True

    def record(self, report: Report) -> dict[str, Any]:
        return {
            "format": 1,
            "benchmark": self.benchmark,
            "model": "mlp",
            "method": self.method,
            "seed": self.seed,
            "settings": self.settings,
            "changed": self.changed,
            **learn(self.benchmark, self.method, self.seed, self.settings, report),
            "environment": environment(),
            "commit": self.commit,
        }


def write(path: Path, record: dict[str, Any]) -> None:
    """The file appears under its name only when it is whole, and one line holds one key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write("{\n" + ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in record.items()) + "\n}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def environment() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")  # where Linux, whose platform.processor() is empty, names it
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "processor": processor,
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def current_commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    edited = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode
    return head + ("+changes" if edited else "")


# Many runs -----------------------------------------------------------------------------------------------


class Worker:
    """What a worker process has from its parent: where to report to and whether to go on."""

    messages: "SimpleQueue[tuple[str, int, str]]"
    stop: Event

    @classmethod
    def start(cls, messages: "SimpleQueue[tuple[str, int, str]]", stop: Event) -> None:
        cls.messages, cls.stop = messages, stop
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which sets `stop`
        torch.set_num_threads(1)

    @classmethod
    def run(cls, run: Run) -> None:
        def report(steps: int, line: str) -> None:
            if cls.stop.is_set():
                raise KeyboardInterrupt
            cls.messages.put((str(run.path), steps, line))

        write(run.path, run.record(report))


def run_all(runs: list[Run], jobs: int, console: Console) -> int:
    """Do the runs in `jobs` processes with a progress line for each; returns how many failed."""
    context = multiprocessing.get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
    failed = 0
    with (
        ProcessPoolExecutor(jobs, context, Worker.start, (messages, stop)) as pool,
        Progress(*columns, TextColumn("{task.fields[line]}"), console=console) as progress,
    ):
        overall = progress.add_task("runs", total=len(runs), line="")
        bars: dict[str, Any] = {}
        running = {pool.submit(Worker.run, run): run for run in runs}
        try:
            while running:
                done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                while not messages.empty():
                    path, steps, line = messages.get()
                    if path not in bars:
                        run = next(run for run in runs if str(run.path) == path)
                        total = run.settings["tasks"] * run.settings["steps"]
                        bars[path] = progress.add_task(f"{run.name} seed {run.seed}", total=total, line="")
                    progress.update(bars[path], completed=steps, line=line)
                for future in done:
                    run = running.pop(future)
                    progress.advance(overall)
                    if str(run.path) in bars:
                        progress.remove_task(bars[str(run.path)])
                    if error := future.exception():
                        failed += 1
                        console.print(f"[red]{run.name} seed {run.seed} failed: {type(error).__name__}: {error}")
                    else:
                        console.print(f"{run.name} seed {run.seed}: {summary([run])}")
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def summary(runs: list[Run]) -> str:
    """ACC and BWT over the seeds, mean ± standard deviation."""
    matrices = [json.loads(run.path.read_text())["accuracy"] for run in runs]
    cells = []
    for metric in average_accuracy, backward_transfer:
        values = [metric(matrix) for matrix in matrices]
        deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        cells.append(f"{statistics.fmean(values):.2f}{deviation}")
    return " / ".join(cells)


def table(benchmark: str, runs: list[Run]) -> Table:
    """The runs of one benchmark beside the paper, where their settings are the paper's."""
    result = Table(title=f"{benchmark}, ACC / BWT")
    for name in "method", "seeds", "here", "paper":
        result.add_column(name, justify="left" if name == "method" else "right")
    for name in dict.fromkeys(run.name for run in runs if run.benchmark == benchmark):
        group = [run for run in runs if run.name == name and run.path.exists()]
        if group:
            paper = PAPER[benchmark].get(group[0].method)
            if group[0].changed.keys() & {"tasks", "steps", "samples"}:
                paper = None
            published = f"{paper['acc']:.2f} / {paper['bwt']:.2f}" if paper else "-"
            result.add_row(name.partition("/")[2], str(len(group)), summary(group), published)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5, help="the seeds 0 to N-1 (default 5)", metavar="N")
    parser.add_argument("--tasks", type=int, default=PROTOCOL["tasks"], metavar="N")
    parser.add_argument("--steps", type=int, default=PROTOCOL["steps"], help="per task", metavar="N")
    parser.add_argument("--init", default=PROTOCOL["init"], help="how the model starts (rgo.models.mlp)")
    parser.add_argument(
        "--set", nargs="+", default=[], help="other arguments for RGO, e.g. curvature=softmax alpha=0.1", metavar="K=V"
    )
    parser.add_argument("--permute-logits", action="store_true", help="FEL on the logits too (rgo and fel only)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each", metavar="N")
    args = parser.parse_args()
    for option in "seeds", "tasks", "steps", "jobs":
        if getattr(args, option) < 1:
            parser.error(f"--{option} {getattr(args, option)}: give 1 or more")
    if args.permute_logits and not {"rgo", "fel"}.issuperset(args.methods):
        parser.error("--permute-logits is a part of FEL: give it with --methods rgo fel, or one of them")

    options: dict[str, Any] = {}
    for pair in args.set:
        name, equals, value = pair.partition("=")
        if not equals:
            parser.error(f"--set {pair}: give name=value")
        options[name] = float(value) if value.replace(".", "", 1).isdigit() else value
    if options and any(METHODS[method] is None for method in args.methods):
        parser.error("--set gives arguments to RGO: leave out --methods sgd and stl, or name the others")

    settings = PROTOCOL | {"tasks": args.tasks, "steps": args.steps, "permute_logits": args.permute_logits}
    settings |= {"init": args.init} | ({"options": options} if options else {})
    commit = current_commit()
    runs = [
        Run(benchmark, method, seed, settings, args.out, commit)
        for seed in range(args.seeds)
        for benchmark in args.benchmarks
        for method in args.methods
    ]
    todo = [run for run in runs if not run.is_done()]
    console = Console()
    console.print(f"{len(runs)} runs, {len(runs) - len(todo)} of them done before; results in {args.out}")
    try:
        failed = run_all(todo, args.jobs, console) if todo else 0
    except KeyboardInterrupt:
        console.print("Stopped. What is finished is kept; the same command goes on from here.")
        return 130
    for benchmark in args.benchmarks:
        console.print(table(benchmark, runs))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
