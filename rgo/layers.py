"""How a layer is a matrix: which inputs its weight meets, row by row, and which outputs it makes of them.

One function per layer type turns a module into a `LayerMatrix`. Everything else of the library (projection,
curvature, encoding) speaks of matrices only, so a new layer type is one function and `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .product import product


@dataclass(frozen=True)
class LayerMatrix:
    """A layer as `groups` matrices of shape (outputs, inputs), each meeting rows of its own.

    A *row* is one meeting of the weight with an input: a sample of a Linear, a token, a position of a
    convolution. Rows are ordered sample by sample. For a convolution of 8 groups over 64 -> 32 channels with
    3x3 kernels: groups 8, inputs 72, outputs 4; its P are 8 matrices of 72 x 72 (73 x 73 with a bias).
    """

    groups: int
    inputs: int
    outputs: int
    width: int
    """Features or channels of the layer's input: what a task's permutation rearranges."""
    axis: int
    """Where these lie in the input, counted from the end."""
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(input, weight, bias) -> output, as the layer itself computes it."""
    rows: Callable[[Tensor], Tensor]
    """input -> (rows, groups, inputs)"""
    deltas: Callable[[Tensor], Tensor]
    """gradient of the output -> (rows, groups, outputs), in the order of `rows`"""
    count: Callable[[Tensor], int]
    """input -> its number of rows, from the shape alone"""
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(gradient of the output, input, weight) -> gradient of the input; None: always the general path"""
    matrix: Callable[[Tensor], Tensor] | None = None
    """weight -> (groups, outputs, inputs); None: a reshape does it"""
    weight: Callable[[Tensor], Tensor] | None = None
    """the way back from `matrix`; None: a reshape does it"""
    columns: int | None = None
    """where `width` lies in the weight, so that its columns can be permuted instead of the input; None: never"""
    unfolded: Callable[[Tensor], Tensor] | None = None
    """input -> a view (groups, inputs..., rows...) of what `rows` copies; None: `rows` transposed"""
    gradients: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(gradient of the output, input, weight) -> each sample's own gradient of the weight, as (samples, groups,
    outputs, inputs), without its rows; None: made of rows and deltas"""
    direct: bool = False
    """an input of two dimensions is its own rows, and so is the gradient of its output"""

    def to_matrix(self, weight: Tensor) -> Tensor:
        """A weight (or its gradient) as (groups, outputs, inputs)."""
        if self.matrix is not None:
            return self.matrix(weight)
        return weight.reshape(self.groups, self.outputs, self.inputs)

    def to_columns(self, x: Tensor) -> Tensor:
        """Rows as columns: (groups, inputs..., rows...), mostly a view."""
        return self.unfolded(x) if self.unfolded is not None else self.rows(x).permute(1, 2, 0)

    def to_weight(self, matrix: Tensor, like: Tensor) -> Tensor:
        """A (groups, outputs, inputs) gradient in the layout of the weight `like`."""
        return self.weight(matrix) if self.weight is not None else matrix.reshape(like.shape)


Describe = Callable[[Any], LayerMatrix]
D = TypeVar("D", bound=Describe)
_TYPES: dict[type[nn.Module], Describe] = {}


