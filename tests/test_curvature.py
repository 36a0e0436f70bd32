import pytest
import references
import torch
from torch import nn

import rgo
from rgo.layers import describe
from rgo.projection import CurvatureSum

ALPHA = 0.01
CLASSES = 3


class Pool(nn.Module):
    """The mean over positions or tokens, each with a weight of its own."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def forward(self, x):
        weights = torch.linspace(0.5, 2.0, x.shape[self.axis]).to(x)
        return (x.movedim(self.axis, -1) * weights).mean(-1)


def mlp():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, CLASSES))


def convnet():
    # Rows of a sample, outputs of a group: 9 and 4, 4 and 6, so that both ways of squaring G are met.
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 12, 2, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(2),
        Pool(-1),
        nn.Linear(12, CLASSES),
    )


def tokens():
    return nn.Sequential(  # 3 tokens; 6 outputs, then 2
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=False), nn.Tanh(), Pool(1), nn.Linear(2, CLASSES)
    )


MODELS = {"mlp": (mlp, (4,)), "convnet": (convnet, (2, 6, 6)), "tokens": (tokens, (3, 4))}


def names(model):
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def data(shape, count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def pair(make):
    """The model to attach to, and a plain one of the same weights."""
    torch.manual_seed(0)
    model, plain = make().double(), make().double()
    plain.load_state_dict(model.state_dict())
    return model, plain


def learned(model, batches, classes=None, forward=None, **options):
    learner = rgo.RGO(model, alpha=ALPHA, encode=False, **options)
    learner.begin_task(0)
    learner.end_task(batches, classes=classes, forward=forward)
    return learner


def only(learner):
    (projection,) = learner.projections.values()
    return projection


def assert_H(learner, expected, rtol=1e-10):
    assert list(learner.projections) == list(expected)
    for name, projection in learner.projections.items():
        floor = ALPHA * torch.eye(projection.dim, dtype=torch.float64)
        assert (expected[name] - floor).abs().max() > 1e-6  # the data said something about this layer
        torch.testing.assert_close(
            projection.H.reshape(expected[name].shape), expected[name], rtol=rtol, atol=rtol * 1e-2
        )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("curvature", "root"),
    [
        ("true-class", references.true_class()),
        ("logit", references.logit),
        ("softmax", references.softmax()),
        ("squared-error", references.squared_error),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_every_rule_sums_the_outer_products_of_single_samples_gradients(kind, curvature, root):
    make, shape = MODELS[kind]
    model, plain = pair(make)
    x, y = data(shape)
    learner = learned(model, [(x, y)], curvature=curvature)
    assert_H(learner, references.curvature(plain, names(plain), x, y, root, alpha=ALPHA))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("extractors", ["mean", "sum", "signed"])
def test_every_choice_of_extractors_is_what_its_name_says(kind, extractors):
    make, shape = MODELS[kind]
    model, plain = pair(make)
    x, y = data(shape)
    learner = learned(model, [(x, y)], curvature="squared-error", extractors=extractors)
    root = references.squared_error
    assert_H(learner, references.curvature(plain, names(plain), x, y, root, alpha=ALPHA, extractors=extractors))


@pytest.mark.parametrize("kind", MODELS)
def test_rows_as_extractors_square_every_row_by_itself(kind):
    make, shape = MODELS[kind]
    model, plain = pair(make)
    x, y = data(shape)
    learner = learned(model, [(x, y)], extractors="rows")
    expected = references.row_curvature(plain, names(plain), x, y, references.true_class(), alpha=ALPHA)
    assert_H(learner, expected)
    whole = references.curvature(plain, names(plain), x, y, references.true_class(), alpha=ALPHA)
    assert torch.allclose(expected["0"], whole["0"]) == (kind == "mlp")  # the same only with one row per sample


@pytest.mark.parametrize("kind", MODELS)
def test_inputs_as_curvature_is_owm(kind):
    make, shape = MODELS[kind]
    model, plain = pair(make)
    x, y = data(shape)
    assert_H(
        learned(model, [(x, y)], curvature="inputs"),
        references.input_curvature(plain, names(plain), x, alpha=ALPHA),
    )


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "strided": lambda: nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(1, 2)),
    "groups": lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=(0, 1), groups=4),
    "reflected": lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"),
    "uneven": lambda: nn.Conv2d(4, 6, 2, padding="same"),
    "one dimension": lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2),
    "three dimensions": lambda: nn.Conv3d(4, 6, 2, padding=1, stride=2),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_a_convolutions_gradients_are_those_that_its_rows_and_columns_give(kind, dtype):
    torch.manual_seed(0)
    layer = CONVOLUTIONS[kind]().to(dtype)
    x = torch.randn(3, 4, *[5, 6, 4][: layer.weight.dim() - 2], dtype=dtype)
    matrix = describe(layer)
    delta = torch.randn_like(layer(x)).detach()
    X, D = (rows.unflatten(0, (3, -1)) for rows in (matrix.rows(x), matrix.deltas(delta)))
    found = matrix.gradients(delta, x, layer.weight.detach())
    exact = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(found, torch.einsum("brgo,brgn->bgon", D, X), **exact)
    columns = matrix.to_columns(x).reshape(matrix.groups, matrix.inputs, matrix.count(x))
    assert torch.equal(columns, matrix.rows(x).permute(1, 2, 0))


def test_a_layer_that_serves_twice_adds_up_each_samples_gradients_before_they_are_squared():
    class Twice(nn.Sequential):
        def forward(self, x):
            return self[2](self[1](torch.tanh(self[0](torch.tanh(self[0](x))))))

    model, plain = pair(lambda: Twice(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, CLASSES)))
    x, y = data((2, 4, 4))
    expected = references.curvature(plain, ["0", "2"], x, y, references.true_class(), alpha=ALPHA)
    assert_H(learned(model, [(x, y)]), expected)


@pytest.mark.parametrize("outputs", [4, 12])
@pytest.mark.parametrize("side", [1, 3])
def test_half_of_a_wide_layers_sum_is_multiplied_and_the_whole_is_right(side, outputs):
    def make():
        first = nn.Linear(450, outputs) if side == 1 else nn.Conv2d(50, outputs, 3, padding=1)
        return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(outputs * side**2, CLASSES))

    model, plain = pair(make)
    x, y = data((450,) if side == 1 else (50, side, side))
    expected = references.curvature(plain, ["0", "3"], x, y, references.true_class(), alpha=ALPHA)
    assert len(expected["0"][0]) == 451 > 2 * CurvatureSum.BLOCK
    assert_H(learned(model, [(x, y)]), expected)
    single, _ = pair(make)
    learner = learned(single.float(), [(x.float(), y)])
    assert_H(learner, expected, rtol=1e-4)
    assert torch.equal(learner.projections["0"].H, learner.projections["0"].H.T)


@pytest.mark.parametrize("kind", ["convnet", "tokens"])
def test_the_recursion_takes_the_same_samples_in(kind):
    make, shape = MODELS[kind]
    batches = [data(shape)]
    dense, recursive = learned(pair(make)[0], batches), learned(pair(make)[0], batches, solver="recursive", block=3)
    for name, projection in recursive.projections.items():
        torch.testing.assert_close(projection.P, dense.projections[name].P, rtol=1e-9, atol=1e-11)


def test_classes_drawn_from_the_models_own_softmax_give_the_exact_curvature_on_average():
    model, plain = pair(lambda: nn.Linear(3, CLASSES))
    x, y = data((3,), count=1)
    torch.manual_seed(1)
    learner = learned(model, [(x.expand(4000, -1), y.expand(4000))], curvature="sampled")
    expected = references.curvature(plain, [""], x, y, references.softmax(), alpha=0.0)[""]
    error = (only(learner).H - ALPHA * torch.eye(4)) / 4000 - expected[0]
    assert error.norm() < 0.05 * expected.norm()


def test_drawn_classes_are_among_the_tasks_own():
    model, _ = pair(lambda: nn.Linear(2, CLASSES, bias=False))
    x, y = torch.ones(500, 2, dtype=torch.float64), torch.zeros(500, dtype=torch.long)
    torch.manual_seed(1)
    drawn = []

    def rule(outputs, targets, classes):
        (column,) = rgo.curvature.sampled_class(outputs, targets, classes)
        drawn.append(column)
        yield column

    learned(model, [(x, y)], classes=[0, 2], curvature=rule)
    columns = torch.cat(drawn)
    assert not columns[:, 1].any()  # neither drawn nor given a probability
    assert set((columns < 0).nonzero()[:, 1].tolist()) == {0, 2}


@pytest.mark.parametrize("single", [False, True])
def test_a_sampled_rule_takes_the_gradient_of_the_loss_at_the_drawn_target(single):
    model, plain = pair(mlp)
    x, y = data((4,))

    def loss(f, t):
        each = (f.exp() - t * f).sum(dim=1)
        return each if single else each.sum()

    rule = rgo.sampled(loss=loss, sample=lambda f: f.round() + 2)
    learner = learned(model, [(x, y)], curvature=rule)

    def root(f, y):
        yield f.exp() - (f.round() + 2)

    assert_H(learner, references.curvature(plain, names(plain), x, y, root, alpha=ALPHA))


def test_a_sampled_rule_leaves_out_the_outputs_that_are_not_the_tasks_own():
    model, plain = pair(mlp)
    x, y = data((4,))
    rule = rgo.sampled(loss=lambda f, t: 0.5 * (f - t).square().sum(), sample=torch.zeros_like)
    learner = learned(model, [(x, y)], classes=[0, 2], curvature=rule)

    def root(f, y):
        yield f * torch.tensor([1.0, 0.0, 1.0])

    assert_H(learner, references.curvature(plain, names(plain), x, y, root, alpha=ALPHA))


@pytest.mark.parametrize(
    ("loss", "sample", "hessian"),
    [
        (lambda f, t: (f.exp() - t * f).sum(), lambda f: torch.poisson(f.exp()), torch.exp),
        (lambda f, t: 0.5 * (f - t).square().sum(), lambda f: f + torch.randn_like(f), torch.ones_like),
    ],
    ids=["poisson", "gaussian"],
)
def test_a_sampled_rule_averages_to_the_losss_own_hessian(loss, sample, hessian):
    model, plain = pair(lambda: nn.Linear(3, 2))
    x, _ = data((3,), count=1)
    torch.manual_seed(1)
    learner = learned(model, [(x.expand(4000, -1), torch.zeros(4000, 2))], curvature=rgo.sampled(loss, sample))

    def root(f, y):
        yield from torch.diag(hessian(f).sqrt())

    expected = references.curvature(plain, [""], x, torch.zeros(1), root, alpha=0.0)[""]
    error = (only(learner).H - ALPHA * torch.eye(4)) / 4000 - expected[0]
    assert error.norm() < 0.1 * expected.norm()


def test_a_users_rule_gets_outputs_targets_and_active_classes_and_gives_any_columns():
    model, plain = pair(mlp)
    x, _ = data((4,))
    targets = torch.rand(5, 2, dtype=torch.float64)

    def rule(outputs, given, classes):
        assert torch.equal(given, targets)
        assert classes.tolist() == [True, False, True]
        yield outputs.detach() * classes
        yield given[:, :1].expand(-1, CLASSES)

    learner = learned(model, [(x, targets)], classes=[2, 0], curvature=rule)

    def root(f, t):
        yield f * torch.tensor([1.0, 0.0, 1.0])
        yield t[0].expand(CLASSES)

    assert_H(learner, references.curvature(plain, names(plain), x, targets, root, alpha=ALPHA))


@pytest.mark.parametrize(
    "classes",
    [[0, 2], (2, 0), range(0, 3, 2), torch.tensor([0, 2]), [True, False, True], torch.tensor([True, False, True])],
    ids=["list", "tuple", "range", "tensor", "booleans", "mask"],
)
@pytest.mark.parametrize(("curvature", "reference"), [("true-class", "true_class"), ("softmax", "softmax")])
def test_classes_restrict_the_softmax_to_the_tasks_own(classes, curvature, reference):
    model, plain = pair(mlp)
    x, y = data((4,))
    y = y % 2 * 2
    learner = learned(model, [(x, y)], classes=classes, curvature=curvature)
    root = getattr(references, reference)([0, 2])
    assert_H(learner, references.curvature(plain, names(plain), x, y, root, alpha=ALPHA))


def test_with_classes_the_squared_error_leaves_the_other_outputs_out():
    model, plain = pair(mlp)
    x, y = data((4,))

    def root(f, y):
        yield from torch.eye(CLASSES, dtype=torch.float64)[[0, 2]]

    learner = learned(model, [(x, y)], classes=[0, 2], curvature="squared-error")
    assert_H(learner, references.curvature(plain, names(plain), x, y, root, alpha=ALPHA))


def test_a_label_that_is_not_among_the_classes_is_named():
    model, _ = pair(mlp)
    with pytest.raises(ValueError, match=r"labels \[1\] are not among"):
        learned(model, [(data((4,))[0], torch.tensor([0, 1, 2, 0, 1]))], classes=[0, 2])


# ---- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1] * 10, [3, 1, 4, 2], [9, 1], [10]])
@pytest.mark.parametrize("kind", MODELS)
def test_H_does_not_depend_on_how_the_samples_are_batched(kind, sizes):
    make, shape = MODELS[kind]
    model, plain = pair(make)
    x, y = data(shape, count=10)
    learner = learned(model, list(zip(x.split(sizes), y.split(sizes))))
    assert_H(learner, references.curvature(plain, names(plain), x, y, references.true_class(), alpha=ALPHA))


def test_small_batches_are_joined_to_hundreds_of_samples_and_large_ones_left_alone():
    model, _ = pair(mlp)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    x, y = data((4,), count=300)
    joined = learned(model, list(zip(x.split(7), y.split(7))))
    assert seen[0] == 4  # what a sample is, is checked on a few
    assert sum(seen[1:]) == 300
    assert len(seen) == 3
    whole_model, _ = pair(mlp)
    whole = learned(whole_model, [(x, y)])
    for name, projection in whole.projections.items():
        torch.testing.assert_close(joined.projections[name].H, projection.H, rtol=1e-11, atol=1e-13)


def test_batches_of_different_lengths_are_taken_as_they_come():
    model, plain = pair(tokens)
    parts = [data((length, 4), count=2, seed=length) for length in (3, 3, 2, 5, 2)]
    expected = references.identity(plain, names(plain), ALPHA)
    for x, y in parts:
        for name, H in references.curvature(plain, names(plain), x, y, references.true_class(), alpha=0.0).items():
            expected[name] += H
    assert_H(learned(model, parts), expected)


def test_layers_too_large_for_one_piece_are_taken_some_samples_at_a_time(monkeypatch):
    x, y = data((2, 6, 6), count=7)
    _, plain = pair(convnet)
    expected = references.curvature(plain, names(plain), x, y, references.true_class(), alpha=ALPHA)
    inputs = references.input_curvature(plain, names(plain), x, alpha=ALPHA)
    for size in (1, 4000, 10_000):
        monkeypatch.setattr("rgo.collecting.CHUNK_BYTES", size)
        assert_H(learned(pair(convnet)[0], [(x, y)]), expected)
        assert_H(learned(pair(convnet)[0], [(x, y)], curvature="inputs"), inputs)


def test_samples_fitted_better_than_float32_can_tell_still_count():
    model = nn.Linear(3, CLASSES, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[20.0, 1, 0], [0, 0, 2], [0, -1, 0]]))
    x = torch.tensor([[1.0, 0.25, 0.5], [1.125, 0.5, -0.25]])
    y = torch.tensor([0, 0])
    a = torch.softmax(model(x).detach(), dim=1)[:, 0]
    assert (1 - a < torch.finfo(torch.float32).eps).all()
    plain = nn.Linear(3, CLASSES, bias=False).double()
    plain.load_state_dict(model.state_dict())
    learner = rgo.RGO(model, alpha=1e-12, encode=False)
    learner.begin_task(0)
    learner.end_task([(x, y)])
    expected = references.curvature(plain, [""], x.double(), y, references.true_class(), alpha=1e-12)[""]
    assert expected.abs().max() > 1e-11
    torch.testing.assert_close(only(learner).H, expected[0], rtol=1e-4, atol=1e-16)


def test_a_sample_that_is_not_finite_raises_with_the_layers_name_and_leaves_P_as_it_was():
    model, _ = pair(mlp)
    learner = learned(model, [data((4,))])
    before = learner.projections["2"].P
    learner.begin_task(1)
    x, y = data((4,), seed=1)
    x[2, 1] = torch.inf
    with pytest.raises(FloatingPointError, match="layer '0'"):
        learner.end_task([(x, y)])
    assert learner.active == 1
    assert torch.equal(learner.projections["2"].P, before)


# ---- samples that do not lie in the leading dimension ---------------------------------------------------------------


class SequenceFirst(nn.Module):
    """[B, T, n] outside, [T, B, n] inside; `flat`: [T B, n]."""

    def __init__(self, flat):
        super().__init__()
        self.flat = flat
        self.inner, self.second, self.head = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(2, CLASSES)

    def forward(self, x):
        B, T, _ = x.shape
        h = x.transpose(0, 1)
        h = h.reshape(T * B, 4) if self.flat else h
        h = self.second(self.inner(h).tanh()).tanh().view(T, B, 2)
        return self.head((h * torch.linspace(0.5, 2.0, T).to(h)[:, None, None]).sum(0))


class Interacting(nn.Module):
    """Every sample is centred by the others."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        h = self.inner(x).tanh()
        return self.head((h - h.mean(0)).tanh())


