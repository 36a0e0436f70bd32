"""Matrix products on the processor at hand.

On a CPU torch hands float32 products to MKL, which packs the larger matrix anew at every call. oneDNN can keep a
matrix packed, and P is multiplied thousands of times before it changes: with ten rows a packed P of 785 x 785 takes
67 us instead of 176, in bfloat16 42 (one core of an EPYC with AVX-512; docs/decisions.md). What a processor can do is
looked up, never timed: the numerics of a run must not hang on a race.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

PACK = 128  # rows of B from which packing pays; below, the call itself costs more
WORK = 2**20  # multiplications from which a product goes to oneDNN


def _operator(name: str) -> Any:
    """One of oneDNN's operators as torch wraps them for compiled graphs; None where this build has none."""
    try:
        return getattr(torch.ops.mkldnn, name).default if torch.backends.mkldnn.is_available() else None
    except (AttributeError, RuntimeError):
        return None


_linear, _reorder = _operator("_linear_pointwise"), _operator("_reorder_linear_weight")


@cache
def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def _takes(*matrices: Tensor) -> bool:
    """Whether oneDNN can have these: on the CPU, in a precision it multiplies in hardware, whole in memory (it is
    hundreds of times slower on slices), and with nobody who would differentiate the product."""
    dtype = matrices[0].dtype
    return (
        _linear is not None
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16()))
        and all(m.device.type == "cpu" and (m.is_contiguous() or m.t().is_contiguous()) for m in matrices)
        and not (torch.is_grad_enabled() and any(m.requires_grad for m in matrices))
    )


class Packed:
    """A matrix B (n, m) laid out for many products A @ B with few rows of A.

    Examples:
        >>> B = torch.randn(200, 300)
        >>> A = torch.randn(10, 200)
        >>> torch.allclose(Packed(B).times(A), A @ B, atol=1e-4)
        True
        >>> torch.equal(Packed(B).dense(), B)
        True
    """

    def __init__(self, B: Tensor) -> None:
        packs = min(B.shape) >= PACK and _takes(B)
        self.dtype, self._plain = B.dtype, None if packs else B
        self._packed: Any = _reorder(B.t().contiguous(), 10) if packs else None

    def times(self, A: Tensor, row: Tensor | None = None) -> Tensor:
        """A @ B (+ row): A and the result in their own precision, the product in B's."""
        if self._plain is not None or not A.is_contiguous() or (torch.is_grad_enabled() and A.requires_grad):
            B: Tensor = self.dense()
            if row is None or A.dtype != B.dtype:
                product = (A.to(B.dtype) @ B).to(A.dtype)
                return product if row is None else product + row
            return torch.addmm(row, A, B)
        if A.dtype == self.dtype:
            return _linear(A, self._packed, row, "none", [], "")  # type: ignore[no-any-return]
        row = None if row is None else row.to(self.dtype)
        return _linear(A.to(self.dtype), self._packed, row, "none", [], "").to(A.dtype)  # type: ignore[no-any-return]

    @property
    def packed(self) -> bool:
        return self._plain is None

    def dense(self) -> Tensor:
        """B itself; when it is packed, a copy."""
        if self._plain is not None:
            return self._plain
        B: Tensor = self._packed.to_dense().t()
        return B

    def bytes(self) -> int:
        held = self._plain if self._plain is not None else self._packed
        return int(held.numel() * held.element_size())


def product(A: Tensor, B: Tensor) -> Tensor:
    """A @ B of two matrices."""
    if A.shape[0] * A.shape[1] * B.shape[1] >= WORK and _takes(A, B):
        return _linear(A, B.t(), None, "none", [], "")  # type: ignore[no-any-return]
    return A @ B


def gram(A: Tensor, B: Tensor | None = None, block: int = 192) -> Tensor:
    """A B^T of (n, rows) matrices when the result is symmetric (B = A unless given): half of it is multiplied."""
    B = A if B is None else B
    result = A.new_empty(len(A), len(A))
    for start in range(0, len(A), block):
        stop = start + block
        part = product(A[start:stop], B[start:].t())
        result[start:stop, start:] = part
        result[stop:, start:stop] = part[:, block:].t()
    return result
