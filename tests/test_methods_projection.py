"""GPM, LOS and OWM against their published formulas, written out plainly here."""

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import (
    CLASSES,
    SIDE,
    STEPS,
    WIDTH,
    convnet,
    learn,
    mlp,
    moved,
    observe,
    predict,
    shared_or_split,
    stream,
    vector,
)
from torch import Tensor, nn

from rgo.benchmarks import Task, batches
from rgo.layers import describe
from rgo.methods.gpm import GPM, grow
from rgo.methods.los import LOS, cayley
from rgo.methods.owm import OWM, close


def plainly(loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, weights))


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="threshold has 2 numbers for 3 layers"):
        GPM(mlp(), threshold=(0.9, 0.9)).begin_task(stream()[0], STEPS, 0)
    with pytest.raises(ValueError, match="samples has 3 numbers for 2 layers"):
        GPM(mlp(), samples=(9, 9, 9)).begin_task(stream(split=True)[0], STEPS, 0)
    with pytest.raises(ValueError, match="decay has 1 numbers for 3 layers"):
        OWM(mlp(), decay=(0.5,)).begin_task(stream()[0], STEPS, 0)
    with pytest.raises(ValueError, match="'cube'"):
        LOS(mlp(), variant="cube")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="24 features cannot be divided among 25 tasks"):
        LOS(mlp(), tasks=25)
    with pytest.raises(ValueError, match="one too many"):
        learn(LOS(mlp(), tasks=2), stream(), steps=1)
    with pytest.raises(ValueError, match="meets its tasks once"):
        learn(LOS(mlp()), [*stream(), stream()[0]], steps=1)
    with pytest.raises(ValueError, match="its head cannot be found"):
        GPM(nn.Sequential(nn.Conv2d(1, 1, 1)))


def test_memory_counts_what_is_kept() -> None:
    gpm, owm = GPM(mlp(), samples=30), OWM(convnet(), momentum=0.5, clip=1.0, bias=True)
    subspace, stiefel = LOS(mlp(), tasks=3), LOS(convnet(), tasks=3, memory=2)
    for method in (gpm, owm, subspace, stiefel):
        learn(method, stream())
    assert gpm.memory() == sum(4 * M.numel() for M in gpm.bases.values()) > 0
    size = sum(4 * p.numel() for p in owm.model.parameters())
    P = [10**2, 2 * (54 + 1) ** 2, 96**2, 25**2]
    assert owm.memory() == size + 8 * sum(P) + 8  # and the counter
    assert stiefel.memory() == 3 * CLASSES * 2 * (4 * WIDTH + 8) + 8
    assert subspace.memory() == 8


# ---- GPM ---------------------------------------------------------------------------------------------------------


def published_rule(basis: Tensor | None, R: Tensor, epsilon: float) -> Tensor:
    """The authors' update of one layer's memory from its representation matrix R (dim, columns)."""
    if basis is None:
        U, S, _ = torch.linalg.svd(R, full_matrices=False)
        ratio = S**2 / (S**2).sum()
        return U[:, : int((ratio.cumsum(0) < epsilon).sum())]
    total = (torch.linalg.svdvals(R) ** 2).sum()
    R_hat = R - basis @ basis.T @ R
    U, S, _ = torch.linalg.svd(R_hat, full_matrices=False)
    explained, r = (total - (S**2).sum()) / total, 0
    for share in S**2 / total:
        if explained >= epsilon:
            break
        explained, r = explained + share, r + 1
    if r == 0:
        return basis
    grown = torch.cat([basis, U[:, :r]], dim=1)
    return grown[:, : len(grown)]


def span(M: Tensor) -> Tensor:
    return M @ M.mT


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 12), st.floats(0.3, 0.999), st.integers(1, 4))
def test_gpm_grows_its_basis_by_the_published_rule(seed: int, dim: int, columns: int, epsilon: float, k: int) -> None:
    """Task after task, from singular values of R as published and from R R^T here."""
    source = torch.Generator().manual_seed(seed)
    ours, theirs = torch.zeros(dim, 0, dtype=torch.float64), None
    for task in range(k):
        scale = torch.logspace(0, -2, dim, dtype=torch.float64)[:, None]
        R = torch.randn(dim, columns, generator=source, dtype=torch.float64) * scale.roll(task, 0)
        theirs = published_rule(theirs, R, epsilon)
        ours = grow(ours, R @ R.T, epsilon, first=task == 0)
        torch.testing.assert_close(span(ours), span(theirs), rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.T @ ours, torch.eye(ours.shape[1], dtype=torch.float64), rtol=0, atol=1e-9)


