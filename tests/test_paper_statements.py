"""The paper's statements, one by one: what its theorems, lemmas and claims say, checked where `rgo` computes them.

Equations, theorems and lemmas are numbered as LaTeX numbers them: equations (1) to (31) through text and appendix,
theorems and lemmas on one counter (Theorems 1 to 3 in the text, Lemma 4 to Lemma 8 in the appendix). A statement
that holds only under a condition has a second test, in which the condition is broken and the statement fails.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rgo
from rgo import curvature

seeds = st.integers(0, 2**31 - 1)
quick = settings(max_examples=40, deadline=None, derandomize=True)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int | torch.Generator) -> Tensor:
    source = generator(seed) if isinstance(seed, int) else seed
    return torch.randn(*shape, dtype=torch.float64, generator=source)


def orthogonal(n: int, seed: int | torch.Generator) -> Tensor:
    return torch.linalg.qr(normal(n, n, seed=seed))[0]


def projection_of(g: Tensor, **options) -> rgo.Projection:
    """The library's P after one task whose samples are the rows of g."""
    p = rgo.Projection(g.shape[1], dtype=torch.float64, **options)
    task = p.collect()
    task.add(g.unsqueeze(0))
    return p.updated(task)


def largest(P: Tensor, H: Tensor) -> float:
    """The paper's sigma_m(P H): the largest eigenvalue of a product of two symmetric matrices, H positive definite."""
    L = torch.linalg.cholesky(H)
    return float(torch.linalg.eigvalsh(L.T @ P @ L)[-1])


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def regression(n: int, outputs: int = 1, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(n, outputs, bias=False, dtype=torch.float64)


def learn(learner: rgo.RGO, task: int, x: Tensor, y: Tensor) -> None:
    """A task whose training is over before it begins: only its curvature matters."""
    learner.begin_task(task)
    learner.end_task([(x, y)])


# ---- Theorem 1: the learning rate ---------------------------------------------------------------------------------


def test_the_expected_learning_rate_of_an_isotropic_gradient_is_kept_when_trace_P_is_dim_P():
    """Theorem 1, equations (14) to (18): E[g^T cP g] = E[g^T g] with c = dim(P) / trace(P)."""
    n = 6
    p = projection_of(3 * normal(4, n, seed=0))
    g = normal(200_000, n, seed=1)
    plain = g.square().sum(1).mean()
    projected = ((g @ (p.c * p.P)) * g).sum(1).mean()
    assert projected / plain == pytest.approx(1, abs=0.01)
    assert ((g @ p.P) * g).sum(1).mean() / plain < 0.6  # P without its normalisation would learn more slowly
    assert p.c * p.P.trace() == pytest.approx(n)
    assert p.applied.ww[0].trace() == pytest.approx(n)  # and so for the matrix that is really multiplied


def test_equal_second_moments_are_all_of_isotropy_that_theorem_1_needs():
    """Theorem 1, equation (17), uses E[x_i^2] alone: for the axes of any orthogonal frame it holds exactly."""
    n = 7
    p = projection_of(normal(5, n, seed=2))
    frame = orthogonal(n, seed=3)
    decrease = torch.einsum("in,nm,im->i", frame, p.c * p.P, frame)
    assert decrease.mean() == pytest.approx(1, abs=1e-12)
    assert decrease.std() > 0.1  # only the mean is kept


def test_a_gradient_that_is_not_isotropic_learns_slower_where_old_tasks_live_and_faster_elsewhere():
    """Theorem 1's condition: along what old tasks use the rate falls, along what they leave free it rises."""
    g = torch.zeros(1, 4, dtype=torch.float64)
    g[0, 0] = 3.0
    cP = (p := projection_of(g)).c * p.P
    assert cP[0, 0] < 0.2
    assert cP[1, 1] > 1.2


def test_isotropy_is_invariant_under_orthogonal_maps():
    """Lemma 4. Every moment of a rotated isotropic vector is the same; of independent equal components only two."""
    n, draws = 4, 400_000
    V = orthogonal(n, seed=4)
    radius = torch.rand(draws, 1, dtype=torch.float64, generator=generator(5)) + 0.5
    x = radius * F.normalize(normal(draws, n, seed=6), dim=1)
    cube = 2 * torch.rand(draws, n, dtype=torch.float64, generator=generator(7)) - 1
    for power, tolerance in ((2, 0.02), (4, 0.03)):
        assert torch.allclose((x @ V.T).pow(power).mean(0), x.pow(power).mean(0), rtol=tolerance)
    assert torch.allclose((cube @ V.T).pow(2).mean(0), cube.pow(2).mean(0), rtol=0.02)
    assert not torch.allclose((cube @ V.T).pow(4).mean(0), cube.pow(4).mean(0), rtol=0.1)


def test_the_trace_is_invariant_under_orthogonal_maps_and_c_with_it():
    """Lemma 5: rotating the samples rotates P; its trace, the free directions and c stay."""
    g, V = normal(5, 6, seed=8), orthogonal(6, seed=9)
    p, rotated = projection_of(g), projection_of(g @ V.T)
    assert torch.allclose(rotated.P, V @ p.P @ V.T)
    assert rotated.c == pytest.approx(p.c, rel=1e-12)
    assert rotated.free == pytest.approx(float(torch.linalg.eigvalsh(p.P).sum()), rel=1e-12)


# ---- Theorem 2: the bound -----------------------------------------------------------------------------------------


class Descent:
    """Gradient descent on one regression task with RGO, after another task: what the proof of Theorem 2 adds up."""

    def __init__(self, lr: float, time: float = 2.0, scale: float = 0.3) -> None:
        n, steps = 8, max(1, round(time / lr))
        model = regression(n)
        learner = rgo.RGO(model, curvature="squared-error")
        learn(learner, 0, normal(5, n, seed=10), normal(5, 1, seed=11))
        self.p = learner.projections["model"]
        self.cP, self.H = self.p.c * self.p.P, self.p.H
        x, y = scale * normal(6, n, seed=12), normal(6, 1, seed=13)
        start = model.weight.detach().clone()
        learner.begin_task(1)
        descents, moved = [], []
        for i in range(steps):
            model.weight.grad = None
            loss = (model(x) - y).square().sum() / 2
            if i == 0:
                self.first_loss = float(loss.detach())
            loss.backward()
            g = ((model(x) - y).T @ x).detach().squeeze(0)
            descents.append(lr * g @ model.weight.grad.squeeze(0))  # eta g^T cP g
            moved.append(lr * g)
            with torch.no_grad():
                model.weight -= lr * model.weight.grad
        self.last_loss = float((model(x) - y).square().sum().detach() / 2)
        self.promised = float(torch.stack(descents).sum())  # the right-hand side of equation (22)
        self.moved = torch.stack(moved)
        step = (model.weight - start).detach().squeeze(0)
        self.forgetting = float(step @ self.H @ step / 2)  # F_k^RLL, equation (4)
        self.sigma = largest(self.cP, self.H)
        self.bound = steps * lr * self.sigma * self.first_loss / 2
        self.half_way = float(steps * self.sigma * torch.einsum("in,nm,im->", self.moved, self.cP, self.moved) / 2)


@pytest.mark.parametrize("lr", [0.1, 0.02, 0.004])
def test_forgetting_stays_below_the_upper_bound_when_steps_are_small(lr):
    """Theorem 2, equations (8), (20), (21), (23), along a run of the library."""
    run = Descent(lr)
    total = run.moved.sum(0)
    assert run.forgetting == pytest.approx(float(total @ run.cP @ run.H @ run.cP @ total / 2), rel=1e-9)
    assert run.forgetting <= float(run.sigma * total @ run.cP @ total / 2) * (1 + 1e-12)  # (20)
    assert run.forgetting <= run.half_way  # (21)
    assert run.forgetting <= run.bound  # (8)
    assert run.sigma == pytest.approx(run.p.c)  # cP H = c alpha I: the bound's factor is the library's c


def test_the_violation_of_the_loss_inequality_vanishes_with_the_step():
    """Equation (22) neglects the second order in the step: what it promises too much falls in proportion to lr."""
    runs = [Descent(lr) for lr in (0.04, 0.02, 0.01, 0.005)]
    excess = [run.promised - (run.first_loss - run.last_loss) for run in runs]
    assert all(e > 0 for e in excess)  # convex: at any finite step (22) is promised a little too much
    for a, b in pairwise(excess):
        assert b / a == pytest.approx(0.5, abs=0.05)
    assert excess[-1] < 0.01 * runs[-1].first_loss


def test_at_a_large_step_the_loss_inequality_and_the_upper_bound_both_fail():
    """The condition of Theorem 2. L(t) = t^2 / 2 from t = 1 with lr 1: the new task is solved in one step.

    The inequality (22) says 1/2 >= 1, and F = H / 2 is twice the bound H / 4.
    """
    model, lr = regression(1), 1.0
    learner = rgo.RGO(model, curvature="squared-error")
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(one)
    learn(learner, 0, one, one)
    p = learner.projections["model"]
    learner.begin_task(1)
    first_loss = (model(one) - zero).square().sum() / 2
    first_loss.backward()
    loss, step = float(first_loss.detach()), float(lr * model.weight.grad)
    assert float(model.weight.detach()) - step == 0  # trained perfectly
    assert loss == 0.5
    assert step * 1.0 > loss  # eta g^T cP g, with g = 1
    H = float(p.H)
    bound = 1 * lr * largest(p.c * p.P, p.H) * loss / 2
    assert step * H * step / 2 == pytest.approx(2 * bound)


@quick
@given(seeds, st.integers(1, 5), st.integers(1, 6))
def test_the_square_of_a_sum_in_the_P_norm_is_at_most_n_times_the_sum_of_squares(seed, n, dim):
    """Lemma 8, with the P that the library applies; equality when all vectors are the same."""
    source = generator(seed)
    p = projection_of(normal(3, dim, seed=source))
    v = normal(n, dim, seed=source)
    squares = torch.einsum("in,nm,im->i", v, p.P, v)
    assert v.sum(0) @ p.P @ v.sum(0) <= n * squares.sum() * (1 + 1e-12)
    same = v[:1].expand(n, dim)
    assert same.sum(0) @ p.P @ same.sum(0) == pytest.approx(float(n**2 * squares[0]), rel=1e-9)


# ---- Equations (9) and (10): the best P ---------------------------------------------------------------------------


def feasible(n: int, source: torch.Generator, rank: int | None = None) -> Tensor:
    """A random positive semidefinite P with trace(P) = dim(P); it commutes with nothing."""
    A = normal(n, rank or n, seed=source) * torch.rand(rank or n, dtype=torch.float64, generator=source).exp2()
    P = A @ A.T
    return P * (n / P.trace())


@quick
@given(seeds, st.integers(2, 6), st.integers(1, 8))
def test_no_feasible_P_has_a_smaller_bound_than_the_normalised_inverse_curvature(seed, n, samples):
    """Problem (9) and its solution (10), against P that share no eigenvectors with H.

    The paper solves the case of common eigenvectors. In general: with s = sigma_m(P H), P <= s H^-1 as matrices,
    so n = trace(P) <= s trace(H^-1), with equality for P = s H^-1 alone.
    """
    source = generator(seed)
    p = projection_of(2 * normal(samples, n, seed=source))
    H, best = p.H, p.c * p.P
    least = largest(best, H)
    inverse = torch.linalg.inv(H)
    assert best.trace() == pytest.approx(n)
    assert torch.allclose(best, n / inverse.trace() * inverse)
    assert least == pytest.approx(float(n / inverse.trace()), rel=1e-9)
    for rank in (1, n, 3 * n):
        assert largest(feasible(n, source, rank), H) >= least * (1 - 1e-9)
    for size in (1e-3, 0.1, 0.5):  # neighbours of the solution, commuting or not
        assert largest((1 - size) * best + size * feasible(n, source), H) >= least * (1 - 1e-9)
    values, U = torch.linalg.eigh(H)
    weights = torch.rand(n, dtype=torch.float64, generator=source) + 1e-3
    assert largest(U @ torch.diag(n * weights / weights.sum()) @ U.T, H) >= least * (1 - 1e-9)
    assert torch.allclose(torch.linalg.eigvalsh(best).flip(0), n / (values * (1 / values).sum()))  # (26)


def test_the_identity_is_worse_than_the_solution_as_soon_as_the_curvature_is_not_isotropic():
    """Problem (9): plain gradient descent is P = I, which is feasible and has a larger bound."""
    p = projection_of(normal(3, 6, seed=20))
    assert largest(eye(6), p.H) > 2 * largest(p.c * p.P, p.H)


def test_among_all_directions_with_the_same_effect_on_the_new_task_P_g_forgets_least():
    """Problem (5) for one step: minimise d^T H d / 2 under a given first-order decrease g^T d; d is H^-1 g."""
    p = projection_of(2 * normal(5, 6, seed=21))
    H, g = p.H, normal(6, seed=22)
    d = p.P @ g
    least = d @ H @ d / (g @ d) ** 2
    others = torch.cat([normal(500, 6, seed=23), d + 0.05 * normal(500, 6, seed=24), g[None]])
    forgotten = torch.einsum("in,nm,im->i", others, H, others) / (others @ g) ** 2
    assert bool((forgotten >= least * (1 - 1e-12)).all())
    assert forgotten[-1] > 1.2 * least  # the plain gradient


def test_P_turns_the_gradient_without_closing_any_direction():
    """Section 3.3: "without reducing the search region". cP stays positive definite, so it is zero only with g."""
    model = regression(5, 2)
    learner = rgo.RGO(model)
    free = []
    for task in range(4):
        learn(learner, task, normal(20, 5, seed=task), torch.arange(20) % 2)
        free.append(learner.projections["model"].free)
    assert torch.linalg.eigvalsh(learner.projections["model"].P)[0] > 0
    assert free == sorted(free, reverse=True)  # the limitation section: what is free only ever becomes less
    assert free[-1] > 0


# ---- Theorem 6: F and F^RLL ---------------------------------------------------------------------------------------


class Quadratics:
    """Tasks L_j = (t - t_j)^T H_j (t - t_j) / 2, with the sums of their first Hessians singular."""

    def __init__(self, tasks: int = 4, n: int = 8, seed: int = 0, definite: bool = True, restrained: bool = True):
        source = generator(seed)
        self.n, sums = n, [torch.zeros(n, n, dtype=torch.float64)]
        for _ in range(1, tasks):
            if definite:
                A = normal(n, 2, seed=source)
                sums.append(sums[-1] + A @ A.T)
            else:  # any symmetric matrix with a null vector: no H_j vanishes on the step by itself
                u = F.normalize(normal(n, 1, seed=source), dim=0)
                A, Q = normal(n, n, seed=source), eye(n) - u @ u.T
                sums.append(Q @ (A + A.T) @ Q)
        self.sums = sums  # sums[k - 1] = H_1 + ... + H_(k-1)
        self.hessians = [b - a for a, b in pairwise(sums)]
        self.optima = [normal(n, seed=source)]  # theta_1*
        for k in range(2, tasks + 1):
            values, vectors = torch.linalg.eigh(sums[k - 1])
            null = vectors[:, values.abs() < 1e-9] if restrained else vectors
            self.optima.append(self.optima[-1] + null @ normal(null.shape[1], seed=source))

    def D(self, k: int) -> Tensor:
        return sum(H @ (self.optima[k - 1] - t) for H, t in zip(self.hessians[: k - 1], self.optima))

    def loss(self, k: int, t: Tensor) -> Tensor:
        """F_k of equation (3), without the tasks' own constants."""
        return sum((t - o) @ H @ (t - o) / 2 for H, o in zip(self.hessians[: k - 1], self.optima))

    def recursive_loss(self, k: int, t: Tensor) -> Tensor:
        """F_k^RLL of equation (4)."""
        d = t - self.optima[k - 2]
        return d @ self.sums[k - 1] @ d / 2


@pytest.mark.parametrize("definite", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_the_pulls_of_all_old_tasks_cancel_when_every_task_was_fully_trained(seed, definite):
    """Lemma 7: if (H_1 + ... + H_(k-1)) (t_k - t_(k-1)) = 0 for every k, then D(k) = 0 for every k."""
    tasks = Quadratics(seed=seed, definite=definite)
    for k in range(2, 5):
        step = tasks.optima[k - 1] - tasks.optima[k - 2]
        assert step.norm() > 0.01
        assert (tasks.sums[k - 1] @ step).norm() < 1e-9
        assert tasks.D(k).norm() < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_old_tasks_and_the_recursive_least_loss_differ_by_a_constant(seed):
    """Theorem 6, equations (3), (4), (19): so they have the same minimisers."""
    tasks = Quadratics(seed=seed)
    for k in range(2, 5):
        t = normal(20, tasks.n, seed=seed)
        differences = torch.stack([tasks.loss(k, u) - tasks.recursive_loss(k, u) for u in t])
        assert differences.std() < 1e-9
        null = torch.linalg.eigh(tasks.sums[k - 1])[1][:, 0]
        minimiser = tasks.optima[k - 2] + null
        assert tasks.recursive_loss(k, minimiser) < 1e-9
        assert bool((torch.stack([tasks.loss(k, u) for u in t]) >= tasks.loss(k, minimiser)).all())


def test_without_full_training_the_two_losses_have_different_minimisers():
    """The condition of Theorem 6: an old optimum that was left makes F_k and F_k^RLL differ by a linear term."""
    tasks = Quadratics(restrained=False)
    assert tasks.D(4).norm() > 0.1
    differences = torch.stack([tasks.loss(4, u) - tasks.recursive_loss(4, u) for u in normal(20, tasks.n, seed=1)])
    assert differences.std() > 0.1


def test_with_a_vanishing_alpha_rgo_trains_in_the_null_space_that_theorem_6_asks_for():
    """Theorem 6's premise along runs of the library: over-parametrised regression tasks, alpha near zero."""
    n, alpha, model = 12, 1e-9, regression(12)
    learner = rgo.RGO(model, alpha=alpha, curvature="squared-error")
    data = [(normal(3, n, seed=30 + k), normal(3, 1, seed=40 + k)) for k in range(3)]
    optima = []
    for k, (x, y) in enumerate(data):
        learner.begin_task(k)
        before = model.weight.detach().clone()
        for _ in range(3000):
            model.weight.grad = None
            ((model(x) - y).square().sum() / 2).backward()
            with torch.no_grad():
                model.weight -= 0.02 * model.weight.grad
        assert (model(x) - y).abs().max() < 1e-3  # the new task is learned
        step = (model.weight.detach() - before).squeeze(0)
        if k > 0:
            old = learner.projections["model"].H - alpha * eye(n)
            assert (old @ step).norm() < 1e-6
            assert step.norm() > 0.1
        learner.end_task([(x, y)])
        optima.append(model.weight.detach().squeeze(0).clone())
    D = sum(x.T @ x @ (optima[-1] - t) for (x, _), t in zip(data, optima))
    assert D.norm() < 1e-6
    with learner.task(0), torch.no_grad():
        assert max(float((model(x) - y).abs().max()) for x, y in data) < 1e-3  # and nothing was forgotten


# ---- Theorem 3: one problem a layer -------------------------------------------------------------------------------


class Blocks:
    """Layers whose Hessian is M^T M, M = [M_1 ... M_L]: the paper's approximation (12) for all pairs of layers."""

    def __init__(self, seed: int = 0) -> None:
        source = generator(seed)
        self.dims = [3, 5, 4]
        self.M = [scale * normal(6, n, seed=source) for n, scale in zip(self.dims, (1.0, 3.0, 0.3))]
        self.layers = [projection_of(M) for M in self.M]  # H_l = alpha I + M_l^T M_l
        self.H = [p.H for p in self.layers]

    def bound(self, P: list[Tensor]) -> float:
        """The factor in equation (29): the largest of the layers' sigma_m(P_l H_l)."""
        return max(largest(p, H) for p, H in zip(P, self.H))


@pytest.mark.parametrize("seed", range(5))
def test_with_one_trace_constraint_a_layer_the_local_solutions_minimise_the_global_bound(seed):
    """Theorem 3, equations (28), (29): P_l = dim / trace(H_l^-1) H_l^-1, which is what the library applies."""
    blocks, source = Blocks(seed), generator(seed)
    local = [p.c * p.P for p in blocks.layers]
    assert [float(P.trace()) for P in local] == pytest.approx(blocks.dims)
    for _ in range(200):
        P = [feasible(n, source) for n in blocks.dims]
        assert blocks.bound(P) >= blocks.bound(local)
        near = [0.98 * a + 0.02 * b for a, b in zip(local, P)]
        assert blocks.bound(near) >= blocks.bound(local)
    assert blocks.bound(local) == pytest.approx(max(p.c for p in blocks.layers))


@pytest.mark.parametrize("seed", range(5))
def test_with_a_single_trace_constraint_for_the_network_one_common_c_is_better_than_one_a_layer(seed):
    """The condition of Theorem 3, which the paper does not print: sum of traces = sum of dims has another solution."""
    blocks, source = Blocks(seed), generator(seed)
    c = sum(blocks.dims) / sum(p.free for p in blocks.layers)
    common = [c * p.P for p in blocks.layers]
    assert sum(float(P.trace()) for P in common) == pytest.approx(sum(blocks.dims))
    assert blocks.bound(common) == pytest.approx(c)
    assert blocks.bound(common) < 0.9 * blocks.bound([p.c * p.P for p in blocks.layers])
    for _ in range(200):
        P = [feasible(n, source) * float(torch.rand(1, generator=source) + 0.1) for n in blocks.dims]
        scale = sum(blocks.dims) / sum(float(p.trace()) for p in P)
        assert blocks.bound([scale * p for p in P]) >= c


@pytest.mark.parametrize("seed", range(5))
def test_the_sum_over_layers_obeys_the_bound_when_layers_are_uncorrelated(seed):
    """Equation (29)'s last line drops the products of different layers: right on average over uncorrelated g_l.

    The exact averages over isotropic, independent g_l; for arbitrary g the number of layers enters as a factor.
    """
    blocks = Blocks(seed)
    P = [p.c * p.P for p in blocks.layers]
    sigma = blocks.bound(P)
    forgotten = sum(float((p @ M.T @ M @ p).trace()) for p, M in zip(P, blocks.M))
    assert forgotten <= sigma * sum(float(p.trace()) for p in P)
    g = [normal(2000, n, seed=seed + i) for i, n in enumerate(blocks.dims)]
    total = sum(v @ p @ M.T for v, p, M in zip(g, P, blocks.M)).square().sum(1)
    norm = sum(((v @ p) * v).sum(1) for v, p in zip(g, P))
    assert float(total.mean()) == pytest.approx(forgotten, rel=0.15)
    assert bool((total <= len(P) * sigma * norm).all())


def test_the_sum_over_layers_exceeds_the_bound_when_layers_move_together():
    """The condition of equation (29): two layers of one weight each, both pulled the same way, forget twice as much."""
    g, M, P = 1.0, 1.0, 1.0
    assert (M * P * g + M * P * g) ** 2 > (P * M * M) * (g * P * g + g * P * g)
    assert (M * P * g + M * P * g) ** 2 == 2 * (P * M * M) * (g * P * g + g * P * g)


# ---- Algorithm 1 --------------------------------------------------------------------------------------------------


def algorithm_1(g: Tensor, alpha: float) -> Tensor:
    """Lines 9 to 11 of the paper, letter by letter."""
    P = eye(g.shape[1])
    for row in g:
        k = P @ row / (alpha + row @ P @ row)
        P = P - torch.outer(k, row @ P)
    return P


@pytest.mark.parametrize("alpha", [0.01, 1.0, 7.0])
def test_algorithm_1_computes_the_inverse_of_the_accumulated_curvature_in_any_order(alpha):
    """Algorithm 1 and equation (13): P = alpha (alpha I + sum of g g^T)^-1."""
    g = normal(20, 6, seed=50)
    inverse = alpha * torch.linalg.inv(alpha * eye(6) + g.T @ g)
    for order in (torch.arange(20), torch.arange(20).flip(0), torch.randperm(20, generator=generator(51))):
        assert torch.allclose(algorithm_1(g[order], alpha), inverse, rtol=1e-9, atol=1e-12)
        for options in ({}, {"solver": "recursive", "block": 1}, {"solver": "recursive", "block": 7}):
            assert torch.allclose(projection_of(g[order], alpha=alpha, **options).P, inverse, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.01, 1.0, 7.0])
def test_the_factor_alpha_of_the_recursion_disappears_in_the_trace_normalisation(alpha):
    """Section 4.3 and equation (10): c P is the same for alpha H^-1 and for H^-1."""
    g = normal(20, 6, seed=52)
    H = alpha * eye(6) + g.T @ g
    inverse = torch.linalg.inv(H)
    for solver in ("recursive", "cholesky"):
        p = projection_of(g, alpha=alpha, solver=solver)
        assert torch.allclose(p.c * p.P, 6 / inverse.trace() * inverse, rtol=1e-9, atol=1e-12)


def test_what_a_task_taught_P_stays_when_the_next_is_added():
    """Algorithm 1 goes on from the last task's P: two tasks in turn are one task with the samples of both."""
    g = normal(12, 5, seed=53)
    for solver in ("recursive", "cholesky"):
        first = projection_of(g[:6], solver=solver)
        task = first.collect()
        task.add(g[None, 6:])
        assert torch.allclose(first.updated(task).P, algorithm_1(g, 1.0), rtol=1e-9)


def train(solver: str, block: int, alpha: float) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3))
    model.double()
    learner = rgo.RGO(model, solver=solver, block=block, alpha=alpha)
    for task in range(3):
        x, y = normal(12, 2, 5, 5, seed=task), torch.arange(12) % 3
        learner.begin_task(task)
        for _ in range(4):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.3 * p.grad
        learner.end_task([(x, y)])
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_training_with_the_recursion_and_with_the_inverse_ends_at_the_same_weights(alpha):
    """Algorithm 1, end to end: one by one, in blocks, and by one inversion a task."""
    expected = train("cholesky", 64, alpha)
    for block in (1, 5, 64):
        assert torch.allclose(train("recursive", block, alpha), expected, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(train("cholesky", 64, 10 * alpha), expected, rtol=1e-3)


def test_P_and_its_scale_are_frozen_while_a_task_trains():
    """Section 1 and Algorithm 1: the modification depends on no sample of the task, only on the tasks before."""
    model = regression(5, 2)
    learner = rgo.RGO(model)
    learn(learner, 0, normal(9, 5, seed=54), torch.arange(9) % 2)
    learner.begin_task(1)
    p = learner.projections["model"]
    P, c, applied = p.P.clone(), p.c, p.applied.ww.clone()
    for i in range(3):
        model.weight.grad = None
        F.cross_entropy(model(normal(4, 5, seed=i)), torch.tensor([0, 1, 1, 0])).backward()
        with torch.no_grad():
            model.weight -= model.weight.grad
        p = learner.projections["model"]
        assert torch.equal(p.P, P)
        assert torch.equal(p.applied.ww, applied)
        assert p.c == c


# ---- OWM ----------------------------------------------------------------------------------------------------------


def linear_curvature(rule: str, outputs: int, extractors: str = "mean") -> Tensor:
    model = regression(4, outputs)
    learner = rgo.RGO(model, curvature=rule, extractors=extractors)
    x = normal(15, 4, seed=60)
    learn(learner, 0, x, torch.arange(15) % outputs if rule == "true-class" else normal(15, outputs, seed=61))
    return learner.projections["model"].H


def test_rgo_is_owm_on_one_linear_layer_with_squared_error_and_one_output():
    """Section 7: "For a single-layer linear classifier y = Wx, OWM and RGO are equivalent": l'' = 1, dy/dW = x."""
    x = normal(15, 4, seed=60)
    owm = linear_curvature("inputs", 1)
    assert torch.allclose(owm, eye(4) + x.T @ x)
    for extractors in ("mean", "sum", "signed", "rows"):
        assert torch.allclose(linear_curvature("squared-error", 1, extractors), owm, rtol=1e-12)


def test_with_several_outputs_squared_error_is_still_owm_when_extractors_are_averaged_and_not_when_summed():
    """Section 7: o outputs bring o columns, each seen by one extractor in o; their average is x x^T again."""
    owm = linear_curvature("inputs", 3)
    assert torch.allclose(linear_curvature("squared-error", 3), owm, rtol=1e-12)
    assert not torch.allclose(linear_curvature("squared-error", 3, "sum"), owm, rtol=0.1)


def test_rgo_is_not_owm_on_one_linear_layer_with_cross_entropy_and_several_outputs():
    """The condition of section 7's equivalence: l'' weighs every sample by a_y (1 - a_y), so no scale repairs it."""
    x, y = normal(15, 4, seed=60), torch.arange(15) % 3
    owm, found = linear_curvature("inputs", 3), linear_curvature("true-class", 3)
    a = torch.softmax(x @ regression(4, 3).weight.detach().T, 1).gather(1, y[:, None])
    assert torch.allclose(found, eye(4) + (a * (1 - a) * x).T @ x / 3, rtol=1e-9)
    data, other = owm - eye(4), found - eye(4)
    ratio = other / data
    assert ratio.max() - ratio.min() > 0.1 * ratio.abs().mean()


# ---- Equations (11) to (13) and appendix B.1: the curvature -------------------------------------------------------


def logits(seed: int, rows: int = 6, classes: int = 5) -> Tensor:
    return 2 * normal(rows, classes, seed=seed)


def test_the_hessian_of_the_cross_entropy_in_the_logits_is_diag_a_minus_a_a_transposed():
    """Equations (30) and (31)."""
    for f, y in zip(logits(70), torch.arange(6) % 5):
        a = torch.softmax(f, 0)
        found = torch.autograd.functional.hessian(lambda f, y=y: F.cross_entropy(f[None], y[None]), f)
        assert torch.allclose(found, torch.diag(a) - torch.outer(a, a), atol=1e-14)


def test_the_hessian_in_the_logits_is_symmetric_diagonally_dominant_and_so_positive_semidefinite():
    """Appendix B.1: dominance is weak (every row sums to zero), so the root exists and is singular."""
    for f in logits(71):
        a = torch.softmax(f, 0)
        H = torch.diag(a) - torch.outer(a, a)
        assert torch.equal(H, H.T)
        others = H.abs().sum(1) - H.diagonal()
        assert torch.allclose(H.diagonal(), others, rtol=1e-9)
        values = torch.linalg.eigvalsh(H)
        assert values[0] == pytest.approx(0, abs=1e-15)
        assert values[1] > 0


def columns_of(rule: Callable, f: Tensor, y: Tensor, classes: Tensor | None = None) -> Tensor:
    classes = torch.ones(f.shape[1], dtype=torch.bool) if classes is None else classes
    return torch.stack(list(rule(f, y, classes)))  # (columns, B, C)


def test_the_softmax_columns_are_a_root_of_the_hessian():
    """Appendix B.1: [l'']^(1/2). Any V with V V^T = l'' serves, for only G^T l'' G is ever formed."""
    f, y = logits(72), torch.arange(6) % 5
    V = columns_of(curvature.softmax, f, y)
    a = torch.softmax(f, 1)
    assert torch.allclose(torch.einsum("vbi,vbj->bij", V, V), torch.diag_embed(a) - a[:, :, None] * a[:, None, :])
    active = torch.tensor([True, False, True, True, False])
    a = torch.softmax(f.masked_fill(~active, -math.inf), 1)  # a task that answers with some classes only
    V = columns_of(curvature.softmax, f, y, active)
    assert torch.allclose(torch.einsum("vbi,vbj->bij", V, V), torch.diag_embed(a) - a[:, :, None] * a[:, None, :])


def test_the_true_class_column_is_the_diagonal_element_of_the_ground_truth_label():
    """Appendix B.1: "we only used the diagonal element corresponding to the ground truth label"."""
    f, y = logits(73), torch.arange(6) % 5
    (V,) = columns_of(curvature.true_class, f, y)
    a = torch.softmax(f, 1)
    hessians = torch.diag_embed(a) - a[:, :, None] * a[:, None, :]
    expected = torch.zeros_like(hessians)
    rows = torch.arange(6)
    expected[rows, y, y] = hessians[rows, y, y]
    assert torch.allclose(V[:, :, None] * V[:, None, :], expected)


def test_the_sampled_column_averages_to_the_hessian():
    """Equation (31) as an expectation over labels drawn from the softmax, which is the Fisher matrix."""
    f = logits(74, rows=1)
    a = torch.softmax(f[0], 0)
    H = torch.diag(a) - torch.outer(a, a)
    errors = a - eye(5)  # row t: a - e_t
    assert torch.allclose(torch.einsum("t,ti,tj->ij", a, errors, errors), H, atol=1e-15)
    torch.manual_seed(0)
    (V,) = columns_of(curvature.sampled_class, f.expand(100_000, 5), torch.zeros(100_000, dtype=torch.int64))
    assert torch.allclose(V.T @ V / 100_000, H, atol=3e-3)


def test_the_gradient_in_a_hidden_layer_is_the_product_of_permutations_derivatives_and_weights():
    """Equation (11): g_l = g_L S_L D_L W_L ... S_(l+1) D_(l+1) W_(l+1), in the network that permutes its outputs.

    S acts on activations, which only changes the order in which a row vector meets D and W: g S D W.
    """
    source, n, task = generator(75), 6, 3
    S = eye(n)[rgo.permutation(task, n)]  # (S h)[i] = h[perm[i]]
    W = [normal(n, n, seed=source) for _ in range(3)]
    h = [normal(n, seed=source).requires_grad_()]
    D = []
    for w in W:
        z = w @ h[-1]
        D.append(torch.diag((z > 0).double()))
        h.append(torch.relu(z)[rgo.permutation(task, n)])
    g = torch.autograd.grad((h[-1] * (g_L := normal(n, seed=source))).sum(), h[0])[0]
    expected = g_L @ S @ D[2] @ W[2] @ S @ D[1] @ W[1] @ S @ D[0] @ W[0]
    assert torch.allclose(g, expected)


def test_the_curvature_is_the_average_of_the_extractors_blocks_of_the_exact_hessian_in_a_relu_network():
    """Equations (12) and (13): a ReLU network is piecewise linear in one layer's weights, so l'' is all there is.

    With the exact root of l'', H_l - alpha I is the average over extractors (rows of [W, b]) of their blocks of the
    Hessian of the summed loss: sharing one P means averaging Hessians, not gradients.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, y = normal(7, 3, seed=76), torch.arange(7) % 3
    plain = copy.deepcopy(model)
    learner = rgo.RGO(model, encode=False, curvature="softmax")
    learn(learner, 0, x, y)
    for name, p in learner.projections.items():
        layer = plain.get_submodule(name)
        theta = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()

        def loss(theta: Tensor, name: str = name) -> Tensor:
            weights = {f"{name}.weight": theta[:, :-1], f"{name}.bias": theta[:, -1]}
            return F.cross_entropy(torch.func.functional_call(plain, weights, x), y, reduction="sum")

        hessian = torch.autograd.functional.hessian(loss, theta)  # (o, d, o, d)
        average = torch.einsum("odoe->de", hessian) / len(theta)
        assert torch.allclose(p.H, eye(p.dim) + average, rtol=1e-9, atol=1e-12)


def test_opposed_extractors_cancel_in_the_mean_of_their_gradients_but_not_in_the_mean_of_their_curvatures():
    """Section 4.3, "calculated by the average of the gradients": averaged as vectors they would protect nothing."""
    x, y = normal(9, 4, seed=77), torch.arange(9) % 2

    def data_of_first_layer(extractors: str) -> Tensor:
        model = nn.Sequential(regression(4, 2), regression(2, 2))
        with torch.no_grad():
            model[1].weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))  # df_y / dh = +1, -1
        learner = rgo.RGO(model, encode=False, extractors=extractors)
        learn(learner, 0, x, y)
        return learner.projections["0"].H - eye(4)

    assert data_of_first_layer("signed").norm() < 1e-12
    assert data_of_first_layer("mean").norm() > 0.1


# ---- Appendix B.2: what it costs ----------------------------------------------------------------------------------


def test_P_has_the_size_of_the_layers_input():
    """Appendix B.2's table: a matrix (n1, n2) has P (n1, n1), a kernel (n1, n2, k, k) has (k^2 n1, k^2 n1).

    A bias, for which the table lists a P of its own, is one more input.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, bias=False), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(24, 7, bias=False), nn.Linear(7, 2)
    )
    sizes = {name: tuple(p.P.shape) for name, p in rgo.RGO(model).projections.items()}
    assert sizes == {"0": (75, 75), "1": (73, 73), "3": (24, 24), "4": (8, 8)}


