import sys
from itertools import product

import pytest
import torch
from torch import nn

import rgo
from rgo.experiment import experiment
from rgo.models import (
    INITS,
    MODELS,
    alexnet6,
    alexnet7,
    head_name,
    lenet5,
    load,
    mlp,
    resnet18,
    vgg11,
    vgg13,
)


def test_the_default_is_the_papers_network():
    model = mlp()
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [
        (256, 784), (256,), (256, 256), (256,), (10, 256), (10,)
    ]  # fmt: skip
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_322
    assert [type(module) for module in model] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert model(torch.rand(3, 784)).shape == (3, 10)


def test_widths_are_free_and_no_hidden_layer_is_a_linear_model():
    assert [module.out_features for module in mlp(6, (5, 4, 3), 2) if isinstance(module, nn.Linear)] == [
        5,
        4,
        3,
        2,
    ]
    assert [type(module) for module in mlp(6, (), 2)] == [nn.Linear]


def test_glorot_fills_its_interval_and_leaves_the_biases_at_zero():
    layer = mlp(init="glorot")[0]
    bound = (6 / (784 + 256)) ** 0.5
    assert 0.999 * bound < layer.weight.abs().max() <= bound
    assert layer.weight.mean().abs() < 0.01 * bound
    assert not layer.bias.any()


def test_torch_is_what_linear_layers_do_by_themselves():
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    for ours, theirs in zip(mlp(init="torch", seed=5).parameters(), expected.parameters()):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("init", ["glorot", "torch", "orthogonal"])
def test_weights_are_a_function_of_the_seed_alone(init):
    def weights(seed):
        return torch.cat([parameter.flatten() for parameter in mlp(init=init, seed=seed).parameters()])

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)


def test_an_unknown_init_is_refused_by_name():
    with pytest.raises(ValueError, match="init='he' is unknown: give one of 'glorot', 'torch', 'orthogonal'"):
        mlp(init="he")


# ---- convolutional networks -------------------------------------------------------------------------------------

SMALL = {  # arguments that make a network small enough for many tests
    "mlp": {"inputs": 12, "hidden": (6, 5)},
    "lenet5": {"filters": (2, 3), "units": (6, 5)},
    "alexnet6": {"filters": (2, 3, 4), "units": (6, 5)},
    "alexnet7": {"filters": (2, 3, 3, 3), "units": (6, 5)},
    "vgg11": {"filters": (2, 3, 4, 5, 5), "units": (6, 5)},
    "vgg13": {"filters": (2, 3, 4, 5, 5), "units": (6, 5)},
    "resnet18": {"filters": (2, 3, 4, 5)},
}
CONVOLUTIONAL = [name for name in SMALL if name != "mlp"]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def side(name: str) -> int:
    return 84 if name == "alexnet7" else 32


def test_every_model_has_its_small_twin_here():
    assert list(SMALL) == list(MODELS)


@pytest.mark.parametrize(
    ("name", "image", "parameters"),
    [
        # 75*20+20 + 500*50+50 + 3200*800+800 + 800*500+500 + 500*100+100
        ("lenet5", 32, 3_037_970),
        ("lenet5", 84, 18_117_970),  # 21*21*50 = 22050 units in place of 3200
        # 48*64+64 + 576*128+128 + 512*256+256 + 1024*2048+2048 + 2048*2048+2048 + 2048*100+100
        ("alexnet6", 32, 6_708_772),
        ("alexnet6", 84, 47_078_948),  # 9*9*256 = 20736 units in place of 1024
        # 75*64+64 + 1024*128+128 + 2*(1152*128+128) + 1152*2048+2048 + 2048*2048+2048 + 2048*100+100
        ("alexnet7", 84, 7_193_828),
        # 27*64+64 + 576*128+128 + 1152*256+256 + 2304*256+256 + 2304*512+512 + 3*(4608*512+512)
        #    + 512*4096+4096 + 4096*4096+4096 + 4096*100+100
        ("vgg11", 32, 28_512_740),
        ("vgg11", 84, 34_804_196),  # 2*2*512 units in place of 512
        ("vgg13", 32, 28_697_252),  # VGG-11 + 576*64+64 + 1152*128+128
        ("vgg13", 84, 34_988_708),
        # 147*64+64 + 4*(576*64+64) + 73_856+3*147_584+64*128+128 + 295_168+3*590_080+128*256+256
        #    + 1_180_160+3*2_359_808+256*512+512 + 512*100+100
        ("resnet18", 32, 11_223_012),
        ("resnet18", 84, 11_223_012),
    ],
)
def test_parameters_are_as_many_as_counted_by_hand(name, image, parameters):
    model = load(name, image=image)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.head.out_features == 100
    assert head_name(model) == "head"


