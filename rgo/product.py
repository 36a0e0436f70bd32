"""Matrix products on the processor at hand.

On a CPU torch hands float32 products to MKL, which packs the larger matrix anew at every call. P is multiplied
thousands of times before it changes, so it is packed once, by a library that can: FBGEMM holds it in float16 and
multiplies by it in float32, oneDNN in float32 or bfloat16. FBGEMM's calls cost least, so it is the one for P that fit
a cache; beyond, oneDNN's bfloat16 reads as little and multiplies twice as fast. docs/decisions.md has the times. What
a processor can do is looked up, never timed: the numerics of a run must not hang on a race.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

FBGEMM, ONEDNN = 2**14, 2**18  # elements of B from which a library's packing pays; below, its calls cost more
WORK = 2**22  # multiplications from which a product goes to oneDNN


def _operator(name: str) -> Any:
    """One of oneDNN's operators as torch wraps them for compiled graphs; None where this build has none."""
    try:
        return getattr(torch.ops.mkldnn, name).default if torch.backends.mkldnn.is_available() else None
    except (AttributeError, RuntimeError):
        return None


_linear, _reorder = _operator("_linear_pointwise"), _operator("_reorder_linear_weight")


@cache
def _fbgemm() -> tuple[Any, Any]:
    """FBGEMM's float16 matrices: what packs one, and what multiplies by it; None and None where there is none.

    torch announces, once a process, that it will drop these operators one day. Then P is in float32 or bfloat16 again.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pack, linear = torch.fbgemm_pack_gemm_matrix_fp16, torch.fbgemm_linear_fp16_weight_fp32_activation
            one = torch.ones(1, 1, device="cpu", dtype=torch.float32)
            linear(one, pack(one), None)
        return pack, linear
    except (AttributeError, RuntimeError, TypeError):
        return None, None


def has_float16() -> bool:
    """Whether products with a float16 matrix are fast here (x86 with AVX2, by FBGEMM)."""
    return _fbgemm()[0] is not None


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
    """A matrix B (n, m) laid out for many products A @ B with few rows of A; (g, n, m) is kept as it is.

    Examples:
        >>> B = torch.randn(200, 300)
        >>> A = torch.randn(10, 200)
        >>> torch.allclose(Packed(B).times(A), A @ B, atol=1e-4)
        True
        >>> torch.equal(Packed(B).dense(), B)
        True
    """

    def __init__(self, B: Tensor) -> None:
        self.dtype, self.shape = B.dtype, B.shape
        self._half: Any = None  # what multiplies, when FBGEMM has it
        self._packed: Any = None
        if B.dim() == 2 and B.device.type == "cpu":
            if B.dtype == torch.float16 and has_float16() and B.numel() >= FBGEMM:
                pack, self._half = _fbgemm()
                self._packed = pack(B.t().float().contiguous())
            elif B.numel() >= ONEDNN and _takes(B):
                self._packed = _reorder(B.t().contiguous(), 10)
        self._plain = B if self._packed is None else None

    def times(self, A: Tensor, row: Tensor | None = None) -> Tensor:
        """A @ B (+ row): A and the result in their own precision, the product in B's, or float32 when B is float16."""
        dtype = torch.float32 if self.dtype is torch.float16 else self.dtype
        if A.dtype is not dtype:
            return self.times(A.to(dtype), None if row is None else row.to(dtype)).to(A.dtype)
        if self._packed is None or (torch.is_grad_enabled() and A.requires_grad):
            B = self.dense().to(dtype)
            return A @ B if row is None else torch.addmm(row, A, B)
        if self._half is not None:
            return self._half(A, self._packed, row)  # type: ignore[no-any-return]
        return _linear(A.contiguous(), self._packed, row, "none", [], "")  # type: ignore[no-any-return]

    @property
    def packed(self) -> bool:
        return self._plain is None

    def dense(self) -> Tensor:
        """B itself; when it is packed, a copy."""
        if self._plain is not None:
            return self._plain
        if self._half is not None:  # FBGEMM does not hand it out; the product with the identity is exact
            identity = torch.eye(self.shape[0], dtype=torch.float32, device="cpu")
            return self._half(identity, self._packed, None).to(self.dtype)  # type: ignore[no-any-return]
        B: Tensor = self._packed.to_dense().t()
        return B

    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def product(A: Tensor, B: Tensor) -> Tensor:
    """A @ B of two matrices."""
    if A.numel() * B.shape[1] >= WORK and _takes(A, B):
        return _linear(A, B.t(), None, "none", [], "")  # type: ignore[no-any-return]
    return A @ B
