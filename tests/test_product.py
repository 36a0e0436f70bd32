"""Products on the processor at hand: whatever library multiplies, the product is the plain one."""

import subprocess
import sys

import pytest
import torch

from rgo import RGO, product
from rgo.product import FBGEMM, ONEDNN, WORK, Packed
from rgo.projection import Projection

HALF = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 0.02}  # relative to float64, of B as it is rounded
fbgemm = pytest.mark.skipif(not product.has_float16(), reason="FBGEMM has no float16 here")


def matrix(n, m, dtype=torch.float32, seed=0):
    return torch.randn(n, m, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["all libraries", "without FBGEMM", "without oneDNN", "without either"])
def libraries(request, monkeypatch):
    """Every build of torch there may be."""
    if request.param in ("without FBGEMM", "without either"):
        monkeypatch.setattr(product, "_fbgemm", lambda: (None, None))
    if request.param in ("without oneDNN", "without either"):
        monkeypatch.setattr(product, "_linear", None)


@pytest.mark.parametrize("size", [(FBGEMM // 100 - 1, 100), (200, 150), (ONEDNN // 512, 512), (1000, 290)])
@pytest.mark.parametrize("dtype", HALF)
def test_a_packed_matrix_multiplies_like_a_plain_one(libraries, dtype, size):
    B, A, row = matrix(*size, dtype), matrix(10, size[0], seed=1), matrix(1, size[1], seed=2)[0]
    exact, packed = A.double() @ B.double(), Packed(B)
    for found, expected in ((packed.times(A), exact), (packed.times(A, row), exact + row)):
        assert found.dtype == A.dtype
        assert (found - expected).norm() <= HALF[dtype] * expected.norm()
    assert torch.equal(packed.times(A), packed.times(A))  # to the bit
    assert packed.bytes() == B.numel() * B.element_size()


@pytest.mark.parametrize("dtype", HALF)
def test_a_packed_matrix_comes_back_bit_for_bit(libraries, dtype):
    B = matrix(600, 550, dtype)
    assert torch.equal(Packed(B).dense(), B)
    assert torch.equal(Packed(Packed(B).dense()).times(matrix(3, 600)), Packed(B).times(matrix(3, 600)))


@pytest.mark.parametrize("dtype", HALF)
def test_rows_may_lie_anyhow_in_memory_and_be_of_any_precision(libraries, dtype):
    packed, A = Packed(matrix(600, 600, dtype)), matrix(600, 20)
    exact = A.t().double() @ packed.dense().double()
    for rows in (A.t(), A.t().double(), A.t()[::2], A.t()[:, None, :][:, 0]):
        expected = exact[::2] if len(rows) == 10 else exact
        found = packed.times(rows)
        assert found.dtype == rows.dtype
        assert (found - expected).norm() <= HALF[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", HALF)
def test_a_product_that_is_differentiated_is_one_that_torch_can_differentiate(libraries, dtype):
    packed, A = Packed(matrix(600, 600, dtype)), matrix(10, 600).requires_grad_()
    row = matrix(1, 600, seed=1)[0].requires_grad_()
    gradient, of_row = torch.autograd.grad(packed.times(A, row).sum(), (A, row))
    expected = packed.dense().double().sum(1).expand(10, 600)
    assert (gradient - expected).norm() <= HALF[dtype] * expected.norm()
    assert torch.equal(of_row, torch.full((600,), 10.0))


def test_groups_are_multiplied_each_by_its_own(libraries):
    B, A = matrix(3 * 150, 150).reshape(3, 150, 150), matrix(3 * 4, 150).reshape(3, 4, 150)
    assert not Packed(B).packed
    for dtype in (torch.float32, torch.float16):
        torch.testing.assert_close(Packed(B.to(dtype)).times(A), A @ B.to(dtype).float())


@fbgemm
def test_float16_is_multiplied_in_float32_so_that_large_activations_do_not_overflow():
    packed = Packed(torch.eye(150, dtype=torch.float16) / 2)
    assert packed.packed
    assert torch.equal(packed.times(torch.full((2, 150), 1e6)), torch.full((2, 150), 5e5))


@pytest.mark.parametrize("size", [(10, 20, 30), (256, 128, 128), (64, 256, 2**8)])
def test_a_product_is_the_plain_one_however_its_factors_lie_in_memory(libraries, size):
    n, k, m = size
    A, B = matrix(2 * n, k), matrix(k, m, seed=1)
    for left, right in ((A[:n], B), (A[::2], B), (A[:n], B.t().contiguous().t()), (A.t().contiguous().t()[:n], B)):
        torch.testing.assert_close(product.product(left, right), left @ right, atol=1e-4, rtol=1e-5)


def test_a_large_product_can_be_differentiated_too(libraries):
    A, B = matrix(256, 128).requires_grad_(), matrix(128, WORK // (256 * 128))
    (gradient,) = torch.autograd.grad(product.product(A, B).sum(), A)
    torch.testing.assert_close(gradient, B.sum(1).expand(256, 128), atol=1e-4, rtol=1e-5)


def test_the_precision_of_P_follows_the_layer_and_the_processor(monkeypatch):
    layers = {"small": 100, "large": 200, "huge": 1100}
    model = torch.nn.ModuleDict({name: torch.nn.Linear(n, 2) for name, n in layers.items()})

    def chosen(**options):
        learner = RGO(model, **options)
        found = {name: p.dtype for name, p in learner.projections.items()}
        learner.detach()
        return found

    for half in (True, False):
        for brain in (True, False):
            monkeypatch.setattr("rgo.rgo.has_float16", lambda half=half: half)
            monkeypatch.setattr("rgo.rgo.has_bfloat16", lambda brain=brain: brain)
            large = torch.float16 if half else torch.float32
            expected = {"small": torch.float32, "large": large, "huge": torch.bfloat16 if brain else large}
            assert chosen() == expected
            assert set(chosen(dtype=torch.float32).values()) == {torch.float32}
    model.double()
    assert set(chosen().values()) == {torch.float64}


@pytest.mark.parametrize("tolerance", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_state_goes_from_one_processor_to_another(dtype, tolerance):
    """c P is made anew from H in the precision that is fast there."""
    here = Projection(200, bias=True, tolerance=tolerance, dtype=dtype)
    task = here.collect()
    task.add(matrix(8, 200)[None])
    here = here.updated(task)
    there = Projection(200, bias=True, tolerance=tolerance)
    assert there.problems(here.state_dict()) == []
    again = there.restored(here.state_dict())
    expected = there.updated(task)
    assert (again.c, again.rank) == (expected.c, expected.rank)
    assert all(torch.equal(a, b) for a, b in zip(again.applied.tensors().values(), expected.applied.tensors().values()))
    back = here.restored(here.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(back.applied.tensors().values(), here.applied.tensors().values()))


QUIET = "import torch; from rgo.product import Packed; Packed(torch.eye(200).half()).times(torch.ones(3, 200))"


def test_what_torch_says_of_its_operators_future_does_not_reach_the_user():
    done = subprocess.run([sys.executable, "-W", "error", "-c", QUIET], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