def flops(model: nn.Module, x: Tensor) -> int:
    """Two per multiplication, in one forward and backward."""
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("rows", "factor"), [(1, 1), (4, 4), (200, 40)])
def test_modifying_the_gradient_costs_n1_squared_a_row_and_not_n1_squared_n2(rows, factor):
    """Appendix B.2: (P x) (dL/dy)^T takes n1^2 multiplications beyond backpropagation; n1^2 n2 is never exceeded."""
    sizes = (48, 64, 40)
    model = nn.Sequential(nn.Linear(48, 64, bias=False), nn.ReLU(), nn.Linear(64, 40, bias=False)).double()
    x = normal(rows, 48, seed=80)
    bare = flops(copy.deepcopy(model), x)
    learner = rgo.RGO(model)
    learner.begin_task(0)
    first = flops(model, x)
    learner.end_task([(x, torch.arange(rows) % 40)])
    learner.begin_task(1)
    extra = flops(model, x) - bare
    assert first == bare  # P = I is not multiplied
    if rows == 200:
        assert extra == 2 * (48**2 * 64 + 64**2 * 40)  # with more rows than outputs, G P is the cheaper order
    else:
        assert extra == factor * 2 * (48**2 + 64**2)
        assert extra < 2 * (48**2 * 64 + 64**2 * 40) / 8
    assert bare == rows * 2 * (2 * 48 * 64 + 3 * 64 * sizes[2])


