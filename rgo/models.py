"""The models of the experiments: the paper's networks, and a way to name them or a user's own.

Every network ends in a linear layer, the classifier, named `head` (`mlp` numbers its layers: see `head_name`).
A function of `seed` alone makes the weights; torch's global generator is neither used nor changed.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MLP_INITS = ("glorot", "torch", "orthogonal")
INITS = (*_MLP_INITS, "he", "truncated", "truncated-0.1")
"""How a network's weights can start, and its biases with them:

    "torch"          what nn.Linear and nn.Conv2d do by themselves
    "glorot"         uniform with variance 2 / (fan in + fan out); biases 0
    "orthogonal"     orthonormal rows or columns; biases 0.1
    "he"             normal with variance 2 / fan in; biases 0
    "truncated"      normal with deviation 0.05, redrawn beyond two deviations; biases 0
    "truncated-0.1"  the same with deviation 0.1; biases 0.1
"""


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
    _check_init(init, _MLP_INITS)
    layers: list[nn.Module] = []
    with torch.device("meta"):
        for width, following in pairwise([inputs, *hidden, classes]):
            layers += [nn.Linear(width, following), nn.ReLU()]
    return _start(nn.Sequential(*layers[:-1]), init, seed)


def lenet5(
    classes: int = 100,
    *,
    image: int = 32,
    filters: Sequence[int] = (20, 50),
    units: Sequence[int] = (800, 500),
    init: str = "glorot",
    seed: int = 0,
    dropout: float | Sequence[float] = 0.0,
    bias: bool = True,
) -> nn.Sequential:
    """LeNet-5: two 5x5 convolutions with SAME padding, each with ReLU and 2x2 max-pooling, and dense layers.

    `dropout` acts on every hidden layer: one rate, or a rate for each of `filters` and `units` in turn.

    >>> lenet5()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    >>> lenet5().fc1
    Linear(in_features=3200, out_features=800, bias=True)
    """
    stages = [_Stage((5,), same=True)] * 2
    return _chain("lenet5", stages, filters, units, classes, image, init, seed, dropout, bias)


def alexnet6(
    classes: int = 100,
    *,
    image: int = 32,
    filters: Sequence[int] = (64, 128, 256),
    units: Sequence[int] = (2048, 2048),
    init: str = "glorot",
    seed: int = 0,
    dropout: float | Sequence[float] = 0.0,
    bias: bool = True,
) -> nn.Sequential:
    """AlexNet-6: 4x4, 3x3 and 2x2 convolutions without padding, each with ReLU and 2x2 max-pooling, and dense layers.

    `dropout` acts on every hidden layer: one rate, or a rate for each of `filters` and `units` in turn.

    >>> alexnet6(dropout=(0.2, 0.2, 0.5, 0.5, 0.5)).fc1
    Linear(in_features=1024, out_features=2048, bias=True)
    """
    stages = [_Stage((4,)), _Stage((3,)), _Stage((2,))]
    return _chain("alexnet6", stages, filters, units, classes, image, init, seed, dropout, bias)


def alexnet7(
    classes: int = 100,
    *,
    image: int = 84,
    filters: Sequence[int] = (64, 128, 128, 128),
    units: Sequence[int] = (2048, 2048),
    init: str = "glorot",
    seed: int = 0,
    dropout: float | Sequence[float] = 0.0,
    bias: bool = True,
) -> nn.Sequential:
    """AlexNet-7, for images of 50 pixels and more: convolutions of 5x5, 4x4, 3x3, 3x3 without padding, as AlexNet-6.

    `dropout` acts on every hidden layer: one rate, or a rate for each of `filters` and `units` in turn.

    >>> alexnet7().fc1
    Linear(in_features=1152, out_features=2048, bias=True)
    """
    stages = [_Stage((5,)), _Stage((4,)), _Stage((3,)), _Stage((3,))]
    return _chain("alexnet7", stages, filters, units, classes, image, init, seed, dropout, bias)


def vgg11(
    classes: int = 100,
    *,
    image: int = 32,
    filters: Sequence[int] = (64, 128, 256, 512, 512),
    units: Sequence[int] = (4096, 4096),
    init: str = "he",
    seed: int = 0,
    dropout: float | Sequence[float] = 0.0,
    bias: bool = True,
) -> nn.Sequential:
    """VGG-11 without BatchNorm: stages of 1, 1, 2, 2, 2 3x3 convolutions, 2x2 max-pooling after each, dense layers.

    `dropout` acts on the dense layers: one rate, or one for each of `units`.

    >>> vgg11(units=(64,)).fc1
    Linear(in_features=512, out_features=64, bias=True)
    """
    stages = [_Stage((3,) * convs, same=True, dropout=False) for convs in (1, 1, 2, 2, 2)]
    return _chain("vgg11", stages, filters, units, classes, image, init, seed, dropout, bias)


def vgg13(
    classes: int = 100,
    *,
    image: int = 32,
    filters: Sequence[int] = (64, 128, 256, 512, 512),
    units: Sequence[int] = (4096, 4096),
    init: str = "he",
    seed: int = 0,
    dropout: float | Sequence[float] = 0.0,
    bias: bool = True,
) -> nn.Sequential:
    """VGG-13 without BatchNorm: VGG-11 with two convolutions in every stage.

    >>> sum(isinstance(module, torch.nn.Conv2d) for module in vgg13(filters=(4, 4, 4, 4, 4), units=(8, 8)))
    10
    """
    stages = [_Stage((3, 3), same=True, dropout=False)] * 5
    return _chain("vgg13", stages, filters, units, classes, image, init, seed, dropout, bias)


def resnet18(
    classes: int = 100,
    *,
    image: int = 32,
    filters: Sequence[int] = (64, 128, 256, 512),
    norm: str | None = None,
    stem_relu: bool = True,
    init: str | None = None,
    seed: int = 0,
    bias: bool = True,
) -> nn.Sequential:
    """ResNet-18 for small images: a 7x7 stem of stride 1, four stages of two blocks, global average pooling.

    Without normalisation (`norm=None`) weights start "zero-last": as "he", but the last convolution of every block
    at zero, so that a block starts as its shortcut; "he" alone diverges. `norm="batch"` is the baselines' network:
    BatchNorm after every convolution of the stem and the blocks, whose shift takes the place of all the
    convolutions' biases (a shortcut's would be added to the same sum); weights start as "he".
    Any `image` will do: the average is over what is left of it. RGO answers for the network without normalisation.

    >>> model, x = resnet18(filters=(4, 8, 8, 8)), torch.rand(2, 4, 6, 6)
    >>> torch.equal(model.stage1(x), x)
    True
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """
    _check_widths("resnet18", filters, 4)
    if norm not in (None, "batch"):
        raise ValueError(f"norm={norm!r} is unknown: give None or 'batch'")
    if image < 1:
        raise ValueError(f"resnet18 needs an image of at least 1 pixel, got image={image}")
    init = init or ("he" if norm else "zero-last")
    _check_init(init, INITS if norm else (*INITS, "zero-last"))
    bias_of_convs = bias and norm is None
    with torch.device("meta"):
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["stem"] = nn.Conv2d(3, filters[0], 7, padding=3, bias=bias_of_convs)
        layers["norm"] = _norm(filters[0], norm)
        layers["relu"] = nn.ReLU() if stem_relu else nn.Identity()
        for i, (before, width) in enumerate(pairwise([filters[0], *filters])):
            first = _Block(before, width, stride=1 if i == 0 else 2, norm=norm, bias=bias_of_convs)
            second = _Block(width, width, stride=1, norm=norm, bias=bias_of_convs)
            layers[f"stage{i + 1}"] = nn.Sequential(first, second)
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["head"] = nn.Linear(filters[-1], classes, bias=bias)
        model = nn.Sequential(layers)
    return _start(model, init, seed)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet5": lenet5,
    "alexnet6": alexnet6,
    "alexnet7": alexnet7,
    "vgg11": vgg11,
    "vgg13": vgg13,
    "resnet18": resnet18,
}


def load(name: str, /, *, seed: int = 0, **given: Any) -> nn.Module:
    """A model by name: one of `MODELS`, or "package.module:function", which is imported and called.

    A function of one's own is given the `seed` if it takes one; torch's global generator has it in any case.

    >>> type(load("lenet5", classes=10).head)
    <class 'torch.nn.modules.linear.Linear'>
    >>> load("torch.nn:Linear", in_features=3, out_features=2)
    Linear(in_features=3, out_features=2, bias=True)
    """
    make, known = _maker(name), arguments(name)
    check(name, given)
    if known is None or "seed" in known:
        given["seed"] = seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(**given)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} must return a torch.nn.Module, but it returned {type(model).__name__}")
    return model


def arguments(name: str) -> dict[str, inspect.Parameter] | None:
    """What the function of a model can be given by name; None: it takes any name, or does not tell."""
    found = _parameters(name)
    if found is None or any(p.kind is p.VAR_KEYWORD for p in found):
        return None
    return {p.name: p for p in found if p.kind is not p.POSITIONAL_ONLY}


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """A function's parameters, their annotations evaluated where that can be done."""
    found = inspect.signature(function)
    with suppress(Exception):  # a name that is imported for type checkers only, and whatever else somebody writes
        found = inspect.signature(function, eval_str=True)
    return found.parameters


