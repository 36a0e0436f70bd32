"""The laboratory's loop against loops written by hand, several jobs against one, and on CUDA the captured step.

    python performance/loop.py                      on the CPU: writes performance/loop.json
    python performance/loop.py --cuda --start-mps   on a GPU, within six minutes: writes performance/loop-cuda.json
    python performance/loop.py --out X PART ...     these parts only (loop, jobs; permuted, agreement, step, jobs)

loop       `run` against a loop by hand on Permuted MNIST: one process, one thread, taking turns, medians of pairs.
permuted   20 tasks of Permuted MNIST with RGO by the clock on the wall: data, evaluation and checkpoints included.
agreement  accuracies of captured and eager runs of one seed, and of an eager run done twice.
step       the captured step against an eager loop by hand, batch 10, in the second task: P is one that training made.
jobs       several runs at a time against one. On CUDA they share the card under NVIDIA's MPS.

A loop by hand is what one would write for its method alone: data on the device, nothing recorded, nothing saved. Where
the shape of CIFAR-100 is wanted, its pictures are made up.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import rgo
from rgo import results
from rgo.benchmarks import BENCHMARKS, Benchmark, Task, order
from rgo.experiment import Experiment, experiment
from rgo.metrics import average_accuracy
from rgo.models import head_name, load
from rgo.runner import run
from rgo.suite import mps_runs, run_all

METHODS = ("sgd", "a-gem", "rgo")
NETWORKS: dict[str, dict[str, Any]] = {"alexnet6": {}, "resnet18": {"norm": None}}
ROUNDS = 10

Add = Callable[..., None]
"""one more row of a part: printed, and written to the file at once"""


class ByHand:
    """A model and the loop that trains it by SGD, A-GEM or RGO."""

    def __init__(self, e: Experiment, device: str) -> None:
        self.device, self.seed, self.batch, self.agem = device, e.seed, e.settings["batch_size"], e.method == "a-gem"
        self.tasks: Benchmark = BENCHMARKS[e.benchmark](tasks=e.settings["tasks"], seed=e.seed)
        self.model = load(e.settings["model"], seed=e.seed, **e.settings["model_options"]).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=e.settings["lr"])
        head = () if self.tasks[0].classes is None else (head_name(self.model),)
        self.logits = self.model.get_submodule(head_name(self.model)).out_features
        self.learner = rgo.RGO(self.model, skip=head, dtype=torch.float32) if e.method == "rgo" else None
        self.memory: list[tuple[Tensor, Tensor, Tensor]] = []  # one sample of each class, and its task's mask

    def train(self, k: int, steps: int) -> float:
        """Task k; returns the seconds that its steps took."""
        task = self.tasks[k]
        x, y = (t.to(self.device) for t in task.train)
        rows = order(task.id, len(x), self.batch, steps, self.seed).to(self.device)
        mask = self.mask(task)
        if self.learner is not None:
            self.learner.begin_task(k)
        self.model.train()
        start = self.clock()
        if self.memory:
            self.replaying(x, y, mask, rows)
        else:
            for row in rows:
                self.optimizer.zero_grad()
                loss(self.model(x[row]), y[row], mask).backward()
                self.optimizer.step()
        seconds = self.clock() - start
        self.model.eval()
        if self.learner is not None:
            self.learner.end_task(zip(x.split(500), y.split(500)), classes=task.classes)
        if self.agem:
            first = [int((y == label).nonzero()[0]) for label in y.unique()]
            self.memory.append((x[first], y[first], mask.expand(len(first), -1)))
        return seconds

    def replaying(self, x: Tensor, y: Tensor, mask: Tensor, rows: Tensor) -> None:
        """A-GEM's steps, with ten remembered samples in each."""
        old_x, old_y, old_mask = (torch.cat(parts) for parts in zip(*self.memory))
        parameters = list(self.model.parameters())
        sizes = [p.numel() for p in parameters]
        for row in rows:
            g = flat(torch.autograd.grad(loss(self.model(x[row]), y[row], mask), parameters))
            drawn = torch.randperm(len(old_x), device=x.device)[:10]
            replayed = loss(self.model(old_x[drawn]), old_y[drawn], old_mask[drawn])
            ref = flat(torch.autograd.grad(replayed, parameters))
            if (dot := g @ ref) < 0:
                g -= dot / (ref @ ref) * ref
            for p, part in zip(parameters, g.split(sizes)):
                p.grad = part.view_as(p)
            self.optimizer.step()

    def mask(self, task: Task) -> Tensor:
        """The logits that are not the task's; empty where it may answer with all."""
        if task.classes is None:
            return torch.zeros(0, dtype=torch.bool, device=self.device)
        mask = torch.ones(self.logits, dtype=torch.bool, device=self.device)
        mask[list(task.classes)] = False
        return mask

    @torch.no_grad()
    def accuracy(self, k: int) -> float:
        x, y = (t.to(self.device) for t in self.tasks[k].test)
        with self.learner.task(k) if self.learner is not None else nullcontext():
            logits = torch.cat([self.model(part) for part in x.split(1000)])
        right = masked(logits, self.mask(self.tasks[k])).argmax(1) == y
        return round(100 * int(right.sum()) / len(y), 2)

    def clock(self) -> float:
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.masked_fill(mask, -torch.inf) if mask.numel() else logits