def energies(*values: float) -> Tensor:
    return torch.diag(torch.tensor(values, dtype=torch.float64))


EMPTY, E0 = torch.zeros(4, 0, dtype=torch.float64), torch.eye(4, dtype=torch.float64)[:, :1]


@pytest.mark.parametrize(
    ("basis", "C", "epsilon", "first", "rank"),
    [
        (EMPTY, energies(8, 4, 2, 2), 0.80, True, 2),  # .5, .75 are below; the one that crosses stays out
        (EMPTY, energies(8, 4, 2, 2), 0.75, True, 1),  # strictly below: .75 itself is not
        (EMPTY, energies(8, 4, 2, 2), 0.50, True, 0),
        (EMPTY, energies(8, 4, 2, 2), 1.00, True, 3),
        (EMPTY, energies(1, 0, 0, 0), 0.99, True, 0),  # one direction holds everything, and crosses at once
        (EMPTY, energies(0, 0, 0, 0), 0.99, True, 0),  # a layer that meets nothing but zeros
        (E0, energies(8, 4, 2, 2), 0.50, False, 1),  # explained already: skip
        (E0, energies(8, 4, 2, 2), 0.51, False, 2),  # later the one that crosses is taken
        (E0, energies(8, 4, 2, 2), 0.75, False, 2),  # and reaching epsilon is enough
        (E0, energies(8, 4, 2, 2), 0.76, False, 3),
        (E0, energies(8, 4, 2, 2), 1.00, False, 4),  # full
        (E0, energies(0, 4, 0, 0), 0.99, False, 2),  # nothing explained of these inputs
        (E0, energies(8, 4, 0, 0), 2.00, False, 2),  # never a direction without energy
        (torch.eye(4, dtype=torch.float64), energies(8, 4, 2, 2), 1.00, False, 4),  # the whole space: no more
        (EMPTY, energies(8, 4, 2, 2), 0.51, False, 2),  # an empty basis, but not the first task
    ],
)
def test_gpm_ranks_of_known_spectra(basis: Tensor, C: Tensor, epsilon: float, first: bool, rank: int) -> None:
    M = grow(basis, C, epsilon, first)
    assert M.shape == (4, rank)
    torch.testing.assert_close(M.T @ M, torch.eye(rank, dtype=torch.float64))
    assert torch.equal(M[:, : basis.shape[1]], basis)


def test_gpm_trains_as_published() -> None:
    """Three tasks of a bias-free network in float64: SVD of its inputs, G - G M M^T, all written out."""
    tasks, epsilon = [moved(t, torch.float64) for t in stream()], (0.9, 0.95, 0.99)
    method = learn(GPM(mlp().double(), threshold=epsilon, samples=60), tasks)
    weights = [w.detach().clone().requires_grad_() for w in mlp().double().parameters() if w.dim() == 2]

    def forward(x: Tensor) -> tuple[list[Tensor], Tensor]:
        h1 = F.relu(x @ weights[0].T)
        h2 = F.relu(h1 @ weights[1].T)
        return [x, h1, h2], h2 @ weights[2].T

    memory: list[Tensor | None] = [None] * 3
    for task in tasks:
        for x, y in batches(task, batch_size=10, steps=STEPS, seed=0):
            gradients = plainly(F.cross_entropy(forward(x)[1], y), weights)
            for w, g, M in zip(weights, gradients, memory):
                w.data -= 0.1 * (g if M is None else g - g @ M @ M.T)
        met = forward(task.train[0])[0]
        memory = [published_rule(M, R.detach().T, e) for M, R, e in zip(memory, met, epsilon)]
    for layer, w in zip((0, 2, 4), weights):
        found = method.model[layer]  # type: ignore[index]
        torch.testing.assert_close(found.weight.data, w.data, rtol=1e-9, atol=1e-9)
        assert found.bias.eq(0).all()


