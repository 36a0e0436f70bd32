"""The one training loop: a method meets the tasks of a benchmark, and what it could do then is written down.

A run is a function of (benchmark, method, seed) and its settings. Killed at any moment it goes on from its last
checkpoint and writes the result that an uninterrupted run would have written.
"""

from __future__ import annotations

import fcntl
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import results
from .benchmarks import BENCHMARKS, Task, order
from .experiment import Experiment
from .methods import make
from .methods.method import NOTHING, Method
from .models import load

Report = Callable[[int, str], None]
"""(steps done so far, how it goes): called now and then; may raise KeyboardInterrupt to stop the run"""

EVALUATE, LEARN = 1000, 500  # samples at a time, testing and in end_task


class BusyError(RuntimeError):
    """Another process is at work on this run."""


class DivergedError(ArithmeticError):
    """A loss or an output was not finite: there is no result."""


def run(
    experiment: Experiment,
    out: Path,
    *,
    device: str = "cpu",
    capture: bool = True,
    checkpoint_every: int = 500,
    report: Report = lambda steps, line: None,
    report_every: int = 100,
) -> dict[str, Any]:
    """Do one run, or finish it, and write its JSON file; a finished one is only read."""
    path = experiment.path(out)
    if path.exists():
        return finished(experiment, path)
    with results.writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    lock, kept = path.with_suffix(".lock"), (_task_file(path), _step_file(path))
    with _locked(lock):
        if path.exists():  # finished by whoever held the lock
            return finished(experiment, path)
        try:
            begun = _Run(experiment, path, torch.device(device), capture, checkpoint_every, report, report_every)
            record = begun.finish()
        except Exception:
            if not any(file.exists() for file in kept):  # nothing is left to go on with
                lock.unlink()
            raise
        results.write(path, record)
        # Of a process that was killed as it wrote, files with temporary names are left as well.
        for rest in (*kept, *path.parent.glob(f".{path.stem}.*")):
            rest.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)
    del begun
    gc.collect()  # a model and its learner hold each other, and the data with them; the next run needs the room
    return record


def finished(experiment: Experiment, path: Path) -> dict[str, Any]:
    """The record of a run that is done; that of another run in its place is refused."""
    record, wanted = results.read(path), _identity(experiment)
    # The number of threads is no part of the path: a run is done with any.
    wanted["settings"] = {**wanted["settings"], "threads": record["settings"].get("threads")}
    if other := results.difference(record, wanted):
        raise ValueError(f"{path} is the result of another run: {other}. Move it away, or use another --out")
    return record


def _identity(e: Experiment) -> dict[str, Any]:
    return {"benchmark": e.benchmark, "method": e.method, "seed": e.seed, "settings": e.settings}


