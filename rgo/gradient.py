"""How a gradient arrives projected: two paths, and the guard that notices whatever comes around them.

General path: an identity on the pair (weight, bias) whose backward turns [G_W, g_b] into [G_W, g_b] c P. A hook on
the weight alone could not: it never sees the bias' column. Fast path: the layer's own map as one node whose backward
forms delta^T (x c P) directly, which is cheaper when there are fewer rows than outputs; the unprojected weight
gradient is never built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .encoding import TaskId
from .layers import LayerMatrix
from .projection import Projection


class Guard:
    """Compares, at a task's first backward, what reaches a parameter with what its projections returned.

    A penalty in the loss, a use of the weight outside its layer or a fused path adds a gradient that was never
    projected. With one use of the weight the gradient that arrives must be the very tensor that was returned; this
    costs no wait for the host and is settled at once. Otherwise (several uses are added up by the engine; a penalty
    such as EWC's has a zero gradient at first) the values are compared, up to rounding, over some backward passes.
    """

    PASSES = 10  # comparisons by value before a weight is trusted

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.left = name, self.PASSES
        self.parts: list[Tensor] = []  # what projections returned in the backward pass `graph`
        self.graph = -1
        self.handle: Any = parameter.register_hook(self._arrived)
        hooks = parameter._backward_hooks
        if hooks is not None:  # before the user's own hooks, which may change the gradient as they like
            others = {key: hook for key, hook in hooks.items() if key != self.handle.id}
            mine = hooks.pop(self.handle.id)
            hooks.clear()  # torch calls them in the order of insertion
            hooks.update({self.handle.id: mine, **others})

    @property
    def armed(self) -> bool:
        return self.handle is not None

    def disarm(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle, self.parts = None, []

    def returned(self, grad: Tensor) -> None:
        """A projection of the parameter's gradient; a pass that never reaches the parameter leaves it behind."""
        if self.graph != torch._C._current_graph_task_id():
            self.graph, self.parts = torch._C._current_graph_task_id(), []
        self.parts.append(grad)

    def _arrived(self, grad: Tensor) -> None:
        parts = self.parts if self.graph == torch._C._current_graph_task_id() else []
        self.parts = []
        if len(parts) == 1 and grad is parts[0]:
            self.disarm()
            return
        if grad.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # comparing values would wait for the host; the guard stays armed for the next eager backward
        total, size = torch.zeros_like(grad), torch.zeros_like(grad)
        for part in parts:
            total, size = total + part, size + part.abs()
        rounding = len(parts) * torch.finfo(grad.dtype).eps * size if len(parts) > 1 else 0.0
        if bool(((grad - total).abs() > rounding).any()):
            raise RuntimeError(
                f"a gradient reached {self.name!r} without passing through its layer, so it was not projected and "
                "would make the model forget. Causes: a penalty on the weights in the loss (L2, EWC: use the "
                "optimizer or drop it), a use of the weight outside its layer (F.linear(x, layer.weight)), a fused "
                f"kernel. Remove it, or give skip=({self.name.rsplit('.', 1)[0]!r},) to leave the layer unprotected"
            )
        self.left -= 1
        if self.left == 0:
            self.disarm()


class Covered:
    """One weight that RGO protects: its P, its guards, and the training session its gradients belong to.

    Modules tied to one weight share one `Covered`: a P for each use would protect nothing.
    """

    def __init__(self, name: str, matrix: LayerMatrix, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.name, self.matrix = name, matrix
        self.weight, self.bias = weight, bias  # bias: None when there is none or it is frozen
        self.projection: Projection
        self.session: int | None = None  # counts begin_task; None between tasks
        self.guards: list[Guard] = []
        self.differentiated = False  # inside a backward that takes a gradient itself, to be recorded by that backward
        self.unseen: list[TaskId] = []  # tasks learned while it was frozen or not there: not in its P

    @property
    def shape(self) -> str:
        """For people: the matrix and its groups."""
        m = self.matrix
        return f"{m.outputs} x {m.inputs}" + (f" x {m.groups} groups" if m.groups > 1 else "")

    def arm(self) -> None:
        """Watch this task's first backward."""
        self.disarm()
        self.guards = [Guard(f"{self.name}.weight", self.weight)]
        if self.bias is not None:
            self.guards.append(Guard(f"{self.name}.bias", self.bias))

    def disarm(self) -> None:
        for guard in self.guards:
            guard.disarm()
        self.guards = []

    @property
    def transparent(self) -> bool:
        """Nothing to do in backward: P is the identity, a task is being trained and the guard has seen enough."""
        if self.projection.applied is not None or self.session is None:
            return False
        return not any(guard.armed for guard in self.guards)

    def check_session(self, session: int | None) -> None:
        if session is None:
            raise RuntimeError(
                f"backward through layer {self.name!r} outside a task: its P is not settled between tasks. "
                "Call begin_task(id) before the forward whose gradients train the model"
            )
        if session != self.session:
            raise RuntimeError(
                f"backward through layer {self.name!r}, but its forward belongs to a task that has ended since. "
                "Call backward before end_task"
            )

    def record(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Tell the guards what a projection returned."""
        if not self.differentiated:
            for guard, grad in zip(self.guards, (weight, bias)):
                if guard.armed and grad is not None:
                    guard.returned(grad)

    def project(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[G_W, g_b] c P in the layouts of the parameters (Algorithm 1, line 5)."""
        applied = self.projection.applied
        if applied is not None:
            m, dtype = self.matrix, self.projection.dtype
            W = m.to_matrix(weight).to(dtype)
            b = None if bias is None else bias.reshape(m.groups, m.outputs).to(dtype)
            W, b = applied.gradient(W, b)
            weight = m.to_weight(W, weight).to(weight.dtype)
            bias = None if b is None or bias is None else b.reshape(bias.shape).to(bias.dtype)
        return weight, bias

    def project_rows(
        self, matrix: LayerMatrix, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """delta^T ([x, 1] c P): the same gradients without building the unprojected one."""
        applied = self.projection.applied
        assert applied is not None
        dtype = self.projection.dtype
        rows, deltas = matrix.rows(x).to(dtype), matrix.deltas(delta)
        px, pb = applied.rows(rows)
        px = px.to(delta.dtype)
        if px.shape[1] == 1:
            W = (deltas.squeeze(1).t() @ px.squeeze(1)).unsqueeze(0)
        else:
            W = torch.einsum("rgo,rgn->gon", deltas, px)
        weight = matrix.to_weight(W, weight)
        if bias is not None and pb is not None:
            bias = torch.einsum("rgo,rg->go", deltas, pb.to(delta.dtype)).reshape(bias.shape)
        elif bias is not None:  # left to plain training by skip=
            bias = deltas.sum(0).reshape(bias.shape)
        return weight, bias


class ProjectPair(torch.autograd.Function):
    """(W, b) -> (W, b), whose backward projects the pair of their gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, covered: Covered, session: int | None, own: bool) -> Any:
        ctx.covered, ctx.session, ctx.own = covered, session, own
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.covered.check_session(ctx.session)
        projected = ctx.covered.project(weight, bias if ctx.needs_input_grad[1] else None)
        if ctx.own:
            ctx.covered.record(*projected)
        return *projected, None, None, None


class ProjectedMap(torch.autograd.Function):
    """The layer's own map; its backward forms delta^T (x c P). Cheaper than the pair for few rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        matrix: LayerMatrix,
        covered: Covered,
        session: int | None,
        own: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.matrix, ctx.covered, ctx.session, ctx.own = matrix, covered, session, own
        return matrix.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        matrix, covered = ctx.matrix, ctx.covered
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if torch.is_grad_enabled():  # create_graph: what is differentiated again must pass the projection again
            # Aliases: hooks of the user and of the guard belong to the outer backward, once.
            x, weight = x.view_as(x), weight.view_as(weight)
            bias = None if bias is None else bias.view_as(bias)
            y = connect(covered, matrix, x, weight, bias, fast=False, session=ctx.session, own=ctx.own)
            inputs = [t for t, need in zip((x, weight, bias), (need_x, need_w, need_b)) if need]
            covered.differentiated = True
            try:
                grads = iter(torch.autograd.grad(y, inputs, delta, create_graph=True))
            finally:
                covered.differentiated = False
            dx, dw, db = (next(grads) if need else None for need in (need_x, need_w, need_b))
        else:
            if need_x:
                dx = matrix.input_gradient(delta, x, weight)
            if need_w:
                covered.check_session(ctx.session)
                dw, db = covered.project_rows(matrix, x, delta, weight, bias if need_b else None)
        if ctx.own:
            covered.record(dw, db)
        return dx, dw, db, None, None, None, None


def connect(
    covered: Covered,
    matrix: LayerMatrix,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    fast: bool,
    session: int | None,
    own: bool,
) -> Tensor:
    """The layer's output, wired so that gradients of (weight, bias) arrive projected.

    `own`: they are the model's parameters, not others put in their place (torch.func.functional_call).
    """
    outside = covered.bias is None  # a frozen bias has no column in P and needs no gradient
    if fast:
        return ProjectedMap.apply(x, weight, bias, matrix, covered, session, own)  # type: ignore[no-any-return,no-untyped-call]
    W, b = ProjectPair.apply(weight, None if outside else bias, covered, session, own)  # type: ignore[no-untyped-call]
    return matrix.forward(x, W, bias if outside else b)