class Neighbours(nn.Module):
    """Every sample but the first meets the one before it."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        h = self.inner(x).tanh()
        return self.head(torch.cat([h[:1], h[1:] + h[:-1]]).tanh())


class Functional(nn.Module):
    """A weight used without calling its layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.unmet, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        h = self.inner(x).tanh()
        return self.head(nn.functional.linear(h, self.unmet.weight, self.unmet.bias).tanh())


class Broadcast(nn.Module):
    """One layer reads the same positions for all samples."""

    def __init__(self):
        super().__init__()
        self.inner, self.positions, self.head = nn.Linear(4, 5), nn.Linear(2, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        at = torch.stack([torch.arange(x.shape[1]), torch.arange(x.shape[1]) ** 2], dim=1).to(x)
        return self.head((self.inner(x) + self.positions(at)).tanh().sum(1))


class Loop(nn.Module):
    """One sample after the other, each without a batch dimension."""

    def __init__(self):
        super().__init__()
        self.inner, self.conv, self.head = nn.Linear(4, 6), nn.Conv1d(2, 4, 2), nn.Linear(4, CLASSES)

    def forward(self, x):
        hidden = [self.conv(self.inner(row).tanh().view(2, 3)).tanh().sum(1) for row in x]
        return torch.stack([self.head(h) for h in hidden])


FALLBACKS = {
    "sequence-first": (lambda: SequenceFirst(False), (3, 4), False),
    "time-major": (lambda: SequenceFirst(True), (3, 4), False),
    "interacting": (Interacting, (4,), True),
    "neighbours": (Neighbours, (4,), True),
    "functional": (Functional, (4,), False),
    "broadcast": (Broadcast, (3, 4), False),
    "loop": (Loop, (4,), False),
}


def layers(model):
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv1d)]


