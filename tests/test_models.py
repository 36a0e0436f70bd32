import pytest
import torch
from torch import nn

from rgo.models import mlp


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
