"""What a run is: a benchmark, a method, a seed, and the settings in which it departs from their protocol."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from . import models
from .benchmarks import BENCHMARKS, PROTOCOLS
from .methods import METHODS
from .models import MODELS
from .rgo import RGO

RUN = {  # settings of the run itself
    "model": str,
    "tasks": int,
    "steps": int,
    "batch_size": int,
    "lr": float,
    "dtype": str,
    "threads": int,
}
DTYPES = ("float32", "float64", "bfloat16")
THREADS = 1024  # no machine has use for more
_UNNAMED = object()  # what the protocol has of a setting it does not name: None would be a value


@dataclass(frozen=True)
class Experiment:
    """One run's name and settings; `settings` are complete, `changed` are those that the protocol does not have.

    >>> e = experiment("permuted-mnist", "rgo", 0, steps=100)
    >>> e.changed
    {'steps': 100}
    >>> str(e.path("results"))
    'results/permuted-mnist/rgo+steps=100/seed-0.json'
    """

    benchmark: str
    method: str
    seed: int
    settings: dict[str, Any]
    changed: dict[str, Any]

    @property
    def name(self) -> str:
        """The method and what is changed, as a folder can be called; what cannot be one is cut and told by a digest."""
        told = self.method + "".join(f"+{k}={_text(v)}" for k, v in sorted(self.changed.items()))
        name = re.sub(r"[^\w.,:;+=()\[\]{}'-]", "_", told)
        if name == told and len(name.encode()) <= 200:
            return name
        return name.encode()[:180].decode(errors="ignore") + "~" + hashlib.sha256(told.encode()).hexdigest()[:12]

    def path(self, out: Path | str) -> Path:
        """Where the result of this run lies."""
        return Path(out) / self.benchmark / self.name / f"seed-{self.seed}.json"


def experiment(benchmark: str, method: str, seed: int, **changes: Any) -> Experiment:
    """The run of a method on a benchmark as its paper has it, but for `changes`.

    A change is named by the setting of the run (model, tasks, steps, batch_size, lr, dtype, threads) or by an argument
    of the method, the model or the benchmark.
    """
    _known(benchmark, BENCHMARKS, "benchmark")
    _known(method, METHODS, "method")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: give a whole number from 0 to 2**63 - 1")
    changes = {name: _plain(value, name) for name, value in changes.items()}
    for name, value in changes.items():
        _check(name, value, RUN.get(name, Any))
    protocol = _plain(_protocol(benchmark, method))
    settings = {**protocol, **{k: dict(protocol[k]) for k in ("benchmark_options", "model_options", "method_options")}}
    if "model" in changes and changes["model"] != protocol["model"]:
        settings["model"] = changes["model"]
        settings["model_options"] = {k: v for k, v in protocol["model_options"].items() if k in ("image", "classes")}
    if ":" not in settings["model"]:
        _known(settings["model"], MODELS, "model")
    taken = models.arguments(settings["model"])  # None: anything
    if taken is not None:
        settings["model_options"] = {k: v for k, v in settings["model_options"].items() if k in taken}
    of_method = {**models.parameters(RGO.__init__), **models.parameters(METHODS[method].kind.__init__)}
    of_benchmark = models.parameters(BENCHMARKS[benchmark])
    owners = {
        "method_options": {name: of_method[name] for name in METHODS[method].options},
        "model_options": {name: p for name, p in (taken or {}).items() if name != "seed"},
        "benchmark_options": {name: p for name, p in of_benchmark.items() if name not in ("tasks", "seed")},
    }
    reserved = ("benchmark", "method", *RUN, *owners["method_options"])
    if clash := [name for name in models.needed(settings["model"]) if name in reserved]:
        raise ValueError(
            f"model {settings['model']!r} needs {clash[0]!r}, but that name is taken by a setting of the run or of "
            f"{method}: rename the model's argument"
        )
    changed: dict[str, Any] = {}
    for name, value in changes.items():
        if name in RUN:
            before, settings[name] = protocol[name], value
        else:
            rest = "model_options" if taken is None else None
            owner = next((o for o, names in owners.items() if name in names), rest)
            if owner is None:
                legal = sorted({*RUN, *(n for names in owners.values() for n in names)})
                near = difflib.get_close_matches(name, legal, n=1)
                raise ValueError(
                    f"{method} on {benchmark} has no setting {name!r}"
                    + (f"; did you mean {near[0]!r}?" if near else ".")
                    + f" Settings: {', '.join(legal)}"
                )
            if name in owners[owner]:
                _check(name, value, owners[owner][name].annotation)
            before = settings[owner].get(name, _UNNAMED)  # the model may be another one than the protocol's
            settings[owner][name] = value
        if value != before:
            changed[name] = value
    models.check(settings["model"], settings["model_options"])
    _known(settings["dtype"], DTYPES, "dtype")
    for name in ("tasks", "steps", "batch_size", "threads"):
        if settings[name] < 1:
            raise ValueError(f"{name}={settings[name]}: give at least 1")
    if settings["threads"] > THREADS:
        raise ValueError(f"threads={settings['threads']}: give at most {THREADS}")
    if settings["lr"] <= 0:
        raise ValueError(f"lr={settings['lr']}: give a positive number")
    changed.pop("threads", None)  # recorded, and part of the settings, but no departure from anybody's protocol
    return Experiment(benchmark, method, seed, settings, changed)


def _protocol(benchmark: str, method: str) -> dict[str, Any]:
    base, recipe = PROTOCOLS[benchmark], METHODS[method]
    own = dict(recipe.benchmarks.get(benchmark, {}))
    return {
        "model": base["model"],
        "tasks": _default(BENCHMARKS[benchmark], "tasks"),
        "steps": base["steps"],
        "batch_size": base["batch_size"],
        "lr": own.pop("lr", base["lr"]),
        "dtype": "float32",
        "threads": 1,
        "benchmark_options": {},
        "model_options": {**base["arguments"], **recipe.models.get(base["model"], {})},
        "method_options": {**recipe.fixed, **own},
    }


def _default(function: Callable[..., Any], argument: str) -> Any:
    return inspect.signature(function).parameters[argument].default


def _known(name: str, names: Iterable[str], kind: str) -> None:
    if not isinstance(name, str) or name not in names:
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}")


def _plain(value: Any, name: str = "") -> Any:
    """As JSON would give it back: a record compares equal to the experiment that made it."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v, name) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, name) for v in value]
    if not (value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))):
        raise ValueError(f"{name}={value}: a setting is text, a finite number, true, false, none, or a list of these")
    return value