def needed(name: str) -> list[str]:
    """The arguments that a model's function cannot do without."""
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY
    found = [p for p in _parameters(name) or () if p.default is p.empty]
    if by_place := [p.name for p in found if p.kind is p.POSITIONAL_ONLY]:
        raise ValueError(
            f"model {name!r} takes {by_place[0]!r} by position only, but is called with names: remove the /"
        )
    return [p.name for p in found if p.kind not in kinds]


def check(name: str, given: Iterable[str]) -> None:
    """Raise unless a model's function can be called with these arguments and a seed."""
    known, names = arguments(name), set(given)
    if known is not None and (wrong := sorted(names - known.keys())):
        near = difflib.get_close_matches(wrong[0], known, n=1)
        raise ValueError(
            f"model {name!r} takes no {wrong[0]!r}"
            + (f"; did you mean {near[0]!r}?" if near else f". It takes {', '.join(sorted(known)) or 'nothing'}")
        )
    if missing := [argument for argument in needed(name) if argument not in {*names, "seed"}]:
        settings = " ".join(f"--set {argument}=..." for argument in missing)
        raise ValueError(f"model {name!r} needs {', '.join(missing)}: give it a default, or say {settings}")


def head_name(model: nn.Module) -> str:
    """The dotted name of the linear layer registered last: the classifier, for `skip=` and the like.

    >>> head_name(lenet5()), head_name(mlp())
    ('head', '4')
    """
    names: list[str] = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear, so its head cannot be found: "
            "name the layer that gives the logits yourself"
        )
    return names[-1]


