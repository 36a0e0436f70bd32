import pytest
import references
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rgo import Projection
from rgo.projection import Dense, Spectral

ALPHA = 0.3
FLOAT64 = {"dtype": torch.float64, "alpha": ALPHA}


def samples(count, dim, groups=1, seed=0, scale=1.0):
    return scale * torch.randn(groups, count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def learned(projection, *tasks):
    for task in tasks:
        total = projection.collect()
        for part in [task] if isinstance(task, torch.Tensor) else task:
            total.add(part)
        projection = projection.updated(total)
    return projection


def expected(dim, groups, *tasks, alpha=ALPHA):
    """alpha H^-1 and c by explicit sums and inverses, group by group."""
    H = torch.stack([alpha * torch.eye(dim, dtype=torch.float64) for _ in range(groups)])
    for task in tasks:
        for g in range(groups):
            for sample in task[g]:
                H[g] += torch.outer(sample.double(), sample.double())
    return H, *references.projector(H, alpha)


def applied_matrix(projection):
    """c P as gradients meet it: (groups, d, d), by projecting unit gradients."""
    d, n, g = projection.dim, projection.dim - projection.bias, projection.groups
    unit = torch.eye(d, dtype=projection.dtype).repeat(g, 1, 1)
    W, b = projection.applied.times(unit[..., :n], unit[..., n:] if projection.bias else None)
    return W if b is None else torch.cat([W, b], dim=2)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_P_is_the_explicit_inverse_in_float64_whatever_the_dtype_it_is_applied_in(groups, bias):
    first, second = samples(4, 5, groups), samples(7, 5, groups, seed=1)
    for dtype in (torch.float32, torch.float64):
        projection = Projection(5, groups=groups, bias=bias, alpha=ALPHA, dtype=dtype)
        projection = learned(projection, first, second)
        H, P, c = expected(5, groups, first, second)
        assert projection.P.dtype == projection.H.dtype == torch.float64
        assert projection.P.shape == ((5, 5) if groups == 1 else (groups, 5, 5))
        torch.testing.assert_close(projection.H.reshape(H.shape), H, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(projection.P.reshape(P.shape), P, rtol=1e-11, atol=1e-12)
        assert projection.c == pytest.approx(c, rel=1e-12)


def test_before_the_first_task_P_is_the_identity_and_nothing_is_held_or_multiplied():
    projection = Projection(4, groups=2)
    assert torch.equal(projection.P, torch.eye(4, dtype=torch.float64).repeat(2, 1, 1))
    assert projection.applied is None
    assert torch.equal(projection.H, torch.eye(4, dtype=torch.float64).repeat(2, 1, 1))
    assert projection.rank is None
    assert (projection.c, projection.free, projection.bytes()) == (1.0, 8.0, 0)


@pytest.mark.parametrize("solver", ["cholesky", "recursive"])
@pytest.mark.parametrize("groups", [1, 3])
def test_c_P_has_the_trace_of_the_identity_and_free_is_the_trace_of_P(solver, groups):
    projection = learned(Projection(6, groups=groups, bias=True, solver=solver, **FLOAT64), samples(9, 6, groups))
    trace = applied_matrix(projection).diagonal(dim1=1, dim2=2).sum()
    assert float(trace) == pytest.approx(6 * groups, rel=1e-12)
    assert projection.free == pytest.approx(float(projection.P.reshape(-1, 6, 6).diagonal(dim1=1, dim2=2).sum()))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tolerance", [0.0, 1e-12])
def test_a_gradient_and_a_row_are_multiplied_by_c_P(groups, bias, tolerance):
    task = samples(2, 12, groups)
    projection = learned(Projection(12, groups=groups, bias=bias, tolerance=tolerance, **FLOAT64), task)
    assert isinstance(projection.applied, Spectral if tolerance and groups == 1 else Dense)
    _, P, c = expected(12, groups, task)
    n = 12 - bias
    G = samples(5, 12, groups, seed=2)
    W, b = projection.applied.times(G[..., :n], G[..., n:] if bias else None)
    torch.testing.assert_close(W, (c * G @ P)[..., :n], rtol=1e-10, atol=1e-11)
    x = samples(7, n, groups, seed=3).transpose(0, 1)
    if groups == 1:
        px, pb = (None if t is None else t.reshape(1, 7, -1) for t in projection.applied.times_rows(x[:, 0]))
    else:
        px, pb = projection.applied.times(x.transpose(0, 1), torch.ones(groups, 7, 1).double() if bias else None)
    px = px.transpose(0, 1)
    rows = torch.cat([x, x.new_ones(7, groups, 1)], dim=2) if bias else x
    projected = torch.stack([c * rows[:, g] @ P[g] for g in range(groups)], dim=1)
    torch.testing.assert_close(px, projected[..., :n], rtol=1e-10, atol=1e-11)
    if bias:
        torch.testing.assert_close(b.squeeze(2), (c * G @ P)[..., n], rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(pb.squeeze(2).T, projected[..., n], rtol=1e-10, atol=1e-11)
    else:
        assert b is None
        assert pb is None


@pytest.mark.parametrize("solver", ["cholesky", "recursive"])
def test_updated_returns_another_projection_and_leaves_this_one_as_it_was(solver):
    projection = learned(Projection(5, bias=True, solver=solver, **FLOAT64), samples(3, 5))
    before = {k: v.clone() for k, v in projection.applied.tensors().items()}
    P, c = projection.P.clone(), projection.c
    task = projection.collect()
    task.add(samples(4, 5, seed=1))
    one, two = projection.updated(task), projection.updated(task)
    assert one is not projection
    assert torch.equal(one.P, two.P)
    assert not torch.equal(one.P, P)
    assert torch.equal(projection.P, P)
    assert projection.c == c
    assert all(torch.equal(before[k], v) for k, v in projection.applied.tensors().items())


@pytest.mark.parametrize("solver", ["cholesky", "recursive"])
def test_samples_added_to_a_task_after_updated_do_not_reach_the_projection(solver):
    projection = Projection(5, solver=solver, **FLOAT64)
    task = projection.collect()
    task.add(samples(4, 5, seed=1))
    projection = projection.updated(task)
    P = projection.P.clone()
    task.add(samples(4, 5, seed=2))
    assert torch.equal(projection.P, P)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("block", [1, 3, 64])
def test_the_recursion_in_any_blocks_is_algorithm_1_sample_by_sample(block, groups):
    first, second = samples(8, 5, groups), samples(7, 5, groups, seed=1)
    recursive = Projection(5, groups=groups, solver="recursive", block=block, **FLOAT64)
    recursive = learned(recursive, first, [second[:, :2], second[:, 2:]])
    literal = torch.eye(5, dtype=torch.float64)
    literal = torch.stack(
        [
            references.algorithm_1(references.algorithm_1(literal, first[g], ALPHA), second[g], ALPHA)
            for g in range(groups)
        ]
    )
    torch.testing.assert_close(recursive.P.reshape(literal.shape), literal, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_recursion_and_the_inverse_of_the_sum_are_the_same_P(groups):
    tasks = [samples(30, 6, groups, seed=s) for s in range(4)]
    dense = learned(Projection(6, groups=groups, bias=True, **FLOAT64), *tasks)
    recursive = learned(Projection(6, groups=groups, bias=True, solver="recursive", **FLOAT64), *tasks)
    torch.testing.assert_close(recursive.P, dense.P, rtol=1e-9, atol=1e-12)
    assert recursive.c == pytest.approx(dense.c, rel=1e-9)
    torch.testing.assert_close(applied_matrix(recursive), applied_matrix(dense), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(recursive.H, dense.H, rtol=1e-8, atol=1e-9)
    assert "H" not in recursive.state_dict()  # computed when asked for: the recursion keeps P alone


def test_the_recursion_refuses_pairs_of_factors():
    with pytest.raises(ValueError, match="recursion"):
        Projection(3, solver="recursive").collect().add(samples(1, 3), samples(1, 3))


def test_a_pair_of_factors_adds_their_product():
    left, right = samples(4, 3, 2), samples(4, 3, 2, seed=1)
    task = Projection(3, groups=2, **FLOAT64).collect()
    task.add(left, right)
    torch.testing.assert_close(task.total, left.transpose(1, 2) @ right)


def test_the_spectral_form_equals_the_dense_one_when_every_taken_direction_is_kept():
    task = samples(3, 20)
    spectral = learned(Projection(20, bias=True, tolerance=1e-10, **FLOAT64), task)
    dense = learned(Projection(20, bias=True, **FLOAT64), task)
    assert spectral.rank == 3
    assert spectral.c == pytest.approx(dense.c, rel=1e-12)
    torch.testing.assert_close(applied_matrix(spectral), applied_matrix(dense), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tolerance", [0.5, 0.05, 0.005])
def test_the_spectral_form_errs_by_no_more_than_the_tolerance_and_takes_c_from_what_it_applies(tolerance):
    scales = (0.3 ** torch.arange(40, dtype=torch.float64))[:, None]
    task = samples(40, 60) * scales * 3
    spectral = learned(Projection(60, bias=True, tolerance=tolerance, **FLOAT64), task)
    assert 0 < spectral.rank < 15
    applied = applied_matrix(spectral)[0]
    error = torch.linalg.matrix_norm(applied / spectral.c - spectral.P, ord=2)
    assert 0 < float(error) <= tolerance
    assert float(torch.trace(applied)) == pytest.approx(60, rel=1e-12)
    assert spectral.c < learned(Projection(60, bias=True, **FLOAT64), task).c


def test_the_spectral_form_gives_way_to_the_dense_one_from_a_quarter_of_the_width_on():
    fifth, quarter = samples(4, 20), samples(5, 20)
    assert learned(Projection(20, tolerance=1e-10, **FLOAT64), fifth).rank == 4
    wide = learned(Projection(20, tolerance=1e-10, **FLOAT64), quarter)
    assert wide.rank is None
    assert isinstance(wide.applied, Dense)
    assert torch.equal(applied_matrix(wide), applied_matrix(learned(Projection(20, **FLOAT64), quarter)))
    full = learned(Projection(20, tolerance=1e-10, **FLOAT64), fifth, samples(9, 20, seed=1))
    assert full.rank is None  # and it does so when later tasks fill it


def test_the_spectral_form_keeps_the_whole_curvature_so_that_errors_do_not_add_up():
    tasks = [samples(1, 20, seed=s, scale=0.05) for s in range(60)]
    coarse = learned(Projection(20, tolerance=0.1, **FLOAT64), *tasks)
    H, _, _ = expected(20, 1, *tasks)
    torch.testing.assert_close(coarse.H, H[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("tolerance", [0.0, 1e-10])
def test_c_P_is_held_and_multiplied_in_the_dtype_asked_for(dtype, rtol, tolerance):
    task = samples(3, 20)
    projection = learned(Projection(20, bias=True, alpha=ALPHA, tolerance=tolerance, dtype=dtype), task)
    wide = torch.promote_types(dtype, torch.float32)  # of what is small of P, and of the gradients it meets
    for key, t in projection.applied.tensors().items():
        assert t.dtype == (dtype if key in ("ww", "U") else wide)
    assert projection.H.dtype == torch.float64
    G = samples(4, 20, seed=1).to(wide)
    W, b = projection.applied.times(G[..., :19], G[..., 19:])
    assert W.dtype == b.dtype == wide
    _, P, c = expected(20, 1, task)
    exact = c * G.double() @ P
    error = torch.cat([W, b], dim=2).double() - exact
    assert float(error.norm()) <= rtol * float(exact.norm())


@pytest.mark.parametrize("tolerance", [0.0, 1e-10])
def test_moving_to_another_dtype_converts_what_is_applied_and_nothing_else(tolerance):
    projection = learned(Projection(20, bias=True, tolerance=tolerance, **FLOAT64), samples(3, 20))
    assert projection.to(torch.device("cpu"), torch.float64) is projection
    moved = projection.to(torch.device("cpu"), torch.float32)
    assert torch.equal(moved.H, projection.H)
    assert (moved.c, moved.rank) == (projection.c, projection.rank)
    for k, v in projection.applied.tensors().items():
        assert torch.equal(moved.applied.tensors()[k], v.float())
    assert projection.dtype == torch.float64


@pytest.mark.parametrize("size", [1e3, 1e5])
def test_when_rounding_eats_alpha_a_little_of_the_diagonal_is_added(size):
    task = torch.full((1, 1, 3), size, dtype=torch.float64)
    projection = Projection(3, alpha=1e-20, dtype=torch.float64)
    _, info = torch.linalg.cholesky_ex(task[0].T @ task[0] + 1e-20 * torch.eye(3))
    assert info > 0  # without the jitter there is no factorisation
    projection = learned(projection, task)
    free = torch.eye(3, dtype=torch.float64) - torch.full((3, 3), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(applied_matrix(projection)[0], 1.5 * free, rtol=0.02, atol=0.02)


def test_the_jitter_grows_until_it_suffices():
    projection = Projection(2, alpha=1e-3, dtype=torch.float64)
    task = projection.collect()
    task.total += torch.diag(torch.tensor([1.0, -1e-3 - 1e-11], dtype=torch.float64))  # 1e-14, 1e-12 do not suffice
    projection = projection.updated(task)
    assert torch.isfinite(projection.P).all()
    assert float(projection.P[1, 1]) == pytest.approx(1e-3 / (0.5e-10 * 1.001 - 1e-11), rel=0.05)


def test_a_curvature_that_is_not_positive_definite_raises_and_names_alpha():
    projection = Projection(3, alpha=0.01)
    task = projection.collect()
    task.add(samples(2, 3), -samples(2, 3))
    with pytest.raises(FloatingPointError, match=r"alpha = 0\.01"):
        projection.updated(task)
    assert (projection.c, projection.bytes()) == (1.0, 0)


@pytest.mark.parametrize("solver", ["cholesky", "recursive"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_curvature_that_is_not_finite_raises_and_loses_nothing(solver, bad):
    projection = learned(Projection(3, solver=solver, **FLOAT64), samples(2, 3))
    before = projection.P.clone()
    task = projection.collect()
    task.add(torch.tensor([[[1.0, bad, 0.0]]], dtype=torch.float64))
    with pytest.raises(FloatingPointError, match="not finite"):
        projection.updated(task)
    assert torch.equal(projection.P, before)


@pytest.mark.parametrize("solver", ["cholesky", "recursive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_projection_goes_on_bit_for_bit(solver, dtype, tmp_path):
    fresh = Projection(20, bias=True, solver=solver, alpha=ALPHA, dtype=dtype)
    projection = learned(fresh, samples(6, 20))
    torch.save(projection.state_dict(), tmp_path / "state.pt")
    restored = fresh.restored(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(restored.P, projection.P)
    assert restored.c == projection.c
    after = [learned(p, samples(5, 20, seed=1)) for p in (projection, restored)]
    assert torch.equal(after[0].P, after[1].P)
    for k, v in after[0].applied.tensors().items():
        assert torch.equal(after[1].applied.tensors()[k], v)


def test_a_restored_spectral_form_applies_the_same_bits():
    fresh = Projection(20, bias=True, tolerance=1e-6)
    projection = learned(fresh, samples(2, 20).float())
    restored = fresh.restored(projection.state_dict())
    assert restored.rank == projection.rank == 2
    G = samples(4, 20).float()
    for a, b in zip(*(p.applied.times(G[..., :19], G[..., 19:]) for p in (projection, restored))):
        assert torch.equal(a, b)
    projection.state_dict()["H"].zero_()
    assert float(restored.H.diagonal().sum()) > 0  # a copy, not an alias


def test_the_state_of_a_fresh_projection_restores_the_identity():
    fresh = Projection(3)
    used = learned(fresh, samples(2, 3))
    restored = used.restored(fresh.state_dict())
    assert restored.applied is None
    assert (restored.c, restored.bytes()) == (1.0, 0)


@pytest.mark.parametrize("solver", ["cholesky", "recursive"])
@pytest.mark.parametrize("groups", [1, 3])
def test_bytes_are_those_of_H_in_float64_and_of_c_P_however_many_tasks_follow(solver, groups):
    one = learned(Projection(6, groups=groups, solver=solver), samples(3, 6, groups))
    assert one.bytes() == groups * 36 * (8 + 4) == one.full_bytes()
    assert learned(one, *[samples(3, 6, groups, seed=s) for s in range(5)]).bytes() == one.bytes()
    half = learned(Projection(6, groups=groups, solver=solver, dtype=torch.bfloat16), samples(3, 6, groups))
    assert half.bytes() == groups * 36 * (8 + 2) == half.full_bytes()
    assert one.worst_bytes() > one.full_bytes()


def test_with_a_bias_its_column_of_c_P_is_held_once():
    projection = learned(Projection(6, bias=True), samples(3, 6))
    assert projection.bytes() == 36 * 8 + (25 + 5 + 1) * 4 <= projection.full_bytes()


def test_the_spectral_form_holds_rank_columns_in_place_of_c_P():
    projection = learned(Projection(40, tolerance=1e-10, dtype=torch.float64), samples(3, 40))
    assert projection.bytes() == 40 * 40 * 8 + (40 * 3 + 3 + 1) * 8


# ---- properties -----------------------------------------------------------------------------------------------------


@st.composite
def learnings(draw):
    dim, groups = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    seed, scale = draw(st.integers(0, 2**20)), draw(st.sampled_from([1e-3, 1.0, 30.0]))
    tasks = [samples(count, dim, groups, seed=seed + i, scale=scale) for i, count in enumerate(counts)]
    options = {
        "groups": groups,
        "bias": dim > 1 and draw(st.booleans()),
        "alpha": draw(st.sampled_from([1e-2, 1.0, 10.0])),
        "solver": draw(st.sampled_from(["cholesky", "recursive"])),
        "block": draw(st.integers(1, 5)),
        "dtype": torch.float64,
    }
    return Projection(dim, **options), tasks


properties = settings(max_examples=40, deadline=None, database=None, derandomize=True)


@properties
@given(learnings())
def test_P_is_symmetric_with_eigenvalues_between_nothing_and_one(learning):
    projection, tasks = learning
    P = learned(projection, *tasks).P
    torch.testing.assert_close(P, P.mT, rtol=1e-9, atol=1e-12)
    values = torch.linalg.eigvalsh(P)
    assert float(values.min()) > -1e-12
    assert float(values.max()) <= 1 + 1e-9


@properties
@given(learnings())
def test_the_trace_of_c_P_is_the_dimension(learning):
    projection, tasks = learning
    projection = learned(projection, *tasks)
    trace = float(applied_matrix(projection).diagonal(dim1=1, dim2=2).sum())
    assert trace == pytest.approx(projection.dim * projection.groups, rel=1e-8)
    assert projection.c >= 1 - 1e-12


@properties
@given(learnings(), st.randoms(use_true_random=False))
def test_the_order_of_samples_and_of_tasks_does_not_matter(learning, random):
    projection, tasks = learning
    everything = torch.cat(tasks, dim=1)
    order = list(range(everything.shape[1]))
    random.shuffle(order)
    shuffled = learned(projection, everything[:, order])
    straight = learned(projection, *tasks)
    torch.testing.assert_close(shuffled.P, straight.P, rtol=1e-5, atol=1e-8)


@properties
@given(learnings())
def test_more_curvature_never_frees_a_direction(learning):
    projection, tasks = learning
    previous = torch.eye(projection.dim, dtype=torch.float64)
    for task in tasks:
        projection = learned(projection, task)
        assert float(torch.linalg.eigvalsh(previous - projection.P).min()) >= -1e-9
        previous = projection.P