class _Run:
    def __init__(
        self,
        experiment: Experiment,
        path: Path,
        device: torch.device,
        capture: bool,
        every: int,
        report: Report,
        report_every: int,
    ) -> None:
        self.experiment, self.path, self.device = experiment, path, device
        self.every, self.report, self.report_every = every, report, report_every
        torch.set_num_threads(experiment.settings["threads"])
        settings = experiment.settings
        self.tasks: Sequence[Task] = BENCHMARKS[experiment.benchmark](
            tasks=settings["tasks"], seed=experiment.seed, **settings["benchmark_options"]
        )
        self.dtype: torch.dtype = getattr(torch, settings["dtype"])
        self.tests: list[Task] = []  # the tasks so far, with their test sets on the device
        self.model = self._fresh(0).to(device)
        split = self.tasks[0].classes is not None
        self.method: Method = make(experiment, self.model, lambda k: self._fresh(k).to(device), split)
        self.captured = capture and device.type == "cuda"
        if device.type == "cuda":  # as convolutions have it by default; the curvature pass sums in float32
            torch.set_float32_matmul_precision("high")
        self.done: dict[str, Any] = {  # what the tasks finished so far have left
            "accuracy": list[list[float]](),
            "train_diagonal": list[float](),
            "loss": list[list[float]](),
            "timing": {"train": list[float](), "end_task": list[float](), "evaluate": list[float]()},
        }
        self.begun = 0  # steps of the task in training that a checkpoint holds

    def _fresh(self, k: int) -> nn.Module:
        settings = self.experiment.settings
        seed = self.experiment.seed + 1000 * k
        return load(settings["model"], seed=seed, **settings["model_options"]).to(self.dtype)

    def finish(self) -> dict[str, Any]:
        """The loop: train, take in what must be remembered, answer for all tasks so far."""
        torch.manual_seed(self.experiment.seed)  # dropout, where a model has it
        first = self._resume()
        for k in range(first, len(self.tasks)):
            task = _on(self.tasks[k], self.device, self.dtype)
            if k > first or not self.begun:
                self.method.begin_task(task, self.experiment.settings["steps"], self.experiment.seed)
            self.model.train()
            with self._timed("train"):
                losses = self._train(task, k)
            self.model.eval()
            with self._timed("end_task"):
                self.method.end_task(task, _parts(task.train, LEARN))
            with self._timed("evaluate"):
                self._keep_tests(k, task)
                row = [self._accuracy(known, *known.test) for known in self.tests]
            self.done["accuracy"].append(row)
            self.done["train_diagonal"].append(self._accuracy(task, *task.train))
            self.done["loss"].append([round(statistics.fmean(part), 5) for part in _hundreds(losses)])
            self._save_task(k)
            self.report((k + 1) * len(losses), f"task {k + 1}  ACC {statistics.fmean(row):.1f}")
        self.model.eval()  # also of a run that was killed after its last task
        return self._record()

    def _record(self) -> dict[str, Any]:
        e, parameters = self.experiment, sum(p.numel() for p in self.model.parameters())
        own = sum(p.numel() * p.element_size() for p in self.model.parameters())
        on_device = (_on(task, self.device, self.dtype) for task in self.tasks)
        final = [self._accuracy(task, *task.train) for task in on_device]
        kept = self.method.memory()
        # Models count as capacity, what is only needed to go on training (H, P, samples) as memory.
        models = len(self.tasks) if e.method == "stl" else 1
        return {
            "format": results.FORMAT,
            "benchmark": e.benchmark,
            "model": e.settings["model"],
            "method": e.method,
            "seed": e.seed,
            "settings": e.settings,
            "changed": e.changed,
            "accuracy": self.done["accuracy"],
            "train_accuracy": {"diagonal": self.done["train_diagonal"], "final": final},
            "loss": self.done["loss"],
            "timing": self.done["timing"],
            "memory": kept - (models - 1) * own,
            "parameters": parameters,
            "capacity": 100 * models,
            "captured": self.captured,
            "environment": results.environment(e.settings["threads"], self.device),
            "commit": results.commit(),
        }

    def _train(self, task: Task, k: int) -> list[float]:
        settings = self.experiment.settings
        steps = settings["steps"]
        x, _ = task.train
        rows = order(task.id, len(x), settings["batch_size"], steps, self.experiment.seed).to(self.device)
        losses = torch.zeros(steps, device=self.device)
        start, self.begun = self.begun, 0
        if start:
            losses[:start] = self.resumed_losses.to(self.device)
        step = (_Captured if self.captured else _Eager)(self.method, task, rows, losses, start)
        for i in range(start, steps):
            step()
            if (i + 1) % self.report_every == 0:
                self.report(k * steps + i + 1, f"task {k + 1}")
            if (i + 1) % self.every == 0 and i + 1 < steps:
                self._save_step(k, i + 1, losses)
        values: list[float] = losses.tolist()
        if (at := next((i for i, loss in enumerate(values) if not math.isfinite(loss)), None)) is not None:
            self._diverged(f"the loss of task {k + 1} is {values[at]} at step {at + 1} of {steps}")
        return values

    def _keep_tests(self, k: int, task: Task) -> None:
        """Tasks are built when asked for, and their test sets are asked for after every task: these stay."""
        for j in range(len(self.tests), k + 1):
            known = task if j == k else _on(self.tasks[j], self.device, self.dtype)
            self.tests.append(replace(known, train=NOTHING))

    def _accuracy(self, task: Task, x: Tensor, y: Tensor) -> float:
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            for part, true in _parts((x, y), EVALUATE):
                logits = self.method.predict(part, task)
                counts[0] += (logits.argmax(1) == true).sum()
                counts[1] += logits.amax(1).isfinite().logical_not().sum()
        right, lost = map(int, counts.tolist())
        if lost:
            learned = min(len(self.done["loss"]) + 1, len(self.tasks))
            self._diverged(f"after task {learned} the outputs for {lost} samples of task {task.id!r} are not finite")
        return round(100 * right / len(y), 2)

    def _diverged(self, where: str) -> NoReturn:
        raise DivergedError(f"it diverged: {where}. Give a lower lr than {self.experiment.settings['lr']}")

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def _save_task(self, k: int) -> None:
        state = {
            "run": _identity(self.experiment),
            "task": k + 1,
            "model": self.model.state_dict(),
            "method": self.method.state_dict(),
            "random": _random_state(self.device),
            "done": self.done,
        }
        results.save(_task_file(self.path), state)
        _step_file(self.path).unlink(missing_ok=True)

    def _save_step(self, k: int, step: int, losses: Tensor) -> None:
        state = {
            "run": _identity(self.experiment),
            "task": k,
            "step": step,
            "model": self.model.state_dict(),
            "method": self.method.state_dict(inside=True),
            "random": _random_state(self.device),
            "loss": losses[:step].clone(),
        }
        results.save(_step_file(self.path), state)

    def _resume(self) -> int:
        """Go back to where a killed run was; returns the task to train."""
        task, steps, run = 0, self.experiment.settings["steps"], _identity(self.experiment)
        saved = results.restore(_task_file(self.path), run, self.device)
        if saved is not None:
            with results.restoring(_task_file(self.path)):
                self.done, task = saved["done"], _within(saved["task"], 1, len(self.tasks))
                done = (
                    *(self.done[part] for part in ("accuracy", "train_diagonal", "loss")),
                    *self.done["timing"].values(),
                )
                if {len(part) for part in done} != {task}:
                    raise ValueError(f"it does not hold what {task} tasks have left")
                self.model.load_state_dict(saved["model"])
                self.method.load_state_dict(saved["method"])
                _set_random_state(saved["random"], self.device)
        inside = results.restore(_step_file(self.path), run, self.device)
        if inside is not None:
            with results.restoring(_step_file(self.path)):
                at, step = _within(inside["task"], 0, len(self.tasks) - 1), _within(inside["step"], 1, steps - 1)
            if at != task:  # the task that it is of has been finished since
                return task
            self.method.begin_task(_on(self.tasks[task], self.device, self.dtype), steps, self.experiment.seed)
            with results.restoring(_step_file(self.path)):
                self.begun, self.resumed_losses = step, inside["loss"].view(step)
                self.model.load_state_dict(inside["model"])
                self.method.load_state_dict(inside["method"], inside=True)
                _set_random_state(inside["random"], self.device)
        return task

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.done["timing"][what].append(round(time.perf_counter() - start, 3))


