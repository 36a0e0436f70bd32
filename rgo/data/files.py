"""Where files are found, and the error that says what is wrong with one."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

Folder = str | os.PathLike[str]


class DataError(Exception):
    """A data file is missing or is not what it should be."""

    def __init__(self, file: Folder, expected: str, found: str, remedy: str) -> None:
        # All four go to Exception, so that the error can be sent from a worker process to its parent.
        super().__init__(os.fspath(file), expected, found, remedy)

    def __str__(self) -> str:
        file, expected, found, remedy = self.args
        return f"{file}: expected {expected}, found {found}; {remedy}"


def roots(folder: Folder | None = None) -> tuple[Path, ...]:
    """The folders that are searched, in this order: `folder` alone if given, else `$RGO_DATA` and the user's cache.

    >>> roots("~/pictures") == (Path.home() / "pictures",)
    True
    """
    if folder is not None:
        return (Path(folder).expanduser().absolute(),)
    if sys.platform == "win32":
        caches = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = os.environ.get("RGO_DATA")
    return tuple(
        Path(root).expanduser().absolute() for root in ([named] if named else []) + [os.path.join(caches, "rgo")]
    )


def lab(module: str) -> Any:
    """A module that only the extra `lab` brings."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = {"PIL": "pillow"}.get(module.split(".")[0], module)
        message = f"this needs {package}, which is not installed: pip install 'rgo[lab]' (or pip install {package})"
        raise ModuleNotFoundError(message, name=module) from error


class Bar:
    """A progress bar on a terminal, if rich is there; otherwise nothing."""

    def __init__(self, what: str, total: int, *, in_bytes: bool = False) -> None:
        self._progress: Any = None
        if not sys.stderr.isatty():
            return
        try:
            from rich import progress
            from rich.console import Console
        except ModuleNotFoundError:
            return
        amount = progress.DownloadColumn() if in_bytes else progress.MofNCompleteColumn()
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            amount,
            progress.TimeRemainingColumn(),
        )
        self._progress = progress.Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self) -> "Bar":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress:
            self._progress.stop()

    def advance(self, amount: int = 1) -> None:
        if self._progress:
            self._progress.advance(self._task, amount)