def register(kind: type[nn.Module]) -> Callable[[D], D]:
    """Teach RGO a layer type: decorate a function that describes such a module as a `LayerMatrix`.

    The module must have a parameter `weight` and may have a parameter `bias` (one number per output); it is
    called with one tensor. Subclasses with a forward of their own are other types and need their own entry.

    Examples:
        >>> import torch, rgo
        >>> class Doubled(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> @rgo.register(Doubled)
        ... def doubled(layer):
        ...     n, o = layer.in_features, layer.out_features
        ...     return rgo.LayerMatrix(
        ...         groups=1, inputs=n, outputs=o, width=n, axis=-1, count=lambda x: x.numel() // n,
        ...         forward=lambda x, w, b: 2 * torch.nn.functional.linear(x, w, b),
        ...         rows=lambda x: 2 * x.reshape(-1, 1, n), deltas=lambda d: d.reshape(-1, 1, o))
        >>> rgo.RGO(torch.nn.Sequential(Doubled(3, 2, bias=False))).summary().covered[0].name
        '0'
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register takes a subclass of torch.nn.Module, got {kind!r}")

    def decorate(describe: D) -> D:
        _TYPES[kind] = describe
        return describe

    return decorate


def describe(module: nn.Module) -> LayerMatrix | None:
    """The module as a matrix, or None when no entry speaks for its type."""
    for kind in type(module).__mro__:
        if kind in _TYPES:
            same = type(module).forward is kind.forward  # a forward of its own may compute anything
            conv = getattr(type(module), "_conv_forward", None) is getattr(kind, "_conv_forward", None)
            return _TYPES[kind](module) if same and conv else None
    return None


@register(nn.Linear)
def linear(layer: nn.Linear) -> LayerMatrix:
    """y = x W^T + b for any leading dimensions: every row of x is a row."""
    n, o = layer.in_features, layer.out_features
    return LayerMatrix(
        groups=1,
        inputs=n,
        outputs=o,
        width=n,
        axis=-1,
        forward=F.linear,
        rows=lambda x: x.reshape(-1, 1, n),
        deltas=lambda delta: delta.reshape(-1, 1, o),
        count=lambda x: x.numel() // n,
        input_gradient=lambda delta, x, weight: product(delta, weight) if delta.dim() == 2 else delta @ weight,
        columns=1,
        direct=True,
    )


@register(nn.Conv1d)
@register(nn.Conv2d)
@register(nn.Conv3d)
def convolution(layer: _ConvNd) -> LayerMatrix:
    """Every output position is a row: the patch under the kernel, in the order of weight.view(out, -1)."""
    dims = len(layer.kernel_size)
    g, c, kernel = layer.groups, layer.in_channels, layer.kernel_size
    stride, dilation = layer.stride, layer.dilation
    n, o = c // g * prod(kernel), layer.out_channels // g
    around: list[int] = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    even = mode == "constant" and around[::2] == around[1::2]  # the convolution itself can pad so
    inner = tuple(around[::-2]) if even else (0,) * dims
    only_weight = [False, True, False]
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation)]

    def pad(x: Tensor) -> Tensor:
        return F.pad(x, around, mode=mode) if any(around) else x

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return layer._conv_forward(x, weight, bias)

    positions, offsets = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)

    def patches(x: Tensor) -> Tensor:
        x = pad(x if x.dim() == dims + 2 else x.unsqueeze(0))
        for i in range(dims):  # (N, C, positions..., kernel...): a view, to be copied once
            x = x.unfold(2 + i, spans[i], stride[i])
        for i in range(dims):
            x = x[(..., slice(None, None, dilation[i])) + (slice(None),) * (dims - 1 - i)]
        return x

    def rows(x: Tensor) -> Tensor:
        return patches(x).permute(0, *positions, 1, *offsets).reshape(-1, g, n)

    def unfolded(x: Tensor) -> Tensor:
        result: Tensor = patches(x).permute(1, *offsets, 0, *positions).unflatten(0, (g, -1))
        return result

    def deltas(delta: Tensor) -> Tensor:
        return delta.movedim(-1 - dims, -1).reshape(-1, g, o)

    def count(x: Tensor) -> int:
        sizes = x.shape[-dims:]
        pads = [a + b for a, b in zip(around[-2::-2], around[::-2])]
        batch = x.shape[0] if x.dim() == dims + 2 else 1
        return batch * prod((s + p - w) // t + 1 for s, p, w, t in zip(sizes, pads, spans, stride))

    def gradients(delta: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if x.dim() != dims + 2:
            delta, x = delta.unsqueeze(0), x.unsqueeze(0)
        x = x if even else pad(x)
        found = [
            torch.ops.aten.convolution_backward(
                delta[i : i + 1], x[i : i + 1], weight, None, stride, inner, dilation, False, [0] * dims, g, only_weight
            )[1]
            for i in range(len(x))
        ]
        return torch.stack(found).view(len(x), g, o, n)

    def input_gradient(delta: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        batched = x.dim() == dims + 2
        if not batched:
            delta, x = delta.unsqueeze(0), x.unsqueeze(0)
        result: Tensor = torch.ops.aten.convolution_backward(
            delta, x, weight, None, stride, inner, dilation, False, [0] * dims, g, [True, False, False]
        )[0]
        return result if batched else result.squeeze(0)

    return LayerMatrix(
        groups=g,
        inputs=n,
        outputs=o,
        width=c,
        axis=-1 - dims,
        forward=forward,
        rows=rows,
        deltas=deltas,
        count=count,
        input_gradient=input_gradient if even else None,
        unfolded=unfolded,
        gradients=gradients,
        columns=1 if g == 1 else None,
    )


REFUSED: dict[type, str] = {
    _BatchNorm: (
        "BatchNorm's running statistics and affine parameters belong to whichever task was trained last and are not "
        "moved by a gradient that could be projected: old tasks would be answered with the new task's statistics. "
        "Use GroupNorm or LayerNorm instead, or build the network without normalisation"
    ),
    _ConvTransposeNd: (
        "transposed convolutions are not covered. Use an upsampling followed by a convolution, which is"
    ),
    nn.RNNBase: "recurrent layers keep packed weights outside any layer RGO can project. Use Linear or attention",
    nn.RNNCellBase: "recurrent cells are not covered. Write the cell with nn.Linear layers, which are",
    nn.Bilinear: "bilinear layers are not covered. Use nn.Linear on concatenated or multiplied features",
    LazyModuleMixin: "its shape is not known yet. Run the model once on a batch, then attach",
}


def why_refused(module: nn.Module) -> str | None:
    """Why a model with this module cannot be attached to, and what to use instead; None when it can."""
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "InstanceNorm with running statistics has BatchNorm's trouble. Set track_running_stats=False"
    for kind, why in REFUSED.items():
        if isinstance(module, kind):
            return why
    return None


def why_unprotected(module: nn.Module) -> str:
    """Why the trainable parameters held by `module` itself are left to plain training."""
    if isinstance(module, NonDynamicallyQuantizableLinear | nn.MultiheadAttention):
        return "MultiheadAttention uses its packed weights directly, without calling a layer"
    if describe(module) is not None:
        return "its weight is frozen, and a bias alone has no P"
    if any(isinstance(module, kind) for kind in _TYPES):
        return f"{type(module).__name__} has a forward of its own: describe it with rgo.register"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embeddings are not covered"
    if isinstance(module, nn.LayerNorm | nn.GroupNorm | _InstanceNorm | nn.RMSNorm):
        return "the affine parameters of a normalisation are not covered: build it with affine=False to do without"
    return f"parameters of {type(module).__name__} are not covered"