def loss(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(masked(logits, mask), y)


def flat(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients])


# ---- on the CPU -------------------------------------------------------------------------------------------------


def loop(add: Add) -> None:
    """Steps of the second and the third task: each round a run and a loop by hand, in turns first and second."""
    for method in METHODS:
        e, pairs = experiment("permuted-mnist", method, 0, tasks=3), list[tuple[float, float]]()
        steps = e.settings["steps"]

        def runs(e: Experiment = e) -> tuple[list[float], list[float]]:
            with tempfile.TemporaryDirectory() as folder:
                record = run(e, Path(folder))
            return record["timing"]["train"], record["accuracy"][-1]

        def hand(e: Experiment = e, steps: int = steps) -> tuple[list[float], list[float]]:
            by_hand = ByHand(e, "cpu")
            return [by_hand.train(k, steps) for k in range(3)], [by_hand.accuracy(k) for k in range(3)]

        for i in range(ROUNDS):
            (ours, accuracy), (theirs, by_hand) = (runs(), hand()) if i % 2 else (hand(), runs())[::-1]
            pairs += zip(ours[1:], theirs[1:])
        ours, theirs, ratio = (statistics.median(v) for v in zip(*((a, b, b / a) for a, b in pairs)))
        speeds = {"run": round(steps / ours), "by_hand": round(steps / theirs), "ratio": round(ratio, 3)}
        accuracies = {"accuracy": accuracy, "accuracy_by_hand": by_hand}
        add(model="mlp", method=method, **speeds, pairs=len(pairs), **accuracies)


def jobs(add: Add) -> None:
    """A suite of eight runs, by the clock on the wall, processes started and data read included."""
    experiments = [experiment("permuted-mnist", m, seed, tasks=5) for seed in (0, 1) for m in (*METHODS, "ewc")]
    for _ in range(3):
        seconds = []
        for count in (1, 2):
            start = time.perf_counter()
            finish(experiments, count, "cpu")
            seconds.append(time.perf_counter() - start)
        one, two = seconds
        add(model="mlp", jobs=2, seconds_one=round(one, 1), seconds=round(two, 1), throughput=round(one / two, 2))


def finish(experiments: list[Experiment], count: int, device: str) -> list[dict[str, Any]]:
    """The results of these runs, `count` of them at a time."""
    with tempfile.TemporaryDirectory() as folder:
        if run_all(experiments, Path(folder), jobs=count, device=device):
            raise SystemExit("a run failed: see above")
        return [results.read(e.path(folder)) for e in experiments]


# ---- on a GPU ---------------------------------------------------------------------------------------------------


def permuted(add: Add) -> None:
    """Three seeds one after another; the first starts CUDA and reads the files too."""
    for seed in range(3):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            record = run(experiment("permuted-mnist", "rgo", seed), Path(folder), device="cuda")
            wall = time.perf_counter() - start
        parts = {part: round(sum(values), 2) for part, values in record["timing"].items()}
        acc = round(average_accuracy(record["accuracy"]), 2)
        add(seed=seed, seconds=round(wall, 2), **parts, rest=round(wall - sum(parts.values()), 2), acc=acc)


def agreement(add: Add) -> None:
    """Three tasks of 300 steps."""
    for benchmark, model in (("permuted-mnist", "mlp"), ("split-cifar100", "alexnet6")):
        for method in METHODS:
            found = []
            for capture in (True, False, False):
                with tempfile.TemporaryDirectory() as folder:
                    e = experiment(benchmark, method, 0, model=model, tasks=3, steps=300)
                    record = run(e, Path(folder), device="cuda", capture=capture)
                    assert record["captured"] == capture
                    found.append([accuracy for row in record["accuracy"] for accuracy in row])
            captured, eager, again = found
            differ, twice = (round(max(abs(a - b) for a, b in zip(other, eager)), 2) for other in (captured, again))
            rows = {"captured": captured[-3:], "eager": eager[-3:]}
            add(model=model, method=method, **rows, differ=differ, eager_twice_differ=twice)