def test_updating_P_by_the_recursion_costs_dim_squared_a_sample():
    """Appendix B.2: "the time complexity of updating P is obviously O(dim(P)^2)", per sample."""

    def cost(dim: int, samples: int) -> int:
        task = rgo.Projection(dim, solver="recursive", block=1).collect()
        with FlopCounterMode(display=False) as counter:
            task.add(normal(1, samples, dim, seed=0))
        return counter.get_total_flops()

    for dim in (32, 64, 128):
        assert cost(2 * dim, 1) / cost(dim, 1) == pytest.approx(4, rel=0.05)
        assert cost(dim, 6) == 6 * cost(dim, 1)
        assert cost(dim, 1) <= 2 * (2 * dim**2 + 2 * dim)


def test_memory_does_not_grow_with_the_number_of_tasks():
    """Section 3.2: "a space-invariant method"."""
    model = regression(6, 3)
    learner = rgo.RGO(model)
    kept = []
    for task in range(5):
        learn(learner, task, normal(9, 6, seed=task), torch.arange(9) % 3)
        kept.append(learner.memory())
    assert kept == [kept[0]] * 5
    assert kept[0] == 6 * 6 * (8 + 8)  # H and c P in float64


# ---- Section 4.1: the virtual feature encoding layer --------------------------------------------------------------