def test_batch_norm_takes_the_place_of_the_biases_of_all_convolutions():
    model = resnet18(norm="batch")
    # 3904 shifts and as many scales; without the 3904 biases beside them and the 896 of the shortcuts.
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_223_012 + 3_904 - 896
    assert all(module.bias is None for module in model.modules() if isinstance(module, nn.Conv2d))
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 17
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.1)}
    for norm in norms:
        assert norm.weight.eq(1).all()
        assert not norm.bias.any()
        assert not norm.running_mean.any()
        assert norm.running_var.eq(1).all()
        assert norm.num_batches_tracked == 0


@pytest.mark.parametrize(("name", "image"), [(n, i) for n in CONVOLUTIONAL for i in (32, 84) if i >= side(n)])
def test_images_go_in_and_logits_come_out(name, image):
    model = load(name, classes=7, image=image, **SMALL[name])
    assert model(torch.rand(2, 3, image, image)).shape == (2, 7)


def test_the_image_shrinks_as_in_the_papers_networks():
    def sides(model, image):
        x, seen = torch.zeros(1, 3, image, image), [image]
        for module in model:
            x = module(x)
            if isinstance(module, nn.Conv2d | nn.MaxPool2d):
                seen.append(x.shape[-1])
        return seen

    assert sides(lenet5(**SMALL["lenet5"]), 32) == [32, 32, 16, 16, 8]
    assert sides(alexnet6(**SMALL["alexnet6"]), 32) == [32, 29, 14, 12, 6, 5, 2]
    assert sides(alexnet7(**SMALL["alexnet7"]), 84) == [84, 80, 40, 37, 18, 16, 8, 6, 3]
    assert sides(vgg11(**SMALL["vgg11"]), 32) == [32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2, 1]
    assert sides(vgg13(image=84, **SMALL["vgg13"]), 84)[-3:] == [5, 5, 2]


@pytest.mark.parametrize(("name", "least"), [("lenet5", 4), ("alexnet6", 19), ("alexnet7", 50), ("vgg11", 32)])
def test_an_image_too_small_is_refused_with_the_smallest_that_fits(name, least):
    with pytest.raises(ValueError, match=rf"{name} does not fit image={least - 1}.*at least {least} x {least}"):
        load(name, image=least - 1, **SMALL[name])
    model = load(name, image=least, **SMALL[name])
    assert model(torch.zeros(1, 3, least, least)).shape == (1, 100)


def test_the_average_of_a_residual_network_takes_images_of_any_size():
    assert resnet18(image=1, filters=(2, 2, 2, 2))(torch.zeros(1, 3, 1, 1)).shape == (1, 100)
    with pytest.raises(ValueError, match="at least 1 pixel, got image=0"):
        resnet18(image=0)


def test_the_flattened_maps_lie_channel_by_channel():
    model = lenet5(**SMALL["lenet5"])
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(model.flatten(x)[:, :64], x[:, 0].flatten(1))


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_bias_false_leaves_no_bias_anywhere(name):
    model = load(name, bias=False, **SMALL[name])
    assert all("bias" not in key for key, _ in model.named_parameters())


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_a_forward_changes_neither_its_input_nor_the_model(name):
    model = load(name, **SMALL[name])
    before, state = torch.randn(2, 3, side(name), side(name)), weights(model)
    x = before.clone()
    model(x).sum().backward()
    assert torch.equal(x, before)
    assert torch.equal(weights(model), state)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("lenet5", {"filters": (4,)}, r"lenet5 has 2 stages: give 2 numbers of filters, not \[4\]"),
        ("vgg13", {"filters": (4, 4)}, "vgg13 has 5 stages"),
        ("resnet18", {"filters": (4, 4, 4)}, "resnet18 has 4 stages"),
        ("resnet18", {"norm": "group"}, "norm='group' is unknown: give None or 'batch'"),
        ("alexnet6", {"dropout": (0.2, 0.5)}, "alexnet6: dropout is one rate or 5, one for each hidden layer; got 2"),
        ("lenet5", {"init": "xavier"}, "init='xavier' is unknown: give one of 'glorot', 'torch', .*'truncated-0.1'$"),
        ("lenet5", {"init": "zero-last"}, "init='zero-last' is unknown"),
        ("resnet18", {"init": "xavier"}, "init='xavier' is unknown: give one of .*'he'.*'zero-last'"),
        ("resnet18", {"init": "zero-last", "norm": "batch"}, "init='zero-last' is unknown"),
    ],
)
def test_what_does_not_make_a_network_is_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        load(name, **arguments)