def step(add: Add) -> None:
    """Steps a second: a task of the protocol's 2000, capture and checkpoints included; 500 eager ones by hand."""
    for model, options in NETWORKS.items():
        for method in METHODS:
            e = experiment("split-cifar100", method, 0, model=model, tasks=2, **options)
            by_hand = ByHand(e, "cuda")
            by_hand.train(0, 300)
            eager = 500 / by_hand.train(1, 500)
            del by_hand
            with tempfile.TemporaryDirectory() as folder:
                record = run(e, Path(folder), device="cuda")
            assert record["captured"]
            captured = e.settings["steps"] / record["timing"]["train"][1]
            speeds = {"run": round(captured), "by_hand": round(eager), "ratio": round(captured / eager, 2)}
            add(model=model, method=method, **speeds)


def jobs_cuda(add: Add, start: bool) -> None:
    """Five runs of RGO at once: their steps a second together, by the slowest of them, against one run alone."""
    os.environ.setdefault("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")  # not before: the other parts have the card alone
    start = start and not mps_runs()
    if start:
        Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).mkdir(exist_ok=True)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    elif not mps_runs():
        print("no MPS: give --start-mps, or say CUDA_MPS_PIPE_DIRECTORY=/tmp/mps nvidia-cuda-mps-control -d")
        return
    try:
        for model, tasks in (("alexnet6", 4), ("resnet18", 2)):
            experiments = [experiment("split-cifar100", "rgo", seed, model=model, tasks=tasks) for seed in range(5)]
            alone, slowest = (
                max(sum(map(sum, record["timing"].values())) for record in finish(experiments[:count], count, "cuda"))
                for count in (1, 5)
            )
            times = {"seconds_one": round(alone, 1), "seconds": round(slowest, 1)}
            throughput = round(5 * alone / slowest, 2)
            add(model=model, jobs=5, **times, throughput=throughput, served_by_mps=bool(mps("get_server_list")))
    finally:
        if start:
            mps("quit")


def mps(command: str) -> str:
    """What NVIDIA's MPS daemon answers."""
    control = subprocess.run(["nvidia-cuda-mps-control"], input=command + "\n", capture_output=True, text=True)
    return control.stdout.strip()


def made_up(folder: Path) -> None:
    """Files in the format of CIFAR-100: each class a coarse pattern of its own, and noise."""
    source = np.random.default_rng(0)
    pattern = source.integers(0, 128, (100, 3, 4, 4), np.uint8).repeat(8, axis=2).repeat(8, axis=3).reshape(100, -1)
    for split, each in (("train", 500), ("test", 100)):
        label = np.arange(100, dtype=np.uint8).repeat(each)
        pixels = pattern[label] + source.integers(0, 128, (len(label), pattern.shape[1]), np.uint8)
        np.column_stack([label // 5, label, pixels]).tofile(folder / f"{split}.bin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--cuda", action="store_true", help="the parts for a GPU")
    parser.add_argument("--start-mps", action="store_true", help="start the MPS daemon for the jobs, and end it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    on_gpu = {"permuted": permuted, "agreement": agreement, "step": step}
    on_gpu["jobs"] = lambda add: jobs_cuda(add, args.start_mps)
    parts: dict[str, Callable[[Add], None]] = on_gpu if args.cuda else {"loop": loop, "jobs": jobs}
    if unknown := set(args.parts) - parts.keys():
        parser.error(f"unknown parts {sorted(unknown)}: give some of {', '.join(parts)}")
    out = args.out or Path(__file__).with_name("loop-cuda.json" if args.cuda else "loop.json")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if args.cuda else "highest")  # as `run` has it
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as data:
        if args.cuda:
            made_up(Path(data))
            os.environ["RGO_DATA"] = data
        for name in args.parts or parts:

            def add(part: str = name, **row: Any) -> None:
                record.setdefault("environment", results.environment(1, torch.device("cuda" if args.cuda else "cpu")))
                record.setdefault("commit", results.commit())
                record.setdefault(part, []).append(row)
                results.write(out, record)
                print(f"{part:10}", *(f"{key} {value}  " for key, value in row.items()), flush=True)

            parts[name](add)


if __name__ == "__main__":
    main()