def test_the_feature_encoding_layer_adds_no_parameter_and_nothing_to_the_models_state():
    """Section 4.1: "without additional parameters", "does not require extra space"."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    names, modules = list(model.state_dict()), [type(m) for m in model.modules()]
    learner = rgo.RGO(model, project=False)
    for task in range(3):
        learner.begin_task(task)
        model(torch.randn(2, 4)).sum().backward()
        learner.end_task([(torch.randn(6, 4), torch.arange(6) % 2)])
    assert list(model.state_dict()) == names
    assert [type(m) for m in model.modules()] == modules
    assert learner.memory() == 0


def test_the_order_of_a_task_is_a_permutation_of_the_identity_seeded_by_the_task_alone():
    """Definition 4.1 and S_l(k): a rearrangement, the same whenever it is asked for, another for another task."""
    for width in (1, 2, 7, 64):
        for task in (0, 1, "spam"):
            order = rgo.permutation(task, width)
            assert torch.equal(order.sort().values, torch.arange(width))
            torch.manual_seed(width)  # no generator is involved
            assert torch.equal(rgo.permutation(task, width), order)
    orders = {tuple(rgo.permutation(task, 64).tolist()) for task in range(50)}
    assert len(orders) == 50


def test_whatever_can_be_represented_without_feature_encoding_can_be_represented_with_it():
    """Section 1: "such a strategy will not change the fitting ability": permute the columns of each weight."""
    torch.manual_seed(2)
    bare = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 8), nn.Linear(8, 3)
    ).double()
    model = copy.deepcopy(bare)
    x = normal(4, 1, 6, 6, seed=90)
    learner = rgo.RGO(model, project=False, raw=["0"])
    for task in range(3):
        learner.begin_task(task)
        with torch.no_grad():
            for name in ("2", "5", "6"):
                weight = bare.get_submodule(name).weight
                model.get_submodule(name).weight.copy_(weight[:, rgo.permutation(task, weight.shape[1])])
        assert torch.allclose(model(x), bare(x))
        model.load_state_dict(bare.state_dict())
        assert not torch.allclose(model(x), bare(x))  # with the very same weights it is another function
        learner.end_task([(x, torch.arange(4) % 3)])


# ---- Output side and input side -----------------------------------------------------------------------------------


def rows_and_bias(layer: nn.Module, part: str = "data") -> Tensor:
    """A layer's weight (or its gradient) as a matrix, the bias its last column."""
    weight, bias = (getattr(p, part) for p in (layer.weight, layer.bias))
    return torch.cat([weight.flatten(1), bias[:, None]], dim=1)


