"""What of a model can be protected: which layers are covered, which are left, which are refused and why."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .gradient import Covered
from .layers import LayerMatrix, describe, why_refused, why_unprotected


@dataclass(frozen=True)
class Site:
    """A layer that can be covered, as found in the model."""

    name: str
    """what messages and states call it"""
    path: str
    """where it lies in the model: the name, but for a model that is itself a layer"""
    layer: nn.Module
    matrix: LayerMatrix
    weight: nn.Parameter
    bias: nn.Parameter | None


@dataclass
class Survey:
    """What a walk through the model found."""

    sites: list[Site] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    unprotected: dict[str, str] = field(default_factory=dict)  # parameter -> why
    trained: set[int] = field(default_factory=set)  # ids of the parameters that are being trained


def join(name: str, parameter: str) -> str:
    """The full name of a module's parameter."""
    return f"{name}.{parameter}" if name else parameter


def is_skipped(name: str, skip: Iterable[str]) -> bool:
    return any(name == s or s == "" or name.startswith(s + ".") for s in skip)


def check_names(model: nn.Module, names: Iterable[str], argument: str) -> None:
    known = [n for n, _ in model.named_modules()] + [n for n, _ in model.named_parameters()]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; modules: {known[1:9]} ..."
            raise ValueError(f"{argument} names {name!r}, which is no module or parameter of the model{hint}")


def survey(model: nn.Module, skip: Sequence[str], thawed: Collection[str] = ()) -> Survey:
    """Find what can be covered; refuse, with the reason, what would break protection silently."""
    found = Survey(trained={id(p) for p in model.parameters() if p.requires_grad})
    owned: set[int] = set()  # parameters that a covered layer projects
    refused: list[str] = []
    for name, module in model.named_modules():
        if is_skipped(name, skip):
            continue
        why = why_refused(module)
        if why is not None:
            refused.append(f"{name or 'the model'!r} ({type(module).__name__}): {why}")
            continue
        own = dict(module.named_parameters(recurse=False))
        for key, p in own.items():
            if p.is_meta:
                raise ValueError(
                    f"parameter {join(name, key)!r} is on the meta device and has no values. Materialise the model "
                    "(model.to_empty(device=...) and load its weights) before attaching"
                )
        matrix = None if isinstance(module, NonDynamicallyQuantizableLinear) else describe(module)
        if matrix is None:
            continue
        weight = own.get("weight")
        if weight is None:
            if any(p.requires_grad for p in module.parameters()):
                raise ValueError(
                    f"the weight of {name!r} is not a parameter but is computed from others (weight_norm, a "
                    f"parametrization, pruning): its gradient cannot be projected. Remove that, or skip=({name!r},)"
                )
            continue
        if is_skipped(join(name, "weight"), skip):
            continue
        if not weight.requires_grad and name not in thawed:
            found.frozen.append(name)
            continue
        bias = own.get("bias")
        frozen_bias = bias is not None and not bias.requires_grad and weight.requires_grad
        if frozen_bias or is_skipped(join(name, "bias"), skip):
            bias = None
        found.sites.append(Site(name or "model", name, module, matrix, weight, bias))
        owned |= {id(weight)} | ({id(bias)} if bias is not None else set())
    if refused:
        names = ", ".join(repr(line.split("'")[1]) for line in refused)
        raise ValueError(
            "cannot attach to " + ";\n  ".join(refused) + f".\nTo leave them to plain training and take the "
            f"consequences, give skip=({names},)"
        )
    _find_other_uses(model, found, owned, skip)
    return found


def _find_other_uses(model: nn.Module, found: Survey, owned: set[int], skip: Sequence[str]) -> None:
    covered = {(id(s.layer), key) for s in found.sites for key in ("weight", "bias")}
    holder = {id(s.weight): s.name for s in found.sites}
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            full = join(name, key)
            if not p.requires_grad:
                continue
            if id(p) in owned:
                if (id(module), key) not in covered:
                    raise ValueError(
                        f"{full!r} ({type(module).__name__}) shares its tensor with the covered layer "
                        f"{holder.get(id(p), '?')!r}: gradients of one use would be projected and of the other not. "
                        f"Untie them, or give skip=({name!r}, {holder.get(id(p), '?')!r})"
                    )
            elif is_skipped(full, skip):
                found.skipped.append(full)
            else:
                found.unprotected[full] = why_unprotected(module)


def tie(sites: Sequence[Site]) -> list[list[Site]]:
    """Sites grouped by the weight they share, each group to get one P."""
    groups: dict[int, list[Site]] = {}
    for site in sites:
        groups.setdefault(id(site.weight), []).append(site)
    for group in groups.values():
        a = group[0]
        for b in group[1:]:
            shapes = [(s.matrix.groups, s.matrix.inputs, s.matrix.outputs) for s in (a, b)]
            if shapes[0] != shapes[1] or a.bias is not b.bias:
                raise ValueError(
                    f"layers {a.name!r} and {b.name!r} share a weight but not "
                    f"{'its shape as a matrix' if shapes[0] != shapes[1] else 'their bias'}: one P cannot serve both. "
                    f"Share both or neither, or give skip=({a.name!r}, {b.name!r})"
                )
    return list(groups.values())


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on a device; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def check_memory(covered: Iterable[Covered]) -> None:
    """Refuse, before anything is allocated, what cannot fit."""
    by_device: dict[torch.device, list[Covered]] = {}
    for c in covered:
        by_device.setdefault(c.projection.device, []).append(c)
    for device, layers in by_device.items():
        need, have = sum(c.projection.worst_bytes() for c in layers), available_bytes(device)
        if have is not None and need > have:
            worst = max(layers, key=lambda c: c.projection.worst_bytes())
            p = worst.projection
            raise MemoryError(
                f"the projections need up to {need:,} bytes on {device}, {have:,} are available. The largest is layer "
                f"{worst.name!r}: P of {p.dim} x {p.dim}"
                + (f" x {p.groups} groups" if p.groups > 1 else "")
                + f", {p.worst_bytes():,} bytes with H and the workspace of end_task. Leave it unprotected with "
                f"skip=({worst.name!r},), freeze it, or give it fewer inputs"
            )
