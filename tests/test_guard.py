"""Whatever reaches a covered weight around its projection is right, or raised by the layer's name."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgo


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def data(n: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)


def learned(model: nn.Module, **options: object) -> rgo.RGO:
    """A learner that knows one task and is in the middle of nothing."""
    learner = rgo.RGO(model, **options)  # type: ignore[arg-type]
    learner.begin_task(0)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    model.zero_grad()
    learner.end_task([(x, y)])
    return learner


@pytest.mark.parametrize("task", [0, 1])
def test_an_l2_penalty_in_the_loss_is_raised_by_the_layers_name(task: int) -> None:
    model = mlp()
    learner = rgo.RGO(model) if task == 0 else learned(model)
    learner.begin_task(task)
    x, y = data()
    loss = F.cross_entropy(model(x), y) + 1e-3 * model[2].weight.square().sum()
    with pytest.raises(RuntimeError, match=r"'2\.weight' without passing through its layer"):
        loss.backward()


def test_a_penalty_whose_gradient_is_zero_at_first_is_raised_once_it_is_not() -> None:
    """EWC's penalty starts at theta*: comparing values at the first backward alone would trust it for good."""
    model = mlp()
    learner = learned(model)
    anchor = [p.detach().clone() for p in model.parameters()]
    learner.begin_task(1)
    x, y = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        penalty = sum((p - a).square().sum() for p, a in zip(model.parameters(), anchor))
        (F.cross_entropy(model(x), y) + penalty).backward()
        optimizer.step()

    step()
    with pytest.raises(RuntimeError, match="without passing through its layer"):
        step()


def test_after_the_guard_has_raised_training_without_the_penalty_goes_on() -> None:
    model = mlp()
    learner = learned(model)
    learner.begin_task(1)
    x, y = data()
    with pytest.raises(RuntimeError, match="without passing"):
        (F.cross_entropy(model(x), y) + model[0].bias.square().sum() + model[0].bias.sum()).backward()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    learner.end_task([(x, y)])
    assert learner.tasks == (0, 1)


def test_a_functional_use_of_a_weight_is_raised() -> None:
    class Peeking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + F.linear(x, self.fc.weight)

    model = Peeking()
    learner = rgo.RGO(model)
    learner.begin_task(0)
    x, y = data()
    with pytest.raises(RuntimeError, match=r"'fc\.weight'"):
        F.cross_entropy(model(x), y).backward()


def test_a_weight_used_only_around_its_layer_is_raised() -> None:
    class Bypassing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(F.linear(x, self.fc.weight, self.fc.bias)))

    model = Bypassing()
    rgo.RGO(model).begin_task(0)
    x, y = data()
    with pytest.raises(RuntimeError, match=r"'fc\."):
        F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("uses", [2, 3, 5])
def test_a_layer_called_several_times_passes_and_a_penalty_on_it_does_not(uses: int) -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loop, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(uses):
                x = torch.tanh(self.loop(x))
            return self.head(x)

    torch.manual_seed(0)
    model = Looped()
    learner = learned(model)
    learner.begin_task(1)
    x, y = data()
    for _ in range(12):  # longer than the guard looks
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
    learner.end_task([(x, y)])

    learner.begin_task(2)
    anchor = model.loop.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + (model.loop.weight - anchor).square().sum()).backward()
        optimizer.step()

    step()  # the penalty's gradient is zero and its sum with the others looks right
    with pytest.raises(RuntimeError, match=r"'loop\.weight'"):
        step()


def test_the_users_own_hooks_on_a_weight_are_no_alarm_and_act_on_the_projected_gradient() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    learner = learned(model)
    model[2].weight.register_hook(lambda grad: 2 * grad)
    learner.begin_task(1)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.abs().max() <= 1e-3


def test_accumulated_and_repeated_backward_passes_sum_projected_gradients() -> None:
    model = mlp()
    learner = learned(model)
    learner.begin_task(1)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    for p, grad in zip(model.parameters(), once):
        torch.testing.assert_close(p.grad, 3 * grad)


def test_autograd_grad_gives_projected_gradients_too() -> None:
    model = mlp()
    learner = learned(model)
    learner.begin_task(1)
    x, y = data()
    found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    F.cross_entropy(model(x), y).backward()
    for p, grad in zip(model.parameters(), found):
        torch.testing.assert_close(p.grad, grad, rtol=0, atol=0)


