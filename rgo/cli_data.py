"""`rgo data`: which data sets are here, whether they are whole, and how to get them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from . import data
from .data import cifar, idx, mini

app = typer.Typer(
    help="Data sets: which are here, whether they are whole, and how to get them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console, errors = Console(), Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Folder = Annotated[Path | None, typer.Option("--folder", help="A folder other than $RGO_DATA and the user's cache.")]


@contextmanager
def _said() -> Iterator[None]:
    """Errors as a line: 1 for data that is not there or not whole, 2 for a command that cannot be done."""
    try:
        yield
    except (data.DataError, ImportError, OSError, ValueError) as error:
        errors.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, data.DataError) else 2) from None


def found() -> list[dict[str, Any]]:
    """Each data set with the place where it was found (None: it was not), its terms, and what is left to do."""
    places = {"mnist": lambda: idx.PACKAGED, "cifar100": cifar.locate, "miniimagenet": mini.locate}
    rows = []
    for source in data.sources().values():
        place, todo = None, ""
        try:
            place = str(places[source.name]())
        except data.DataError as error:
            todo = f"rgo data fetch {source.name}" if source.files else error.args[3]
        row = {"name": source.name, "title": source.title, "found": place, "bytes": source.bytes}
        rows.append(row | {"licence": source.licence, "todo": todo})
    return rows


@app.command("list")
def list_sources(as_json: AsJson = False) -> None:
    """The data sets: where each was found, its size and its licence, and what to do where it is missing.

    Example: rgo data list --json
    """
    rows = found()
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        place = (row["found"], "green") if row["found"] else ("missing", "yellow")
        console.print(Text.assemble((row["name"], "bold"), ": ", place), soft_wrap=True)
        for line in (
            row["title"],
            f"{row['bytes'] / 1e6:,.0f} MB; {row['licence']}",
            row["todo"] and f"→ {row['todo']}",
        ):
            if line:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    searched = " then ".join(map(str, data.roots()))
    console.print(f"Searched: {searched}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def verify(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="See `rgo data list`.")],
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Whether every file of a data set is whole; the exit code is 1 where one is not.

    Example: rgo data verify mnist cifar100
    """
    with _said():
        conditions = {name: data.verify(name, folder) for name in names}
    if as_json:
        print(json.dumps(conditions))
    else:
        for name, files in conditions.items():
            counts = ", ".join(f"{count} {condition}" for condition, count in Counter(files.values()).items())
            console.print(f"{name}: {counts}", highlight=False)
            for file, condition in files.items():
                if condition != "ok":
                    console.print(f"  {condition}: {file}", style="red", markup=False, highlight=False, soft_wrap=True)
    if any(condition != "ok" for files in conditions.values() for condition in files.values()):
        raise typer.Exit(1)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="See `rgo data list`.")],
    mirror: Annotated[str | None, typer.Option("--mirror", help="URL of another place with the same files.")] = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Download a data set and check it; what is there is kept, and a broken download goes on where it broke.

    Example: rgo data fetch cifar100 --folder ~/data
    """
    with _said():
        paths = data.fetch(name, folder, mirror=mirror)
    if as_json:
        print(json.dumps([str(path) for path in paths]))
        return
    for path in paths:
        console.print(f"ok: {path}", markup=False, highlight=False, soft_wrap=True)
    if not paths:
        console.print(f"{name} is here and is never downloaded: `rgo data verify {name}` checks it", highlight=False)
    if folder is not None and data.roots(folder)[0] not in data.roots():
        hint = f"To have it found: export RGO_DATA={data.roots(folder)[0]}"
        console.print(hint, markup=False, highlight=False, soft_wrap=True)
