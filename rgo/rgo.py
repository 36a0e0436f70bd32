"""RGO: attach to a model, train it on one task after another, answer for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from . import attachment, collecting, state, survey
from .attachment import Attached, RowWiring, Wiring
from .collecting import Recorder
from .curvature import EXTRACTORS, RULES, Extractors, Rule, require
from .encoding import Encode, Encoding, TaskId, task_id, task_ids
from .gradient import Covered
from .product import has_bfloat16, has_float16
from .projection import Projection, Solver
from .summary import Summary, summarise

LARGE, HUGE = 128, 1024  # inputs of a layer from which its P is held in float16 and in bfloat16 by default

# A task laid over the one being trained, per learner: what `with learner.task(id)` says in this thread.
_override: ContextVar[Mapping[int, Wiring]] = ContextVar("rgo_task", default=MappingProxyType({}))


class UnknownTaskError(KeyError):
    """A task that has not been learned was asked for."""

    __str__ = Exception.__str__  # KeyError would quote the message


class RGO:
    """Recursive Gradient Optimization for any model of dense and convolutional layers.

    Attaches to the model; optimizer and loop stay yours. Between `begin_task` and `end_task` gradients arrive
    projected, so that a step forgets least of the tasks before; `end_task` makes one pass over the task's data
    and adds its curvature to P. `task(id)` answers for any task learned so far.

    Examples:
        >>> import torch, rgo
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> learner = rgo.RGO(model)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for k in range(2):
        ...     x, y = torch.randn(32, 4), torch.randint(2, (32,))
        ...     learner.begin_task(k)
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.cross_entropy(model(x), y).backward()
        ...         optimizer.step()
        ...     learner.end_task([(x, y)])
        >>> with learner.task(0), torch.no_grad():
        ...     model(x).shape
        torch.Size([32, 2])

    Args:
        model: any module. Linear, Conv1d, Conv2d and Conv3d with trainable weights are covered; what is not is
            named, by an error or a warning, and in `summary()`.
        alpha: the curvature every layer starts from (the paper's alpha). Smaller protects old tasks more.
        encode: the virtual feature encoding layer: True, False, "after-first" (the first task keeps the identity,
            for pretrained models) or a function (task, layer name, width) -> permutation or None.
        project: False leaves gradients alone: feature encoding without projection.
        curvature: which part of the loss' Hessian is kept: "true-class" (the paper), "softmax" (exact), "logit"
            (the true class with weight one), "squared-error", "sampled", "inputs" (OWM), or a function as
            `rgo.sampled` makes one.
        skip: names of modules or parameters left to plain training, such as a head whose rows belong to one task.
        raw: names of the layers that read the model's raw input, which is never permuted. By default they are found
            at the first forward with gradients.
        extractors: how the rows of a weight share one P: "mean" of their outer products (the paper as it
            reproduces), "sum", "signed" (the outer product of the mean), or "rows" (every position a sample).
        solver: "cholesky" sums H and inverts it once per task; "recursive" is Algorithm 1 to the letter, keeping
            P alone.
        block: samples the recursion takes at a time.
        tolerance: 0 applies the whole P. Above 0, wide layers keep only the directions whose eigenvalue of P differs
            from 1 by more.
        dtype: of the P that is multiplied. By default the weights' own, at least float32; of half as many bytes for
            large layers where the CPU is fast with it (float16 from 128 inputs, bfloat16 from 1024).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        alpha: float = 1.0,
        encode: Encode = True,
        project: bool = True,
        curvature: str | Rule = "true-class",
        skip: Sequence[str] = (),
        raw: Sequence[str] | None = None,
        extractors: Extractors = "mean",
        solver: Solver = "cholesky",
        block: int = 64,
        tolerance: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"RGO attaches to a torch.nn.Module, got {type(model).__name__}")
        require(0 < alpha < float("inf"), f"alpha must be positive and finite, got {alpha}")
        require(0 <= tolerance < 1, f"tolerance is in [0, 1), got {tolerance}")
        require(block >= 1, f"block must be at least 1, got {block}")
        require(solver in ("cholesky", "recursive"), f'solver is "cholesky" or "recursive", got {solver!r}')
        require(
            not (solver == "recursive" and tolerance > 0),
            "the spectral form (tolerance > 0) needs H, which the recursion does not keep: use solver='cholesky'",
        )
        require(
            extractors in EXTRACTORS,
            f"extractors is one of {', '.join(EXTRACTORS)}, got {extractors!r}",
        )
        require(
            callable(curvature) or curvature in RULES,
            f"curvature is one of {', '.join(RULES)} or a function, got {curvature!r}",
        )
        require(
            dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point),
            f"dtype is a floating-point type of torch or None, got {dtype!r}",
        )
        skip, raw = _names(skip, "skip"), None if raw is None else _names(raw, "raw")
        survey.check_names(model, skip, "skip")
        survey.check_names(model, raw or (), "raw")

        self.model, self.project, self.encoding = model, project, Encoding(encode)
        self.alpha, self.skip, self.raw = alpha, tuple(skip), raw
        self.curvature, self.extractors = curvature, extractors
        self.solver, self.block, self.tolerance, self.dtype = solver, block, tolerance, dtype
        self._tasks: list[TaskId] = []
        self._active: TaskId | None = None
        self._first: TaskId | None = None
        self._current: Wiring | None = None  # of the task being trained
        self._sessions = 0
        self._sites: dict[str, Attached] = {}
        self._digests: dict[TaskId, int] = {}  # of a user's encode function, which a state cannot hold
        self._handles: dict[nn.Module, Any] = {}  # what keeps fused paths off
        self._absent: list[Attached] = []  # layers not in the model now, such as another task's head
        self._survey = survey.Survey()
        self._detached = False
        attachment.bring_up_to_date(self)

    # ---- tasks ----------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> tuple[TaskId, ...]:
        """The ids of the tasks learned so far, in order."""
        return tuple(self._tasks)

    @property
    def active(self) -> TaskId | None:
        """The id of the task being trained."""
        return self._active

    def begin_task(self, task: TaskId) -> None:
        """Start training `task`: its wiring is in force, P and its scale are frozen until `end_task`.

        A task may be met again. P keeps what it knows of it: the second visit is restrained by the first as by
        any other task, and `end_task` adds its curvature once more. Calling it for the task that is being
        trained already (after a restart, say) goes on with it.
        """
        self._require_attached()
        task = task_id(task)
        if self._active is not None and task != self._active:
            raise RuntimeError(
                f"begin_task({task!r}): task {self._active!r} is still being trained. Finish it first: "
                "end_task(batches) adds what must be protected of it"
            )
        with torch.inference_mode(False):  # what is made here is trained with
            attachment.bring_up_to_date(self)
            before = self._active, self._current, self._first, self._sessions
            if self._active is None:
                self._sessions += 1
                self._first = task if self._first is None else self._first
            try:
                self._activate(task)
            except BaseException:
                self._active, self._current, self._first, self._sessions = before
                raise
            attachment.warn_when_full(self._layers())

    def end_task(
        self,
        batches: Iterable[Any],
        *,
        classes: Any = None,
        forward: collecting.Forward | None = None,
    ) -> None:
        """One pass over the task's data: its curvature goes into P (Algorithm 1, lines 8 to 12).

        The model stays as it is: parameters, gradients, training flags, buffers and torch's random generators.
        If anything fails, P is what it was and the task is still active, so `end_task` can be called again.

        Args:
            batches: any iterable of (x, y), x with the batch first and y the labels; small batches are joined.
            classes: the logits this task may answer with: a boolean mask or a list of indices. Its softmax is
                taken over these alone.
            forward: for other batches: batch -> (outputs, targets), calling the attached model.
        """
        self._require_attached()
        if self._active is None:
            raise RuntimeError("end_task without begin_task: no task is being trained. Call begin_task(id) first")
        task = self._active
        with torch.inference_mode(False):  # what is made here is trained with
            attachment.bring_up_to_date(self)  # layers unfrozen or added inside the task
            for covered in self._layers():
                covered.disarm()  # the pass takes gradients of its own
            try:
                projections = collecting.collect(self, batches, classes, forward) if self.project else {}
                digest = state.digest(self, task) if callable(self.encoding.encode) else None
            except BaseException:
                self._activate(task)
                raise
        for covered in self._layers():  # nothing can fail from here on
            if covered in projections:
                covered.projection = projections[covered]
            elif self.project:
                covered.unseen.append(task)
            covered.session = None
        if task not in self._tasks:
            self._tasks.append(task)
        if digest is not None:
            self._digests[task] = digest
        self._active, self._current = None, None

    def task(self, task: TaskId | Iterable[TaskId]) -> AbstractContextManager[None]:
        """Answer for `task` inside a `with` block: one id, or a sequence of ids, one per row of the batch.

        Examples:
            >>> import torch, rgo
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 3))
            >>> learner = rgo.RGO(model, raw=["0"])
            >>> learner.begin_task("a"); learner.end_task([(torch.randn(5, 2), torch.tensor([0, 1, 2, 0, 1]))])
            >>> learner.begin_task("b")
            >>> with learner.task(["a", "b"]), torch.no_grad():
            ...     model(torch.randn(2, 2)).shape
            torch.Size([2, 3])
        """
        self._require_attached()
        mixed = not isinstance(task, str) and (isinstance(task, Iterable) and getattr(task, "ndim", 1) > 0)
        ids = task_ids(task) if mixed else (task_id(task),)
        known = {*self._tasks} | ({self._active} if self._active is not None else set())
        unknown = [t for t in dict.fromkeys(ids) if t not in known]
        if unknown:
            raise UnknownTaskError(
                f"task {unknown[0]!r} has not been learned; known: {', '.join(map(repr, self._tasks)) or 'none yet'}"
                + (f"; being trained: {self._active!r}" if self._active is not None else "")
                + ". Ids are exact: 1 and '1' are different tasks"
            )
        return self._answering(Wiring(self.encoding, self._first, ids, mixed))

    def rows(self, tasks: Sequence[TaskId], slots: torch.Tensor) -> AbstractContextManager[None]:
        """Like `task(ids)`, for steps that must not wait for the host: row i is answered for `tasks[slots[i]]`.

        `slots` is an integer tensor on the model's device; its values are not checked.
        """
        self._require_attached()
        return self._answering(RowWiring(self.encoding, self._first, task_ids(tasks), slots))

    # ---- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that outlives a task, as tensors and plain types; save it beside the model's own state_dict.

        Examples:
            >>> import torch, rgo, io
            >>> model = torch.nn.Linear(3, 2)
            >>> learner = rgo.RGO(model)
            >>> learner.begin_task(0); learner.end_task([(torch.randn(8, 3), torch.randint(2, (8,)))])
            >>> file = io.BytesIO(); torch.save(learner.state_dict(), file); _ = file.seek(0)
            >>> again = rgo.RGO(torch.nn.Linear(3, 2))
            >>> again.load_state_dict(torch.load(file, weights_only=True))
            >>> again.tasks
            (0,)
        """
        self._require_attached()
        return state.save(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, bit for bit; inside a task if it was saved inside one.

        Everything is compared first: after an error the learner is as it was.
        """
        self._require_attached()
        with torch.inference_mode(False):  # what is made here is trained with
            attachment.bring_up_to_date(self, thawed=state.layers_of(saved))
            state.compare(self, saved)
            state.load(self, saved)
            self._sessions += 1
            self._active, self._current = None, None
            for covered in self._layers():
                covered.session = None
                covered.disarm()
            if saved["active"] is not None:
                self._activate(saved["active"])

    def memory(self) -> int:
        """Bytes the learner keeps now: H and P of every layer. It does not grow with the number of tasks."""
        self._require_attached()
        return sum(c.projection.bytes() for c in self._layers())

    @property
    def projections(self) -> dict[str, Projection]:
        """The projection of every covered weight, by its layer's name: `.P`, `.H`, `.c`, `.free`."""
        return {c.name: c.projection for c in self._layers()}

    def summary(self) -> Summary:
        """Covered, skipped and unprotected layers; size, cost and fill of each P. Print it."""
        return summarise(self._sites, self._survey, self.model)

    def detach(self) -> None:
        """Take RGO off the model: its layers have their own forward again. The learner cannot be used any more.

        The weights stay as they were trained. With feature encoding they answer only through a task's wiring, so save
        `state_dict` first and attach again to use them.
        """
        self._require_attached()
        for site in (*self._absent, *self._sites.values()):
            if site.layer.__dict__.get("forward") is site:
                del site.layer.__dict__["forward"]
            site.covered.disarm()
        for handle in self._handles.values():
            handle.remove()
        self._sites, self._absent, self._handles, self._detached = {}, [], {}, True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a learner cannot be copied or pickled: it is tied to its model. Copy the model, attach another RGO to the "
            "copy and give it this one's state_dict()"
        )

    def __repr__(self) -> str:
        return (
            f"RGO({type(self.model).__name__}, {len(self._sites)} layers, tasks {self._tasks}, active {self._active!r})"
        )

    # ---- inside ---------------------------------------------------------------------------------------------

    def _layers(self) -> list[Covered]:
        return list(dict.fromkeys(site.covered for site in self._sites.values()))

    @property
    def _trained(self) -> set[int]:
        return self._survey.trained

    def _require_attached(self) -> None:
        if self._detached:
            raise RuntimeError("this learner has been detached from its model. Make another: rgo.RGO(model)")

    def _wiring(self, layer: str) -> Wiring:
        wiring = _override.get().get(id(self)) or self._current
        if wiring is None:
            raise RuntimeError(
                f"layer {layer!r} was called outside any task, so whose answer is wanted is not known. Train between "
                "begin_task(id) and end_task(batches); evaluate inside `with learner.task(id):`"
            )
        return wiring

    @contextmanager
    def _answering(self, wiring: Wiring) -> Iterator[None]:
        token = _override.set({**_override.get(), id(self): wiring})
        try:
            yield
        finally:
            _override.reset(token)

    def _recording(self, recorder: Recorder) -> AbstractContextManager[None]:
        """The curvature pass of the task being trained: `recorder` watches what the layers meet."""
        assert self._active is not None
        return self._answering(Wiring(self.encoding, self._first, (self._active,), recorder=recorder))

    def _activate(self, task: TaskId) -> None:
        """Put a task's wiring in force and everything it needs where the weights are."""
        wiring = Wiring(self.encoding, self._first, (task,))
        if self.encoding.encode is not False:
            for site in self._sites.values():  # now: a captured step must not copy from the host
                wiring.index(site, site.covered.weight.device)
        self._active, self._current = task, wiring
        for covered in self._layers():
            covered.session = self._sessions
            covered.projection = covered.projection.to(covered.weight.device, self._dtype_for(covered))
            covered.disarm()
            if self.project and covered.weight.requires_grad:
                covered.arm()

    def _dtype_for(self, covered: Covered) -> torch.dtype:
        """Of the P that is multiplied: half as many bytes where P is large and the processor multiplies by such."""
        if self.dtype is not None:
            return self.dtype
        if covered.weight.dtype == torch.float64:
            return torch.float64
        if covered.weight.device.type == "cpu" and covered.matrix.groups == 1:
            if covered.matrix.inputs >= HUGE and has_bfloat16():
                return torch.bfloat16
            if covered.matrix.inputs >= LARGE and has_float16() and self.tolerance == 0:
                return torch.float16
        return torch.float32


def _names(names: Any, argument: str) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{argument} is a sequence of names such as ({str(names)!r},), got {names!r}")
    return tuple(names)
