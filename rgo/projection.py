"""P of one layer: what the tasks so far leave free of it.

The paper's Algorithm 1 starts from P = I and lets every sample g take its direction away,
P <- P - P g g^T P / (alpha + g^T P g).  The same matrix, in any order of samples, is

    P = alpha H^-1,    H = alpha I + sum of g g^T,

so the curvature H is summed by matrix products and inverted once per task (`solver="cholesky"`). The recursion
itself is `solver="recursive"`: it keeps P alone. Gradients are multiplied by c P with c = dim(P) / trace(P)
(Algorithm 1, line 5), so that an isotropic gradient keeps its learning rate (Theorem 1).

Shapes: g groups, o outputs of a group, n inputs of a group, d = n + 1 with a bias (its column is the last), else n.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .product import Packed, product

Solver = Literal["cholesky", "recursive"]


def _matrix_device(device: torch.device) -> torch.device:
    """Where float64 lives: on the layer's device, but for Apple's, which has none."""
    return torch.device("cpu") if device.type == "mps" else device


class CurvatureSum:
    """A task's sum of g g^T: products in the samples' own precision, the sum in float64.

    It is symmetric: what lies above the diagonal counts, and on a processor no more than that is multiplied.
    """

    BLOCK = 192  # rows at a time, there

    def __init__(self, groups: int, dim: int, device: torch.device) -> None:
        self.total = torch.zeros(groups, dim, dim, dtype=torch.float64, device=_matrix_device(device))

    def add(self, left: Tensor, right: Tensor | None = None) -> None:
        """Add left^T right (right = left unless given) of two (g, samples, d) factors; a symmetric matrix."""
        if left.shape[0] > 1 or left.device.type != "cpu":
            self.total += (left.transpose(1, 2) @ (left if right is None else right)).to(self.total.device)
            return
        A = left[0].t().contiguous()  # whole in memory, as oneDNN wants them
        B = A if right is None else right[0].t().contiguous()
        for start in range(0, len(A), self.BLOCK):
            self.total[0, start : start + self.BLOCK, start:] += product(A[start : start + self.BLOCK], B[start:].t())


class Recursion:
    """Algorithm 1, lines 9 to 11, in float64: samples one by one, or `block` at a time by Woodbury's identity."""

    def __init__(self, P: Tensor, alpha: float, block: int) -> None:
        self.P, self.alpha, self.block = P.clone(), alpha, block

    def add(self, left: Tensor, right: Tensor | None = None) -> None:
        """Take in (g, samples, d) vectors; a recursion needs the vectors themselves, not a product."""
        if right is not None:
            raise ValueError("a recursion takes the vectors g, not a pair of factors")
        for A in left.to(self.P).split(self.block, dim=1):
            PA = self.P @ A.transpose(1, 2)  # (g, d, k)
            inner = A @ PA
            inner.diagonal(dim1=1, dim2=2).add_(self.alpha)
            self.P = self.P - PA @ torch.linalg.solve(inner, PA.transpose(1, 2))
        self.P = (self.P + self.P.transpose(1, 2)) / 2


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What a gradient is projected in, and what is small of P is kept in."""
    return torch.promote_types(dtype, torch.float32)


class Dense:
    """c P, cut where the bias column begins: ww (g, n, n), wb (g, 1, n), bb (g, 1, 1).

    Only ww is large: it alone is kept in the projection's dtype, and packed for the processor when there is one group.
    """

    def __init__(self, ww: Tensor, wb: Tensor | None, bb: Tensor | None) -> None:
        self._ww, self.wb, self.bb = Packed(ww[0] if len(ww) == 1 else ww), wb, bb
        self._row: Any = None if wb is None else wb[0, 0]  # of the only group
        self._corner: Any = None if bb is None else bb[0, 0]

    @staticmethod
    def of(cP: Tensor, bias: bool, dtype: torch.dtype) -> Dense:
        if not bias:
            return Dense(cP.to(dtype, copy=True), None, None)
        wide = _wide(dtype)
        return Dense(
            cP[:, :-1, :-1].to(dtype).contiguous(),
            cP[:, -1:, :-1].to(wide).contiguous(),
            cP[:, -1:, -1:].to(wide).contiguous(),
        )

    @property
    def ww(self) -> Tensor:
        ww = self._ww.dense()
        return ww if ww.dim() == 3 else ww.unsqueeze(0)

    def times(self, A: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[A, b] (c P) for A (g, k, n) and b (g, k, 1)."""
        if len(A) == 1:
            W, column = self._times(A[0], None if b is None else b[0, :, 0])
            return W.unsqueeze(0), None if column is None else column[None, :, None]
        W = self._ww.times(A)
        if self.wb is None or self.bb is None or b is None:
            return W, None
        return W + b * self.wb, torch.baddbmm(b * self.bb, A, self.wb.mT)

    def _times(self, A: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
        W = self._ww.times(A)
        if self._row is None or b is None:
            return W, None
        return torch.addr(W, b, self._row), torch.addmv(self._corner * b, A, self._row)

    def times_rows(self, A: Tensor) -> tuple[Tensor, Tensor | None]:
        """[A, 1] (c P) for the rows A (k, n) of the only group; the second is (k,)."""
        W = self._ww.times(A, self._row)
        return W, None if self._row is None else torch.addmv(self._corner, A, self._row)

    def tensors(self) -> dict[str, Tensor]:
        held = {"ww": self.ww, "wb": self.wb, "bb": self.bb}
        return {k: v for k, v in held.items() if v is not None}

    def bytes(self) -> int:
        return self._ww.bytes() + _bytes(self.wb) + _bytes(self.bb)


class Spectral:
    """c P = c (I - U D U^T), keeping only directions that the tasks so far have taken away noticeably.

    U (n, r) without the bias' row ub (r,), scaled = c D (r,), c a scalar.
    """

    def __init__(self, U: Tensor, ub: Tensor | None, scaled: Tensor, c: Tensor) -> None:
        self._down, self._up = Packed(U), Packed(U.t())
        self.ub, self.scaled, self.c = ub, scaled, c

    @staticmethod
    def of(U: Tensor, D: Tensor, c: float, bias: bool, dtype: torch.dtype) -> Spectral:
        n, wide = U.shape[0] - bias, _wide(dtype)
        return Spectral(
            U[:n].to(dtype, copy=True),
            U[n].to(wide, copy=True) if bias else None,
            (c * D).to(wide),
            torch.tensor(c, dtype=wide, device=U.device),
        )

    def times(self, A: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[A, b] (c P) for A (1, k, n) and b (1, k, 1)."""
        W, column = self._times(A[0], None if b is None else b[0, :, 0])
        return W.unsqueeze(0), None if column is None else column[None, :, None]

    def times_rows(self, A: Tensor) -> tuple[Tensor, Tensor | None]:
        """[A, 1] (c P) for the rows A (k, n); the second is (k,)."""
        return self._times(A, None if self.ub is None else A.new_ones(len(A)))

    def _times(self, A: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
        inside = self._down.times(A)
        if b is not None and self.ub is not None:
            inside = torch.addr(inside, b, self.ub)
        inside = inside * self.scaled
        W = torch.addcmul(-self._up.times(inside), A, self.c)
        if b is None or self.ub is None:
            return W, None
        return W, self.c * b - inside.mv(self.ub)

    def tensors(self) -> dict[str, Tensor]:
        held = {"U": self._down.dense(), "ub": self.ub, "scaled": self.scaled, "c": self.c}
        return {k: v for k, v in held.items() if v is not None}

    def bytes(self) -> int:
        up = self._up.bytes() if self._up.packed else 0  # else it is U itself, seen from the other side
        return self._down.bytes() + up + _bytes(self.ub) + _bytes(self.scaled) + _bytes(self.c)


def _bytes(t: Tensor | None) -> int:
    return 0 if t is None else t.numel() * t.element_size()


class Projection:
    """H and P of one layer. It never changes: `updated` returns another one, so that a failure loses nothing.

    Examples:
        >>> import torch
        >>> p = Projection(dim=2)
        >>> task = p.collect()
        >>> task.add(torch.tensor([[[2.0, 0.0]]]))        # one sample, along the first direction
        >>> p = p.updated(task)
        >>> p.P.diagonal()                                # P is the inverse of [[5, 0], [0, 1]]
        tensor([0.2000, 1.0000], dtype=torch.float64)
        >>> round(p.c, 4)                                 # 2 / (0.2 + 1)
        1.6667
    """

    def __init__(
        self,
        dim: int,
        *,
        groups: int = 1,
        bias: bool = False,
        alpha: float = 1.0,
        solver: Solver = "cholesky",
        block: int = 64,
        tolerance: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dim, self.groups, self.bias = dim, groups, bias
        self.alpha, self.solver, self.block = alpha, solver, block
        self.tolerance, self.dtype, self.device = tolerance, dtype, torch.device(device)
        self.wide = _wide(dtype)  # in which a gradient is projected
        self._H: Tensor | None = None  # (g, d, d) float64; None while it is alpha I, and for the recursion
        self.applied: Dense | Spectral | None = None  # c P as it is multiplied; None is the identity
        self.c = 1.0
        self._recursive: Tensor | None = None  # P itself, for the recursion

    @property
    def P(self) -> Tensor:
        """P = alpha H^-1 in float64, not normalised: (d, d), or (groups, d, d). A copy."""
        if self._H is not None:
            P = self._inverse(self._H)
        else:
            P = self._identity() if self._recursive is None else self._recursive.clone()
        return P[0] if self.groups == 1 else P

    @property
    def H(self) -> Tensor:
        """The curvature alpha I + sum of g g^T in float64: (d, d), or (groups, d, d). A copy."""
        if self._H is not None:
            H = self._H.clone()
        elif self._recursive is not None:
            H = self.alpha * torch.linalg.inv(self._recursive)
        else:
            H = self.alpha * self._identity()
        return H[0] if self.groups == 1 else H

    @property
    def free(self) -> float:
        """Directions still free, trace(P): all of them before the first task, near 0 when the layer is full."""
        return self.dim * self.groups / self.c

    @property
    def rank(self) -> int | None:
        """Directions kept by the spectral form; None when P is dense or the identity."""
        return len(self.applied.scaled) if isinstance(self.applied, Spectral) else None

    def collect(self) -> CurvatureSum | Recursion:
        """Where one task's samples are added up: hand it to `updated` when the task's data have been seen."""
        if self.solver == "recursive":
            P = self.P if self.groups > 1 else self.P.unsqueeze(0)
            return Recursion(P.to(_matrix_device(self.device)), self.alpha, self.block)
        return CurvatureSum(self.groups, self.dim, self.device)

    def updated(self, task: CurvatureSum | Recursion) -> Projection:
        """The projection that also knows this task."""
        new = self._like()
        known = task.P if isinstance(task, Recursion) else task.total
        if not torch.isfinite(known.sum()):
            raise FloatingPointError("the curvature of this task is not finite")
        if isinstance(task, Recursion):
            new._recursive = task.P.clone()
        else:
            new._H = task.total.triu().add_(task.total.triu(1).transpose(1, 2))
            if self._H is None:
                new._H.diagonal(dim1=1, dim2=2).add_(self.alpha)
            else:
                new._H += self._H.to(new._H.device)
        return new._ready()

    def to(self, device: torch.device, dtype: torch.dtype) -> Projection:
        """The same projection, applied on `device` in `dtype`; c P is made anew for another dtype."""
        if device == self.device and dtype == self.dtype:
            return self
        new = self._like()
        new.device, new.dtype, new.wide, new.c = device, dtype, _wide(dtype), self.c
        home = _matrix_device(device)
        new._H = None if self._H is None else self._H.to(home)
        new._recursive = None if self._recursive is None else self._recursive.to(home)
        if self.applied is not None:
            if dtype != self.dtype:
                return new._ready()
            new.applied = _applied({k: v.to(device) for k, v in self.applied.tensors().items()})
        return new

    def _ready(self) -> Projection:
        """c P of the H or P that is held, ready to be multiplied."""
        if self._H is not None and self._set_spectral(self._H):
            return self
        if self._H is not None:
            P = self._inverse(self._H)
        else:
            assert self._recursive is not None
            P = self._recursive.clone()
        self.c = self.dim * self.groups / float(P.diagonal(dim1=1, dim2=2).sum())
        self.applied = Dense.of(P.mul_(self.c).to(self.device), self.bias, self.dtype)
        return self

    def bytes(self) -> int:
        """What this layer keeps, in bytes."""
        return _bytes(self._H) + _bytes(self._recursive) + (self.applied.bytes() if self.applied else 0)

    def full_bytes(self) -> int:
        """What it keeps from the first task on: H (or the recursion's P) in float64, and c P; then no more."""
        n = self.dim - self.bias
        border = (n + 1) * self.wide.itemsize if self.bias else 0  # symmetric: the row is kept, not the column
        return self.groups * (self.dim**2 * 8 + n * n * self.dtype.itemsize + border)

    def worst_bytes(self) -> int:
        """At the peak of `end_task`: the old projection, the task's sum, the new projection, and a float64 workspace
        for the factor, the inverse and c P."""
        return 2 * self.full_bytes() + self.groups * self.dim**2 * 8 * 4

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers. c P is saved beside H, so that a restored run continues bit for bit."""
        held: dict[str, Any] = {"c": self.c}
        if self._H is not None:
            held["H"] = self._H
        if self._recursive is not None:
            held["P"] = self._recursive
        if self.applied is not None:
            held["applied"] = self.applied.tensors()
        return held

    def problems(self, state: dict[str, Any]) -> list[str]:
        """What keeps a saved state from being restored here."""
        d, found = (self.groups, self.dim, self.dim), []
        matrix = {"cholesky": "H", "recursive": "P"}[self.solver]
        if not isinstance(state.get("c"), float) or ("applied" in state) != (matrix in state):
            return ["the state is damaged: c, applied or " + matrix + " is missing"]
        if matrix in state:
            value = state[matrix]
            if not isinstance(value, Tensor) or value.shape != d or not torch.isfinite(value).all():
                found.append(f"{matrix} is not a finite tensor of shape {d}")
            n = self.dim - self.bias
            shapes = {"ww": (self.groups, n, n), "wb": (self.groups, 1, n), "bb": (self.groups, 1, 1)}
            for key, value in state["applied"].items():
                if key in shapes and value.shape != shapes[key]:
                    found.append(f"{key} has shape {tuple(value.shape)}, expected {shapes[key]}")
        return found

    def restored(self, state: dict[str, Any]) -> Projection:
        """A projection like this one, holding what `state_dict` saved; c P is made anew where another processor, or the
        weights' own precision, asks for another dtype than it was saved in."""
        new = self._like()
        home = _matrix_device(self.device)
        new.c = float(state["c"])
        new._H = state["H"].to(home, torch.float64, copy=True) if "H" in state else None
        new._recursive = state["P"].to(home, torch.float64, copy=True) if "P" in state else None
        if "applied" in state:
            held = state["applied"]
            if (held["ww"] if "ww" in held else held["U"]).dtype != self.dtype:
                return new._ready()
            new.applied = _applied({k: v.to(self.device, copy=True) for k, v in held.items()})
        return new

    def _like(self) -> Projection:
        return Projection(
            self.dim,
            groups=self.groups,
            bias=self.bias,
            alpha=self.alpha,
            solver=self.solver,
            block=self.block,
            tolerance=self.tolerance,
            dtype=self.dtype,
            device=self.device,
        )

    def _identity(self) -> Tensor:
        return torch.eye(self.dim, dtype=torch.float64, device=_matrix_device(self.device)).repeat(self.groups, 1, 1)

    def _inverse(self, H: Tensor) -> Tensor:
        """alpha H^-1. H is alpha I plus squares, so the first attempt succeeds unless rounding ate alpha."""
        scale = H.diagonal(dim1=1, dim2=2).mean(dim=1)
        for jitter in (0.0, 1e-14, 1e-12, 1e-10, 1e-8):
            shifted = H if jitter == 0.0 else H + (jitter * scale)[:, None, None] * torch.eye(self.dim).to(H)
            L, info = torch.linalg.cholesky_ex(shifted)
            if not info.any():
                inverse = torch.cholesky_inverse(L).mul_(self.alpha)
                if torch.isfinite(inverse.sum()):
                    return inverse
        raise FloatingPointError(
            f"H is not positive definite even with 1e-8 of its mean diagonal added: alpha = {self.alpha} vanishes "
            f"beside a curvature of mean {float(scale.max()):.3g}. Use a larger alpha or smaller inputs"
        )

    def _set_spectral(self, H: Tensor) -> bool:
        """Use the form I - U D U^T where few directions differ from free by more than the tolerance."""
        if self.tolerance <= 0 or self.groups > 1:
            return False
        values, vectors = torch.linalg.eigh(H[0])
        D = 1 - self.alpha / values
        kept = self.tolerance < D
        rank = int(kept.sum())
        if rank >= self.dim / 4:
            return False
        D, U = D[kept], vectors[:, kept]
        self.c = self.dim / (self.dim - float(D.sum()))
        self.applied = Spectral.of(U.to(self.device), D.to(self.device), self.c, self.bias, self.dtype)
        return True


def _applied(tensors: dict[str, Tensor]) -> Dense | Spectral:
    if "ww" in tensors:
        return Dense(tensors["ww"], tensors.get("wb"), tensors.get("bb"))
    return Spectral(tensors["U"], tensors.get("ub"), tensors["scaled"], tensors["c"])
