"""Many runs, with a line of progress each: a process each on this machine, or tasks on a cluster of Ray.

Both do the same function of (experiment, folder), `one_run`; one that fails is reported and the rest finish.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .experiment import Experiment
from .metrics import average_accuracy, backward_transfer
from .runner import BusyError, Report, finished, run

console = Console(stderr=True)

Outcome = list[list[float]] | str
"""what became of a run: its accuracies, or what went wrong"""


def run_all(
    experiments: list[Experiment],
    out: Path,
    *,
    jobs: int = 1,
    ray: str | None = None,
    gpus: float | None = None,
    **options: Any,
) -> int:
    """Do what is missing of the experiments, `jobs` at a time here or on the Ray cluster at the address `ray`.

    On the cluster a run takes as many CPUs as it has threads, and on "cuda" `gpus` of a GPU. `options` are those of
    `runner.run`. Returns how many failed.
    """
    device = options.get("device", "cpu")
    if ray is not None and jobs > 1:
        raise ValueError(
            f"--jobs {jobs} is for this machine alone: with --ray, as many run as the cluster has room for"
        )
    if ray is not None and device not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: with --ray give cpu or cuda, for Ray picks the card")
    if gpus is not None and (ray is None or device != "cuda"):
        raise ValueError(f"--gpus {gpus:g} is the share of a GPU that a run takes with --ray and --device cuda")
    named = {e.path(out): e for e in experiments}
    done = {path: e for path, e in named.items() if path.exists()}
    for path, e in done.items():
        finished(e, path)
    todo = [e for path, e in named.items() if path not in done]
    _say(f"{len(named)} runs, {len(done)} of them done before; results in {out}")
    if not todo:
        return 0
    if ray is not None:
        # Ray would report lost processes in its way, too, and on stdout.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
        try:
            from .cluster import on_cluster
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "ray":
                raise
            raise ValueError("--ray needs Ray, here and on all machines: pip install 'rgo[ray]'") from None
        return on_cluster(todo, out, ray, (1.0 if gpus is None else gpus) if device == "cuda" else 0.0, options)
    jobs = min(jobs, len(todo))
    if jobs > 1 and device.startswith("cuda") and not mps_runs():
        _say(
            f"{jobs} runs at a time will take turns on the card: no MPS daemon is found in "
            f"{_mps_folder()}. To have them share it, stop here and start one: nvidia-cuda-mps-control -d"
        )
    return _on_this_machine(todo, out, jobs, options)


def one_run(experiment: Experiment, out: Path, options: dict[str, Any], report: Report, patience: float = 0) -> Outcome:
    """One run, in whatever process it is done; another that holds its lock is waited for, `patience` seconds."""
    until = time.monotonic() + patience
    report(0, "starts")
    while True:
        try:
            accuracy: list[list[float]] = run(experiment, out, report=report, **options)["accuracy"]
            return accuracy
        except BusyError as error:
            if time.monotonic() >= until:
                return f"BusyError: {error}"
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
        report(0, "waits for the process that holds its lock")
        time.sleep(1)


class View:
    """The runs at work, a line each, and above them what became of those that ended."""

    def __init__(self, total: int) -> None:
        columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
        name, line = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[line]"))
        self.progress = Progress(name, *columns, line, console=console)
        self.overall = self.progress.add_task("runs", total=total, line="")
        self.bars: dict[str, TaskID] = {}
        self.failed = 0

    def __enter__(self) -> View:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def update(self, experiment: Experiment, steps: int, line: str) -> None:
        name = title(experiment)
        if name not in self.bars:
            total = experiment.settings["tasks"] * experiment.settings["steps"]
            self.bars[name] = self.progress.add_task(name, total=total, line="")
        self.progress.update(self.bars[name], completed=steps, line=line)

    def remove(self, experiment: Experiment) -> None:
        bar = self.bars.pop(title(experiment), None)
        if bar is not None:
            self.progress.remove_task(bar)

    def end(self, experiment: Experiment, outcome: Outcome) -> None:
        self.remove(experiment)
        self.progress.advance(self.overall)
        if isinstance(outcome, str):
            self.failed += 1
            _say(f"{title(experiment)}: failed: {outcome}", "red")
        else:
            _say(f"{title(experiment)}: {average_accuracy(outcome):.2f} / {backward_transfer(outcome):.2f}")

    def warn(self, line: str) -> None:
        _say(line, "yellow")


def title(experiment: Experiment) -> str:
    return f"{experiment.benchmark} {experiment.name} seed {experiment.seed}"


def _say(line: str, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


# ---- on this machine --------------------------------------------------------------------------------------------


class _Worker:
    """What a worker process has from its parent: where to report to, and whether to go on. It ends with its parent."""

    messages: SimpleQueue[tuple[int, str]]
    stop: Event
    parent: int

    @classmethod
    def start(cls, messages: SimpleQueue[tuple[int, str]], stop: Event) -> None:
        cls.messages, cls.stop = messages, stop
        parent = multiprocessing.parent_process()
        cls.parent = os.getppid() if parent is None or parent.pid is None else parent.pid
        with contextlib.suppress(AttributeError):  # of Linux alone: PR_SET_PDEATHSIG
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        cls.end_with_parent()

    @classmethod
    def end_with_parent(cls) -> None:
        """A run whose parent was killed would hold its lock; killed, it goes on from its last checkpoint."""
        if os.getppid() != cls.parent:
            os._exit(1)

    @classmethod
    def do(cls, experiment: Experiment, out: Path, options: dict[str, Any]) -> Outcome:
        def report(steps: int, line: str) -> None:
            cls.end_with_parent()
            if cls.stop.is_set():
                raise KeyboardInterrupt
            cls.messages.put((steps, line))

        return one_run(experiment, out, options, report)


class _Slot:
    """A worker process and the lines to it, shared with no other: one that dies takes nothing along."""

    def __init__(self, context: SpawnContext) -> None:
        self.messages: SimpleQueue[tuple[int, str]] = context.SimpleQueue()
        self.stop = context.Event()
        self.pool = ProcessPoolExecutor(1, context, _Worker.start, (self.messages, self.stop))

    def submit(self, experiment: Experiment, out: Path, options: dict[str, Any]) -> Future[Outcome]:
        # Ctrl-C is for the parent, which sets `stop`: the process that starts here has it blocked from its birth.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self.pool.submit(_Worker.do, experiment, out, options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_this_machine(todo: list[Experiment], out: Path, jobs: int, options: dict[str, Any]) -> int:
    context = multiprocessing.get_context("spawn")
    slots = [_Slot(context) for _ in range(jobs)]
    idle = slots.copy()
    running: dict[Future[Outcome], tuple[_Slot, Experiment]] = {}
    with View(len(todo)) as view:
        try:
            while running or todo:
                while idle and todo:
                    slot, e = idle.pop(), todo[0]
                    try:
                        future = slot.submit(e, out, options)
                    except BrokenProcessPool:  # its process died between two runs
                        idle.append(_renewed(slots, slot, context))
                        continue
                    running[future] = slot, e
                    view.update(e, 0, "")
                    del todo[0]
                done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for slot, e in running.values():
                    while not slot.messages.empty():
                        view.update(e, *slot.messages.get())
                for future in done:
                    slot, e = running.pop(future)
                    try:
                        view.end(e, future.result())
                    except BrokenProcessPool:
                        view.end(e, "its process died")
                        slot = _renewed(slots, slot, context)
                    idle.append(slot)
        finally:  # by Ctrl-C, the runs at work stop where they next report
            for slot in slots:
                slot.stop.set()
            for slot in slots:
                slot.pool.shutdown(cancel_futures=True)
    return view.failed


def _renewed(slots: list[_Slot], dead: _Slot, context: SpawnContext) -> _Slot:
    """A slot in place of one whose process has died."""
    slot = slots[slots.index(dead)] = _Slot(context)
    return slot


def mps_runs() -> bool:
    """Whether NVIDIA's MPS daemon, by which processes share a card, serves the processes that start here."""
    try:
        os.kill(int((_mps_folder() / "nvidia-cuda-mps-control.pid").read_text()), 0)
    except PermissionError:  # another user's: it lives
        return True
    except (OSError, ValueError):
        return False
    return True


def _mps_folder() -> Path:
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