@pytest.mark.parametrize("encode", [False, True], ids=["plain", "encoded"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_gpm_keeps_a_linear_layers_old_outputs(encode: bool, bias: bool) -> None:
    """With all of the old inputs in the basis, whatever a layer learns is orthogonal to them."""
    tasks = stream(n=12)
    method = GPM(mlp(), threshold=1 - 1e-9, samples=12, bias=bias, encode=encode)
    first: Any = method.model[0]  # type: ignore[index]
    learn(method, tasks[:1])
    x = tasks[0].train[0]
    before, weight = F.linear(x, first.weight, first.bias), first.weight.clone()
    method.begin_task(tasks[1], STEPS, 0)
    observe(method, tasks[1])
    after = F.linear(x, first.weight, first.bias)
    changed = (first.weight - weight) @ F.linear(tasks[1].train[0], torch.eye(WIDTH)).T
    # All but the direction that crosses epsilon (the smallest of twelve) is protected.
    assert (after - before).norm() < 0.05 * changed.norm()
    if not bias:
        M = method.bases["0"][0]
        assert M.shape == (WIDTH, 11)
        assert ((first.weight - weight) @ M).abs().max() < 1e-5 * changed.abs().max()


def test_gpm_bases_stay_orthonormal_in_the_weights_precision() -> None:
    method = GPM(convnet(), samples=20, bias=True, threshold=0.9, until=1.0, tasks=3)
    ranks = []
    for task in stream():
        learn(method, [task])
        ranks.append([int(M.any(1).sum()) for M in method.bases.values()])
        for M in method.bases.values():
            for group in M:
                real = group[:, group.any(0)]
                assert real.shape[1] > 0
                torch.testing.assert_close(real.T @ real, torch.eye(real.shape[1]), rtol=0, atol=2e-6)
    assert all(a <= b for earlier, later in pairwise(ranks) for a, b in zip(earlier, later))


def test_gpm_reads_a_layers_inputs_through_the_tasks_wiring() -> None:
    plain, encoded = (learn(GPM(mlp(), encode=e, samples=60, threshold=0.9), stream()[:1], steps=1) for e in (0, 1))
    assert isinstance(encoded, GPM)
    assert isinstance(plain, GPM)
    assert encoded.wiring is not None
    met: list[Tensor] = []
    second: Any = encoded.model[2]  # type: ignore[index]
    site = second.__dict__["forward"]
    with encoded.wiring.task(0), torch.no_grad():
        hidden = encoded.model[1](encoded.model[0](stream()[0].train[0]))  # type: ignore[index]
        order = encoded.wiring._wiring("2").index(site, hidden.device)
        assert order is not None
        met.append(hidden[:, order.forward])
        torch.testing.assert_close(second(hidden), F.linear(met[0], second.weight, second.bias))
    expected = published_rule(None, met[0].double().T, 0.9)
    torch.testing.assert_close(span(encoded.bases["2"][0]).double(), span(expected), rtol=0, atol=1e-5)
    assert torch.equal(encoded.bases["0"], plain.bases["0"])  # the raw input is never permuted


def test_gpms_threshold_grows_with_the_tasks() -> None:
    """epsilon + (until - epsilon) t / tasks, t from 0: three tasks of one model against `grow` itself."""
    tasks, model = stream(), nn.Sequential(nn.Linear(WIDTH, CLASSES, bias=False))
    method = GPM(model, threshold=0.6, until=0.9, tasks=3, samples=60)
    M = torch.zeros(WIDTH, 0, dtype=torch.float64)
    for t, task in enumerate(tasks):
        learn(method, [task], steps=1)
        R = task.train[0].double().T
        M = grow(M, R @ R.T, 0.6 + 0.1 * t, first=t == 0)
        torch.testing.assert_close(span(method.bases["0"][0]).double(), span(M), rtol=0, atol=1e-5)


def test_gpm_draws_its_samples_by_seed_and_task() -> None:
    def basis(seed: int) -> Tensor:
        method = GPM(nn.Sequential(nn.Linear(WIDTH, CLASSES)), samples=5, threshold=1.0)
        return span(learn(method, stream()[:1], seed=seed, steps=0).bases["0"][0])  # type: ignore[attr-defined]

    assert torch.equal(basis(0), basis(0))
    assert not torch.allclose(basis(0), basis(1))


def test_gpm_holds_what_it_cannot_project_after_the_first_task() -> None:
    class WithBatchNorm(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, CLASSES))

    method = learn(GPM(WithBatchNorm(), samples=30), stream(split=True)[:1])
    norm, head = method.model[1], method.model[3]  # type: ignore[index]
    learned = norm.weight.clone()
    assert not learned.eq(1).all()
    assert norm.running_mean is None  # the batch's own statistics, in evaluation too
    learn(method, stream(split=True)[1:2])
    assert torch.equal(norm.weight, learned)
    assert method.model[0].bias.eq(0).all()  # type: ignore[index]
    assert not head.bias[2:4].eq(0).any()  # a split head is trained plainly, with its bias
    assert method.bases["3"].shape[-1] == 0  # type: ignore[attr-defined]
    assert method.predict(stream()[0].test[0], stream()[0]).shape == (60, CLASSES)


# ---- OWM ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 15), st.sampled_from([1.0, 1e-2, 1e-5]))
def test_owms_block_update_is_one_position_after_another(seed: int, dim: int, rows: int, alpha: float) -> None:
    source = torch.Generator().manual_seed(seed)
    R = torch.randn(rows, 2, dim, generator=source, dtype=torch.float64)
    A = torch.randn(2, dim, dim, generator=source, dtype=torch.float64)
    P = torch.linalg.inv(torch.eye(dim, dtype=torch.float64) + A @ A.mT)
    expected = P.clone()
    for row in R:
        for g in range(2):
            k = expected[g] @ row[g]
            expected[g] -= torch.outer(k, k) / (alpha + row[g] @ k)
    close(P, R, torch.tensor(alpha, dtype=torch.float64))
    torch.testing.assert_close(P, expected, rtol=1e-6, atol=1e-8)
    assert torch.linalg.eigvalsh(P).min() > -1e-9


@shared_or_split
def test_owm_trains_as_published(split: bool) -> None:
    """A convolution, its patches one after another, and two linear layers; momentum and clipping as the authors'."""
    tasks = [moved(t, torch.float64) for t in stream(split, tasks=2)]

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(1, (1, SIDE, SIDE)),
            nn.Conv2d(1, 4, 2, stride=2, padding=1, bias=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(36, 12, bias=False),
            nn.ReLU(),
            nn.Linear(12, CLASSES, bias=False),
        ).double()

    with torch.random.fork_rng():
        model, bare = network(), network()
    method = OWM(model, momentum=0.9, clip=0.5, lr=0.02)
    learn(method, tasks, steps=20)

    weights = list(bare.parameters())
    P = [torch.eye(n, dtype=torch.float64) for n in (4, 36, 12)]
    for task in tasks:
        velocity = [torch.zeros_like(w) for w in weights]
        for i, (x, y) in enumerate(list(batches(task, batch_size=10, steps=STEPS, seed=0))[:20]):
            inputs = [bare[:1](x), bare[:4](x), bare[:6](x)]
            own = list(range(CLASSES)) if task.classes is None else list(task.classes)
            gradients = plainly(F.cross_entropy(bare(x)[:, own], y - own[0]), weights)
            for layer, base in enumerate((1e-5, 1e-2, 0.1)):
                if split and layer == 2:
                    continue
                alpha, mean = base ** (i / STEPS), inputs[layer].detach().mean(0)
                if layer == 0:
                    padded = F.pad(mean, (1, 1, 1, 1))
                    rows = [
                        padded[:, 2 * a : 2 * a + 2, 2 * b : 2 * b + 2].reshape(-1) for a in range(3) for b in range(3)
                    ]
                else:
                    rows = [mean]
                for r in rows:
                    k = P[layer] @ r
                    P[layer] = P[layer] - torch.outer(k, k) / (alpha + r @ k)
                G = gradients[layer]
                gradients[layer] = (G.reshape(len(G), -1) @ P[layer]).reshape(G.shape)
            norm = sum(float((g**2).sum()) for g in gradients) ** 0.5
            for w, g, v in zip(weights, gradients, velocity):
                v.mul_(0.9).add_(g * min(1.0, 0.5 / (norm + 1e-6)))
                w.data -= 0.02 * v
    for ours, theirs in zip(model.parameters(), weights):
        torch.testing.assert_close(ours.data, theirs.data, rtol=1e-7, atol=1e-9)
    for ours, theirs in zip(method.P.values(), P):
        torch.testing.assert_close(ours[0], theirs, rtol=1e-5, atol=1e-8)


def test_owm_closes_the_directions_of_old_inputs() -> None:
    tasks = stream(tasks=2)
    method = learn(OWM(mlp()), tasks[:1])
    first: Any = method.model[0]  # type: ignore[index]
    mean, weight, bias = tasks[0].train[0].mean(0), first.weight.clone(), first.bias.clone()
    learn(method, tasks[1:])
    moved = first.weight - weight
    assert (moved @ mean).norm() < 0.01 * moved.norm() * mean.norm()
    assert torch.equal(first.bias, bias)
    assert bias.eq(0).all()


# ---- LOS ---------------------------------------------------------------------------------------------------------


def dense_cayley(W: Tensor, G: Tensor, lr: float) -> Tensor:
    """The published step, its skew matrix and all."""
    W = W.detach()
    hat = G @ W.T - 0.5 * W @ (W.T @ G @ W.T)
    A = hat - hat.T
    alpha = min(lr, 1 / (float(A.abs().sum(0).max()) + 1e-8))
    Y = W - alpha * A @ W
    for _ in range(2):
        Y = W - alpha * A @ (W + Y) / 2
    return Y


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(6, 3), (3, 6), (5, 5), (700, 2)]),
    st.sampled_from([1e-3, 0.1, 10.0]),
    st.sampled_from([0.01, 1.0, 30.0]),
)
def test_loss_low_rank_step_is_the_dense_one(seed: int, shape: tuple[int, int], lr: float, size: float) -> None:
    """Also where W has more columns than rows, and W^T W is not the identity."""
    source = torch.Generator().manual_seed(seed)
    W = torch.stack([nn.init.orthogonal_(torch.empty(*shape), generator=source) for _ in range(2)]).double()
    G = size * torch.randn(2, *shape, generator=source, dtype=torch.float64)
    expected = torch.stack([dense_cayley(w, g, lr) for w, g in zip(W, G)])
    torch.testing.assert_close(cayley(W, G, lr), expected, rtol=1e-9, atol=1e-9)