def test_gradients_that_are_only_looked_at_are_no_alarm() -> None:
    """A reference gradient, an influence score, a Hessian product: nothing of it is trained with."""
    model = mlp()
    learner = learned(model)
    learner.begin_task(1)
    x, y = data()
    for _ in range(3):
        reference = F.linear(x, model[0].weight, model[0].bias).square().mean()
        torch.autograd.grad(reference, [model[0].weight, model[0].bias])
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"'0\.weight'"):
        F.linear(x, model[0].weight).square().mean().backward()


def test_a_fused_inference_path_answers_what_the_layers_answer() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    model = nn.Sequential(nn.Linear(6, 8), encoder)
    names = [n for n, p in model.named_parameters() if "self_attn" in n or "norm" in n]
    learner = rgo.RGO(model, skip=names, raw=["0"])
    learner.begin_task("a")
    x = torch.randn(4, 5, 6)
    mask = torch.zeros(4, 5, dtype=torch.bool)
    slow, masked = model(x).detach(), encoder(model[0](x), src_key_padding_mask=mask).detach()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), slow)
        torch.testing.assert_close(encoder(model[0](x), src_key_padding_mask=mask), masked)
    learner.detach()
    assert encoder.use_nested_tensor
    with torch.no_grad():
        fused = model(x)
    assert (fused - slow).abs().max() > 1e-2  # the fused path would have ignored the wiring
    assert not encoder.layers[0]._forward_pre_hooks


def test_attention_is_named_as_unprotected() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    with pytest.warns(UserWarning, match="parameters are trained without protection"):
        summary = rgo.RGO(layer).summary()
    assert [row.name for row in summary.covered] == ["linear1", "linear2"]
    assert "MultiheadAttention" in summary.unprotected["self_attn.out_proj.weight"]
    assert "NOT PROTECTED: norm1.weight" in str(summary)


def test_a_deep_copy_is_plain_answers_with_its_own_weights_and_says_so() -> None:
    model = mlp()
    learner = learned(model, encode=False)
    x, _ = data()
    with pytest.warns(UserWarning, match="the copy of a model that RGO is attached to is plain"):
        twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    plain = mlp()
    plain.load_state_dict(twin.state_dict())
    torch.testing.assert_close(twin(x), plain(x), rtol=0, atol=0)
    with learner.task(0):
        assert not torch.equal(twin(x), model(x))
    rgo.RGO(twin)  # it can be attached to like any other model


def test_a_pickled_model_is_plain() -> None:
    model = mlp()
    learned(model, encode=False)
    with pytest.warns(UserWarning, match="is plain"):
        pickled = pickle.dumps(model)
    twin = pickle.loads(pickled)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    x, _ = data()
    torch.testing.assert_close(twin(x), plain(x), rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.dumps(twin)


def test_a_learner_refuses_to_be_copied() -> None:
    learner = learned(mlp())
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(learner)
    with pytest.raises(TypeError, match="cannot be copied"):
        pickle.dump(learner, io.BytesIO())


def test_weight_norm_is_refused_before_and_after_attaching() -> None:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[2])
    with pytest.raises(ValueError, match="weight of '2' is not a parameter but is computed"):
        rgo.RGO(model)
    model = mlp()
    learner = learned(model)
    nn.utils.parametrizations.weight_norm(model[2])
    with pytest.raises(ValueError, match="weight of '2'"):
        learner.begin_task(1)
    model = mlp()
    learner = learned(model)
    learner.begin_task(1)
    nn.utils.parametrizations.weight_norm(model[2])
    with pytest.raises(RuntimeError, match="weight of layer '2' is no longer a parameter"):
        model(data()[0])


def test_an_embedding_tied_to_a_head_is_refused_by_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x).mean(1))

    with pytest.raises(ValueError, match=r"'embed\.weight' \(Embedding\) shares its tensor with .* 'head'"):
        rgo.RGO(Tied())


def test_a_penalty_added_through_the_gradient_after_backward_is_the_users_business() -> None:
    """What happens to .grad afterwards acts on the projected gradient: nothing to raise."""
    model = mlp()
    learner = learned(model)
    learner.begin_task(1)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert norm <= 0.1 + 1e-6
