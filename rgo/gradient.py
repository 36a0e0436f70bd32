"""How a gradient arrives projected: two paths, and the guard that notices whatever comes around them.

General path: an identity on the pair (weight, bias) whose backward turns [G_W, g_b] into [G_W, g_b] c P. A hook on
the weight alone could not: it never sees the bias' column. Fast path: the layer's own map as one node whose backward
forms delta^T (x c P) directly, which is cheaper when there are fewer rows than outputs; the unprojected weight
gradient is never built.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .encoding import Index, TaskId, gathered
from .layers import LayerMatrix
from .product import product
from .projection import Projection


class Guard:
    """Compares, at a task's first backward passes and now and then later, what reaches a parameter with what its
    projections returned.

    A penalty in the loss, a use of the weight outside its layer or a fused path adds a gradient that was never
    projected. With one use of the weight the gradient that arrives must be the very tensor that was returned; this
    costs no wait for the host. Otherwise (several uses are added up by the engine; a penalty such as EWC's has a zero
    gradient at first) the values are compared, up to rounding. Only what ends in `.grad` is an alarm: gradients asked
    of `torch.autograd.grad` are the user's to look at.
    """

    FIRST, LATER, EVERY = 10, 2, 100  # passes watched at a task's start, and after every hundred forwards

    def __init__(self, name: str, parameter: nn.Parameter, passes: int) -> None:
        self.name, self.left = name, passes
        self.parts: list[Tensor] = []  # what projections returned in the backward pass `graph`
        self.graph = -1
        self.wrong = False
        self.handle: Any = parameter.register_hook(self._arrived)
        self.accumulated: Any = parameter.register_post_accumulate_grad_hook(self._accumulated)
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
            self.accumulated.remove()
        self.handle, self.parts = None, []

    def returned(self, grad: Tensor) -> None:
        """A projection of the parameter's gradient; a pass that never reaches the parameter leaves it behind."""
        if self.graph != torch._C._current_graph_task_id():
            self.graph, self.parts = torch._C._current_graph_task_id(), []
        self.parts.append(grad)

    def _arrived(self, grad: Tensor) -> None:
        parts = self.parts if self.graph == torch._C._current_graph_task_id() else []
        self.parts, self.wrong = [], False
        if len(parts) == 1 and grad is parts[0]:
            return
        if grad.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # comparing values would wait for the host; the guard stays armed for the next eager backward
        total, size = torch.zeros_like(grad), torch.zeros_like(grad)
        for part in parts:
            total, size = total + part, size + part.abs()
        rounding = len(parts) * torch.finfo(grad.dtype).eps * size if len(parts) > 1 else 0.0
        self.wrong = bool(((grad - total).abs() > rounding).any())

    def _accumulated(self, _: Tensor) -> None:
        self.left -= 1
        if self.wrong:
            self.wrong = False
            raise RuntimeError(
                f"a gradient reached {self.name!r} without passing through its layer, so it was not projected and "
                "would make the model forget. Causes: a penalty on the weights in the loss (L2, EWC), a use of the "
                "weight outside its layer (F.linear(x, layer.weight)), a fused kernel, a parameter frozen or replaced "
                f"inside the task. Remove it, or attach with skip=({self.name.rsplit('.', 1)[0]!r},) to leave the "
                "layer unprotected"
            )
        if self.left <= 0:
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
        self.forwards = 0  # training forwards, at whose hundreds the guards look again
        self.unseen: list[TaskId] = []  # tasks learned while it was frozen or not there: not in its P

    @property
    def shape(self) -> str:
        """For people: the matrix and its groups."""
        m = self.matrix
        return f"{m.outputs} x {m.inputs}" + (f" x {m.groups} groups" if m.groups > 1 else "")

    def arm(self, passes: int = Guard.FIRST) -> None:
        """Watch the next backward passes."""
        self.disarm()
        self.guards = [Guard(f"{self.name}.weight", self.weight, passes)]
        if self.bias is not None:
            self.guards.append(Guard(f"{self.name}.bias", self.bias, passes))

    def look_again(self) -> None:
        """Counts a training forward: a penalty may join the loss long after the task's start."""
        self.forwards += 1
        if self.forwards % Guard.EVERY == 0 and self.session is not None and self.weight.requires_grad:
            self.arm(Guard.LATER)

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
        for guard, grad in zip(self.guards, (weight, bias)):
            if guard.armed and grad is not None:
                guard.returned(grad)

    def project(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[G_W, g_b] c P in the layouts of the parameters (Algorithm 1, line 5)."""
        applied = self.projection.applied
        if applied is not None:
            m, dtype = self.matrix, self.projection.wide
            column = None if bias is None else bias.reshape(m.groups, m.outputs, 1).to(dtype)
            W, b = applied.times(m.to_matrix(weight).to(dtype), column)
            weight = m.to_weight(W, weight).to(weight.dtype)
            bias = None if b is None or bias is None else b.reshape(bias.shape).to(bias.dtype)
        return weight, bias

    def project_rows(
        self, matrix: LayerMatrix, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """delta^T ([x, 1] c P): the same gradients without building the unprojected one."""
        applied, dtype = self.projection.applied, self.projection.wide
        assert applied is not None
        if matrix.groups == 1:
            direct = matrix.direct and x.dim() == 2  # what follows is half of a small layer's step: no call in vain
            rows = x if direct else matrix.rows(x)[:, 0]
            deltas = (delta if direct else matrix.deltas(delta)[:, 0]).t()
            if rows.dtype is not dtype:
                rows = rows.to(dtype)
            W, b = applied.times_rows(rows)
            if deltas.dtype is not dtype:
                W, b = W.to(deltas.dtype), None if b is None else b.to(deltas.dtype)
            dw = product(deltas, W)
            if not direct:
                dw = matrix.to_weight(dw.unsqueeze(0), weight)
            if bias is None:  # there is none, it is frozen, or left to plain training by skip=
                return dw, None
            return dw, deltas.sum(1) if b is None else deltas.mv(b)
        many = matrix.rows(x).transpose(0, 1).to(dtype)  # (g, rows, n)
        deltas = matrix.deltas(delta).permute(1, 2, 0)  # (g, o, rows)
        W, b = applied.times(many, None if bias is None else many.new_ones(*many.shape[:2], 1))
        dw = matrix.to_weight(deltas @ W.to(delta.dtype), weight)
        if bias is None:
            return dw, None
        db = deltas.sum(2) if b is None else deltas @ b.to(delta.dtype)
        return dw, db.reshape(bias.shape)


class Use(NamedTuple):
    """A layer's use in training, as its backward has to know it."""

    covered: Covered
    matrix: LayerMatrix
    session: int | None
    own: bool
    """They are the model's parameters, not others put in their place (torch.func.functional_call)."""
    order: Index | None
    """The permutation through which the layer reads; None is the identity."""


class ProjectPair(torch.autograd.Function):
    """(W, b) -> (W, b), whose backward projects the pair of their gradients.

    A permutation of the input is one of the columns: W is handed on as it meets the input that was not permuted.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, use: Use) -> Any:
        ctx.use = use
        order, columns = use.order, use.matrix.columns
        if order is None or columns is None:
            weight = weight.view_as(weight)
        else:
            weight = weight.index_select(columns, order.inverse)
        return weight, None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, weight: Tensor, bias: Tensor | None) -> Any:
        covered, matrix, session, own, order = ctx.use
        covered.check_session(session)
        if order is not None:
            weight = select(weight, order, matrix.columns)
        projected = covered.project(weight, bias if ctx.needs_input_grad[1] else None)
        if own:
            covered.record(*projected)
        return *projected, None


class ProjectedMap(torch.autograd.Function):
    """The layer's own map, reading through a task's wiring; its backward forms delta^T (x c P). Cheaper than the pair
    for few rows, and one node where the wiring would be another.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, use: Use) -> Tensor:
        ctx.use = use
        matrix, order = use.matrix, use.order
        read = x if order is None else x.index_select(matrix.axis, order.forward)
        ctx.save_for_backward(x, read, weight, bias)
        return matrix.forward(read, weight, bias)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        given, x, weight, bias = ctx.saved_tensors
        covered, matrix, session, own, order = ctx.use
        if order is not None and torch.is_grad_enabled():  # create_graph: what was read is not in the graph
            x = gathered(given, order, matrix.axis)
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        dx = dw = db = None
        if need_x:
            if torch.is_grad_enabled():  # create_graph: what goes from here to the weight has to be projected too
                weight, _ = paired(weight, bias, ctx.use._replace(order=None))
            dx = matrix.input_gradient(delta, x, weight)
            if order is not None:
                dx = select(dx, Index(order.inverse, order.forward), matrix.axis)
        if need_w:
            covered.check_session(session)
            dw, db = covered.project_rows(matrix, x, delta, weight, bias if need_b else None)
        if own and covered.guards:
            covered.record(dw, db)
        return dx, dw, db, None


