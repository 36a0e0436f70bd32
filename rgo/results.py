"""One run, one JSON file: what it holds, and how it is written and read.

Format 2. Keys of a record: `format`, `benchmark`, `model`, `method`, `seed`; `settings`, everything the run depends on
(files without a `dtype` are of float32, and are read as if they said so); `changed`, what of it departs from the
protocol of the benchmark and the method (empty for a run of the paper's); `accuracy`, row k (counted from 1) with the
test accuracy in percent of tasks 1 to k after task k; `train_accuracy`, `diagonal` and `final`; `loss`, per task the
means over a hundred steps; `timing`, seconds per task of `train`, `end_task`, `evaluate`; `memory`, bytes the method
keeps besides the models it answers with; `parameters`; `capacity`, parameters it answers with relative to the one
model, in percent; `captured`; `environment`; `commit`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import statistics
import subprocess
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from .metrics import average_accuracy, backward_transfer, forgetting, learning_accuracy

FORMAT = 2


def write(path: Path, record: dict[str, Any]) -> None:
    """A run's record; one line holds one key."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in record.items())
    put(path, f"{{\n{lines}\n}}\n")


def put(path: Path, text: str) -> None:
    """A file of text, whole or not at all."""
    _replace(path, lambda file: file.write(text.encode()))


def read(path: Path) -> dict[str, Any]:
    """One run's record, with all that a table or a report takes from it; a file that is none is named."""
    try:
        record = json.loads(path.read_text())
        json.dumps(record, allow_nan=False, ensure_ascii=False).encode()  # no NaN, and no half of a character
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no result of a run ({error}). Delete it and run again") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{path} has format {found!r}, this version of rgo reads {FORMAT}")
    try:
        _check(record)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} is no result of a run (it {error}). Delete it and run again") from None
    record["settings"] = _complete(record["settings"])
    return record


def difference(held: dict[str, Any], run: dict[str, Any]) -> str:
    """In what a file is of another run than this: its benchmark, method, seed and settings; empty where in nothing."""
    names = ("benchmark", "method", "seed")
    a, b = ({**{k: each[k] for k in names}, **_complete(each["settings"])} for each in (held, run))
    return ", ".join(f"{k} is {a.get(k)!r}, not {b.get(k)!r}" for k in {**b, **a} if a.get(k) != b.get(k))


def load(folder: Path | str) -> list[dict[str, Any]]:
    """All runs below a folder, in the order of their paths, each with its `path`."""
    return [{**read(path), "path": str(path)} for path in sorted(Path(folder).rglob("seed-*.json"))]


def table(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per run with its metrics: a list of dicts, which pandas.DataFrame takes as it is."""
    rows = []
    for record in records:
        matrix, train = record["accuracy"], record["train_accuracy"]["final"]
        rows.append(
            {
                **{key: record[key] for key in ("benchmark", "model", "method", "seed", "changed")},
                "acc": average_accuracy(matrix),
                "bwt": backward_transfer(matrix),
                "forgetting": forgetting(matrix),
                "learning": learning_accuracy(matrix),
                "train_acc": statistics.fmean(train),
                "gap": statistics.fmean(train) - average_accuracy(matrix),
                "memory": record["memory"],
                "capacity": record["capacity"],
                **{f"seconds_{part}": sum(values) for part, values in record["timing"].items()},
            }
        )
    return rows


def save(path: Path, state: dict[str, Any]) -> None:
    """A checkpoint, whole or not at all."""
    _replace(path, lambda file: torch.save(state, file))


def restore(path: Path, run: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
    """A checkpoint of this run (its benchmark, method, seed and settings); None where there is none."""
    if not path.exists():
        return None
    with restoring(path):
        with zipfile.ZipFile(path) as parts:  # torch does not look at the checksums
            if (damaged := parts.testzip()) is not None:
                raise ValueError(f"{damaged} does not have its checksum")
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        other = difference(state["run"], run)
    if other:
        raise ValueError(f"the checkpoint {path} belongs to another run: {other}. Delete it, or use another --out")
    return state


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Whatever fails while a checkpoint is taken in says which it is, and what to do."""
    try:
        yield
    except Exception as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"the checkpoint {path} is damaged ({why}). Delete it to begin the run anew") from None


def environment(threads: int, device: torch.device) -> dict[str, Any]:
    """What the run ran on."""
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
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "platform": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str | None:
    """The commit of the code at work, with `+changes` where files differ from it; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    edited = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "."], check=False).returncode
    return head + ("+changes" if edited else "")


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    """A run's settings; those written before `dtype` was one of them are of float32."""
    return {"dtype": "float32", **settings}


_KINDS = {
    **dict.fromkeys(("benchmark", "model", "method"), str),
    "seed": int,
    **dict.fromkeys(("settings", "changed", "train_accuracy", "timing", "environment"), dict),
    "accuracy": list,
    **dict.fromkeys(("memory", "parameters", "capacity"), int | float),
}


def _check(record: dict[str, Any]) -> None:
    """That a record has what a table and a report are made of, each of its type."""
    for key, kind in _KINDS.items():
        if key not in record:
            raise ValueError(f"has no {key!r}")
        if not isinstance(record[key], kind):
            raise ValueError(f"has {key!r} of the wrong type: {type(record[key]).__name__}")
    train, timing = (record[key] for key in ("train_accuracy", "timing"))
    lists = {f"accuracy {k}": row for k, row in enumerate(record["accuracy"], start=1)}
    lists |= {f"train_accuracy {part}": train.get(part) for part in ("diagonal", "final")}
    lists |= {f"timing {part}": timing.get(part) for part in ("train", "end_task", "evaluate", *timing)}
    for name, values in lists.items():
        if not isinstance(values, list) or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            raise ValueError(f"has {name!r} that is no list of numbers")
    tasks, rows = record["settings"].get("tasks"), len(record["accuracy"])
    if tasks is not None and tasks != rows:
        raise ValueError(f"holds {rows} of {tasks} tasks")
    if not rows or not train["final"] or [len(row) for row in record["accuracy"]] != list(range(1, rows + 1)):
        raise ValueError("has another 'accuracy' than k numbers after task k")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An error of the file system while something is written says where, and what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = "Free some space there" if full else "Make it a place that can be written, or name another"
        raise type(error)(
            f"{path} cannot be written: {error.strerror or error}. {todo}, then give the same command again: "
            "what was there before is whole, and an interrupted run goes on from its last checkpoint"
        ) from error


def _replace(path: Path, fill: Callable[[IO[bytes]], Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                try:
                    fill(file)
                except RuntimeError as error:  # torch.save's own, raised while it handles what the file said
                    raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def spread(values: list[float]) -> str:
    """Mean and standard deviation, as tables print them."""
    text = f"{statistics.fmean(values):.2f}"
    return text + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")
