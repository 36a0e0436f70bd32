"""The methods of the laboratory by name, and what a name sets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from ..models import head_name
from ..rgo import RGO
from .agem import AGEM
from .er_ring import ERRing
from .ewc import EWC
from .gpm import GPM
from .los import LOS
from .method import Method
from .owm import OWM
from .rgo import RGOMethod
from .rll import RLL
from .sgd import SGD
from .stl import STL

if TYPE_CHECKING:
    from ..experiment import Experiment

__all__ = ["METHODS", "Method", "Recipe", "make"]


@dataclass(frozen=True)
class Recipe:
    """A method as its paper runs it."""

    kind: type[Method]
    fixed: dict[str, Any] = field(default_factory=dict)
    """what the name stands for"""
    benchmarks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """hyper-parameters on a benchmark"""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """arguments of a model"""

    @property
    def options(self) -> set[str]:
        """What may be set of it: its constructor's arguments, and RGO's where it hands them on."""
        names = set(inspect.signature(self.kind.__init__).parameters)
        if "options" in names:
            names |= set(inspect.signature(RGO.__init__).parameters)
        own = {"dtype"} | ({"project"} if self.kind is RLL else set())  # a setting of the run; RLL's RGO never projects
        return names - {"self", "model", "lr", "options", "fresh", "split_head", "tasks", "skip"} - own


_BATCH_NORM = {"resnet18": {"norm": "batch"}}  # the baselines' network keeps it, RGO's cannot
_SPLITS = ("split-cifar100", "split-miniimagenet")

METHODS: dict[str, Recipe] = {
    "sgd": Recipe(SGD, models=_BATCH_NORM),
    "stl": Recipe(STL),
    "ewc": Recipe(EWC, benchmarks={name: {"every": 50} for name in _SPLITS}, models=_BATCH_NORM),
    "a-gem": Recipe(AGEM, models=_BATCH_NORM),
    "er-ring": Recipe(ERRing, models=_BATCH_NORM),
    "gpm": Recipe(
        GPM,
        benchmarks={
            "permuted-mnist": {"threshold": [0.95, 0.99, 0.99], "samples": 300},
            "rotated-mnist": {"threshold": [0.95, 0.99, 0.99], "samples": 300},
            "split-cifar100": {"threshold": 0.97, "until": 1.0, "samples": 125},
            "split-miniimagenet": {"threshold": 0.985, "until": 1.0, "samples": 100},
        },
        models=_BATCH_NORM,
    ),
    "los": Recipe(
        LOS,
        benchmarks={"split-cifar100": {"lr": 0.4}, "split-miniimagenet": {"lr": 0.2}},
        models=_BATCH_NORM | {"mlp": {"init": "orthogonal"}},
    ),
    # Its P closes the current task's own inputs while it trains, so it learns little at the others' rate.
    "owm": Recipe(OWM, benchmarks={name: {"lr": 1.0} for name in ("permuted-mnist", "rotated-mnist", "digits")}),
    "rgo": Recipe(RGOMethod),
    "rgo-2": Recipe(RGOMethod, fixed={"encode": False}),
    "fel": Recipe(RGOMethod, fixed={"project": False}),
    "rll": Recipe(RLL),
}


def make(experiment: Experiment, model: nn.Module, fresh: Callable[[int], nn.Module], split: bool = False) -> Method:
    """The method of an experiment on a model; `fresh(k)` is task k's own model, for STL.

    `split`: each task has outputs of its own, so the rows of the head belong to one task each.
    """
    recipe, settings = METHODS[experiment.method], experiment.settings
    arguments = dict(settings["method_options"])
    accepted = set(inspect.signature(recipe.kind.__init__).parameters)
    if "fresh" in accepted:
        arguments["fresh"] = fresh
    if "tasks" in accepted:
        arguments["tasks"] = settings["tasks"]
    if "split_head" in accepted and split:
        arguments["split_head"] = head_name(model)
    return recipe.kind(model, lr=settings["lr"], **arguments)
