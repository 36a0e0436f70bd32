"""Many runs on one machine: a process each, a progress line each; one that dies is reported and the rest finish."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from . import results
from .experiment import Experiment
from .metrics import average_accuracy, backward_transfer
from .runner import run

console = Console(stderr=True)


class _Worker:
    """What a worker process has from its parent: where to report to, and whether to go on."""

    messages: SimpleQueue[tuple[int, str]]
    stop: Event

    @classmethod
    def start(cls, messages: SimpleQueue[tuple[int, str]], stop: Event) -> None:
        cls.messages, cls.stop = messages, stop

    @classmethod
    def run(cls, experiment: Experiment, out: Path, options: dict[str, Any]) -> None:
        def report(steps: int, line: str) -> None:
            if cls.stop.is_set():
                raise KeyboardInterrupt
            cls.messages.put((steps, line))

        report(0, "starts")
        run(experiment, out, report=report, **options)


class _Slot:
    """A worker process and the lines to it, shared with no other: one that dies takes nothing along."""

    def __init__(self, context: SpawnContext) -> None:
        self.messages: SimpleQueue[tuple[int, str]] = context.SimpleQueue()
        self.stop = context.Event()
        self.pool = ProcessPoolExecutor(1, context, _Worker.start, (self.messages, self.stop))

    def submit(self, experiment: Experiment, out: Path, options: dict[str, Any]) -> Future[None]:
        # Ctrl-C is for the parent, which sets `stop`: the process that starts here has it blocked from its birth.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self.pool.submit(_Worker.run, experiment, out, options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_all(experiments: list[Experiment], out: Path, *, jobs: int = 1, **options: Any) -> int:
    """Do what is missing of the experiments, `jobs` at a time; returns how many failed.

    `options` are those of `runner.run`.
    """
    named = {e.path(out): e for e in experiments}
    todo = [e for path, e in named.items() if not path.exists()]
    said = f"{len(named)} runs, {len(named) - len(todo)} of them done before; results in {out}"
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    return _work(todo, out, jobs, options) if todo else 0


def _work(todo: list[Experiment], out: Path, jobs: int, options: dict[str, Any]) -> int:
    context = multiprocessing.get_context("spawn")
    slots = [_Slot(context) for _ in range(min(jobs, len(todo)))]
    idle = slots.copy()
    running: dict[Future[None], tuple[_Slot, Experiment, TaskID]] = {}
    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
    failed = 0
    with Progress(*columns, TextColumn("{task.fields[line]}"), console=console) as progress:
        overall = progress.add_task("runs", total=len(todo), line="")
        try:
            while running or todo:
                while idle and todo:
                    slot, e = idle.pop(), todo[0]
                    try:
                        future = slot.submit(e, out, options)
                    except BrokenProcessPool:  # its process died between two runs
                        idle.append(_renewed(slots, slot, context))
                        continue
                    name, total = f"{e.benchmark} {e.name} {e.seed}", e.settings["tasks"] * e.settings["steps"]
                    running[future] = slot, e, progress.add_task(name, total=total, line="")
                    del todo[0]
                done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for slot, _, bar in running.values():
                    while not slot.messages.empty():
                        steps, line = slot.messages.get()
                        progress.update(bar, completed=steps, line=line)
                for future in done:
                    slot, e, bar = running.pop(future)
                    progress.remove_task(bar)
                    progress.advance(overall)
                    error, style = future.exception(), None
                    if error is None:
                        matrix = results.read(e.path(out))["accuracy"]
                        line = f"{average_accuracy(matrix):.2f} / {backward_transfer(matrix):.2f}"
                    else:
                        died = isinstance(error, BrokenProcessPool)
                        line = "failed: " + ("its process died" if died else f"{type(error).__name__}: {error}")
                        failed, style = failed + 1, "red"
                        slot = _renewed(slots, slot, context) if died else slot
                    idle.append(slot)
                    said = f"{e.benchmark} {e.name} seed {e.seed}: {line}"
                    console.print(said, style=style, markup=False, highlight=False, soft_wrap=True)
        finally:  # by Ctrl-C, the runs at work stop where they next report
            for slot in slots:
                slot.stop.set()
            for slot in slots:
                slot.pool.shutdown(cancel_futures=True)
    return failed


def _renewed(slots: list[_Slot], dead: _Slot, context: SpawnContext) -> _Slot:
    """A slot in place of one whose process has died."""
    slot = slots[slots.index(dead)] = _Slot(context)
    return slot