def test_los_keeps_its_kernels_orthonormal() -> None:
    method = LOS(convnet(), tasks=3, memory=2, lr=0.4)

    def errors() -> Iterator[float]:
        for module in method.model.modules():
            if isinstance(module, nn.Conv2d):
                matrix = describe(module)
                assert matrix is not None
                for K in matrix.to_matrix(module.weight.detach()):  # (outputs, inputs)
                    short = K @ K.T if K.shape[0] <= K.shape[1] else K.T @ K
                    yield float((short - torch.eye(len(short))).abs().max())

    assert max(errors()) < 1e-6
    before = [m.weight.clone() for m in method.model.modules() if isinstance(m, nn.Conv2d)]
    learn(method, stream())
    after = [m.weight for m in method.model.modules() if isinstance(m, nn.Conv2d)]
    assert all((a - b).abs().max() > 0.05 for a, b in zip(after, before))
    assert max(errors()) < 0.05  # a hundred and eighty approximate steps


def test_los_starts_from_kernels_drawn_by_the_models_own_seed() -> None:
    def kernels(seed: int) -> Tensor:
        return vector(LOS(convnet(seed), tasks=3))

    assert torch.equal(kernels(0), kernels(0))
    assert not torch.equal(kernels(0), kernels(1))


def test_los_gives_every_task_coordinates_of_its_own() -> None:
    method = learn(LOS(mlp(), tasks=5), stream(), steps=5)
    assert isinstance(method, LOS)
    assert method.masks.sum(1).tolist() == [4] * 5  # floor(24 / 5)
    assert method.masks.sum(0).tolist() == [1] * 20 + [0] * 4
    head: Any = method.model[4]  # type: ignore[index]
    hidden: Any = method.model[:4]  # type: ignore[index]
    for t, task in enumerate(stream()):
        h = hidden(task.test[0])[:, 4 * t : 4 * t + 4]
        torch.testing.assert_close(predict(method, task), h @ head.weight[:, 4 * t : 4 * t + 4].T + head.bias)
    assert not head._forward_pre_hooks


