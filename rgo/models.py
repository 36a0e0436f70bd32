"""The models of the experiments."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

_INITS = ("glorot", "torch", "orthogonal")


def mlp(
    inputs: int = 784,
    hidden: Sequence[int] = (256, 256),
    classes: int = 10,
    *,
    init: str = "torch",
    seed: int = 0,
) -> nn.Sequential:
    """Linear layers with ReLUs between them: the paper's "three-layer fully connected network".

    `init` is "torch" (what `nn.Linear` does by itself), "glorot" (uniform weights, zero biases) or "orthogonal"
    (with biases of 0.1). The same `seed` gives the same weights; the global generator is neither used nor changed.

    >>> sum(parameter.numel() for parameter in mlp().parameters())
    269322
    """
    if init not in _INITS:
        raise ValueError(f"init={init!r} is unknown: give one of {', '.join(map(repr, _INITS))}")
    generator = torch.Generator().manual_seed(seed)
    widths = [inputs, *hidden, classes]
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        # On "meta", where nn.Linear's own initialisation draws no numbers.
        linear = nn.Linear(width, following, device="meta").to_empty(device="cpu")
        if init == "glorot":
            nn.init.xavier_uniform_(linear.weight, generator=generator)
            nn.init.zeros_(linear.bias)
        elif init == "orthogonal":
            nn.init.orthogonal_(linear.weight, generator=generator)
            nn.init.constant_(linear.bias, 0.1)
        else:
            nn.init.kaiming_uniform_(linear.weight, a=5**0.5, generator=generator)
            nn.init.uniform_(linear.bias, -(width**-0.5), width**-0.5, generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
