"""Slow float64 references: plain autograd on a plain model, one sample at a time, explicit inverses.

Nothing here imports rgo. Matrices are (groups, outputs, inputs), with one more column for a trained bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Root = Callable[[Tensor, Tensor], Iterable[Tensor]]  # (outputs (C,), target) -> columns v (C,) of a root of l''


# ---- gradients ------------------------------------------------------------------------------------------------------


def as_matrix(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A weight and a bias, or their gradients, as (groups, outputs, inputs [+ 1])."""
    groups = getattr(layer, "groups", 1)
    W = torch.stack([part.flatten(1) for part in weight.chunk(groups, dim=0)])
    if bias is None:
        return W
    return torch.cat([W, torch.stack(bias.chunk(groups, dim=0)).unsqueeze(2)], dim=2)


def _zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def trained_bias(layer: nn.Module) -> Tensor | None:
    bias = getattr(layer, "bias", None)
    return bias if bias is not None and bias.requires_grad else None


def gradients(model: nn.Module, names: Sequence[str], value: Tensor, retain: bool = False) -> dict[str, Tensor]:
    """d value / d [W, b] of each named layer, by autograd."""
    result = {}
    for i, name in enumerate(names):
        layer = model.get_submodule(name)
        leaves = [p for p in (layer.weight, trained_bias(layer)) if p is not None]
        keep = retain or i < len(names) - 1
        found = torch.autograd.grad(value, leaves, retain_graph=keep, allow_unused=True)
        result[name] = as_matrix(layer, *[_zero(g, p) for g, p in zip(found, leaves)], *[None] * (2 - len(leaves)))
    return result


def arrived(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """What lies in `.grad` of each named layer, as a matrix."""
    result = {}
    for name in names:
        layer = model.get_submodule(name)
        bias = trained_bias(layer)
        db = None if bias is None else _zero(bias.grad, bias)
        result[name] = as_matrix(layer, _zero(layer.weight.grad, layer.weight), db)
    return result


# ---- roots of l'' ---------------------------------------------------------------------------------------------------


def _active_softmax(f: Tensor, classes: Sequence[int] | None) -> Tensor:
    """The softmax over the active classes, written with explicit indices; zero elsewhere."""
    a = torch.zeros_like(f)
    index = list(range(len(f))) if classes is None else list(classes)
    powers = torch.exp(f[index] - f[index].max())
    a[index] = powers / powers.sum()
    return a


def _unit(c: int, like: Tensor) -> Tensor:
    return torch.eye(len(like)).to(like)[c]


def true_class(classes: Sequence[int] | None = None) -> Root:
    def root(f: Tensor, y: Tensor) -> Iterator[Tensor]:
        a = _active_softmax(f, classes)
        others = torch.cat([a[: int(y)], a[int(y) + 1 :]]).sum()  # 1 - a_y without cancellation
        yield _unit(int(y), f) * (a[y] * others).sqrt()

    return root


def logit(f: Tensor, y: Tensor) -> Iterator[Tensor]:
    yield _unit(int(y), f)


def softmax(classes: Sequence[int] | None = None) -> Root:
    """Any root serves: here that of the eigendecomposition of diag(a) - a a^T."""

    def root(f: Tensor, y: Tensor) -> Iterator[Tensor]:
        a = _active_softmax(f, classes)
        values, vectors = torch.linalg.eigh(torch.diag(a) - torch.outer(a, a))
        yield from (vectors * values.clamp(min=0).sqrt()).T

    return root


def squared_error(f: Tensor, y: Tensor) -> Iterator[Tensor]:
    for c in range(len(f)):
        yield _unit(c, f)


# ---- curvature ------------------------------------------------------------------------------------------------------


def identity(model: nn.Module, names: Sequence[str], alpha: float) -> dict[str, Tensor]:
    H = {}
    for name in names:
        layer = model.get_submodule(name)
        g, _, d = as_matrix(layer, layer.weight, trained_bias(layer)).shape
        H[name] = alpha * torch.eye(d, dtype=torch.float64).repeat(g, 1, 1)
    return H


def outer(G: Tensor, extractors: str) -> Tensor:
    """What one sample's gradient (g, o, d) adds to H, extractor by extractor."""
    result = torch.zeros(G.shape[0], G.shape[2], G.shape[2], dtype=torch.float64)
    for g, group in enumerate(G):
        if extractors == "signed":
            result[g] = torch.outer(group.mean(dim=0), group.mean(dim=0))
            continue
        for row in group:
            result[g] += torch.outer(row, row)
        if extractors == "mean":
            result[g] /= len(group)
    return result


def curvature(
    model: nn.Module,
    names: Sequence[str],
    x: Tensor,
    y: Tensor,
    root: Root,
    *,
    alpha: float,
    extractors: str = "mean",
    together: bool = False,
) -> dict[str, Tensor]:
    """H = alpha I + the sum over samples and columns. `together`: the samples must meet in one forward."""
    H = identity(model, names, alpha)
    for i in range(len(y)):
        f = model(x)[i] if together else model(x[i : i + 1])[0]
        for v in root(f.detach(), y[i]):
            for name, G in gradients(model, names, f @ v, retain=True).items():
                H[name] += outer(G, extractors)
    return H


def layer_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """(rows, groups, inputs [+ 1]): what a Linear, or a zero-padded Conv2d, meets."""
    if isinstance(layer, nn.Linear):
        rows = x.flatten(0, -2).unsqueeze(1)
    else:
        patches = [
            F.unfold(part, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
            for part in x.chunk(layer.groups, dim=1)
        ]  # each (B, inputs, positions)
        rows = torch.stack([p.transpose(1, 2).flatten(0, 1) for p in patches], dim=1)
    if trained_bias(layer) is None:
        return rows
    return torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], dim=2)