def _check(name: str, value: Any, annotation: Any) -> None:
    """Raise unless a value is what an argument's annotation allows."""
    if not _fits(value, annotation):
        raise ValueError(f"{name}={value!r}: give {_told(annotation)}")


def _fits(value: Any, annotation: Any) -> bool:
    kind, parts = get_origin(annotation) or annotation, [part for part in get_args(annotation) if part is not ...]
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if kind in (Sequence, list, tuple):
        return isinstance(value, list) and all(any(_fits(v, part) for part in parts or [Any]) for v in value)
    if kind is Callable:
        return False  # which no record can hold
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if kind is NoneType:
        return value is None
    return kind not in (bool, str) or isinstance(value, kind)  # any other kind is the function's to check


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "none"}


def _told(annotation: Any) -> str:
    kind, parts = get_origin(annotation) or annotation, [part for part in get_args(annotation) if part is not ...]
    if kind in (Union, UnionType):
        return " or ".join(_told(part) for part in parts if get_origin(part) is not Callable)
    if kind is Literal:
        return " or ".join(map(repr, parts))
    if kind in (Sequence, list, tuple):
        return "a list" + (" of which each is " + " or ".join(map(_told, dict.fromkeys(parts))) if parts else "")
    return _WORDS.get(kind) or inspect.formatannotation(annotation)


def read_value(text: str) -> Any:
    """A setting's value as it is written: TOML where all of it is (numbers, true, lists, quoted text), else the text.

    >>> [read_value(text) for text in ("0.1", "False", "none", "[32, 16]", "full", "'7'")]
    [0.1, False, None, [32, 16], 'full', '7']
    """
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    with suppress(tomllib.TOMLDecodeError):
        tomllib.loads(f"value = {text} .")  # an error right after a value, and none inside a comment
        return text
    return found["value"] if len(found) == 1 else text


def _text(value: Any) -> str:
    """A value in the name of a folder, so that no other setting reads the same: text is quoted where it has to be."""
    if isinstance(value, str):
        return value if read_value(value) is value and not set("+='\"") & set(value) else repr(value)
    if isinstance(value, list):
        return "[" + ",".join(repr(v) if isinstance(v, str) else _text(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k!r}:{_text([v])[1:-1]}" for k, v in value.items()) + "}"
    return str(value)