class _Eager:
    """One step after another."""

    def __init__(self, method: Method, task: Task, rows: Tensor, losses: Tensor, start: int) -> None:
        self.method, self.task, self.rows, self.losses, self.i = method, task, rows, losses, start

    def __call__(self) -> None:
        x, y = self.task.train
        row = self.rows[self.i]
        self.losses[self.i] = self.method.observe(x.index_select(0, row), y.index_select(0, row), self.task)
        self.i += 1


class _Captured:
    """The step captured in a CUDA graph after a few eager ones; batches are read through an index tensor."""

    WARM = 3

    def __init__(self, method: Method, task: Task, rows: Tensor, losses: Tensor, start: int) -> None:
        self.method, self.task, self.rows, self.losses = method, task, rows, losses
        self.counter = torch.full((1,), start, dtype=torch.int64, device=rows.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm, self.side = 0, torch.cuda.Stream()

    def _step(self) -> None:
        x, y = self.task.train
        row = self.rows.index_select(0, self.counter).view(-1)
        loss = self.method.observe(x.index_select(0, row), y.index_select(0, row), self.task)
        self.losses.index_copy_(0, self.counter, loss.view(1).to(self.losses.dtype))
        self.counter.add_(1)

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif self.warm < self.WARM:
            self.warm += 1
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                self._step()
            torch.cuda.current_stream().wait_stream(self.side)
        else:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
            self.graph.replay()


def _on(task: Task, device: torch.device, dtype: torch.dtype) -> Task:
    """The task with its data on the device; inputs that are real numbers in this precision."""

    def moved(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(device, dtype if x.is_floating_point() else None), y.to(device)

    return replace(task, train=moved(*task.train), test=moved(*task.test))


def _parts(data: tuple[Tensor, Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(data[0].split(size), data[1].split(size))


def _hundreds(values: list[float]) -> Iterator[list[float]]:
    for i in range(0, len(values), 100):
        yield values[i : i + 100]


def _within(number: Any, low: int, high: int) -> int:
    if not isinstance(number, int) or not low <= number <= high:
        raise ValueError(f"it is at {number!r} where {low} to {high} is expected")
    return number


def _task_file(path: Path) -> Path:
    return path.with_suffix(".task")


def _step_file(path: Path) -> Path:
    return path.with_suffix(".step")


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0].cpu())
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1].cpu(), device)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process per run; the lock goes with the process, however it ends."""
    with ExitStack() as held:
        with results.writing(path):
            file = held.enter_context(path.open("ab", buffering=0))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(f"another process is at work on {path.with_suffix('.json')}") from None
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                raise BusyError(f"another process has just ended its work on {path.with_suffix('.json')}")
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield
