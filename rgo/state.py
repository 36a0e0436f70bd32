"""What a learner remembers, as tensors and plain types, and whether a saved state fits."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .encoding import RECIPE, TaskId
from .gradient import Covered

if TYPE_CHECKING:
    from .rgo import RGO

FORMAT = 1


def save(learner: RGO) -> dict[str, Any]:
    """The state of `learner`; it loads with `weights_only=True`."""
    return {
        "format": FORMAT,
        "recipe": RECIPE,
        "settings": _settings(learner),
        "tasks": list(learner._tasks),
        "active": learner._active,
        "first": learner._first,
        "digests": dict(learner._digests),
        "layers": {
            c.name: {**_shape(c), "unseen": list(c.unseen), **c.projection.state_dict()} for c in learner._layers()
        },
        "sites": {
            name: {"layer": site.covered.name, "raw": site.raw, "plain": sorted(site.plain, key=repr)}
            for name, site in learner._sites.items()
        },
    }


def load(learner: RGO, state: Mapping[str, Any]) -> None:
    """Put a state that `compare` found to fit into the learner: all of it, or nothing."""
    restored = {c: c.projection.restored(state["layers"][c.name]) for c in learner._layers()}
    sites = {name: (saved["raw"], frozenset(saved["plain"])) for name, saved in state["sites"].items()}
    tasks, digests = list(state["tasks"]), dict(state["digests"])
    for covered, projection in restored.items():
        covered.projection, covered.unseen = projection, list(state["layers"][covered.name]["unseen"])
    for name, (raw, plain) in sites.items():
        learner._sites[name].raw, learner._sites[name].plain = raw, plain
    learner._tasks, learner._first, learner._digests = tasks, state["first"], digests


def layers_of(state: Any) -> frozenset[str]:
    """The layers that a state knows, so that frozen ones are attached to before it is compared."""
    sites = state.get("sites") if isinstance(state, Mapping) else None
    return frozenset(sites) if isinstance(sites, Mapping) else frozenset()


def digest(learner: RGO, task: TaskId, sites: Mapping[str, Mapping[str, Any]] | None = None) -> int:
    """A checksum of what a user's encode function answers for a task: a state cannot hold the function."""
    value = 0
    for name, site in sorted(learner._sites.items()):
        plain, raw = (site.plain, site.raw) if sites is None else (sites[name]["plain"], sites[name]["raw"])
        if task not in plain and not raw:
            order = learner.encoding.order(task, name, site.matrix.width, learner._first)
            value = zlib.crc32(name.encode() + (b"" if order is None else order.numpy().tobytes()), value)
    return value


def compare(learner: RGO, state: Mapping[str, Any]) -> None:
    """Raise, naming every difference, unless `state` is of this learner's kind."""
    keys = ("format", "recipe", "settings", "tasks", "active", "first", "digests", "layers", "sites")
    missing = [k for k in keys if not isinstance(state, Mapping) or k not in state]
    if missing:
        raise ValueError(
            f"this is no state of an RGO learner: {', '.join(missing)} missing. Save learner.state_dict(), not the "
            "model's, and load both"
        )
    kinds = {"settings": Mapping, "tasks": list, "digests": Mapping, "layers": Mapping, "sites": Mapping}
    damaged = [f"{k} is a {type(state[k]).__name__}" for k, kind in kinds.items() if not isinstance(state[k], kind)]
    damaged += [f"{k} is {state[k]!r}" for k in ("active", "first") if not isinstance(state[k], int | str | None)]
    damaged += [
        f"site {n!r} is incomplete" for n, s in state["sites"].items() if not {"layer", "raw", "plain"} <= s.keys()
    ]
    if damaged:
        raise ValueError(f"the state is damaged: {'; '.join(damaged)}. Load another copy of it")
    wrong = [
        f"{key}: the state has {state[key]!r}, this version of rgo reads {ours!r}"
        for key, ours in (("format", FORMAT), ("recipe", RECIPE))
        if state[key] != ours
    ]
    wrong += [
        f"{key}: saved with {state['settings'].get(key)!r}, this learner has {value!r}"
        for key, value in _settings(learner).items()
        if state["settings"].get(key) != value
    ]
    layers = {c.name: c for c in learner._layers()}
    for kind, ours, theirs in (("weight", layers, state["layers"]), ("layer", learner._sites, state["sites"])):
        wrong += [f"{kind} {n!r} is covered in the state and not in this model" for n in theirs if n not in ours]
        wrong += [f"{kind} {n!r} is covered in this model and not in the state" for n in ours if n not in theirs]
    for name in layers.keys() & state["layers"].keys():
        saved = state["layers"][name]
        wrong += [
            f"weight {name!r}: {k} {saved.get(k)!r} in the state, {v!r} in this model"
            for k, v in _shape(layers[name]).items()
            if saved.get(k) != v
        ]
        wrong += [f"weight {name!r}: {problem}" for problem in layers[name].projection.problems(saved)]
    wrong += [
        f"layer {n!r} shares the weight of {state['sites'][n]['layer']!r} in the state, of {site.covered.name!r} here"
        for n, site in learner._sites.items()
        if n in state["sites"] and state["sites"][n]["layer"] != site.covered.name
    ]
    if not wrong:
        wrong = [
            f"encode: the function answers task {task!r} with other permutations than when the state was saved"
            for task, was in state["digests"].items()
            if digest(learner, task, state["sites"]) != was
        ]
    if wrong:
        raise ValueError("the state does not fit this learner:\n  " + "\n  ".join(sorted(set(wrong))))


def _settings(learner: RGO) -> dict[str, Any]:
    return {
        "alpha": float(learner.alpha),
        "encode": learner.encoding.setting,
        "project": learner.project,
        "curvature": learner.curvature if isinstance(learner.curvature, str) else "function",
        "extractors": learner.extractors,
        "solver": learner.solver,
        "block": learner.block if learner.solver == "recursive" else None,
        "tolerance": float(learner.tolerance),
        "dtype": None if learner.dtype is None else str(learner.dtype).removeprefix("torch."),
    }


def _shape(covered: Covered) -> dict[str, Any]:
    m = covered.matrix
    return {"groups": m.groups, "inputs": m.inputs, "outputs": m.outputs, "bias": covered.bias is not None}