# ---- dropout ----------------------------------------------------------------------------------------------------


def rates(model: nn.Module) -> dict[str, float]:
    return {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}


def test_one_rate_of_dropout_is_every_hidden_layers_or_the_dense_ones_of_vgg():
    assert rates(lenet5(dropout=0.3, **SMALL["lenet5"])) == {
        "conv1_dropout": 0.3, "conv2_dropout": 0.3, "fc1_dropout": 0.3, "fc2_dropout": 0.3
    }  # fmt: skip
    assert rates(vgg13(dropout=0.5, **SMALL["vgg13"])) == {"fc1_dropout": 0.5, "fc2_dropout": 0.5}
    assert rates(alexnet6(**SMALL["alexnet6"])) == {}


def test_rates_of_dropout_go_to_the_hidden_layers_in_turn():
    assert list(rates(alexnet6(dropout=(0.2, 0.2, 0.5, 0.5, 0.5), **SMALL["alexnet6"])).values()) == [
        0.2, 0.2, 0.5, 0.5, 0.5
    ]  # fmt: skip
    assert rates(vgg11(dropout=[0, 0.5], **SMALL["vgg11"])) == {"fc2_dropout": 0.5}


def test_dropout_changes_no_weight_and_no_name():
    plain, dropped = (alexnet6(dropout=rate, **SMALL["alexnet6"]) for rate in (0.0, 0.5))
    assert list(plain.state_dict()) == list(dropped.state_dict())
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(plain(x), dropped.eval()(x))


# ---- initialisation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "init"), [*product(CONVOLUTIONAL, INITS), ("resnet18", "zero-last")])
def test_every_network_is_a_function_of_the_seed_alone(name, init):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights(load(name, init=init, **SMALL[name]))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(weights(load(name, init=init, **SMALL[name])), first)
    assert not torch.equal(weights(load(name, init=init, seed=1, **SMALL[name])), first)
    assert first.isfinite().all()


def test_torch_is_what_convolutions_do_by_themselves():
    torch.manual_seed(5)
    expected = [nn.Conv2d(3, 20, 5), nn.Conv2d(20, 50, 5), nn.Linear(3200, 800), nn.Linear(800, 500)]
    ours = [module for module in lenet5(init="torch", seed=5) if isinstance(module, nn.Conv2d | nn.Linear)]
    for layer, by_itself in zip(ours, expected):
        assert torch.equal(layer.weight, by_itself.weight)
        assert torch.equal(layer.bias, by_itself.bias)


@pytest.mark.parametrize(
    ("init", "deviation", "largest", "bias"),
    [
        ("glorot", (2 / (1024 + 2048)) ** 0.5, (6 / (1024 + 2048)) ** 0.5, 0.0),
        ("he", (2 / 1024) ** 0.5, None, 0.0),
        ("truncated", 0.05 * 0.8796, 0.1, 0.0),  # a normal cut at two deviations has 0.8796 of its deviation
        ("truncated-0.1", 0.1 * 0.8796, 0.2, 0.1),
        ("orthogonal", 2048**-0.5, None, 0.1),
    ],
)
def test_initialisations_are_as_documented(init, deviation, largest, bias):
    layer = alexnet6(init=init).fc1
    assert layer.weight.std().item() == pytest.approx(deviation, rel=0.01)
    assert layer.weight.mean().abs() < 0.01 * deviation
    assert largest is None or 0.99 * largest < layer.weight.abs().max() <= largest
    assert layer.bias.eq(bias).all()


def test_an_orthogonal_kernel_is_orthogonal_over_its_patches():
    rows = lenet5(init="orthogonal").conv2.weight.flatten(1)
    assert torch.allclose(rows @ rows.T, torch.eye(50), atol=1e-5)


def test_residual_blocks_start_as_the_identity_or_as_their_shortcut():
    model = resnet18(filters=(4, 6, 8, 8), seed=3)
    x = model.relu(model.stem(torch.randn(2, 3, 9, 9)))
    for stage in (model.stage1, model.stage2, model.stage3, model.stage4):
        for block in stage:
            y = block(x)
            assert torch.equal(y, block.shortcut(x).relu())
            if isinstance(block.shortcut, nn.Identity):
                assert torch.equal(y, x)
            x = y
    assert (
        sum(isinstance(block.shortcut, nn.Identity) for stage in (model.stage1, model.stage4) for block in stage) == 3
    )


