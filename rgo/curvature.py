"""What a task's data say about each layer: Algorithm 1, line 9, and its exact alternatives.

For a sample with outputs f and the loss' Hessian l'' in f, a layer's curvature is the sum over columns v of a root of
l'' of the outer products of G = d (v^T f) / dW, averaged over the layer's feature extractors (the rows of W):
H += (1/o) G^T G. The paper keeps one column, sqrt(a_y (1 - a_y)) at the true class y. With one row per sample,
G = delta x^T and the average is mean_j(delta_j^2) x x^T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor, Tensor], Iterable[Tensor]]
"""(outputs (B, C), targets, active classes as a mask (C,)) -> columns v of a root of l'', each (B, C)"""
Extractors = Literal["mean", "sum", "signed", "rows"]


def _softmax(outputs: Tensor, classes: Tensor) -> Tensor:
    # float64: 1 - a_y of a well-fitted sample has no digits left in float32
    return torch.softmax(outputs.detach().double().masked_fill(~classes, -torch.inf), dim=1)


def _one_hot(targets: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(1, targets[:, None], 1.0)


def true_class(outputs: Tensor, targets: Tensor, classes: Tensor) -> Iterable[Tensor]:
    """The paper's: the diagonal element of l'' at the true class, sqrt(a_y (1 - a_y)) e_y."""
    a = _softmax(outputs, classes)
    a_y = a.gather(1, targets[:, None])
    yield _one_hot(targets, a) * (a_y * (1 - a_y)).sqrt()


def logit(outputs: Tensor, targets: Tensor, classes: Tensor) -> Iterable[Tensor]:
    """The true class with weight one: samples that are fitted well count like the others."""
    yield _one_hot(targets, outputs)


def softmax(outputs: Tensor, targets: Tensor, classes: Tensor) -> Iterable[Tensor]:
    """Exact: all C columns sqrt(a_c) (e_c - a) of a root of diag(a) - a a^T."""
    a = _softmax(outputs, classes)
    for c in classes.nonzero().flatten().tolist():
        column = -a
        column[:, c] += 1
        yield column * a[:, c : c + 1].sqrt()


def squared_error(outputs: Tensor, targets: Tensor, classes: Tensor) -> Iterable[Tensor]:
    """Exact for half the squared error, whose l'' is the identity: one column per output."""
    for c in classes.nonzero().flatten().tolist():
        column = torch.zeros_like(outputs)
        column[:, c] = 1
        yield column


def sampled_class(outputs: Tensor, targets: Tensor, classes: Tensor) -> Iterable[Tensor]:
    """One column a - e_t with t drawn from the model's own softmax: diag(a) - a a^T in expectation."""
    a = _softmax(outputs, classes)
    yield a - _one_hot(torch.multinomial(a, 1).flatten(), a)


def sampled(loss: Callable[[Tensor, Tensor], Tensor], sample: Callable[[Tensor], Tensor]) -> Rule:
    """A rule for any loss: its gradient at targets drawn from what the model itself predicts.

    `loss(outputs, targets)` gives one number per sample or their sum; `sample(outputs)` draws targets from the
    distribution whose negative log-likelihood the loss is. The outer products then average to l''.

    Examples:
        >>> import torch, rgo
        >>> poisson = rgo.sampled(
        ...     loss=lambda f, t: (f.exp() - t * f).sum(), sample=lambda f: torch.poisson(f.exp()))
        >>> learner = rgo.RGO(torch.nn.Linear(4, 1), curvature=poisson)
    """

    def rule(outputs: Tensor, targets: Tensor, classes: Tensor) -> Iterable[Tensor]:
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            drawn = sample(leaf.detach())
            (column,) = torch.autograd.grad(loss(leaf, drawn).sum(), leaf)
        yield column * classes

    return rule


RULES: dict[str, Rule | None] = {
    "true-class": true_class,
    "logit": logit,
    "softmax": softmax,
    "squared-error": squared_error,
    "sampled": sampled_class,
    "inputs": None,  # OWM: x x^T, no backward at all
}
LABELLED = ("true-class", "logit", "softmax", "sampled")
EXTRACTORS: tuple[Extractors, ...] = ("mean", "sum", "signed", "rows")


def check_outputs(outputs: Any, where: str) -> None:
    """The outputs of a batch must be (samples, classes) and finite; `where` is for errors."""
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        found = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise ValueError(
            f"{where}: the model must return outputs of shape (samples, classes), got {found}. Give forward=, a "
            "function batch -> (outputs, targets), to reduce them"
        )
    if len(outputs) == 0:
        raise ValueError(f"{where} is empty: it holds no samples")
    if not torch.isfinite(outputs).all():
        raise FloatingPointError(
            f"{where}: the outputs are not finite, so training has diverged. P is as it was; go back to weights that "
            "work, lower the learning rate, and call end_task again"
        )


def checked_labels(outputs: Tensor, given: Any, mask: Tensor, where: str) -> Tensor:
    """Class labels as int64, once they have been found sound."""
    number = isinstance(given, Tensor) and not given.is_floating_point() and given.dtype != torch.bool
    if not number or given.shape != outputs.shape[:1]:
        found = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(
            f"{where}: labels must be integers of shape ({len(outputs)},), one per sample, got {found}. For other "
            'targets attach with curvature="squared-error" or rgo.sampled(...) (the task need not be trained again: '
            "detach, attach, begin_task, end_task)"
        )
    targets: Tensor = given.long()
    low, high, C = int(targets.min()), int(targets.max()), outputs.shape[1]
    if low < 0 or high >= C:
        hint = ". Drop samples without a label (-100) first" if low == -100 else ""
        hint = '. For a single logit use two outputs, or attach with curvature="squared-error"' if C == 1 else hint
        raise ValueError(f"{where}: labels lie in {low}..{high}, but the model has {C} outputs: 0..{C - 1}{hint}")
    outside = sorted(set(targets[~mask[targets]].tolist()))
    if outside:
        active = mask.nonzero().flatten().tolist()
        raise ValueError(
            f"{where}: labels {outside[:5]} are not among classes= {active[:10]}{' ...' if len(active) > 10 else ''}. "
            "Labels count all of the model's outputs"
        )
    return targets


def class_mask(classes: Any, C: int, device: torch.device) -> Tensor:
    """What `classes=` selects of C outputs, as booleans (C,)."""
    if classes is None:
        return torch.ones(C, dtype=torch.bool, device=device)
    if not isinstance(classes, Iterable):
        raise ValueError(f"classes= is a mask of {C} booleans or a list of output indices, got {classes!r}")
    given = classes if isinstance(classes, Tensor) else torch.as_tensor(list(classes))
    if given.dtype == torch.bool:
        require(given.shape == (C,), f"classes= as a mask has shape ({C},), got {tuple(given.shape)}")
        mask = given.to(device)
    else:
        require(
            given.dim() == 1 and not given.is_floating_point() and len(given) > 0,
            f"classes= is a mask of {C} booleans or a list of output indices, got {classes!r}",
        )
        require(
            int(given.min()) >= 0 and int(given.max()) < C,
            f"classes= names outputs {int(given.min())}..{int(given.max())}, the model has 0..{C - 1}",
        )
        mask = torch.zeros(C, dtype=torch.bool, device=device)
        mask[given.to(device)] = True
    require(bool(mask.any()), "classes= selects no output at all")
    return mask


def require(condition: bool, message: str) -> None:
    """Raise ValueError with a message unless a condition on an argument holds."""
    if not condition:
        raise ValueError(message)