def select(x: Tensor, order: Index, axis: int) -> Tensor:
    """`gathered` in a backward: a node of its own only where that backward is differentiated in turn."""
    return gathered(x, order, axis) if torch.is_grad_enabled() else x.index_select(axis, order.forward)


def paired(weight: Tensor, bias: Tensor | None, use: Use) -> tuple[Tensor, Tensor | None]:
    """The parameters as the layer is to use them, so that their gradients arrive projected."""
    if use.covered.bias is None:  # P has no column for it: there is none, it is frozen, or skip= names it
        return ProjectPair.apply(weight, None, use)[0], bias  # type: ignore[no-untyped-call]
    return ProjectPair.apply(weight, bias, use)  # type: ignore[no-any-return,no-untyped-call]


def connect(x: Tensor, weight: Tensor, bias: Tensor | None, use: Use, fast: bool) -> Tensor:
    """The layer's output, wired so that gradients of (weight, bias) arrive projected."""
    if fast:
        return ProjectedMap.apply(x, weight, bias, use)  # type: ignore[no-any-return,no-untyped-call]
    if use.order is not None and (use.matrix.columns is None or x.numel() < weight.numel()):
        x, use = gathered(x, use.order, use.matrix.axis), use._replace(order=None)
    return use.matrix.forward(x, *paired(weight, bias, use))
