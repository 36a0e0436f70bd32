"""What a run is: a benchmark, a method, a seed, and the settings in which it departs from their protocol."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import models
from .benchmarks import BENCHMARKS, PROTOCOLS
from .methods import METHODS
from .models import MODELS

RUN = ("model", "tasks", "steps", "batch_size", "lr", "dtype", "threads")  # settings of the run itself
DTYPES = ("float32", "float64", "bfloat16")


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
    protocol = _protocol(benchmark, method)
    settings = {**protocol, **{k: dict(protocol[k]) for k in ("benchmark_options", "model_options", "method_options")}}
    if "model" in changes and changes["model"] != protocol["model"]:
        settings["model"] = changes["model"]
        settings["model_options"] = {k: v for k, v in protocol["model_options"].items() if k in ("image", "classes")}
    if ":" not in settings["model"]:
        _known(settings["model"], MODELS, "model")
    taken = models.arguments(settings["model"])  # None: anything
    if taken is not None:
        settings["model_options"] = {k: v for k, v in settings["model_options"].items() if k in taken}
    owners = {
        "method_options": METHODS[method].options,
        "model_options": (taken or set()) - {"seed"},
        "benchmark_options": set(inspect.signature(BENCHMARKS[benchmark]).parameters) - {"tasks", "seed"},
    }
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
            before = protocol[owner].get(name)
            settings[owner][name] = value
        if value != before:
            changed[name] = value
    models.check(settings["model"], settings["model_options"])
    _known(settings["dtype"], DTYPES, "dtype")
    settings, changed = _plain(settings), _plain(changed)
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
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}")


def _plain(value: Any) -> Any:
    """As JSON would give it back: a record compares equal to the experiment that made it."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value).replace(" ", "")