def follow(
    model: nn.Module,
    output_side: Callable[[nn.Module, Tensor, Callable[[Tensor], Tensor]], Tensor],
    x: Tensor,
    y: Tensor,
    encode: object = True,
) -> None:
    """Train with the library and, step by step, compare with the paper's network, which permutes its outputs.

    `output_side(plain copy, x, S)` is that network; S permutes the channels (dimension 1) of a map by the task.
    Compared are the functions, the gradients (through c P) and the curvature, in every step of three tasks.
    """
    plain = copy.deepcopy(model)
    learner = rgo.RGO(model, encode=encode)
    layers = {name: plain.get_submodule(name) for name in learner.projections}
    H = {name: eye(p.dim) for name, p in learner.projections.items()}
    differ = 0.0
    for task in range(3):

        def S(h: Tensor, task: int = task) -> Tensor:
            return h[:, rgo.permutation(task, h.shape[1])]

        learner.begin_task(task)
        for _ in range(3):  # in every step: the order does not change while a task trains
            plain.load_state_dict(model.state_dict())
            model.zero_grad()
            plain.zero_grad()
            found, expected = model(x), output_side(plain, x, S)
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
            differ = max(differ, float((expected - plain(x)).abs().max().detach()))
            F.cross_entropy(found, y).backward()
            F.cross_entropy(expected, y).backward()
            for name, p in learner.projections.items():
                projected = rows_and_bias(layers[name], "grad") @ (p.c * p.P)
                mine = rows_and_bias(model.get_submodule(name), "grad")
                assert torch.allclose(mine, projected, rtol=1e-8, atol=1e-12)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.2 * p.grad
        plain.load_state_dict(model.state_dict())
        learner.end_task([(x, y)])
        for i in range(len(x)):  # line 9 of Algorithm 1, sample by sample, in the paper's network
            f = output_side(plain, x[i : i + 1], S)[0]
            a = torch.softmax(f, 0)[y[i]].detach()
            plain.zero_grad()
            ((a * (1 - a)).sqrt() * f[y[i]]).backward()
            for name, layer in layers.items():
                G = rows_and_bias(layer, "grad")
                H[name] += G.T @ G / len(G)
        for name, p in learner.projections.items():
            assert torch.allclose(p.H, H[name], rtol=1e-8, atol=1e-12)
    assert differ > 1e-3  # the permutations were really there


