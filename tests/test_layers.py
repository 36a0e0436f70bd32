import pytest
import references
import torch
import torch.nn.functional as F
from torch import nn

import rgo
from rgo.layers import _TYPES, describe

# torch's own remark on even kernels, once per process
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

ALPHA = 0.01
CLASSES = 3


class Around(nn.Module):
    """The layer under test between a raw input (or a stem) and a head."""

    def __init__(self, layer, features, stem=None):
        super().__init__()
        self.stem, self.layer, self.head = stem, layer, nn.Linear(features, CLASSES)

    def forward(self, x):
        if self.stem is not None:
            x = self.stem(x).tanh()
        h = self.layer(x).tanh()
        if not isinstance(self.layer, nn.Linear):
            h = h.flatten(2).transpose(1, 2)  # positions as tokens
        h = h.flatten(1, -2) if h.dim() > 2 else h.unsqueeze(1)
        return self.head((h * torch.linspace(0.5, 2.0, h.shape[1]).to(h)[:, None]).mean(1))


def pair(make, dtype=torch.float64):
    """The model to attach to, and a plain one of the same weights in float64."""
    torch.manual_seed(0)
    model, plain = make().to(dtype), make().double()
    plain.load_state_dict(model.state_dict())
    return model, plain


def data(shape, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def second_task(model, x, y, **options):
    """A learner that has learned task 0 from (x, y) and is being trained on task 1."""
    learner = rgo.RGO(model, **{"alpha": ALPHA, "encode": False, **options})
    learner.begin_task(0)
    learner.end_task([(x, y)])
    learner.begin_task(1)
    return learner


def paths(learner):
    return {layer.name: layer.path for layer in learner.summary().covered}


def curvature(plain, names, x, y, **options):
    return references.curvature(plain, names, x, y, references.true_class(), alpha=ALPHA, **options)


def loss(outputs, y):
    return F.cross_entropy(outputs, y, reduction="sum")


def assert_P(learner, H):
    assert list(learner.projections) == list(H)
    for name, projection in learner.projections.items():
        P, c = references.projector(H[name], ALPHA)
        assert (P - torch.eye(P.shape[-1])).abs().max() > 1e-3  # far enough from the identity to tell
        torch.testing.assert_close(projection.P.reshape(P.shape), P, rtol=1e-9, atol=1e-11)
        assert projection.c == pytest.approx(c, rel=1e-9)


def assert_gradients(model, expected, rtol=1e-9):
    for name, found in references.arrived(model, list(expected)).items():
        assert expected[name].abs().max() > 1e-6
        torch.testing.assert_close(found.double(), expected[name], rtol=rtol, atol=rtol * 1e-1, msg=name)


def check(make, shape, counts, path, learn=5):
    """P against an explicit inverse, gradients against per-sample autograd, for one batch size."""
    model, plain = pair(make)
    names = [name for name, m in plain.named_modules() if describe(m) is not None]
    x, y = data(shape, learn)
    learner = second_task(model, x, y)
    H = curvature(plain, names, x, y)
    assert_P(learner, H)
    x, y = data(shape, counts, seed=1)
    total = dict.fromkeys(names, 0.0)
    for i in range(len(y)):
        single = loss(plain(x[i : i + 1]), y[i : i + 1])
        for name, G in references.gradients(plain, names, single, retain=True).items():
            total[name] = total[name] + G
    loss(model(x), y).backward()
    assert_gradients(model, references.projected(total, H, ALPHA))
    assert paths(learner)["layer"] == path
    return learner


def linear(*args, frozen=False, **kwargs):
    layer = nn.Linear(*args, **kwargs)
    if frozen:
        layer.bias.requires_grad_(False)
    return layer


LINEAR = {
    "flat": ({}, (4,), 3, 17),
    "flat, no bias": ({"bias": False}, (4,), 3, 17),
    "flat, frozen bias": ({"frozen": True}, (4,), 3, 17),
    "tokens": ({}, (3, 4), 2, 7),
    "tokens, no bias": ({"bias": False}, (3, 4), 2, 7),
    "tokens, frozen bias": ({"frozen": True}, (3, 4), 2, 7),
    "further dimensions": ({}, (2, 3, 4), 1, 3),
}


@pytest.mark.parametrize("few", [True, False], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", LINEAR)
def test_a_linear_layer_is_projected_exactly(kind, few):
    options, shape, small, large = LINEAR[kind]
    learner = check(
        lambda: Around(linear(4, 13, **options), 13),
        shape,
        small if few else large,
        "rows" if few else "gradient",
    )
    assert learner.projections["layer"].dim == 4 + (not options)


def conv(dims, *args, frozen=False, **kwargs):
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*args, **kwargs)
    if frozen:
        layer.bias.requires_grad_(False)
    return layer


# dims, (in, out, kernel), options, input size, samples on the path of few rows (None: there is none)
CONVOLUTIONS = {
    "1d": (1, (3, 24, 3), {}, (7,), 2),
    "1d stride": (1, (3, 24, 3), {"stride": 2}, (8,), 2),
    "1d same": (1, (3, 24, 3), {"padding": "same"}, (7,), 2),
    "1d same, even kernel": (1, (3, 24, 4), {"padding": "same"}, (7,), None),
    "1d same, dilated": (1, (3, 24, 3), {"padding": "same", "dilation": 2}, (7,), 2),
    "1d same, even kernel, groups": (1, (4, 24, 2), {"padding": "same", "groups": 2}, (5,), None),
    "1d circular": (1, (3, 24, 3), {"padding": 2, "padding_mode": "circular"}, (5,), None),
    "1d depthwise": (1, (4, 4, 3), {"groups": 4}, (6,), None),
    "2d": (2, (2, 24, 3), {}, (5, 5), 2),
    "2d no bias": (2, (2, 24, 3), {"bias": False}, (5, 5), 2),
    "2d frozen bias": (2, (2, 24, 3), {"frozen": True}, (5, 5), 2),
    "2d stride that leaves a rest": (2, (2, 24, 3), {"stride": 2}, (6, 6), 2),
    "2d oblong": (2, (2, 24, (3, 2)), {"stride": (1, 2), "padding": (1, 0)}, (3, 6), 2),
    "2d padding": (2, (2, 24, 3), {"padding": 2, "stride": 3}, (5, 5), 2),
    "2d tuple padding": (2, (2, 24, 3), {"padding": (0, 2), "stride": 2}, (5, 4), 2),
    "2d same": (2, (2, 24, 3), {"padding": "same"}, (3, 3), 2),
    "2d same, even kernel": (2, (2, 24, (2, 4)), {"padding": "same"}, (3, 4), None),
    "2d same, even in one dimension": (2, (2, 24, (3, 2)), {"padding": "same"}, (3, 3), None),
    "2d valid": (2, (2, 24, 3), {"padding": "valid"}, (4, 5), 2),
    "2d reflect": (2, (2, 24, 3), {"padding": 1, "padding_mode": "reflect"}, (3, 3), None),
    "2d replicate": (2, (2, 24, 3), {"padding": (2, 1), "padding_mode": "replicate", "stride": 2}, (3, 3), None),
    "2d circular": (2, (2, 24, 3), {"padding": (1, 2), "padding_mode": "circular"}, (3, 3), None),
    "2d circular same, even kernel": (2, (2, 24, 2), {"padding": "same", "padding_mode": "circular"}, (3, 3), None),
    "2d dilation": (2, (2, 24, 3), {"dilation": (2, 1)}, (6, 4), 2),
    "2d dilation, stride, padding": (2, (2, 24, 3), {"dilation": 2, "stride": 2, "padding": 2}, (5, 6), 2),
    "2d kernel of one": (2, (5, 24, 1), {}, (2, 3), 2),
    "2d groups": (2, (4, 24, 3), {"groups": 2}, (4, 4), 2),
    "2d groups, no bias": (2, (6, 24, 3), {"groups": 2, "bias": False, "padding": 1, "stride": 2}, (4, 4), 2),
    "2d groups, frozen bias": (2, (4, 24, 3), {"groups": 2, "frozen": True}, (4, 4), 2),
    "2d depthwise": (2, (4, 4, 3), {"groups": 4, "padding": 1}, (3, 3), None),
    "2d depthwise, multiplied": (2, (3, 24, 3), {"groups": 3}, (4, 3), 2),
    "2d depthwise, no bias": (2, (4, 4, 3), {"groups": 4, "bias": False}, (4, 4), None),
    "3d": (3, (2, 24, 2), {}, (3, 3, 3), 2),
    "3d padding, stride": (3, (2, 24, 2), {"padding": (0, 1, 0), "stride": (1, 2, 2)}, (3, 2, 4), 2),
    "3d groups, dilation": (3, (4, 24, 2), {"groups": 2, "dilation": (1, 2, 1)}, (2, 3, 3), 2),
    "3d same, even kernel": (3, (2, 24, 2), {"padding": "same"}, (2, 2, 2), None),
    "3d replicate": (3, (1, 24, 3), {"padding": 1, "padding_mode": "replicate"}, (2, 2, 2), None),
}


@pytest.mark.parametrize("few", [True, False], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_is_projected_exactly(kind, few):
    dims, sizes, options, shape, small = CONVOLUTIONS[kind]
    count = (small or 1) if few else 25
    learner = check(
        lambda: Around(conv(dims, *sizes, **options), sizes[1]),
        (sizes[0], *shape),
        count,
        "rows" if few and small else "gradient",
    )
    groups = options.get("groups", 1)
    kernel = sizes[2] ** dims if isinstance(sizes[2], int) else sizes[2][0] * sizes[2][1]
    bias = options.get("bias", True) and not options.get("frozen", False)
    projection = learner.projections["layer"]
    assert (projection.dim, projection.groups) == (sizes[0] // groups * kernel + bias, groups)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_rows_and_deltas_of_a_convolution_rebuild_output_and_weight_gradient(kind):
    dims, sizes, options, shape, _ = CONVOLUTIONS[kind]
    layer = conv(dims, *sizes, **options).double()
    m = describe(layer)
    for batch in ((3,), (1,), ()):
        x = torch.randn(*batch, sizes[0], *shape, dtype=torch.float64, requires_grad=True)
        rows, W = m.rows(x), m.to_matrix(layer.weight)
        output = layer(x)
        assert m.count(x) == len(rows)
        bias = 0.0 if layer.bias is None else layer.bias.view(m.groups, m.outputs)
        y = torch.einsum("rgn,gon->rgo", rows, W) + bias
        torch.testing.assert_close(m.deltas(output), y, rtol=1e-11, atol=1e-12)
        assert torch.equal(m.forward(x, layer.weight, layer.bias), output)
        delta = torch.randn_like(output)
        dx, dw = torch.autograd.grad(output, (x, layer.weight), delta)
        G = torch.einsum("rgo,rgn->gon", m.deltas(delta), rows)
        torch.testing.assert_close(m.to_weight(G, layer.weight), dw, rtol=1e-10, atol=1e-11)
        if m.input_gradient is not None:
            torch.testing.assert_close(m.input_gradient(delta, x, layer.weight), dx, rtol=1e-10, atol=1e-11)


# ---- in models ------------------------------------------------------------------------------------------------------


def test_the_path_follows_the_number_of_rows_and_summary_says_which():
    model, _ = pair(lambda: Around(nn.Linear(4, 13), 13))
    learner = rgo.RGO(model, encode=False)
    learner.begin_task(0)
    x, y = data((4,), 13)
    loss(model(x), y).backward()
    assert paths(learner) == {"layer": "none", "head": "none"}  # P is the identity
    learner.end_task([(x, y)])
    learner.begin_task(1)
    for count, expected in ((14, "gradient"), (13, "rows"), (4, "rows"), (40, "gradient")):
        loss(model(x.repeat(4, 1)[:count]), y.repeat(4)[:count]).backward()
        assert paths(learner)["layer"] == expected
        assert paths(learner)["head"] == "gradient"  # three outputs


class Repeated(nn.Module):
    """One module called three times, on features and with another number of rows."""

    def __init__(self):
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        h = self.stem(x).tanh()
        h = self.layer(self.layer(h).tanh()).tanh()
        pairs = self.layer(torch.stack([h, h.flip(1)], dim=1)).tanh()
        return self.head(pairs.mean(1))


class Tied(nn.Module):
    """Two modules share a weight; `bias`: "shared", "none"."""

    def __init__(self, bias):
        super().__init__()
        self.stem = nn.Linear(4, 16)
        self.layer, self.other = (nn.Linear(16, 16, bias=bias == "shared") for _ in range(2))
        self.head = nn.Linear(16, CLASSES)
        self.other.weight = self.layer.weight
        if bias == "shared":
            self.other.bias = self.layer.bias

    def forward(self, x):
        h = self.stem(x).tanh()
        return self.head(self.other(self.layer(h).tanh()).tanh())


class TiedConvolutions(nn.Module):
    """One kernel at two strides."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 18, 3, padding=1, bias=False)
        self.other = nn.Conv2d(2, 18, 3, stride=2, bias=False)
        self.other.weight = self.layer.weight
        self.head = nn.Linear(18, CLASSES)

    def forward(self, x):
        h = self.layer(x).tanh().flatten(2).mean(2) + self.other(x).tanh().flatten(2).sum(2)
        return self.head(h)


@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Repeated, (4,)),
        (lambda: Tied("shared"), (4,)),
        (lambda: Tied("none"), (4,)),
        (TiedConvolutions, (2, 3, 3)),
    ],
    ids=["called three times", "tied with bias", "tied without", "tied convolutions"],
)
def test_a_weight_used_several_times_has_one_P_of_its_summed_gradients(make, shape, count):
    model, plain = pair(make)
    names = [name for name in ("stem", "layer", "head") if hasattr(plain, name)]
    x, y = data(shape, 5)
    learner = second_task(model, x, y)
    H = curvature(plain, names, x, y)
    assert_P(learner, H)
    x, y = data(shape, count, seed=1)
    loss(model(x), y).backward()
    expected = references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA)
    assert_gradients(model, expected)
    tied = {layer.name: layer.tied for layer in learner.summary().covered}
    assert tied.get("other") == ("layer" if hasattr(plain, "other") else None)


def test_a_shared_weight_with_biases_of_their_own_is_refused():
    model = Tied("shared")
    model.other.bias = nn.Parameter(model.layer.bias.detach().clone())
    with pytest.raises(ValueError, match="'layer' and 'other' share a weight but not their bias"):
        rgo.RGO(model)


FEL = {
    "linear": (lambda: Around(nn.Linear(6, 13), 13, nn.Linear(4, 6)), (4,), (2, 17)),
    "tokens": (lambda: Around(nn.Linear(6, 13), 13, nn.Linear(4, 6)), (3, 4), (2, 9)),
    "conv1d": (lambda: Around(nn.Conv1d(6, 24, 3), 24, nn.Conv1d(2, 6, 1)), (2, 5), (2, 15)),
    "conv2d": (lambda: Around(nn.Conv2d(6, 24, 3), 24, nn.Conv2d(2, 6, 1)), (2, 4, 4), (2, 15)),
    "grouped": (lambda: Around(nn.Conv2d(6, 24, 3, groups=2), 24, nn.Conv2d(2, 6, 1)), (2, 4, 4), (2, 15)),
    "depthwise": (lambda: Around(nn.Conv2d(6, 6, 3, groups=6), 6, nn.Conv2d(2, 6, 1)), (2, 4, 4), (2, 15)),
    "circular": (
        lambda: Around(nn.Conv2d(6, 24, 2, padding=1, padding_mode="circular"), 24, nn.Conv2d(2, 6, 1)),
        (2, 2, 2),
        (2, 15),
    ),
    "conv3d": (lambda: Around(nn.Conv3d(6, 24, 2), 24, nn.Conv3d(2, 6, 1)), (2, 3, 3, 3), (2, 15)),
}


@pytest.mark.parametrize("few", [True, False], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", FEL)
def test_with_feature_encoding_P_and_gradients_are_those_of_permuted_inputs(kind, few):
    make, shape, counts = FEL[kind]
    model, plain = pair(make)
    names = ["stem", "layer", "head"]
    widths = {"layer": 6, "head": plain.head.in_features}
    orders = [{name: rgo.permutation(task, width).tolist() for name, width in widths.items()} for task in (0, 1)]
    x, y = data(shape, 5)
    learner = second_task(model, x, y, encode=True)
    with references.wired(plain, orders[0]):
        H = curvature(plain, names, x, y)
    assert_P(learner, H)
    x, y = data(shape, counts[not few], seed=1)
    output = model(x)
    loss(output, y).backward()
    with references.wired(plain, orders[1]):
        torch.testing.assert_close(output, plain(x), rtol=1e-11, atol=1e-12)
        expected = references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA)
    assert_gradients(model, expected)
    learner.end_task([(x, y)])
    with references.wired(plain, orders[1]):
        for name, more in curvature(plain, names, x, y).items():
            H[name] += more - references.identity(plain, names, ALPHA)[name]
    assert_P(learner, H)


class Positions(nn.Module):
    def __init__(self, layer, features):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(features, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x).tanh().flatten(-2).sum(-1))


class Plain(nn.Module):
    def __init__(self, layer, features):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(features, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x).tanh())


@pytest.mark.parametrize(
    ("make", "shape", "path"),
    [
        (lambda: Plain(nn.Linear(4, 12), 12), (4,), "rows"),
        (lambda: Positions(nn.Conv2d(2, 12, 3, padding=1, stride=2), 12), (2, 4, 4), "rows"),
        (lambda: Positions(nn.Conv2d(2, 12, 3, padding=1), 12), (2, 4, 4), "gradient"),
        (lambda: Positions(nn.Conv2d(4, 24, 3, groups=2), 24), (4, 5, 4), "rows"),
        (lambda: Positions(nn.Conv2d(2, 12, 2, padding="same"), 12), (2, 3, 3), "gradient"),
    ],
    ids=["linear", "conv", "conv, many rows", "grouped conv", "same"],
)
def test_inputs_without_a_batch_dimension_are_one_sample(make, shape, path):
    model, plain = pair(make)
    x, y = data(shape, 1)
    learner = rgo.RGO(model, alpha=ALPHA, encode=False)
    learner.begin_task(0)
    learner.end_task([(x[0], y)], forward=lambda batch: (model(batch[0]).unsqueeze(0), batch[1]))
    H = curvature(plain, ["layer", "head"], x, y)
    assert_P(learner, H)
    learner.begin_task(1)
    x, y = data(shape, 1, seed=1)
    loss(model(x[0]), y[0]).backward()
    expected = references.projected(references.gradients(plain, ["layer", "head"], loss(plain(x), y)), H, ALPHA)
    assert_gradients(model, expected)
    assert paths(learner)["layer"] == path


@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("dims", [0, 2])
def test_activations_in_place_behind_a_layer_change_nothing(dims, count):
    def make(inplace=True):
        layers = [nn.Conv2d(2, 24, 3), nn.Conv2d(24, 24, 1)] if dims else [nn.Linear(4, 24), nn.Linear(24, 24)]
        head = [nn.Flatten(), nn.Linear(24, CLASSES)]
        return nn.Sequential(layers[0], nn.ReLU(inplace), layers[1], nn.LeakyReLU(0.1, inplace), *head)

    shape = (2, 3, 3) if dims else (4,)
    model, _ = pair(make)
    _, plain = pair(lambda: make(inplace=False))
    names = ["0", "2", "5"]
    x, y = data(shape, 5)
    learner = second_task(model, x, y)
    H = curvature(plain, names, x, y)
    assert_P(learner, H)
    x, y = data(shape, count, seed=1)
    loss(model(x), y).backward()
    expected = references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA)
    assert_gradients(model, expected)
    assert set(paths(learner).values()) == ({"rows"} if count == 2 else {"rows", "gradient"}) | {paths(learner)["5"]}


# ---- more than one plain backward -----------------------------------------------------------------------------------


def smooth():
    return nn.Sequential(nn.Linear(4, 13), nn.Tanh(), nn.Linear(13, 14, bias=False), nn.Tanh(), nn.Linear(14, CLASSES))


def smooth_conv():
    return nn.Sequential(
        nn.Conv2d(2, 24, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(24, 24, 2, groups=2), nn.Tanh(),
        nn.Flatten(), nn.Linear(24, CLASSES),
    )  # fmt: skip


def tied():
    return Tied("shared")


DIFFERENTIABLE = {"mlp": (smooth, (4,), ["0", "2", "4"]), "conv": (smooth_conv, (2, 4, 4), ["0", "2", "5"])}
DIFFERENTIABLE["tied"] = (tied, (4,), ["stem", "layer", "head"])


def learned(kind, **options):
    make, shape, names = DIFFERENTIABLE[kind]
    model, plain = pair(make)
    x, y = data(shape, 5)
    learner = second_task(model, x, y, **options)
    return learner, model, plain, names, curvature(plain, names, x, y)


def penalised(model, x, y):
    x = x.clone().requires_grad_()
    value = loss(model(x), y)
    (dx,) = torch.autograd.grad(value, x, create_graph=True)
    return value + dx.square().sum()


@pytest.mark.parametrize("first", [True, False], ids=["at once", "after a step"])
@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("kind", DIFFERENTIABLE)
def test_a_gradient_penalty_arrives_as_its_true_second_order_gradient_projected(kind, count, first):
    learner, model, plain, names, H = learned(kind)
    x, y = data(DIFFERENTIABLE[kind][1], count, seed=1)
    if not first:
        loss(model(x), y).backward()
        model.zero_grad()
    penalised(model, x, y).backward()
    expected = references.projected(references.gradients(plain, names, penalised(plain, x, y)), H, ALPHA)
    assert_gradients(model, expected)
    assert paths(learner)[names[1]] == ("rows" if count == 2 else "gradient")


@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize(("kind", "widths"), [("mlp", {"2": 13, "4": 14}), ("conv", {"2": 24, "5": 24})])
def test_a_gradient_penalty_is_right_through_a_tasks_wiring_too(kind, widths, count):
    make, shape, names = DIFFERENTIABLE[kind]
    model, plain = pair(make)
    x, y = data(shape, 5)
    orders = [{name: rgo.permutation(task, width).tolist() for name, width in widths.items()} for task in (0, 1)]
    second_task(model, x, y, encode=True)
    with references.wired(plain, orders[0]):
        H = curvature(plain, names, x, y)
    x, y = data(shape, count, seed=1)
    penalised(model, x, y).backward()
    with references.wired(plain, orders[1]):
        expected = references.projected(references.gradients(plain, names, penalised(plain, x, y)), H, ALPHA)
    assert_gradients(model, expected)


@pytest.mark.parametrize("large", ["input", "weight"])
def test_a_tasks_wiring_permutes_the_smaller_of_input_and_weight(large):
    size = 12 if large == "input" else 4
    model = Around(nn.Conv2d(6, 2, 3), 2, nn.Conv2d(2, 6, 1)).double()
    second_task(model, *data((2, 4, 4), 5), encode=True)
    h = model.layer(model.stem(data((2, size, size), 1)[0]))
    node, seen = [h.grad_fn], set()
    while node:
        seen.add(node[-1])
        node += [parent for parent, _ in node.pop().next_functions if parent is not None]
    assert any("Gather" in each.name() for each in seen) == (large == "weight")
    assert any("ProjectPair" in each.name() for each in seen)


@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_the_input_gradient_is_never_projected(kind, count):
    _, model, plain, _, _ = learned(kind)
    x, y = data(DIFFERENTIABLE[kind][1], count, seed=1)
    found = []
    for m in (model, plain):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(loss(m(leaf), y), leaf, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), leaf)
        found.append((dx, ddx))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("count", [2, 20])
def test_an_input_gradient_before_the_first_step_is_nothing_the_guard_minds(count, create_graph):
    _, model, plain, names, H = learned("mlp")
    x, y = data((4,), count, seed=1)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss(model(leaf), y), leaf, create_graph=create_graph)  # an adversarial sample
    x = x + 0.1 * dx.detach().sign()
    loss(model(x), y).backward()
    assert_gradients(model, references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA))


@pytest.mark.parametrize("count", [2, 20])
def test_gradients_of_some_weights_alone_come_projected_and_disturb_no_later_backward(count):
    _, model, plain, names, H = learned("mlp")
    x, y = data((4,), count, seed=1)
    (W,) = torch.autograd.grad(loss(model(x), y), [model[0].weight])
    expected = references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA)
    torch.testing.assert_close(W, expected["0"][0, :, :4], rtol=1e-9, atol=1e-11)
    loss(model(x), y).backward()
    assert_gradients(model, expected)


@pytest.mark.parametrize("count", [2, 20])
def test_gradients_accumulate_over_batches_and_over_forwards_in_one_graph(count):
    learner, model, plain, names, H = learned("conv")
    x, y = data((2, 4, 4), 2 * count, seed=1)
    expected = references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA)
    for part in (slice(0, count), slice(count, None)):
        loss(model(x[part]), y[part]).backward()
    assert_gradients(model, expected)
    model.zero_grad()
    learner.begin_task(1)  # the guard watches again
    (loss(model(x[:count]), y[:count]) + loss(model(x[count:]), y[count:])).backward()
    assert_gradients(model, expected)


@pytest.mark.parametrize("first", [True, False], ids=["at once", "after a step"])
@pytest.mark.parametrize("count", [2, 20])
def test_functional_calls_with_other_parameters_give_their_projected_gradients(count, first):
    _, model, plain, names, H = learned("mlp")
    x, y = data((4,), count, seed=1)
    if not first:
        loss(model(x), y).backward()
        model.zero_grad()
    other = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
    output = torch.func.functional_call(model, other, (x,))
    plain.load_state_dict(other)
    torch.testing.assert_close(output, plain(x), rtol=1e-12, atol=1e-13)
    found = dict(zip(other, torch.autograd.grad(loss(output, y), list(other.values()))))
    expected = references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA)
    for name in names:
        G = references.as_matrix(plain.get_submodule(name), found[f"{name}.weight"], found.get(f"{name}.bias"))
        torch.testing.assert_close(G, expected[name], rtol=1e-9, atol=1e-11)
    assert all(p.grad is None for p in model.parameters())
    plain.load_state_dict(model.state_dict())  # and the model's own gradients afterwards are as ever
    loss(model(x), y).backward()
    assert_gradients(model, references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA))


@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_what_changes_between_two_steps_is_noticed(kind, count):
    """A layer remembers how its last step went; whatever of it no longer holds is looked up again."""
    learner, model, *_ = learned(kind, encode=True)
    shape = DIFFERENTIABLE[kind][1]
    x, y = data(shape, count, seed=1)
    first, *_, last = model.children()

    def gradients(remember, x=x, y=y):
        for site in learner._sites.values():
            site.lane = site.lane if remember else None
        model.zero_grad()
        loss(model(x), y).backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    def assert_noticed(*batch):
        for with_lane, without in zip(gradients(True, *batch), gradients(False, *batch)):
            assert (with_lane is None and without is None) or torch.equal(with_lane, without)

    gradients(True)
    assert all(site.lane is not None for site in learner._sites.values())
    assert_noticed()
    gradients(True)
    assert_noticed(*data(shape, 22 - count, seed=2))  # as many rows as take the other path
    gradients(True)
    with learner.task(0):  # another task's wiring
        plain_answer = model(x).detach()
        assert_noticed()
    gradients(True)
    with learner.task(0), torch.no_grad():
        torch.testing.assert_close(model(x), plain_answer)
    last.weight.requires_grad_(False)
    last.bias.requires_grad_(False)
    model.zero_grad()
    loss(model(x), y).backward()
    assert last.weight.grad is None
    assert last.bias.grad is None
    last.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="was trained when its P was made and is not now"):
        model(x)
    last.bias.requires_grad_(True)
    gradients(True)
    with pytest.raises(TypeError, match=r"got an input of torch\.int64"):
        first(x.long())
    with torch.no_grad():
        assert model(x).grad_fn is None
    learner.end_task([(x, y)])
    with pytest.raises(RuntimeError, match="outside any task"):
        model(x)
    learner.begin_task(2)
    assert_noticed()


@pytest.mark.parametrize("count", [2, 20])
def test_a_bias_named_in_skip_is_trained_without_projection(count):
    learner, model, plain, _, _ = learned("mlp", skip=("0.bias",))
    x, y = data((4,), count, seed=1)
    loss(model(x), y).backward()
    (expected,) = torch.autograd.grad(loss(plain(x), y), [plain[0].bias])
    assert learner.projections["0"].dim == 4
    assert model[0].bias.grad is not None
    torch.testing.assert_close(model[0].bias.grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("count", [2, 20])
def test_float32_gradients_and_P_are_right_to_float32_precision(kind, count):
    make, shape, names = DIFFERENTIABLE[kind]
    model, plain = pair(make, dtype=torch.float32)
    x, y = data(shape, 5)
    x = x.float().double()
    learner = second_task(model, x.float(), y)
    H = curvature(plain, names, x, y)
    for name, projection in learner.projections.items():
        assert (projection.dtype, projection.H.dtype) == (torch.float32, torch.float64)
        P, _ = references.projector(H[name], ALPHA)
        torch.testing.assert_close(projection.P.reshape(P.shape), P, rtol=0.0, atol=2e-5)
    x, y = data(shape, count, seed=1)
    x = x.float().double()
    loss(model(x.float()), y).backward()
    expected = references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA)
    for name, found in references.arrived(model, names).items():
        assert found.dtype == torch.float32
        assert float((found - expected[name]).norm()) < 2e-5 * float(expected[name].norm())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("count", [2, 20])
def test_dtype_is_the_precision_of_the_multiplication_alone(dtype, bound, count):
    _, model, plain, names, H = learned("conv", dtype=dtype)
    x, y = data((2, 4, 4), count, seed=1)
    loss(model(x), y).backward()
    expected = references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA)
    for name, found in references.arrived(model, names).items():
        assert found.dtype == torch.float64
        assert float((found - expected[name]).norm()) < bound * float(expected[name].norm())


@pytest.mark.parametrize("count", [1, 30])
def test_the_spectral_form_gives_the_same_gradients_on_both_paths(count):
    def make():
        return nn.Sequential(nn.Linear(60, 19), nn.Tanh(), nn.Linear(19, CLASSES))

    model, plain = pair(make)
    x, y = data((60,), 5)
    learner = second_task(model, x, y, tolerance=1e-12)
    assert learner.projections["0"].rank == 5
    assert learner.projections["2"].rank is None  # a quarter of its width or more
    H = curvature(plain, ["0", "2"], x, y)
    x, y = data((60,), count, seed=1)
    loss(model(x), y).backward()
    expected = references.projected(references.gradients(plain, ["0", "2"], loss(plain(x), y)), H, ALPHA)
    assert_gradients(model, expected)


# ---- which types are covered ----------------------------------------------------------------------------------------


class Transposed(nn.Module):
    """A Linear whose weight lies (inputs, outputs), as in GPT-2."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.fixture
def registering():
    """Registered types are forgotten again."""
    before = dict(_TYPES)
    yield
    _TYPES.clear()
    _TYPES.update(before)


def transposed(fast):
    def describe(layer):
        n, o = layer.weight.shape
        return rgo.LayerMatrix(
            groups=1,
            inputs=n,
            outputs=o,
            width=n,
            axis=-1,
            forward=lambda x, w, b: x @ w + b,
            rows=lambda x: x.reshape(-1, 1, n),
            deltas=lambda delta: delta.reshape(-1, 1, o),
            count=lambda x: x.numel() // n,
            input_gradient=(lambda delta, x, w: delta @ w.t()) if fast else None,
            matrix=lambda w: w.t().unsqueeze(0),
            weight=lambda m: m.squeeze(0).t(),
        )

    return describe


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize(("fast", "count"), [(True, 2), (True, 20), (False, 2)])
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.usefixtures("registering")
def test_a_registered_layer_is_projected_like_the_linear_layer_it_is(shape, fast, count, one_by_one):
    rgo.register(Transposed)(transposed(fast))

    class Model(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.stem, self.layer, self.head = kind(4, 13), kind(13, 14), nn.Linear(14, CLASSES)

        def forward(self, x):
            h = self.layer(self.stem(x).tanh()).tanh()
            h = h if h.dim() == 2 else h.cumsum(1).mean(1)
            return self.head((h - h.mean(0)).tanh() if one_by_one else h)

    torch.manual_seed(0)
    model, plain = Model(Transposed).double(), Model(nn.Linear).double()
    transpose = {"stem.weight", "layer.weight"}
    plain.load_state_dict({k: v.t() if k in transpose else v for k, v in model.state_dict().items()})
    names = ["stem", "layer", "head"]
    orders = [{name: rgo.permutation(t, w) for name, w in (("layer", 13), ("head", 14))} for t in (0, 1)]
    x, y = data(shape, 5)
    if one_by_one:
        with pytest.warns(UserWarning, match="one sample at a time"):
            learner = second_task(model, x, y, encode=True)
    else:
        learner = second_task(model, x, y, encode=True)
    with references.wired(plain, orders[0]):
        H = curvature(plain, names, x, y, together=one_by_one)
    assert_P(learner, H)
    x, y = data(shape, count, seed=1)
    loss(model(x), y).backward()
    with references.wired(plain, orders[1]):
        expected = references.projected(references.gradients(plain, names, loss(plain(x), y)), H, ALPHA)
    for name in names:
        layer = model.get_submodule(name)
        weight = layer.weight.grad.t() if name != "head" else layer.weight.grad
        found = torch.cat([weight, layer.bias.grad[:, None]], dim=1)
        torch.testing.assert_close(found, expected[name][0], rtol=1e-9, atol=1e-11)
    rows = count * (3 if len(shape) == 2 else 1)
    assert paths(learner)["layer"] == ("rows" if fast and rows < 14 else "gradient")


def test_register_takes_module_types_only():
    for kind in (nn.Linear(2, 2), int, "Linear"):
        with pytest.raises(TypeError, match="subclass of torch"):
            rgo.register(kind)


class Renamed(nn.Linear):
    """Nothing of its own."""


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Standardised(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class ScaledConvolution(nn.Conv1d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_without_a_forward_of_its_own_is_covered():
    assert list(rgo.RGO(nn.Sequential(Renamed(4, 5), nn.Linear(5, 3))).projections) == ["0", "1"]


@pytest.mark.parametrize(
    "layer", [Scaled(4, 5), Standardised(4, 5, 1), ScaledConvolution(4, 5, 1)], ids=lambda m: type(m).__name__
)
def test_a_subclass_with_a_forward_of_its_own_is_named_as_unprotected(layer):
    model = nn.Sequential(layer, nn.Linear(5, 3))
    with pytest.warns(UserWarning, match=r"2 parameters are trained without protection .*0\.weight.*rgo\.register"):
        learner = rgo.RGO(model)
    assert list(learner.projections) == ["1"]
    assert list(learner.summary().unprotected) == ["0.weight", "0.bias"]
    assert "rgo.register" in learner.summary().unprotected["0.weight"]
    assert "NOT PROTECTED: 0.weight" in str(learner.summary())


@pytest.mark.usefixtures("registering")
def test_the_entry_of_a_subclass_goes_before_that_of_its_base():
    @rgo.register(Scaled)
    def scaled(layer):
        n, o = layer.in_features, layer.out_features
        return rgo.LayerMatrix(
            groups=1,
            inputs=n,
            outputs=o,
            width=n,
            axis=-1,
            forward=lambda x, w, b: 2 * F.linear(x, w, b),
            rows=lambda x: 2 * x.reshape(-1, 1, n),
            deltas=lambda d: d.reshape(-1, 1, o),
            count=lambda x: x.numel() // n,
        )

    model, plain = pair(lambda: nn.Sequential(Scaled(4, 5, bias=False), nn.Tanh(), nn.Linear(5, CLASSES)))
    x, y = data((4,), 5)
    learner = second_task(model, x, y)
    H = curvature(plain, ["0", "2"], x, y)
    assert_P(learner, H)
    loss(model(x), y).backward()
    expected = references.projected(references.gradients(plain, ["0", "2"], loss(plain(x), y)), H, ALPHA)
    assert_gradients(model, expected)


def test_integer_inputs_are_refused_with_the_layers_name():
    learner = rgo.RGO(nn.Sequential(nn.Linear(4, 3)), raw=("0",))
    learner.begin_task(0)
    with pytest.raises(TypeError, match=r"layer '0' got an input of torch.int64"):
        learner.model(torch.zeros(2, 4, dtype=torch.long))