def test_zero_last_is_he_but_for_the_last_convolutions():
    arguments = SMALL["resnet18"]
    ours, he = resnet18(**arguments).state_dict(), resnet18(init="he", **arguments).state_dict()
    assert [name for name in ours if not torch.equal(ours[name], he[name])] == [
        f"stage{stage}.{block}.conv2.weight" for stage in (1, 2, 3, 4) for block in (0, 1)
    ]


def test_zero_weights_learn_nonetheless():
    model = resnet18(filters=(8, 8, 8, 8))
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert all(block.conv2.weight.grad.any() for block in [*model.stage1, *model.stage4])


def test_the_relu_after_the_stem_is_an_option():
    arguments = {**SMALL["resnet18"], "seed": 2}
    with_relu, without = resnet18(**arguments), resnet18(stem_relu=False, **arguments)
    assert list(with_relu.state_dict()) == list(without.state_dict())
    assert isinstance(with_relu.relu, nn.ReLU)
    assert isinstance(without.relu, nn.Identity)


def test_batch_norm_starts_with_he_and_not_at_zero():
    model = resnet18(norm="batch", **SMALL["resnet18"])
    assert all(block.conv2.weight.any() for block in [*model.stage1, *model.stage4])
    assert model(torch.rand(4, 3, 8, 8)).isfinite().all()


# ---- under RGO --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("lenet5", [75, 500, 3200, 800]),
        ("alexnet6", [48, 576, 512, 1024, 2048]),
        ("alexnet7", [75, 1024, 1152, 1152, 1152, 2048]),
        ("vgg11", [27, 576, 1152, 2304, 2304, 4608, 4608, 4608, 512, 4096]),
        ("vgg13", [27, 576, 576, 1152, 1152, 2304, 2304, 4608, 4608, 4608, 512, 4096]),
        (
            "resnet18",
            [
                147,
                576,
                576,
                576,
                576,
                576,
                1152,
                64,
                1152,
                1152,
                1152,
                2304,
                128,
                2304,
                2304,
                2304,
                4608,
                256,
                4608,
                4608,
            ],
        ),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_every_layer_but_the_head_has_a_projection_of_its_input_side(name, inputs, bias):
    learner = rgo.RGO(load(name, bias=bias), skip=("head",))
    assert [layer.dim for layer in learner.summary().covered] == [width + bias for width in inputs]
    assert learner.summary().unprotected == {}


@pytest.mark.parametrize("name", list(SMALL))
def test_two_tasks_can_be_learned(name):
    torch.manual_seed(0)
    model = load(name, classes=4, **SMALL[name])
    x = torch.rand(6, 12) if name == "mlp" else torch.rand(6, 3, side(name), side(name))
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    learner = rgo.RGO(model, skip=(head_name(model),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for task in range(2):
        learner.begin_task(task)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        learner.end_task([(x, y)])
    with learner.task(0), torch.no_grad():
        assert model(x).isfinite().all()


def test_rgo_refuses_the_baselines_network():
    with pytest.raises(ValueError, match=r"cannot attach to 'norm' \(BatchNorm2d\)"):
        rgo.RGO(resnet18(norm="batch", **SMALL["resnet18"]), skip=("head",))


# ---- names ------------------------------------------------------------------------------------------------------


def test_the_head_is_the_last_linear_layer():
    assert head_name(mlp()) == "4"
    assert head_name(nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.ReLU())) == "0.0"
    with pytest.raises(ValueError, match=r"ReLU has no nn\.Linear"):
        head_name(nn.ReLU())


def test_an_unknown_model_is_refused_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"'LeNet' is unknown: did you mean 'lenet5'\? Give one of 'mlp', .*'resnet18'"
    ):
        load("LeNet")
    with pytest.raises(ValueError, match=r"'transformer' is unknown\. Give one of"):
        load("transformer")


