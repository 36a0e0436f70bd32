"""What the methods that project by layer inputs share: the layers, what they meet, and where their gradients lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attachment import Attached
from ..encoding import gather
from ..layers import LayerMatrix, describe


class Layer(NamedTuple):
    """A layer as matrices (groups, outputs, dim); a trained bias is one more input, which is always 1."""

    name: str
    module: Any
    matrix: LayerMatrix
    bias: bool

    @property
    def dim(self) -> int:
        return self.matrix.inputs + self.bias

    def rows(self, x: Tensor) -> Tensor:
        """The layer's input as (rows, groups, dim): samples, tokens or patches."""
        rows = self.matrix.rows(x)
        return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1) if self.bias else rows

    @property
    def gradient(self) -> Tensor:
        """(groups, outputs, dim)"""
        G = self.matrix.to_matrix(self.module.weight.grad)
        if self.bias:
            G = torch.cat([G, self.module.bias.grad.reshape(*G.shape[:-1], 1)], dim=-1)
        return G

    def set_gradient(self, G: Tensor) -> None:
        if self.bias:
            self.module.bias.grad.copy_(G[..., -1].reshape(-1))
            G = G[..., :-1]
        weight = self.module.weight
        weight.grad.copy_(self.matrix.to_weight(G, weight))


def layers_of(model: nn.Module, *, bias: bool) -> list[Layer]:
    """The model's trained layers, in its own order. Without `bias`, biases are no inputs."""
    return [
        Layer(name, module, matrix, bias and getattr(module, "bias", None) is not None)
        for name, module in model.named_modules()
        if (matrix := describe(module)) is not None and getattr(module, "weight").requires_grad  # noqa: B009
    ]


def without_biases(layers: Sequence[Layer]) -> None:
    """Idle biases to zero: with `hold`, the network computes and learns as if it had none."""
    with torch.no_grad():
        for bias in idle_biases(layers):
            bias.zero_()


def idle_biases(layers: Sequence[Layer]) -> list[nn.Parameter]:
    """The biases that are not an input of these layers."""
    return [ly.module.bias for ly in layers if not ly.bias and getattr(ly.module, "bias", None) is not None]


def beside(model: nn.Module, layers: Sequence[Layer]) -> list[nn.Parameter]:
    """The parameters that belong to none of these layers: the affine map of a normalisation, an embedding."""
    inside = {id(p) for layer in layers for p in layer.module.parameters(recurse=False)}
    return [p for p in model.parameters() if id(p) not in inside]


def each(argument: float | Sequence[float], layers: Sequence[Layer], name: str) -> list[float]:
    """An argument given once, or once per layer, as one number per layer."""
    if isinstance(argument, int | float):
        return [argument] * len(layers)
    if len(argument) != len(layers):
        names = ", ".join(layer.name for layer in layers)
        raise ValueError(f"{name} has {len(argument)} numbers for {len(layers)} layers ({names}): give one or one each")
    return list(argument)


def hold(parameters: Sequence[nn.Parameter]) -> None:
    """Leave these parameters out of the coming step."""
    for p in parameters:
        p.grad = None


@contextmanager
def watching(layers: Sequence[Layer], see: Callable[[Layer, Tensor], None]) -> Iterator[None]:
    """Call `see` with every input these layers meet, in the frame their weights see it in: after any encoding."""

    def hook(layer: Layer) -> Callable[[nn.Module, tuple[Tensor, ...], Any], None]:
        return lambda module, inputs, output: see(layer, _as_read(module, inputs[0].detach()))

    handles = [layer.module.register_forward_hook(hook(layer)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _as_read(module: nn.Module, x: Tensor) -> Tensor:
    site = module.__dict__.get("forward")
    if not isinstance(site, Attached) or site.raw:
        return x
    index = site.learner._wiring(site.name).index(site, x.device)
    return x if index is None else gather(x, index, site.matrix.axis, site.name)
