"""Many runs on one machine: a process each, a progress line each; one that dies is reported and the rest finish."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import results
from .experiment import Experiment
from .metrics import average_accuracy, backward_transfer
from .runner import run

console = Console(stderr=True)


class _Worker:
    """What a worker process has from its parent: where to report to, and whether to go on."""

    messages: SimpleQueue[tuple[int, int, str]]
    stop: Event

    @classmethod
    def start(cls, messages: SimpleQueue[tuple[int, int, str]], stop: Event) -> None:
        cls.messages, cls.stop = messages, stop
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which sets `stop`

    @classmethod
    def run(cls, number: int, experiment: Experiment, out: Path, options: dict[str, Any]) -> None:
        def report(steps: int, line: str) -> None:
            if cls.stop.is_set():
                raise KeyboardInterrupt
            cls.messages.put((number, steps, line))

        run(experiment, out, report=report, **options)


def run_all(experiments: list[Experiment], out: Path, *, jobs: int = 1, **options: Any) -> int:
    """Do what is missing of the experiments, `jobs` at a time; returns how many failed.

    `options` are those of `runner.run`.
    """
    todo = {i: e for i, e in enumerate(experiments) if not e.path(out).exists()}
    console.print(f"{len(experiments)} runs, {len(experiments) - len(todo)} of them done before; results in {out}")
    failed = 0
    while todo:
        failed += _pool(todo, out, jobs, options)
    return failed


def _pool(todo: dict[int, Experiment], out: Path, jobs: int, options: dict[str, Any]) -> int:
    """One pool of processes; when a worker dies the pool is lost, and the next one does what is left of `todo`."""
    context = multiprocessing.get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
    failed = 0
    with (
        Progress(*columns, TextColumn("{task.fields[line]}"), console=console) as progress,
        ProcessPoolExecutor(jobs, context, _Worker.start, (messages, stop)) as pool,
    ):
        overall = progress.add_task("runs", total=len(todo), line="")
        bars: dict[int, Any] = {}
        waiting = list(todo)
        running: dict[Future[None], int] = {}
        try:
            while running or waiting:
                while waiting and len(running) < jobs:
                    number = waiting.pop(0)
                    running[pool.submit(_Worker.run, number, todo[number], out, options)] = number
                done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                while not messages.empty():
                    number, steps, line = messages.get()
                    e = todo.get(number)
                    if e is not None and number not in bars:
                        total = e.settings["tasks"] * e.settings["steps"]
                        bars[number] = progress.add_task(f"{e.benchmark} {e.name} {e.seed}", total=total, line="")
                    if number in bars:
                        progress.update(bars[number], completed=steps, line=line)
                for future in done:
                    number = running.pop(future)
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool) and len(running) + len(done) > 1:
                        continue  # which of them died is not known: all are tried again
                    e = todo.pop(number)
                    progress.advance(overall)
                    if number in bars:
                        progress.remove_task(bars.pop(number))
                    if error is None:
                        matrix = results.read(e.path(out))["accuracy"]
                        line = f"{average_accuracy(matrix):.2f} / {backward_transfer(matrix):.2f}"
                        console.print(f"{e.benchmark} {e.name} seed {e.seed}: {line}", highlight=False)
                    else:
                        failed += 1
                        what = "its process died" if isinstance(error, BrokenProcessPool) else error
                        console.print(f"[red]{e.benchmark} {e.name} seed {e.seed} failed: {what}", highlight=False)
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        except BrokenProcessPool:
            pass  # submitting to a pool that has lost a worker: the next pool goes on
    return failed