OWN = """
import torch
from torch import nn

bare, number, anything = nn.Linear, 3, dict

def wide(units=4):
    return nn.Linear(2, units)

def told(seed, units, *, bias=True):
    layer = nn.Linear(2, units, bias)
    nn.init.constant_(layer.weight, seed)
    return layer

def open_to_all(units=4, **rest):
    return nn.Linear(2, units + len(rest))

def text():
    return "no model"

def by_place(seed, /):
    return nn.Linear(2, 4)

def named(name="four"):
    return nn.Linear(2, len(name))

def greedy(lr):
    return nn.Linear(2, 4)

def bent(alpha):
    return nn.Linear(2, 4)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import no_such_dependency\n")
    (tmp_path / "own_wrong.py").write_text("def net(:\n")
    (tmp_path / "own_end.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_models", None)


@pytest.mark.usefixtures("own_module")
def test_a_model_of_ones_own_is_imported_and_called():
    assert load("own_models:wide", units=7).out_features == 7
    assert load("own_models:open_to_all", seed=2, other=1).out_features == 4 + 2  # the seed, too, is one of the rest
    assert load("own_models:bare", in_features=3, out_features=5).weight.shape == (5, 3)
    assert load("own_models:named", name="seven").out_features == 5  # as `load`'s own argument might be called


@pytest.mark.usefixtures("own_module")
def test_a_model_of_ones_own_is_a_function_of_the_seed_whether_it_takes_one_or_not():
    before = torch.get_rng_state()
    assert load("own_models:told", seed=9, units=3).weight.eq(9).all()
    first, again, other = (load("own_models:wide", seed=seed).weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("own_modles:wide", {}, "there is no module 'own_modles'. .*PYTHONPATH"),
        ("own_models.deep:wide", {}, "there is no module 'own_models.deep'"),
        ("own_broken:wide", {}, "'own_broken' is there, but what it imports is not: .* 'no_such_dependency'"),
        ("own_wrong:net", {}, "importing 'own_wrong' fails: SyntaxError"),
        ("own_end:net", {}, "importing 'own_end' fails: SystemExit: 3"),
        ("own_models:by_place", {}, "takes 'seed' by position only"),
        ("own_models:wine", {}, "module 'own_models' has no 'wine'; did you mean 'wide'"),
        ("own_models:zzzzzz", {}, "has no 'zzzzzz'. Give the name of a function"),
        ("own_models:number", {}, "is an object of type int, which cannot be called"),
        ("own_models:text", {}, "must return a torch.nn.Module, but it returned str"),
        ("own_models:anything", {"units": 3}, "must return a torch.nn.Module, but it returned dict"),
        ("own_models:", {}, "is given as 'package.module:function'"),
        (":wide", {}, "is given as 'package.module:function'"),
        ("own_models:told", {}, "needs units: give it a default, or say --set units="),
        ("own_models:bare", {"in_features": 3}, "needs out_features: "),
        ("own_models:wide", {"unit": 3}, "takes no 'unit'; did you mean 'units'"),
        ("own_models:wide", {"depth": 3}, "takes no 'depth'. It takes units"),
        ("own_models:text", {"depth": 3}, "takes no 'depth'. It takes nothing"),
        ("lenet5", {"unit": 3}, "takes no 'unit'; did you mean 'units'"),
    ],
)
def test_what_is_no_model_is_refused(name, arguments, message):
    with pytest.raises(ValueError, match=f"^model {name!r}.*{message}"):
        load(name, **arguments)


@pytest.mark.usefixtures("own_module")
def test_a_run_with_a_model_of_ones_own_is_checked_before_it_starts():
    wanted = experiment("digits", "rgo", 0, model="own_models:told", units=5, bias=False, alpha=2.0, kind="permuted")
    assert wanted.settings["model_options"] == {"units": 5, "bias": False}
    assert wanted.settings["method_options"] == {"alpha": 2.0}
    assert wanted.settings["benchmark_options"] == {"kind": "permuted"}
    assert wanted.name == "rgo+alpha=2.0+bias=False+kind=permuted+model=own_models:told+units=5"
    # What the benchmark knows of a model is offered: classes and image, taken or not.
    assert experiment("split-cifar100", "sgd", 0, model="own_models:wide").settings["model_options"] == {}
    everything = experiment("split-cifar100", "sgd", 0, model="own_models:open_to_all", depth=3, normalise="unit")
    assert everything.settings["model_options"] == {"classes": 100, "depth": 3}
    assert everything.settings["benchmark_options"] == {"normalise": "unit"}
    for wrong, message in (
        ({"model": "own_models:wine"}, "did you mean 'wide'"),
        ({"model": "own_models:told"}, "needs units"),
        ({"model": "own_models:wide", "unit": 3}, "no setting 'unit'; did you mean 'units'"),
        ({"model": "own_models:greedy", "lr": 0.1}, "needs 'lr', but that name is taken .* rename"),
        ({"model": "own_models:bent", "alpha": 2.0}, "needs 'alpha', but that name is taken .* rename"),
        ({"model": "own_models:told", "units": 5, "bias": 1, "seed_": 0}, "no setting 'seed_'"),
    ):
        with pytest.raises(ValueError, match=message):
            experiment("digits", "rgo", 0, **wrong)