@pytest.mark.parametrize("extractors", ["mean", "sum", "signed"])
@pytest.mark.parametrize("samples", [2, 3, 4, 6])  # as many samples as tokens, or features, must not be a trap
@pytest.mark.parametrize("kind", FALLBACKS)
def test_where_samples_cannot_be_told_apart_end_task_goes_one_by_one_and_says_so(kind, samples, extractors):
    make, shape, together = FALLBACKS[kind]
    model, plain = pair(make)
    x, y = data(shape, count=samples)
    with pytest.warns(UserWarning, match="one sample at a time"):
        learner = learned(model, [(x, y)], extractors=extractors, curvature="squared-error")
    expected = references.curvature(
        plain,
        layers(plain),
        x,
        y,
        references.squared_error,
        alpha=ALPHA,
        extractors=extractors,
        together=together,
    )
    assert_H(learner, expected)


def test_going_one_by_one_sums_all_batches_and_warns_once():
    model, plain = pair(lambda: SequenceFirst(False))
    first, second = data((3, 4), count=3), data((2, 4), count=4, seed=1)
    with pytest.warns(UserWarning, match="one sample at a time") as caught:
        learner = learned(model, [first, second])
    assert len(caught) == 1
    assert "'inner'" in str(caught[0].message)
    expected = references.identity(plain, layers(plain), ALPHA)
    for x, y in (first, second):
        root = references.true_class()
        for name, H in references.curvature(plain, layers(plain), x, y, root, alpha=0.0).items():
            expected[name] += H
    assert_H(learner, expected)


