"""`rgo demo`: six methods on five tasks, side by side, and the report on them."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .cli_doctor import cores_usable
from .experiment import experiment

console = Console()

METHODS = ("sgd", "ewc", "er-ring", "gpm", "rgo-2", "rgo")


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of the results; the page goes to report/ in it.")] = Path(
        "demo"
    ),
    tasks: Annotated[int, typer.Option("--tasks", min=1)] = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Per task, of ten samples each.")] = 1000,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time; by default as many as there are cores.")
    ] = None,
    show: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Show the page; by default where there is a display.")
    ] = None,
) -> None:
    """Five tasks of Permuted MNIST with six methods: plain SGD forgets, RGO does not. Then a page about it.

    Stop it any time: what is done is kept, and the same command goes on.

    Example: rgo demo --no-open
    """
    from .cli import _do, _fail  # which imports this module
    from .report import report

    runs = [experiment("permuted-mnist", method, 0, tasks=tasks, steps=steps) for method in METHODS]
    _do(runs, out, jobs=min(jobs or cores_usable(), len(runs)), device="cpu", capture=False, every=500, as_json=False)
    try:
        page = report(out, out / "report").resolve()
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    for line in (
        f"ACC: the mean accuracy (%) on the test data of all {tasks} tasks after the last one.",
        "BWT: how much all but the last have changed, on average, since each was learned; negative is forgetting.",
        f"The report: {page}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if (_display() if show is None else show) and not webbrowser.open(page.as_uri()):
        console.print("No browser could be started: open it yourself.")


def _display() -> bool:
    """Whether somebody sits before a screen that a browser can open on."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