# ---- inside -----------------------------------------------------------------------------------------------------


class _Stage(NamedTuple):
    """Convolutions of one width, ReLU (and dropout) after each, 2x2 max-pooling after the last."""

    kernels: tuple[int, ...]
    same: bool = False
    dropout: bool = True

    def size(self, before: int) -> int:
        return (before if self.same else before - sum(k - 1 for k in self.kernels)) // 2


def _chain(
    name: str,
    stages: Sequence[_Stage],
    filters: Sequence[int],
    units: Sequence[int],
    classes: int,
    image: int,
    init: str,
    seed: int,
    dropout: float | Sequence[float],
    bias: bool,
) -> nn.Sequential:
    """conv1, relu1, pool1, ..., flatten, fc1, ..., head."""
    _check_init(init, INITS)
    _check_widths(name, filters, len(stages))
    side = _side(stages, image)
    if side < 1:
        least = next(i for i in count(image + 1) if _side(stages, i) >= 1)
        raise ValueError(
            f"{name} does not fit image={image}: nothing is left of it after the poolings. "
            f"Give images of at least {least} x {least} pixels, or take another network"
        )
    # A rate for each hidden layer that can have one, taken in turn.
    dropped = sum(len(stage.kernels) for stage in stages if stage.dropout) + len(units)
    rates = [float(dropout)] * dropped if isinstance(dropout, int | float) else list(dropout)
    if len(rates) != dropped:
        raise ValueError(f"{name}: dropout is one rate or {dropped}, one for each hidden layer; got {len(rates)}")
    turn = iter(rates)

    layers: OrderedDict[str, nn.Module] = OrderedDict()

    def hidden(kind: str, number: int | str, layer: nn.Module, drops: bool) -> None:
        layers[f"{kind}{number}"] = layer
        layers[f"{kind}{number}_relu"] = nn.ReLU()
        if drops and (rate := next(turn)):
            layers[f"{kind}{number}_dropout"] = nn.Dropout(rate)

    with torch.device("meta"):
        before, conv = 3, 0
        for i, (stage, width) in enumerate(zip(stages, filters)):
            for kernel in stage.kernels:
                conv += 1
                padding = kernel // 2 if stage.same else 0
                hidden("conv", conv, nn.Conv2d(before, width, kernel, padding=padding, bias=bias), stage.dropout)
                before = width
            layers[f"pool{i + 1}"] = nn.MaxPool2d(2)
        layers["flatten"] = nn.Flatten()  # channel-major: all positions of channel 0, then of channel 1, ...
        before *= side**2
        for i, width in enumerate(units):
            hidden("fc", i + 1, nn.Linear(before, width, bias=bias), True)
            before = width
        layers["head"] = nn.Linear(before, classes, bias=bias)
        model = nn.Sequential(layers)
    return _start(model, init, seed)