def test_a_mismatch_that_a_later_batch_brings_is_noticed_then():
    class Switching(SequenceFirst):
        def forward(self, x):
            if x.shape[1] == 3:
                return self.head(self.second(self.inner(x).tanh()).tanh().sum(1))
            return super().forward(x)

    model, plain = pair(lambda: Switching(False))
    first, second = data((3, 4), count=3), data((2, 4), count=3, seed=1)
    with pytest.warns(UserWarning, match="one sample at a time"):
        learner = learned(model, [first, second])
    expected = references.identity(plain, layers(plain), ALPHA)
    for x, y in (first, second):
        root = references.true_class()
        for name, H in references.curvature(plain, layers(plain), x, y, root, alpha=0.0).items():
            expected[name] += H
    assert_H(learner, expected)


def test_going_one_by_one_the_recursion_sees_the_same_samples():
    make, shape, _ = FALLBACKS["time-major"]
    learners = []
    for solver in ("cholesky", "recursive"):
        with pytest.warns(UserWarning, match="one sample at a time"):
            learners.append(learned(pair(make)[0], [data(shape)], solver=solver))
    for name, projection in learners[1].projections.items():
        torch.testing.assert_close(projection.P, learners[0].projections[name].P, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["sequence-first", "time-major"])
def test_rows_as_extractors_are_refused_where_rows_cannot_be_told_apart(kind):
    make, shape, _ = FALLBACKS[kind]
    with pytest.raises(ValueError, match=r'extractors="rows".*\'inner\''):
        learned(pair(make)[0], [data(shape)], extractors="rows")


