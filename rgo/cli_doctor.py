"""`rgo doctor`: what this machine has for the work, and what to do about what it has not."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.text import Text

from . import data, results
from .cli_data import found
from .suite import mps_runs

console = Console()

EXTRAS = {  # what is installed -> how it is imported, and what needs it
    "typer": ("typer", "the command line"),
    "rich": ("rich", "the command line"),
    "matplotlib": ("matplotlib", "figures"),
    "jinja2": ("jinja2", "reports"),
    "pillow": ("PIL", "pictures"),
    "pooch": ("pooch", "downloads"),
    "ray": ("ray", "suites on many machines"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `todo` is empty where nothing is to be done."""

    about: str
    state: Literal["ok", "note", "broken"]
    found: str
    todo: str = ""


def findings(out: Path) -> Iterator[Finding]:
    """All that `rgo doctor` looks at; a look that fails is a finding, too."""
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "Python": _python,
        "CUDA": _cuda,
        "processor": _processor,
        "memory": _memory,
        "extras": _extras,
        "data": _data,
        "results": lambda: _results(out),
    }
    for about, look in looks.items():
        try:
            yield from look()
        except Exception as error:
            yield Finding(about, "broken", f"{type(error).__name__}: {error}", "this look itself failed: report it")


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    old = sys.version_info < (3, 11)
    yield Finding("Python", "broken" if old else "ok", version, "install Python 3.11 or newer" if old else "")
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)
    yield Finding("torch", "broken" if old else "ok", torch.__version__, "pip install 'torch>=2.6'" if old else "")
    try:
        torch.linalg.eigh(torch.eye(2))
    except RuntimeError as error:
        yield Finding("linear algebra", "broken", str(error), "reinstall torch: this build has no LAPACK")


def _cuda() -> Iterator[Finding]:
    if torch.version.cuda is None:
        yield Finding("CUDA", "note", "a torch for the CPU", "for a GPU, install torch from https://pytorch.org")
    elif not torch.cuda.is_available():
        todo = "with a GPU, see whether `nvidia-smi` lists it and its driver is new enough"
        yield Finding("CUDA", "note", f"torch for CUDA {torch.version.cuda} sees no GPU", todo)
    else:
        for i in range(torch.cuda.device_count()):
            try:
                torch.zeros(1, device=f"cuda:{i}")
                free, total = (f"{amount / 2**30:.0f}" for amount in torch.cuda.mem_get_info(i))
                yield Finding(f"cuda:{i}", "ok", f"{torch.cuda.get_device_name(i)}, {free} of {total} GiB free")
            except RuntimeError as error:
                yield Finding(f"cuda:{i}", "broken", str(error).partition("\n")[0], "see what `nvidia-smi` says")
        if mps_runs():
            yield Finding("MPS", "ok", "runs: several runs share a GPU at a time")
        else:
            yield Finding("MPS", "note", "does not run", "before --jobs on one GPU: nvidia-cuda-mps-control -d")


def _processor() -> Iterator[Finding]:
    environment = results.environment(torch.get_num_threads(), torch.device("cpu"))
    slow = environment["capability"] in ("DEFAULT", "NO AVX")
    todo = "runs will be slow: torch finds no vector instructions that it knows" if slow else ""
    found = f"{environment['processor']}, {environment['capability']}"
    yield Finding("processor", "note" if slow else "ok", found, todo)
    cores = cores_usable()
    todo = f"a run uses one thread: --jobs {cores} uses all cores" if cores > 1 else ""
    yield Finding("cores", "ok", f"{cores} usable of {os.cpu_count()}, torch uses {torch.get_num_threads()}", todo)


def cores_usable() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_available(proc: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that new processes can have, in a container as well; None where this is not Linux."""
    amounts = []
    if proc.exists():
        fields = dict(line.split(":") for line in proc.read_text().splitlines())
        amounts.append(1024 * int(fields["MemAvailable"].split()[0]))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (group / limit).exists() and (most := (group / limit).read_text().strip()).isdigit():
            amounts.append(int(most) - int((group / used).read_text()))
    return min(amounts, default=None)


def _memory() -> Iterator[Finding]:
    amount = memory_available()
    if amount is None:
        yield Finding("memory", "note", "not known here", "count on 1 to 2 GiB for each of --jobs")
        return
    low = amount < 2 * 2**30
    todo = "a run needs 1 to 2 GiB: keep --jobs 1 or free some" if low else ""
    yield Finding("memory", "note" if low else "ok", f"{amount / 2**30:.1f} GiB available", todo)


def _extras() -> Iterator[Finding]:
    for name, (module, use) in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            yield Finding(name, "note", f"missing: needed for {use}", f"pip install 'rgo[lab]' (or pip install {name})")
        else:
            yield Finding(name, "ok", metadata.version(name))


def _data() -> Iterator[Finding]:
    for row in found():
        missing = row["found"] is None
        yield Finding(row["name"], "note" if missing else "ok", row["found"] or "missing", row["todo"])
    wrong = [file for file, condition in data.verify("mnist").items() if condition != "ok"]
    if wrong:
        yield Finding("mnist", "broken", f"missing or damaged: {', '.join(wrong)}", "reinstall rgo, which ships it")


def _results(out: Path) -> Iterator[Finding]:
    folder = next(f for f in (out.absolute(), *out.absolute().parents) if f.exists())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        todo = "give another folder with --out: files must be written and locked there"
        yield Finding("results", "broken", f"{folder}: {error.strerror}", todo)
        return
    free = shutil.disk_usage(folder).free
    low = free < 2**30
    found = f"{out.absolute()} can be written, {free / 2**30:.1f} GiB free"
    yield Finding("results", "note" if low else "ok", found, "free some space for checkpoints" if low else "")


def doctor(
    out: Annotated[Path, typer.Option("--out", help="Folder of the results.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """What this machine has for the work and what to do about it; the exit code is 1 if something is broken.

    Example: rgo doctor --out experiments/results
    """
    all_found = list(findings(out))
    if as_json:
        print(json.dumps([asdict(each) for each in all_found]))
    else:
        for each in all_found:
            style = {"ok": "green", "note": "yellow", "broken": "red"}[each.state]
            line = Text.assemble((f"{each.state:7}", style), (f"{each.about}: ", "bold"), each.found)
            console.print(line, soft_wrap=True)
            if each.todo:
                console.print(f"{'':7}→ {each.todo}", markup=False, highlight=False, soft_wrap=True)
    if any(each.state == "broken" for each in all_found):
        raise typer.Exit(1)