def _side(stages: Sequence[_Stage], image: int) -> int:
    for stage in stages:
        image = stage.size(image)
    return image


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, width: int, stride: int, norm: str | None, bias: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=bias)
        self.norm1 = _norm(width, norm)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=bias)
        self.norm2 = _norm(width, norm)
        same = stride == 1 and before == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def _norm(width: int, norm: str | None) -> nn.Module:
    return nn.BatchNorm2d(width, eps=1e-3, momentum=0.1) if norm else nn.Identity()


def _start(model: nn.Sequential, init: str, seed: int) -> nn.Sequential:
    """The model, built on "meta" where torch's own initialisation draws no numbers, with weights."""
    generator = torch.Generator().manual_seed(seed)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            _fill(module.weight, module.bias, init, generator)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
    if init == "zero-last":
        for module in model.modules():
            if isinstance(module, _Block):
                nn.init.zeros_(module.conv2.weight)
    return model


def _fill(weight: Tensor, bias: Tensor | None, init: str, generator: torch.Generator) -> None:
    if init == "torch":
        nn.init.kaiming_uniform_(weight, a=5**0.5, generator=generator)
        if bias is not None:
            bound = weight[0].numel() ** -0.5
            nn.init.uniform_(bias, -bound, bound, generator=generator)
        return
    if init == "glorot":
        nn.init.xavier_uniform_(weight, generator=generator)
    elif init == "orthogonal":
        nn.init.orthogonal_(weight, generator=generator)
    elif init in ("truncated", "truncated-0.1"):
        std = 0.05 if init == "truncated" else 0.1
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
    else:
        nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)
    if bias is not None:
        nn.init.constant_(bias, 0.1 if init in ("orthogonal", "truncated-0.1") else 0.0)


def _check_init(init: str, legal: Sequence[str]) -> None:
    if init not in legal:
        raise ValueError(f"init={init!r} is unknown: give one of {', '.join(map(repr, legal))}")


def _check_widths(name: str, filters: Sequence[int], stages: int) -> None:
    if len(filters) != stages:
        raise ValueError(f"{name} has {stages} stages: give {stages} numbers of filters, not {list(filters)}")


def _maker(name: str) -> Callable[..., Any]:
    if ":" in name:
        return _imported(name)
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.4)
        raise ValueError(
            f"model {name!r} is unknown"
            + (f": did you mean {near[0]!r}? " if near else ". ")
            + f"Give one of {', '.join(map(repr, MODELS))}, or 'package.module:function' for your own"
        )
    return MODELS[name]


def _parameters(name: str) -> list[inspect.Parameter] | None:
    make = _maker(name)
    try:
        found = parameters(make).values()
    except ValueError:  # a function in C need not have one
        return None
    return [p for p in found if p.kind is not p.VAR_POSITIONAL]


def _imported(name: str) -> Callable[..., Any]:
    where, _, attribute = name.partition(":")
    if not where or not attribute:
        raise ValueError(f"model {name!r}: a model of your own is given as 'package.module:function'")
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise ValueError(f"model {name!r}: {where!r} is there, but what it imports is not: {error}") from error
        raise ValueError(
            f"model {name!r}: there is no module {error.name!r}. Install it, or add its folder to PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"model {name!r}: importing {where!r} fails: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        raise ValueError(
            f"model {name!r}: module {where!r} has no {attribute!r}"
            + (f"; did you mean {near[0]!r}?" if near else ". Give the name of a function that returns the model")
        )
    make = getattr(module, attribute)
    if not callable(make):
        raise ValueError(
            f"model {name!r} is an object of type {type(make).__name__}, which cannot be called: "
            "give a function that returns the model"
        )
    return make  # type: ignore[no-any-return]
