"""RGO's hold on a model: which layers it covers, and what stands in for their `forward`.

Only the instance attribute `forward` of each covered layer is replaced; classes, parameters, hooks and `state_dict`
keys stay as they are, and `detach` takes it off again.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .collecting import Recorder
from .encoding import Encoding, Index, TaskId, check_width, gather, gathered
from .gradient import Covered, Use, connect
from .projection import Projection
from .survey import Site, Survey, check_memory, is_skipped, join, survey, tie

if TYPE_CHECKING:
    from .rgo import RGO

FULL = 0.01  # share of free directions below which begin_task warns


class Wiring:
    """Whose answers the layers give: one task's, or one task a row."""

    def __init__(
        self,
        encoding: Encoding,
        first: TaskId | None,
        tasks: Sequence[TaskId],
        mixed: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.encoding, self.first, self.tasks, self.mixed = encoding, first, tuple(tasks), mixed
        self.recorder = recorder  # the curvature pass watches what the layers meet
        self._found: dict[tuple[Attached, torch.device], Index | None] = {}

    def index(self, site: Attached, device: torch.device) -> Index | None:
        """The permutation through which this layer reads; None is the identity."""
        key = (site, device)
        if key not in self._found:
            self._found[key] = self._rows(site, device) if self.mixed else self._one(self.tasks[0], site, device)
        return self._found[key]

    def _one(self, task: TaskId, site: Attached, device: torch.device) -> Index | None:
        if task in site.plain:
            return None
        return self.encoding.index(task, site.name, site.matrix.width, self.first, device)

    def _rows(self, site: Attached, device: torch.device) -> Index | None:
        width = site.matrix.width
        orders = {task: self._one(task, site, torch.device("cpu")) for task in set(self.tasks)}
        if all(order is None for order in orders.values()):
            return None
        with torch.inference_mode(False):
            identity = torch.arange(width, device="cpu")
            rows = [identity if (o := orders[task]) is None else o.forward for task in self.tasks]
            return Index.of(torch.stack(rows), device)


class RowWiring(Wiring):
    """Whose answers the rows of a batch want, said by positions on the device: nothing is copied from the host.

    The tables of permutations are made at the first use, which must therefore not be inside a captured step.
    """

    def __init__(self, encoding: Encoding, first: TaskId | None, tasks: Sequence[TaskId], slots: Tensor) -> None:
        super().__init__(encoding, first, tasks, mixed=True)
        self.slots = slots

    def index(self, site: Attached, device: torch.device) -> Index | None:
        key = (self.tasks, self.first, site.plain, device)
        if key not in site.tables:
            site.tables.clear()
            site.tables[key] = self._rows(site, device)
        table = site.tables[key]
        if table is None:
            return None
        return Index(table.forward[self.slots], table.inverse[self.slots])


class Lane:
    """A training call as a layer met it last: all that was looked up then holds while what is kept here does.

    What only the start or the end of a task changes is not compared: each makes another wiring.
    """

    __slots__ = ("bias", "bias_trained", "device", "dtype", "fast", "shape", "use", "weight", "wiring")

    def __init__(self, wiring: Wiring, x: Tensor, weight: Tensor, bias: Tensor | None, use: Use, fast: bool) -> None:
        self.wiring, self.weight, self.bias, self.use, self.fast = wiring, weight, bias, use, fast
        self.bias_trained = bias is not None and bias.requires_grad
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device


class Attached:
    """Stands in for one layer's `forward`: reads through the task's wiring, and lets gradients arrive projected."""

    def __init__(self, learner: RGO, found: Site, covered: Covered) -> None:
        self.learner, self.name, self.path, self.layer = learner, found.name, found.path, found.layer
        self.matrix, self.covered = found.matrix, covered
        self.raw: bool | None = None  # reads the model's raw input, which is never permuted; None: not known yet
        self.plain: frozenset[TaskId] = frozenset()  # tasks learned before this layer was covered
        self.rows = 0  # of the last training batch, for the summary
        self.tables: dict[Any, Index | None] = {}  # of RowWiring
        self.lane: Lane | None = None

    def __call__(self, input: Tensor) -> Tensor:
        learner, x = self.learner, input
        parameters = self.layer._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        wiring, lane = learner._wiring(self.name), self.lane
        if (  # in a small model's step Python shows: one condition, and no calls of ours
            lane is not None
            and wiring is lane.wiring
            and weight is lane.weight
            and bias is lane.bias
            and x.shape == lane.shape
            and x.dtype is lane.dtype
            and x.device == lane.device
            and weight.requires_grad
            and (bias is None or bias.requires_grad is lane.bias_trained)
            and torch.is_grad_enabled()
            and not torch._C._is_any_autocast_enabled()
        ):
            self.covered.look_again()
            return connect(x, weight, bias, lane.use, lane.fast)
        if weight is None:
            raise RuntimeError(
                f"the weight of layer {self.name!r} is no longer a parameter but is computed from others "
                "(weight_norm, a parametrization, pruning): its gradient cannot be projected. Remove that, or "
                f"attach with skip=({self.name!r},)"
            )
        if not x.is_floating_point():
            raise TypeError(
                f"layer {self.name!r} got an input of {x.dtype}; layers take floating-point inputs. "
                "Convert it first: x.float()"
            )
        covered, matrix = self.covered, self.matrix
        index: Index | None = None
        if learner.encoding.encode is not False:
            index = wiring.index(self, x.device)
            if self.raw is None and (torch.is_grad_enabled() or index is not None):
                self.raw = self._reads_raw_input(x, weight)
            if self.raw:
                index = None
        if wiring.recorder is not None:
            return wiring.recorder.meet(covered, matrix, self._read(x, index), weight, bias)
        if not (learner.project and weight.requires_grad and torch.is_grad_enabled()):
            return matrix.forward(self._read(x, index), weight, bias)
        if (bias is not None and bias.requires_grad) != (covered.bias is not None) and not is_skipped(
            join(self.path, "bias"), learner.skip
        ):
            raise RuntimeError(
                f"the bias of layer {self.name!r} was {'trained' if covered.bias is not None else 'frozen'} when its P "
                "was made and is not now: P has a column for it or has not. Freeze or unfreeze before attaching"
            )
        if covered.transparent:
            return matrix.forward(self._read(x, index), weight, bias)
        covered.look_again()
        if covered.projection.device != weight.device:  # the model has been moved inside the task
            covered.projection = covered.projection.to(weight.device, covered.projection.dtype)
        if index is not None:
            check_width(x, index, matrix.axis, self.name)
            if index.mixed:
                x, index = gathered(x, index, matrix.axis), None
        use = Use(covered, matrix, covered.session, weight is covered.weight, index)
        fast = self._is_fast(x)
        if covered.projection.applied is not None and wiring is learner._current and use.own:
            self.lane = Lane(wiring, x, weight, bias, use, fast)
        return connect(x, weight, bias, use, fast)

    def _read(self, x: Tensor, index: Index | None) -> Tensor:
        return x if index is None else gather(x, index, self.matrix.axis, self.name)

    def _is_fast(self, x: Tensor) -> bool:
        """Project the smaller factor: rows x d^2 multiplications against outputs x d^2."""
        self.rows = self.matrix.count(x)
        fast = self.matrix.input_gradient is not None and self.rows <= self.matrix.outputs
        if not fast or self.covered.projection.applied is None or self.covered.session is None:
            return False
        # Under autocast the general path leaves the choice of precision to torch.
        return not torch.is_autocast_enabled(x.device.type)

    def _reads_raw_input(self, x: Tensor, weight: Tensor) -> bool:
        """Whether no parameter that is being trained lies behind `x`."""
        if not torch.is_grad_enabled() or weight is not self.covered.weight:
            raise RuntimeError(
                "which layers read the model's raw input is not known yet: that is seen at the first forward with "
                "gradients enabled and the model's own parameters. This forward has none (torch.no_grad, "
                "functional_call, activation checkpointing with use_reentrant=True), and layer "
                f"{self.name!r} needs to know. Train a step first, or name the layers that are fed the raw input: "
                'RGO(model, raw=["name of the first layer"])'
            )
        trained = self.learner._trained
        if id(x) in trained:
            return False
        seen: set[Any] = set()
        nodes = [x.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in trained:
                return False
            nodes.extend(parent for parent, _ in node.next_functions)
        return True

    def __reduce__(self) -> Any:
        """A copied or pickled model is plain: its layers have their own forward again."""
        warnings.warn(
            "the copy of a model that RGO is attached to is plain: its gradients are not projected and it reads its "
            "features in the order in which they lie, not through a task's wiring. To go on learning in the copy "
            "attach another RGO to it and load this one's state_dict",
            UserWarning,
            stacklevel=2,
        )
        return getattr, (self.layer, "forward")


def bring_up_to_date(learner: RGO, thawed: Collection[str] = ()) -> None:
    """Walk the model: attach to layers that are new, unfrozen or replaced.

    Layers that are gone for now (a head swapped for another task's) stay attached and keep their P. `thawed` names
    layers to attach to although they are frozen, because a state has them.
    """
    found = survey(learner.model, learner.skip, thawed)
    attached = {id(site.layer): site for site in (*learner._absent, *learner._sites.values())}
    sites: dict[str, Attached] = {}
    owners: dict[Covered, str] = {}
    for group in tie(found.sites):
        known = dict.fromkeys(attached[id(s.layer)].covered for s in group if id(s.layer) in attached)
        covered = next(iter(known), None) or _cover(learner, group[0])
        if len(known) > 1 or covered in owners:
            other = owners.get(covered, group[-1].name)
            raise RuntimeError(
                f"layers {group[0].name!r} and {other!r} were {'tied' if covered in owners else 'separate weights'} "
                "when their P was made and are not now. Keep weights tied or untied for good, or detach and attach anew"
            )
        owners[covered] = group[0].name
        _check_same(covered, group[0])
        covered.name, covered.matrix = group[0].name, group[0].matrix
        covered.weight, covered.bias = group[0].weight, group[0].bias
        for s in group:
            site = sites[s.name] = attached.get(id(s.layer)) or _attach(learner, s, covered)
            held = s.layer.__dict__.get("forward", site)
            if held is not site and id(s.layer) in attached:
                raise RuntimeError(
                    f"the forward of layer {s.name!r} has been replaced by {held!r} since RGO was attached. Undo "
                    "that, or wrap the layer in a module of its own"
                )
            site.name, site.path, site.matrix, site.covered = s.name, s.path, s.matrix, covered
    for name, site in learner._sites.items():
        if name in found.frozen and name not in sites:  # P stays for the tasks that know the layer
            sites[name] = site
    if learner.project:
        check_memory({s.covered for s in sites.values() if s.covered.projection.applied is None})
        _warn_of_gaps(learner, sites, found)
    present = set(sites.values())
    for site in present:
        site.layer.__dict__["forward"] = site
    learner._absent = [site for site in attached.values() if site not in present]
    learner._sites, learner._survey = sites, found
    for module in learner.model.modules():
        if module not in learner._handles:
            learner._handles.update(disable_fused_path(module))


def _check_same(covered: Covered, site: Site) -> None:
    """What P was made for must still be what the layer is."""
    old, new = covered.matrix, site.matrix
    if (old.groups, old.inputs, old.outputs) != (new.groups, new.inputs, new.outputs):
        raise RuntimeError(
            f"layer {site.name!r} was {covered.shape} when its P was made and is {new.outputs} x {new.inputs} now. Put "
            "a new module in its place instead of changing the old one"
        )
    if (covered.bias is None) != (site.bias is None):
        raise RuntimeError(
            f"the bias of layer {site.name!r} was {'frozen' if covered.bias is None else 'trained'} when its P was "
            "made and is not now. Freeze or unfreeze before attaching, or detach and attach anew"
        )


def _cover(learner: RGO, site: Site) -> Covered:
    covered = Covered(site.name, site.matrix, site.weight, site.bias)
    covered.unseen = list(learner._tasks)
    covered.projection = Projection(
        site.matrix.inputs + (site.bias is not None),
        groups=site.matrix.groups,
        bias=site.bias is not None,
        alpha=learner.alpha,
        solver=learner.solver,
        block=learner.block,
        tolerance=learner.tolerance,
        dtype=learner._dtype_for(covered),
        device=site.weight.device,
    )
    covered.session = learner._sessions if learner._active is not None else None
    return covered


def _attach(learner: RGO, found: Site, covered: Covered) -> Attached:
    other = found.layer.__dict__.get("forward")
    # A copy of an attached model carries its class's own forward as an attribute (Attached.__reduce__).
    if other is not None and getattr(other, "__func__", None) is not type(found.layer).forward:
        raise RuntimeError(
            f"layer {found.name!r} already has a forward of its own"
            + (
                ": another RGO is attached to this model. Call its detach() first (it is layer.forward.learner)"
                if isinstance(other, Attached)
                else f" ({other!r}). Undo that, or give skip=({found.name!r},)"
            )
        )
    site = Attached(learner, found, covered)
    # Tasks that know the layer unencoded: all so far, and the one in training, which began without RGO on it.
    site.plain = frozenset(learner._tasks if learner._active is None else (*learner._tasks, learner._active))
    if learner.raw is not None:
        site.raw = is_skipped(found.path, learner.raw)
    return site


def _warn_of_gaps(learner: RGO, sites: dict[str, Attached], found: Survey) -> None:
    """Name, once, what is trained from now on without (full) protection."""
    before = {site.covered for site in learner._sites.values() if site.name not in learner._survey.frozen}
    for covered in dict.fromkeys(site.covered for site in sites.values() if site.name not in found.frozen):
        if covered in before:
            continue
        late = learner._active is not None
        if covered.unseen or late:
            tasks = ", ".join(map(repr, covered.unseen)) or "so far"
            warnings.warn(
                f"layer {covered.name!r} is trained from now on; what the tasks {tasks} made of it is not protected, "
                "because it was added, replaced or frozen when they were learned"
                + (f". In task {learner._active!r} it was trained without RGO until now" if late else ""),
                UserWarning,
                stacklevel=4,
            )
    new = [name for name in found.unprotected if name not in learner._survey.unprotected]
    if new:
        sizes = {name: p.numel() for name, p in learner.model.named_parameters() if p.requires_grad}
        share = 100 * sum(sizes[name] for name in found.unprotected if name in sizes) / sum(sizes.values())
        warnings.warn(
            f"{len(new)} parameters are trained without protection ({share:.1f} % of all): {', '.join(new[:6])}"
            f"{', ...' if len(new) > 6 else ''} ({found.unprotected[new[0]]}). Freeze them after the first task, or "
            "name them in skip= if that is meant; summary() lists all",
            UserWarning,
            stacklevel=4,
        )


def warn_when_full(layers: Sequence[Covered]) -> None:
    """The paper's limitation section: with few directions left, their learning rates explode."""
    for covered in layers:
        p = covered.projection
        if p.free < FULL * p.dim * p.groups:
            warnings.warn(
                f"layer {covered.name!r} is nearly full: {p.free:.1f} of its {p.dim * p.groups} directions are still "
                f"free, at {p.c:.0f} times the learning rate. Expect to forget; use a wider layer or fewer tasks",
                UserWarning,
                stacklevel=3,
            )


def disable_fused_path(module: nn.Module) -> dict[nn.Module, Any]:
    """nn.TransformerEncoderLayer's fused inference path never calls its layers; a hook makes torch leave it.

    Returns a handle whose `remove()` puts everything back, for a module that needs one.
    """
    if isinstance(module, nn.TransformerEncoderLayer):
        return {module: module.register_forward_pre_hook(lambda module, args: None)}
    if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
        return {module: _Restore(module)}
    return {}


class _Restore:
    """Turns the nested tensors of a TransformerEncoder off, which only its fused path can read."""

    def __init__(self, module: nn.TransformerEncoder) -> None:
        self.module = module
        module.use_nested_tensor = False

    def remove(self) -> None:
        self.module.use_nested_tensor = True
