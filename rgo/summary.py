"""What RGO does to a model, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .attachment import Attached
    from .survey import Survey


@dataclass(frozen=True)
class LayerSummary:
    """One covered layer."""

    name: str
    kind: str
    weight: str
    """outputs x inputs, of each group"""
    dim: int
    """of P: inputs, and one more for a trained bias"""
    groups: int
    bytes: int
    """H and P as they are held now"""
    full_bytes: int
    """H and P once the first task has been learned"""
    path: str
    """how gradients are projected: "rows" (fast), "gradient" (general), "none" while P is the identity"""
    cost: float | None
    """multiplications of a training step relative to the bare layer's; None before the first step"""
    c: float
    free: float
    """directions still free: trace of P"""
    encoded: str
    """ "yes": reads its input through the task's permutation; "no"; "raw input"; "?" before the first training step"""
    tied: str | None
    """the layer whose weight it shares"""


@dataclass(frozen=True)
class Summary:
    """`learner.summary()`: read its fields, or print it."""

    covered: tuple[LayerSummary, ...]
    skipped: tuple[str, ...]
    frozen: tuple[str, ...]
    unprotected: Mapping[str, str]
    bytes: int
    full_bytes: int
    parameters: int

    def __str__(self) -> str:
        head = ("layer", "type", "weight", "P", "bytes", "full", "path", "step", "c", "free", "encoded")
        rows = [head]
        for s in self.covered:
            rows.append(
                (
                    s.name,
                    s.kind,
                    s.weight,
                    f"{s.dim} x {s.dim}" + (f" x {s.groups}" if s.groups > 1 else ""),
                    f"{s.bytes:,}",
                    f"{s.full_bytes:,}",
                    s.path if s.tied is None else f"tied to {s.tied}",
                    "?" if s.cost is None else f"x {s.cost:.2f}",
                    f"{s.c:.2f}",
                    f"{s.free:.1f} of {s.dim * s.groups}",
                    s.encoded,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines.append(
            f"{self.bytes:,} bytes are held; {self.full_bytes:,} from the first end_task on, for "
            f"{self.parameters:,} trainable parameters, however many tasks follow."
        )
        if self.frozen:
            lines.append(f"frozen, at no cost: {', '.join(self.frozen)}")
        if self.skipped:
            lines.append(f"skipped as asked: {', '.join(self.skipped)}")
        for name, why in self.unprotected.items():
            lines.append(f"NOT PROTECTED: {name}: {why}")
        return "\n".join(lines)


def summarise(sites: Mapping[str, Attached], survey: Survey, model: nn.Module) -> Summary:
    rows: list[LayerSummary] = []
    for name, site in sites.items():
        covered, p, m = site.covered, site.covered.projection, site.covered.matrix
        cost: float | None = None
        path = "none"
        fast = m.input_gradient is not None and site.rows <= m.outputs
        if site.learner.project and p.applied is not None:
            path = "?" if site.rows == 0 else "rows" if fast else "gradient"
        if site.rows:
            work = (min(site.rows, m.outputs) if fast else m.outputs) * p.dim
            work *= 2 * p.rank if p.rank is not None else p.dim
            cost = 1.0 + (work / (3 * site.rows * m.outputs * m.inputs) if path in ("rows", "gradient") else 0.0)
        encoded = "no" if not site.learner.encoding.encode else {True: "raw input", False: "yes", None: "?"}[site.raw]
        rows.append(
            LayerSummary(
                name=name,
                kind=type(site.layer).__name__,
                weight=covered.shape,
                dim=p.dim,
                groups=p.groups,
                bytes=p.bytes() if name == covered.name else 0,
                full_bytes=p.full_bytes() if name == covered.name else 0,
                path=path,
                cost=cost,
                c=p.c,
                free=p.free,
                encoded=encoded,
                tied=None if name == covered.name else covered.name,
            )
        )
    return Summary(
        covered=tuple(rows),
        skipped=tuple(survey.skipped),
        frozen=tuple(survey.frozen),
        unprotected=dict(survey.unprotected),
        bytes=sum(r.bytes for r in rows),
        full_bytes=sum(r.full_bytes for r in rows),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
