"""One pass over a task's data: every sample's gradient, layer by layer, into the task's curvature."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .curvature import LABELLED, RULES, Extractors, Rule, check_outputs, checked_labels, class_mask
from .gradient import Covered
from .layers import LayerMatrix
from .product import product
from .projection import CurvatureSum, Projection, Recursion

if TYPE_CHECKING:
    from .rgo import RGO

Forward = Callable[[Any], tuple[Tensor, Tensor]]
Use = tuple[LayerMatrix, Tensor, Any]  # a layer's matrix, an input it met, the gradient of its output

CHUNK_BYTES = 64 * 2**20  # rows of a layer unfolded at a time
FEW = 4  # samples on which the first batch is checked
MERGE_SAMPLES, MERGE_BYTES = 256, 4 * 2**20  # small batches are joined up to these at first
MERGE_LESS, MERGE_MORE, MET_BYTES = 32, 2048, 128 * 2**20  # and up to these once it is seen what the layers meet


class Recorder:
    """Takes note of every input a covered layer meets during the curvature pass."""

    def __init__(self, lean: bool = False) -> None:
        self.lean = lean  # without what only the check against autograd's own gradients needs
        self.calls: list[tuple[Covered, LayerMatrix, Tensor, Any]] = []
        self.blind: set[Covered] = set()  # met where gradients are off, so nothing can be known of them

    def meet(self, covered: Covered, matrix: LayerMatrix, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.lean and matrix.direct and x.dim() == 2 and torch.is_grad_enabled():
            y: Tensor = _Dense.apply(x, weight, bias, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        else:
            y = matrix.forward(x, weight, bias)
        if weight.requires_grad:
            if y.requires_grad:  # An edge, not the tensor: an in-place activation may be about to overwrite y.
                self.calls.append((covered, matrix, x.detach(), get_gradient_edge(y)))
            else:
                self.blind.add(covered)
        return y


class _Dense(torch.autograd.Function):
    """A dense layer that sends gradients back to its input alone, by the faster product; `_` keeps it in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _: Tensor) -> Tensor:
        ctx.weight = weight
        y = product(x, weight.t())
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        return product(delta, ctx.weight) if ctx.needs_input_grad[0] else None, None, None, None


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, gradients on, autocast off; afterwards the model and the generators are as they were."""
    training = [(m, m.training) for m in model.modules()]
    buffers = [
        (m, name, b, None if b is None else b.clone()) for m in model.modules() for name, b in m._buffers.items()
    ]
    hooked = [(p, p._backward_hooks) for p in model.parameters() if p._backward_hooks]
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    precision = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in sorted({d.type for d in devices} | {"cpu"}):
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            model.eval()
            for p, _ in hooked:
                p._backward_hooks = None  # hooks on a parameter are for training's gradients, not for these
            torch.set_float32_matmul_precision("highest")  # H is summed in float32 or better
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            for p, hooks in hooked:
                p._backward_hooks = hooks
            for module, mode in training:
                module.training = mode
            for module, name, buffer, value in buffers:
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    with torch.no_grad():
                        buffer.copy_(value)
                module._buffers[name] = buffer


class Room:
    """Samples that one forward of the pass may hold: a guess, until it has been seen how much the layers meet."""

    def __init__(self) -> None:
        self.samples, self.bytes = MERGE_SAMPLES, float(MERGE_BYTES)

    def seen(self, recorder: Recorder, samples: int) -> None:
        met = sum(x.numel() * x.element_size() for _, _, x, _ in recorder.calls) / samples
        processor = all(x.device.type == "cpu" for _, _, x, _ in recorder.calls)
        least = MERGE_LESS if processor else MERGE_SAMPLES  # its caches are soon full
        self.samples = max(least, min(MERGE_MORE, int(MET_BYTES / max(met, 1))))
        if self.samples > MERGE_SAMPLES:
            self.bytes = float("inf")

    def has(self, samples: int, x: Tensor) -> bool:
        """Whether so many samples like those of `x` fit in."""
        return samples <= self.samples and samples * x.numel() * x.element_size() <= self.bytes * max(1, x.shape[0])


def merged(batches: Iterable[Any], room: Room) -> Iterator[tuple[str, Any]]:
    """Join small (x, y) batches of one shape: the pass runs in hundreds of samples, whatever the loader's size.

    Each comes with the numbers of the batches it is made of, for errors.
    """
    held: list[tuple[Tensor, Tensor]] = []
    first = size = 0
    for number, batch in enumerate(batches):
        pair = isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch)
        joins = pair and batch[0].dim() > 0 and batch[1].dim() > 0 and batch[0].shape[0] == batch[1].shape[0]
        if held and not (joins and _alike(batch, held[0]) and room.has(size + batch[0].shape[0], batch[0])):
            yield _joined(held, first)
            held, size = [], 0
        if not joins:
            yield f"batch {number}", batch
            continue
        if not held:
            first = number
        held.append((batch[0], batch[1]))
        size += batch[0].shape[0]
    if held:
        yield _joined(held, first)


def _alike(one: Any, other: Any) -> bool:
    return all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype and a.device == b.device for a, b in zip(one, other))


def _joined(held: list[tuple[Tensor, Tensor]], first: int) -> tuple[str, Any]:
    if len(held) == 1:
        return f"batch {first}", held[0]
    pair = torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])
    return f"one of the batches {first} to {first + len(held) - 1}", pair


class Collector:
    """Adds up one task's curvature for every layer, batch after batch."""

    def __init__(self, layers: list[Covered], rule: Rule | None, extractors: Extractors) -> None:
        self.layers, self.rule, self.extractors = layers, rule, extractors
        self.sums: dict[Covered, CurvatureSum | Recursion] = {layer: layer.projection.collect() for layer in layers}
        self.one_by_one: str | None = None  # why, once it is necessary
        self._checked: set[tuple[Any, ...]] = set()

    def knows(self, recorder: Recorder, samples: int) -> bool:
        """Whether batches like this one have been compared with autograd's own gradients."""
        return self.rule is None or self.one_by_one is not None or self._shapes(recorder, samples) in self._checked

    def check(self, recorder: Recorder, outputs: Tensor) -> None:
        """Compare per-sample gradients with autograd's own, where batches like this one have not been."""
        if not self.knows(recorder, len(outputs)):
            self.one_by_one = self._mismatch(recorder.calls, outputs)
            self._checked.add(self._shapes(recorder, len(outputs)))

    @property
    def checks(self) -> bool:
        """Whether anything has been checked yet."""
        return bool(self._checked)

    @staticmethod
    def _shapes(recorder: Recorder, samples: int) -> tuple[Any, ...]:
        return tuple((c.name, len(x) / samples, x.shape[1:]) for c, _, x, _ in recorder.calls)

    def add(self, recorder: Recorder, outputs: Tensor, targets: Tensor, classes: Tensor) -> None:
        """One batch, whose forward `recorder` has watched."""
        calls, samples = recorder.calls, len(outputs)
        if recorder.blind and self.rule is not None:
            names = ", ".join(sorted(repr(c.name) for c in recorder.blind))
            raise RuntimeError(
                f"end_task met layer {names} without gradients (torch.no_grad or set_grad_enabled(self.training) in "
                "the model's forward, reentrant checkpointing), so what the task needs of it cannot be known. Leave "
                "gradients on in evaluation mode too, or freeze the layer"
            )
        if not calls and self.layers:
            raise RuntimeError(
                "the forward of end_task met none of the covered layers: is it the attached model that it calls, "
                "and not a copy of it?"
            )
        if self.rule is None:
            for layer, uses in self._by_layer(calls, [None] * len(calls)):
                self._add_inputs(layer, uses)
            return
        edges = [edge for *_, edge in calls]
        self.check(recorder, outputs)
        if self.one_by_one is not None and self.extractors == "rows":
            raise ValueError(
                f'extractors="rows" needs to know which rows of layer {self.one_by_one!r} belong to which sample, '
                'but its input does not begin with the batch dimension. Use extractors="mean"'
            )
        # Every column at once: the graph is kept until the last one has been sent back.
        columns = [c.to(outputs.dtype) for c in self.rule(outputs, targets, classes)]
        for i, column in enumerate(columns):
            if self.one_by_one is not None:
                self._add_one_by_one(outputs, column, last=i == len(columns) - 1)
                continue
            grads = torch.autograd.grad(outputs, edges, column, retain_graph=i < len(columns) - 1, allow_unused=True)
            for layer, uses in self._by_layer(calls, list(grads)):
                self._add_layer(layer, uses, samples)

    @staticmethod
    def _by_layer(
        calls: list[tuple[Covered, LayerMatrix, Tensor, Any]], grads: list[Any]
    ) -> Iterator[tuple[Covered, list[Use]]]:
        grouped: dict[Covered, list[Use]] = {}
        for (layer, matrix, x, _), grad in zip(calls, grads):
            grouped.setdefault(layer, []).append((matrix, x, grad))
        yield from grouped.items()

    def _pieces(self, layer: Covered, uses: list[Use], samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All uses' inputs X (g, d, samples, rows) and deltas D (samples, g, o, rows), some samples at a time."""
        for part in _parts(samples, sum(m.count(x) for m, x, _ in uses) * layer.projection.dim * layer.matrix.groups):
            X, D = [], []
            for use in uses:
                m, x, grad = _samples(use, part, samples)
                X.append(_columns(layer, m, x, len(part)))
                D.append(_exact(m.deltas(grad)).reshape(len(part), -1, m.groups, m.outputs).permute(0, 2, 3, 1))
            yield (X[0], D[0]) if len(uses) == 1 else (torch.cat(X, dim=3), torch.cat(D, dim=3))

    def _gradients(self, layer: Covered, uses: list[Use], samples: int) -> Iterator[Tensor]:
        """Every sample's gradient as (g, samples * o, d), some samples at a time."""
        g, o, n = layer.matrix.groups, layer.matrix.outputs, layer.matrix.inputs
        # A processor is fastest without any rows; a GPU would wait for the call of every sample.
        if layer.weight.device.type != "cpu" or not all(m.gradients and len(x) == samples for m, x, _ in uses):
            for X, D in self._pieces(layer, uses, samples):
                yield (D @ X.permute(2, 0, 3, 1)).transpose(0, 1).reshape(g, -1, X.shape[1])
            return
        weight = layer.weight.detach()
        for part in _parts(samples, samples * g * o * layer.projection.dim):
            W, b = [], []
            for use in uses:
                m, x, delta = _samples(use, part, samples)
                assert m.gradients is not None
                W.append(m.gradients(delta, _exact(x), weight.to(delta.dtype)))
                b.append(m.deltas(delta).reshape(len(part), -1, g, o).sum(dim=1))
            G = W[0].new_empty(g, layer.projection.dim, len(part) * o)
            _fill(G[:, :n], reduce(torch.add, W).permute(1, 3, 0, 2).reshape(g, n, -1))
            G[:, n:] = reduce(torch.add, b).transpose(0, 1).reshape(g, 1, -1)
            yield G.transpose(1, 2)

    def _add_layer(self, layer: Covered, uses: list[Use], samples: int) -> None:
        """The average over extractors of the outer products of every sample's gradient."""
        g, o, d, total = layer.matrix.groups, layer.matrix.outputs, layer.projection.dim, self.sums[layer]
        scale = {"sum": 1.0, "signed": 1 / o}.get(self.extractors, o**-0.5)
        live = [(m, x, _exact(grad) * scale) for m, x, grad in uses if grad is not None]
        if not live:
            return
        rows = sum(m.count(x) for m, x, _ in live) // samples
        if self.extractors == "signed":  # the literal mean of the extractors' gradients
            for X, D in self._pieces(layer, live, samples):
                total.add(torch.einsum("gdbr,bgr->gbd", X, D.sum(dim=2)))
        elif rows == 1 or self.extractors == "rows":
            for X, D in self._pieces(layer, live, samples):
                # delta x^T: all extractors are collinear
                X = X.mul_(torch.linalg.vector_norm(D, dim=2).transpose(0, 1).unsqueeze(1))
                total.add(X.reshape(g, d, -1).transpose(1, 2))
        elif o > rows and isinstance(total, CurvatureSum):
            for X, D in self._pieces(layer, live, samples):
                # G^T G = X^T (D D^T) X through the rows x rows factor, which is the smaller one
                right = (D.transpose(2, 3) @ D) @ X.permute(2, 0, 3, 1)  # (samples, g, rows, d)
                total.add(X.reshape(g, d, -1).transpose(1, 2), right.transpose(0, 1).reshape(g, -1, d))
        else:
            for G in self._gradients(layer, live, samples):
                total.add(G)

    def _add_inputs(self, layer: Covered, uses: list[Use]) -> None:
        """OWM: the inputs themselves, row by row."""
        for m, x, _ in uses:
            for part in _parts(len(x), m.count(x) * layer.projection.dim * m.groups):
                X = _columns(layer, m, x[part.start : part.stop], 1)
                self.sums[layer].add(X.flatten(2).transpose(1, 2))

    def _weight_gradients(self, output: Tensor, last: bool) -> list[tuple[Covered, Tensor | None]]:
        """Autograd's own gradient of one number for every layer: (g, o, d), None where it does not depend."""
        layers = [c for c in self.layers if c.weight.requires_grad]
        leaves = [c.weight for c in layers] + [c.bias for c in layers if c.bias is not None]
        found = dict(zip(leaves, torch.autograd.grad(output, leaves, retain_graph=not last, allow_unused=True)))
        result: list[tuple[Covered, Tensor | None]] = []
        for c in layers:
            W = found[c.weight]
            if W is None:
                result.append((c, None))
                continue
            G = c.matrix.to_matrix(W)
            if c.bias is not None:
                b = found[c.bias]
                b = torch.zeros_like(c.bias) if b is None else b
                G = torch.cat([G, b.reshape(c.matrix.groups, c.matrix.outputs, 1)], dim=2)
            result.append((c, _exact(G)))
        return result

    def _add_one_by_one(self, outputs: Tensor, column: Tensor, last: bool) -> None:
        """Slow and always right: one backward per sample."""
        for i in range(len(outputs)):
            final = last and i == len(outputs) - 1
            for layer, G in self._weight_gradients((outputs[i] * column[i]).sum(), final):
                if G is not None:
                    if self.extractors == "signed":
                        G = G.mean(dim=1, keepdim=True)
                    elif self.extractors == "mean":
                        G = G / layer.matrix.outputs**0.5
                    self.sums[layer].add(G)

    def _mismatch(self, calls: list[tuple[Covered, LayerMatrix, Tensor, Any]], outputs: Tensor) -> str | None:
        """Does taking the leading dimension apart give each sample's own gradient? Asked of the first and the last.

        Sequence-first inputs, tokens sorted by length or samples that meet each other would give wrong
        per-sample gradients without a word. Returns the layer where it does not hold.
        """
        samples, edges = len(outputs), [edge for *_, edge in calls]
        for i in {0, samples - 1}:
            probe = outputs[i].sum() + outputs[i, 0]  # any fixed mix of this sample's outputs
            grads = torch.autograd.grad(probe, edges, retain_graph=True, allow_unused=True)
            direct = dict(self._weight_gradients(probe, last=False))
            seen: set[Covered] = set()
            for layer, uses in self._by_layer(calls, list(grads)):
                seen.add(layer)
                expected = direct.get(layer)
                if expected is None:
                    continue
                if any(len(x) % samples or m.count(x) % samples for m, x, _ in uses):
                    return layer.name
                one = [_samples(use, range(i, i + 1), samples) for use in uses if use[2] is not None]
                found = torch.zeros_like(expected)
                for X, D in self._pieces(layer, one, 1):
                    found += torch.einsum("bgor,gdbr->god", D, X)
                if (found - expected).norm() > 0.02 * expected.norm():
                    return layer.name
            missed = [layer.name for layer, G in direct.items() if layer not in seen and G is not None]
            if missed:
                return missed[0]
        return None


def _samples(use: Use, part: range, samples: int) -> Use:
    """A use's share of these samples, whatever the number of rows it has for each."""
    m, x, grad = use
    k, j = len(x) // samples, len(grad) // samples
    return m, x[part.start * k : part.stop * k], grad[part.start * j : part.stop * j]


def _parts(samples: int, numbers: int) -> Iterator[range]:
    """Some samples at a time, where there are so many numbers to hold for all of them."""
    if numbers:
        size = max(1, CHUNK_BYTES // 4 * samples // numbers)
        yield from (range(start, min(start + size, samples)) for start in range(0, samples, size))


def _columns(layer: Covered, matrix: LayerMatrix, x: Tensor, samples: int) -> Tensor:
    """Rows as P meets them, with the bias' ones where it has them, as columns (g, d, samples, rows)."""
    view = matrix.to_columns(x)
    dtype = torch.promote_types(x.dtype, torch.float32)
    X = torch.empty(matrix.groups, layer.projection.dim, matrix.count(x), dtype=dtype, device=view.device)
    _fill(X[:, : matrix.inputs], view)
    X[:, matrix.inputs :] = 1
    return X.view(*X.shape[:2], samples, -1)


def _fill(columns: Tensor, view: Tensor) -> None:
    """Copy a view (g, inputs..., k...) to columns (g, inputs, k); torch transposes two dimensions faster than three."""
    columns.view(view.shape).squeeze(0).copy_(view.squeeze(0))


def _exact(t: Tensor) -> Tensor:
    """Products of half-precision factors are formed in float32."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def collect(learner: RGO, batches: Iterable[Any], classes: Any, forward: Forward | None) -> dict[Covered, Projection]:
    """The projections as they will be once the task being trained has been taken in; nothing is changed yet."""
    rule = learner.curvature if callable(learner.curvature) else RULES[learner.curvature]
    labelled = isinstance(learner.curvature, str) and learner.curvature in LABELLED
    collector = Collector([c for c in learner._layers() if c.weight.requires_grad], rule, learner.extractors)
    task, seen, warned = learner._active, 0, False
    assert task is not None
    with undisturbed(learner.model):
        room = Room()
        numbered = merged(batches, room) if forward is None else ((f"batch {i}", b) for i, b in enumerate(batches))
        mask: Tensor | None = None
        for number, batch in numbered:
            where = f"{number} of end_task (task {task!r})"
            if seen == 0:
                _check_few(collector, learner, batch, where, forward)
            for lean in (True, False) if collector.checks and collector.one_by_one is None else (False,):
                recorder = Recorder(lean)
                with learner._recording(recorder):
                    outputs, targets = _run(learner.model, batch, where, forward)
                check_outputs(outputs, where)
                if collector.knows(recorder, len(outputs)):
                    break
            if mask is None or len(mask) != outputs.shape[1]:
                mask = class_mask(classes, outputs.shape[1], outputs.device)
            if labelled:
                targets = checked_labels(outputs, targets, mask, where)
            collector.add(recorder, outputs, targets, mask)
            room.seen(recorder, len(outputs))
            seen += len(outputs)
            if collector.one_by_one is not None and not warned:
                warned = True
                warnings.warn(
                    f"the input of layer {collector.one_by_one!r} does not begin with the batch dimension (or its "
                    "samples meet each other): end_task goes one sample at a time, which is right and slow",
                    UserWarning,
                    stacklevel=3,
                )
    if seen == 0:
        raise ValueError(
            f"end_task was given no batches: without task {task!r}'s data nothing of it can be protected. An "
            "iterator that has been used up is empty; pass the DataLoader itself"
        )
    result: dict[Covered, Projection] = {}
    for covered, total in collector.sums.items():
        try:
            result[covered] = covered.projection.updated(total)
        except FloatingPointError as error:
            raise FloatingPointError(f"layer {covered.name!r}: {error}. P is as it was before end_task") from None
    return result


def _check_few(collector: Collector, learner: RGO, batch: Any, where: str, forward: Forward | None) -> None:
    """The check on the first batch's first samples, where that can be done: on all it costs as much as the pass."""
    tensors = isinstance(batch, tuple | list) and all(isinstance(t, Tensor) and t.dim() > 0 for t in batch)
    if not tensors or not batch or len({len(t) for t in batch}) > 1 or len(batch[0]) <= FEW:
        return
    recorder = Recorder()
    try:
        with learner._recording(recorder):
            outputs, _ = _run(learner.model, type(batch)(t[:FEW] for t in batch), where, forward)
        if len(outputs) == FEW:
            collector.check(recorder, outputs)
    except Exception:  # a forward that wants whole batches; what is wrong otherwise is said of the batch itself
        return


def _run(model: nn.Module, batch: Any, where: str, forward: Forward | None) -> tuple[Tensor, Tensor]:
    if forward is not None:
        result = forward(batch)
        if not (isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[0], Tensor)):
            raise TypeError(f"{where}: forward must return (outputs, targets), got {type(result).__name__}")
        return result[0], result[1]
    if not (isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch)):
        kind = type(batch).__name__
        if isinstance(batch, tuple | list):
            kind += f" of {', '.join(type(part).__name__ for part in batch)}"
        hint = " (a single batch goes in a list: [(x, y)])" if isinstance(batch, Tensor) else ""
        raise TypeError(
            f"{where} is a {kind}, expected a pair (x, y) of tensors{hint}. For other batches give forward=, a "
            "function batch -> (outputs, targets) that calls the model"
        )
    device = next((p.device for p in model.parameters()), batch[0].device)
    return model(batch[0].to(device)), batch[1].to(device)