def test_the_subspace_variant_trains_only_a_tasks_own_coordinates() -> None:
    method = learn(LOS(mlp(), tasks=3), stream()[:1], steps=5)
    before = [p.clone() for p in method.model.parameters()]
    learn(method, stream()[1:2])
    changed = [(p != q) for p, q in zip(method.model.parameters(), before)]
    own = torch.zeros(24, dtype=torch.bool)
    own[8:16] = True
    assert changed[2].any(1).tolist() == changed[3].tolist() == (own & changed[3]).tolist()
    assert changed[4].any(0).tolist() == (own & changed[4].any(0)).tolist()
    assert changed[3].any()
    assert changed[4].any()


@shared_or_split
def test_the_stiefel_variant_trains_as_published(split: bool) -> None:
    """Both gradients by hand: (1/k)(batch under P_k and its mask, memory of the drawn task under P_j and its mask)."""
    tasks = [moved(t, torch.float64) for t in stream(split)]
    method = LOS(convnet().double(), tasks=3, memory=2)
    learn(method, tasks[:2], steps=5)
    assert method.x.shape == (2, 4 if split else 2 * CLASSES, WIDTH)
    method.begin_task(tasks[2], STEPS, 0)
    bare = copy.deepcopy(method.model)
    names = [name for name, _ in bare.named_parameters()]

    def loss(x: Tensor, y: Tensor, t: int) -> Tensor:
        P = torch.zeros(24, dtype=torch.float64)
        P[8 * t : 8 * t + 8] = 1
        logits = bare[9](bare[:9](x) * P)
        own = list(tasks[t].classes or range(CLASSES))
        return F.cross_entropy(logits[:, own], y - own[0])

    drawn = set()
    for i, (x, y) in enumerate(list(batches(tasks[2], batch_size=10, steps=STEPS, seed=0))[:6]):
        j = int(method.draws[i]) % 2
        drawn.add(j)
        total = (loss(x, y, 2) + loss(method.x[j], method.y[j], j)) / 3
        for name, p, g in zip(names, bare.parameters(), plainly(total, list(bare.parameters()))):
            if name in ("1.weight", "4.weight"):
                groups = 2 if name == "4.weight" else 1
                stepped = [
                    dense_cayley(w.flatten(1).T, h.flatten(1).T, 0.1).T
                    for w, h in zip(p.chunk(groups), g.chunk(groups))
                ]
                p.data = torch.cat(stepped).reshape(p.shape).detach()
            else:
                p.data -= 0.1 * g
        assert float(method.observe(x, y, tasks[2])) == pytest.approx(total.item(), rel=1e-9)
    assert drawn == {0, 1}
    for ours, theirs in zip(method.model.parameters(), bare.parameters()):
        torch.testing.assert_close(ours.data, theirs.data, rtol=1e-8, atol=1e-9)


def test_los_keeps_samples_of_every_class_and_fills_up_smaller_tasks() -> None:
    parts = stream(split=True)
    two_classes, one_class = (
        parts[0],
        Task("one", *((x[y == 2], y[y == 2]) for x, y in (parts[1].train, parts[1].test)), (2,)),
    )
    method = LOS(convnet(), tasks=3, memory=2)
    learn(method, [two_classes, one_class, parts[2]], steps=8)
    assert method.y.tolist() == [[0, 0, 1, 1], [2, 2, -100, -100], [4, 4, 5, 5]]
    for x, y, task in zip(method.x, method.y, (two_classes, one_class, parts[2])):
        for sample, label in zip(x, y):
            if label >= 0:
                assert (task.train[0][task.train[1] == label] == sample).all(1).any()
    assert all(torch.isfinite(p).all() for p in method.model.parameters())


def test_los_chooses_its_variant_by_the_model() -> None:
    assert LOS(mlp(), tasks=3).variant == "subspace"
    assert LOS(convnet(), tasks=3).variant == "stiefel"
    assert LOS(convnet(), tasks=3, variant="subspace").kernels == []