def layer_deltas(layer: nn.Module, delta: Tensor) -> Tensor:
    """(rows, groups, outputs)"""
    if isinstance(layer, nn.Linear):
        return delta.flatten(0, -2).unsqueeze(1)
    return torch.stack([p.flatten(2).transpose(1, 2).flatten(0, 1) for p in delta.chunk(layer.groups, dim=1)], dim=1)


@contextmanager
def watched(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """The (input, output) of every named layer at the last forward."""
    met: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            met[name] = (args[0], output)

        return note

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield met
    finally:
        for handle in handles:
            handle.remove()


def row_curvature(
    model: nn.Module, names: Sequence[str], x: Tensor, y: Tensor, root: Root, *, alpha: float
) -> dict[str, Tensor]:
    """extractors="rows": every row delta_r x_r^T is squared by itself."""
    H = identity(model, names, alpha)
    for i in range(len(y)):
        with watched(model, names) as met:
            f = model(x[i : i + 1])[0]
        for v in root(f.detach(), y[i]):
            for name in names:
                layer = model.get_submodule(name)
                (delta,) = torch.autograd.grad(f @ v, met[name][1], retain_graph=True)
                for row, d in zip(layer_rows(layer, met[name][0].detach()), layer_deltas(layer, delta)):
                    for g in range(len(row)):
                        H[name][g] += outer(torch.outer(d[g], row[g])[None], "mean")[0]
    return H


def input_curvature(model: nn.Module, names: Sequence[str], x: Tensor, *, alpha: float) -> dict[str, Tensor]:
    """OWM: the inputs themselves, row by row."""
    H = identity(model, names, alpha)
    with watched(model, names) as met, torch.no_grad():
        model(x)
    for name in names:
        for row in layer_rows(model.get_submodule(name), met[name][0]):
            for g in range(len(row)):
                H[name][g] += torch.outer(row[g], row[g])
    return H


# ---- projection -----------------------------------------------------------------------------------------------------


def projector(H: Tensor, alpha: float) -> tuple[Tensor, float]:
    """P = alpha H^-1 and c = dim / trace over all groups, from explicit inverses."""
    P = torch.stack([alpha * torch.linalg.inv(h) for h in H])
    return P, P.shape[0] * P.shape[1] / sum(float(torch.trace(p)) for p in P)


def projected(G: Mapping[str, Tensor], H: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """c G P, group by group."""
    result = {}
    for name in G:
        P, c = projector(H[name], alpha)
        result[name] = torch.stack([c * (g @ p) for g, p in zip(G[name], P)])
    return result


def algorithm_1(P: Tensor, samples: Tensor, alpha: float) -> Tensor:
    """P <- P - P g g^T P / (alpha + g^T P g), sample by sample, for one group."""
    for g in samples:
        Pg = P @ g
        P = P - torch.outer(Pg, Pg) / (alpha + g @ Pg)
    return P


# ---- feature encoding -----------------------------------------------------------------------------------------------


def permuted(layer: nn.Module, x: Tensor, order: Sequence[int]) -> Tensor:
    """The layer's input with feature (or channel) i taken from position order[i]."""
    axis = -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)
    return torch.stack([x.select(axis, int(i)) for i in order], dim=axis)


@contextmanager
def wired(model: nn.Module, orders: Mapping[str, Sequence[int]]) -> Iterator[nn.Module]:
    """A plain model whose named layers read their inputs in the given orders."""

    def hook(order: Sequence[int]) -> Callable[..., tuple[Tensor]]:
        return lambda layer, args: (permuted(layer, args[0], order),)

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(order)) for name, order in orders.items()]
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()