def test_one_token_a_sample_lies_batch_first_whatever_its_order_is_called():
    model, plain = pair(lambda: SequenceFirst(True))
    x, y = data((1, 4))
    learner = learned(model, [(x, y)])  # no warning
    assert_H(learner, references.curvature(plain, layers(plain), x, y, references.true_class(), alpha=ALPHA))


def test_inputs_need_no_sample_to_be_told_apart():
    model, plain = pair(lambda: SequenceFirst(False))
    x, y = data((3, 4))
    learner = learned(model, [(x, y)], curvature="inputs")  # no warning
    assert_H(learner, references.input_curvature(plain, layers(plain), x, alpha=ALPHA))


def test_samples_from_a_sequence_first_loader_go_through_forward():
    model, plain = pair(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Pool(0), nn.Linear(5, CLASSES)))
    x, y = data((3, 4), count=4)
    batches = [{"tokens": x[i : i + 2].transpose(0, 1), "label": y[i : i + 2]} for i in (0, 2)]
    with pytest.warns(UserWarning, match="one sample at a time"):
        learner = learned(model, batches, forward=lambda b: (model(b["tokens"]), b["label"]))
    expected = references.identity(plain, ["0", "3"], ALPHA)
    for i in range(4):
        f = plain(x[i : i + 1].transpose(0, 1))[0]
        for v in references.true_class()(f.detach(), y[i]):
            for name, G in references.gradients(plain, ["0", "3"], f @ v, retain=True).items():
                expected[name] += references.outer(G, "mean")
    assert_H(learner, expected)