def test_permuting_inputs_is_permuting_outputs_in_a_chain_of_dense_layers():
    """Section 4.1: the same function, gradients and curvature, in every step of three tasks."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)).double()

    def output_side(m: nn.Module, x: Tensor, S: Callable[[Tensor], Tensor]) -> Tensor:
        h = S(torch.relu(m[0](x)))
        h = S(torch.relu(m[2](h)))
        return m[4](h)

    follow(model, output_side, normal(8, 4, seed=91), torch.arange(8) % 3)


def conv_chain() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 6, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, 7), nn.ReLU(), nn.Linear(7, 3),
    ).double()  # fmt: skip


def conv_chain_output_side(m: nn.Module, x: Tensor, S: Callable[[Tensor], Tensor]) -> Tensor:
    h = S(m[2](torch.relu(m[0](x))))
    h = S(torch.relu(m[3](h)))  # channels, in front of the flatten
    h = S(torch.relu(m[6](h.flatten(1))))
    return m[8](h)


def test_permuting_inputs_is_permuting_outputs_in_a_chain_of_convolutions():
    """Section 4.1: channels permuted in front of a flatten are a block permutation of the flattened units."""

    def encode(task: int, name: str, width: int) -> Tensor:
        if name != "6":
            return rgo.permutation(task, width)
        channels = rgo.permutation(task, 6)  # six maps of 2 x 2 units
        return (channels[:, None] * 4 + torch.arange(4)).flatten()

    follow(conv_chain(), conv_chain_output_side, normal(6, 2, 6, 6, seed=92), torch.arange(6) % 3, encode)


def test_behind_a_flatten_the_library_permutes_unit_by_unit():
    """Section 4.1 leaves open what a feature is behind a flatten: the default is the units of the dense layer."""

    def output_side(m: nn.Module, x: Tensor, S: Callable[[Tensor], Tensor]) -> Tensor:
        h = S(m[2](torch.relu(m[0](x))))
        h = S(torch.relu(m[3](h)).flatten(1))
        h = S(torch.relu(m[6](h)))
        return m[8](h)

    x, y = normal(6, 2, 6, 6, seed=93), torch.arange(6) % 3
    follow(conv_chain(), output_side, x, y)
    with pytest.raises(AssertionError):
        follow(conv_chain(), conv_chain_output_side, x, y)


class Residual(nn.Module):
    """A stem, a block with an identity shortcut, one with a 1 x 1 shortcut to another width, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1)
        self.a1, self.a2 = nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)
        self.b1, self.b2 = nn.Conv2d(5, 6, 3, stride=2, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.short = nn.Conv2d(5, 6, 1, stride=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        h = torch.relu(self.a2(torch.relu(self.a1(h))) + h)
        h = torch.relu(self.b2(torch.relu(self.b1(h))) + self.short(h))
        return self.head(h.mean((2, 3)))


def residual_output_side(m: nn.Module, x: Tensor, S: Callable[[Tensor], Tensor]) -> Tensor:
    h = torch.relu(S(m.stem(x)))
    h = torch.relu(S(m.a2(torch.relu(S(m.a1(h))))) + h)
    h = torch.relu(S(m.b2(torch.relu(S(m.b1(h))))) + S(m.short(h)))
    return m.head(h.mean((2, 3)))


def test_permuting_inputs_is_permuting_outputs_in_a_residual_network_whose_layers_of_one_width_share_it():
    """Section 4.1: the identity shortcut carries S h in one network and h in the other."""
    torch.manual_seed(5)
    follow(Residual().double(), residual_output_side, normal(6, 2, 4, 4, seed=94), torch.arange(6) % 3)


class Shortcut(nn.Module):
    """One identity shortcut between dense layers of one width, or none."""

    def __init__(self, shortcut: bool) -> None:
        super().__init__()
        self.stem, self.block, self.head, self.shortcut = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3), shortcut

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        return self.head(torch.relu(self.block(h)) + (h if self.shortcut else 0))


@pytest.mark.parametrize(
    ("shortcut", "shared", "same"),
    [(False, False, True), (True, True, True), (True, False, False)],
    ids=["chain", "shared", "own"],
)
def test_output_side_permutations_may_differ_from_layer_to_layer_in_a_chain_but_not_around_a_shortcut(
    shortcut, shared, same
):
    """The condition of the above: each layer reads through its producer's permutation; a sum has two producers."""
    torch.manual_seed(6)
    plain = Shortcut(shortcut).double()
    x, task = normal(5, 4, seed=97), 1
    S = {name: rgo.permutation("all" if shared else name, 6) for name in ("stem", "block")}
    h = torch.relu(plain.stem(x))[:, S["stem"]]
    expected = plain.head(torch.relu(plain.block(h))[:, S["block"]] + (h if shortcut else 0))
    found = []
    for producer in ("stem", "block"):  # through whose permutation the head reads
        model = copy.deepcopy(plain)
        wiring = {"block": S["stem"], "head": S[producer]}
        learner = rgo.RGO(model, encode=lambda task, name, width, wiring=wiring: wiring.get(name), raw=["stem"])
        learner.begin_task(task)
        found.append(torch.allclose(model(x), expected))
    assert found[1] is same
    assert found[0] is shared


@pytest.mark.parametrize("rows", [3, 40])
def test_the_gradient_is_projected_on_the_side_of_the_inputs(rows):
    """Appendix B.2 prints P (dL/dy) x^T, where P would need n2 rows: it is c G P, which is dL/dy (x P)^T.

    Three rows take the path through x P, forty the one through G P.
    """
    n1, n2 = 5, 12
    model = regression(n1, n2)
    learner = rgo.RGO(model)
    learn(learner, 0, 2 * normal(10, n1, seed=95), torch.arange(10) % n2)
    p = learner.projections["model"]
    assert p.P.shape == (n1, n1)
    learner.begin_task(1)
    x, y = normal(rows, n1, seed=96), torch.arange(rows) % n2
    output = model(x)
    (delta,) = torch.autograd.grad(F.cross_entropy(leaf := output.detach().requires_grad_(), y), leaf)
    output.backward(delta)
    G = delta.T @ x
    assert torch.allclose(model.weight.grad, p.c * (G @ p.P), rtol=1e-9)
    assert torch.allclose(model.weight.grad, p.c * (delta.T @ (x @ p.P)), rtol=1e-9)
    assert not torch.allclose(model.weight.grad, G, rtol=1e-2)


# ---- What it is for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_for_the_same_progress_on_the_new_task_projected_steps_raise_the_old_quadratic_loss_less(seed):
    """Problem (5) on over-parametrised regression: the same loss of task 2, less of task 1 lost."""
    n, source = 12, generator(seed)
    old, new = ((normal(m, n, seed=source), normal(m, 1, seed=source)) for m in (7, 3))

    def damage(project: bool) -> float:
        model = regression(n)
        with torch.no_grad():
            model.weight.copy_(torch.linalg.lstsq(*old).solution.T)  # task 1 is solved
        learner = rgo.RGO(model, project=project, curvature="squared-error")
        learn(learner, 0, *old)
        learner.begin_task(1)
        for _ in range(5000):
            model.weight.grad = None
            loss = (model(new[0]) - new[1]).square().sum() / 2
            if loss < 1e-3:
                break
            loss.backward()
            with torch.no_grad():
                model.weight -= 0.01 * model.weight.grad
        assert loss < 1e-3
        return float((model(old[0]) - old[1]).square().sum().detach() / 2)

    assert damage(project=True) < 0.5 * damage(project=False)
