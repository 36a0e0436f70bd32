"""Models that change under the learner's hands: right, or raised by the layer's name, never silently unprotected."""

import pytest
import torch
import torch.nn.functional as F
from test_rgo import assert_equal, data, learned, mlp, parameters, train
from torch import Tensor, nn

import rgo


def answer(learner: rgo.RGO, model: nn.Module, task: int | str, x: Tensor) -> Tensor:
    with learner.task(task), torch.no_grad():
        return model(x)


@pytest.mark.parametrize("how", ["replaced", "thawed"])
def test_a_layer_that_joins_inside_a_task_is_announced_and_keeps_answering_for_it(how: str) -> None:
    model = mlp()
    model[2].requires_grad_(how == "replaced")
    learner = rgo.RGO(model)
    learner.begin_task(0)
    x, y = data()
    train(model, x, y, steps=2)
    if how == "replaced":
        model[2] = nn.Linear(16, 16)
    model[2].requires_grad_(True)
    train(model, x, y, steps=20)
    before = model(x).detach()  # the new layer is not wired yet
    with pytest.warns(UserWarning, match="layer '2' is trained from now on.* In task 0 it was trained without RGO"):
        learner.end_task([(x, y)])
    torch.testing.assert_close(answer(learner, model, 0, x), before)
    learner.begin_task(1)
    train(model, x, y, steps=2)
    learner.end_task([(x, y)])
    assert learner.summary().covered[1].encoded == "yes"


def test_heads_swapped_for_each_task_keep_their_P_and_their_answers() -> None:
    heads = {k: nn.Linear(16, 3) for k in range(2)}
    model = mlp()
    model[4] = heads[0]
    learner = learned(model, tasks=1)
    x, y = data()
    expected, P = answer(learner, model, 0, x), learner.projections["4"].P
    model[4] = heads[1]
    with pytest.warns(UserWarning, match="layer '4' is trained from now on"):
        learner.begin_task(1)
    learner.end_task([(x, y)])
    model[4] = heads[0]
    torch.testing.assert_close(answer(learner, model, 0, x), expected)
    learner.begin_task(2)
    torch.testing.assert_close(learner.projections["4"].P, P)
    learner.detach()
    assert all("forward" not in head.__dict__ for head in heads.values())


def test_a_layer_taken_out_and_put_back_keeps_its_P() -> None:
    model = mlp()
    learner = learned(model, tasks=1)
    old, P = model[2], learner.projections["2"].P
    model[2] = nn.Identity()
    x, y = data(1)
    learner.begin_task(1)
    train(model, x, y, steps=2)
    learner.end_task([(x, y)])
    model[2] = old
    learner.begin_task(2)
    torch.testing.assert_close(learner.projections["2"].P, P)


def test_layers_whose_names_shift_are_known_by_their_new_names() -> None:
    model = mlp()
    learner = learned(model, tasks=1)
    P = learner.projections["2"].P
    model.insert(0, nn.Linear(6, 6))
    with pytest.warns(UserWarning, match="layer '0' is trained from now on"):
        learner.begin_task(1)
    assert list(learner.projections) == ["0", "1", "3", "5"]
    torch.testing.assert_close(learner.projections["3"].P, P)
    assert len(learner.state_dict()["layers"]) == 4


def test_a_layer_changed_in_place_is_raised_by_its_name() -> None:
    model = mlp()
    learner = learned(model, tasks=1)
    model[4].out_features, model[4].weight = 5, nn.Parameter(torch.randn(5, 16))
    model[4].bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(RuntimeError, match="layer '4' was 3 x 16 when its P was made and is 5 x 16 now"):
        learner.begin_task(1)


def test_a_convolution_whose_padding_changes_is_read_anew() -> None:
    model = nn.Sequential(nn.Conv2d(1, 9, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, 3))
    learner = rgo.RGO(model)
    x, y = data(shape=(1, 5, 5))
    learner.begin_task(0)
    learner.end_task([(x, y)])
    model[0].padding, model[0]._reversed_padding_repeated_twice = (1, 1), [1, 1, 1, 1]
    learner.begin_task(1)
    for part in (slice(0, 40), slice(0, 1)):
        model.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
    learner.end_task([(x, y)])
    assert learner.projections["0"].free < 10


def test_weights_tied_or_untied_after_attaching_are_raised() -> None:
    model = mlp()
    model[4] = nn.Linear(16, 16)
    model[4].weight, model[4].bias = model[2].weight, model[2].bias
    learner = rgo.RGO(model)
    model[4].weight = nn.Parameter(model[2].weight.detach().clone())
    model[4].bias = nn.Parameter(model[2].bias.detach().clone())
    with pytest.raises(RuntimeError, match="layers '4' and '2' were tied when their P was made and are not now"):
        learner.begin_task(0)
    model = mlp()
    model[4] = nn.Linear(16, 16)
    learner = rgo.RGO(model)
    model[4].weight, model[4].bias = model[2].weight, model[2].bias
    with pytest.raises(RuntimeError, match="layers '2' and '4' were separate weights"):
        learner.begin_task(0)


def test_a_forward_wrapped_by_somebody_else_is_not_thrown_away() -> None:
    model = mlp()
    learner = learned(model, tasks=1)
    inner = model[2].forward
    model[2].forward = lambda x: 2 * inner(x)
    with pytest.raises(RuntimeError, match="the forward of layer '2' has been replaced"):
        learner.begin_task(1)
    wrapper = model[2].forward
    learner.detach()
    assert model[2].forward is wrapper


def test_a_fused_layer_added_later_answers_what_its_layers_answer() -> None:
    model = nn.Sequential(nn.Linear(6, 8))
    learner = rgo.RGO(model)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    for p in (*encoder.self_attn.parameters(), *encoder.norm1.parameters(), *encoder.norm2.parameters()):
        p.requires_grad_(False)
    model.append(encoder)
    learner.begin_task(0)
    x = torch.randn(3, 4, 6)
    slow = model(x).detach()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), slow)


@pytest.mark.parametrize("when", ["its own backward", "from a later step on"])
def test_a_penalty_that_comes_late_is_noticed_all_the_same(when: str) -> None:
    model = mlp()
    learner = learned(model)
    learner.begin_task(1)
    x, y = data()

    def step(penalised: bool) -> None:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        penalty = 1e-2 * model[0].weight.square().sum()
        if when == "its own backward":
            loss.backward()
            if penalised:
                penalty.backward()
        else:
            (loss + penalty if penalised else loss).backward()

    def steps() -> None:
        for i in range(250):
            step(penalised=i >= (0 if when == "its own backward" else 30))

    with pytest.raises(RuntimeError, match=r"'0\.weight' without passing through its layer"):
        steps()


def test_gradients_turned_off_in_evaluation_mode_are_noticed_by_end_task() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(self.training):
                h = F.relu(self.trunk(x))
            return self.head(h)

    model = Careful()
    learner = rgo.RGO(model)
    learner.begin_task(0)
    x, y = data()
    train(model, x, y, steps=2)
    with pytest.raises(RuntimeError, match="end_task met layer 'trunk' without gradients"):
        learner.end_task([(x, y)])
    assert learner.active == 0


def test_an_encode_function_that_fails_at_the_end_changes_nothing() -> None:
    broken = False

    def encode(task: int | str, name: str, width: int) -> list[int]:
        if broken:
            raise ZeroDivisionError
        return list(range(width))[::-1]

    model = mlp()
    learner = rgo.RGO(model, encode=encode)
    learner.begin_task(0)
    x, y = data()
    train(model, x, y, steps=2)
    broken = True
    with pytest.raises(ZeroDivisionError):
        learner.end_task([(x, y)])
    broken = False
    assert (learner.active, learner.tasks) == (0, ())
    assert all(p.c == 1 for p in learner.projections.values())
    train(model, x, y, steps=2)
    learner.end_task([(x, y)])


def test_a_begin_task_that_fails_changes_nothing() -> None:
    learner = rgo.RGO(mlp(), encode=lambda task, name, width: [0] * width if task == "bad" else None)
    with pytest.raises(ValueError, match="must return a permutation"):
        learner.begin_task("bad")
    assert learner.active is None
    learner.begin_task("good")
    assert learner.state_dict()["first"] == "good"


def test_a_loaded_state_forgets_what_the_learner_had_cached() -> None:
    source, target = mlp(), mlp()
    learner = rgo.RGO(source, encode="after-first")
    x, y = data()
    for task in ("b", "a"):
        learner.begin_task(task)
        train(source, x, y, steps=2)
        learner.end_task([(x, y)])
    other = rgo.RGO(target, encode="after-first")
    other.begin_task("a")
    target(x)
    target.load_state_dict(source.state_dict())
    other.load_state_dict(learner.state_dict())
    for task in ("a", "b"):
        assert_equal([answer(other, target, task, x)], [answer(learner, source, task, x)])


def test_a_state_saved_with_a_layer_frozen_loads_into_a_model_frozen_alike() -> None:
    model, twin = mlp(), mlp()
    learner = learned(model, tasks=1)
    model[0].requires_grad_(False)
    learner.begin_task(1)
    twin.load_state_dict(model.state_dict())
    twin[0].requires_grad_(False)
    other = rgo.RGO(twin)
    other.load_state_dict(learner.state_dict())
    x, y = data(1)
    for each, net in ((learner, model), (other, twin)):
        train(net, x, y, steps=3)
        each.end_task([(x, y)])
    assert_equal(parameters(model), parameters(twin))
    torch.testing.assert_close(other.projections["0"].P, learner.projections["0"].P)


def damaged(key: str) -> dict[str, object]:
    state = learned(mlp()).state_dict()
    layer = state["layers"]["2"]
    if key == "shape":
        layer["H"] = torch.zeros(1, 3, 3)
    elif key == "nan":
        layer["H"] = torch.full_like(layer["H"], torch.nan)
    elif key in ("c", "applied", "H"):
        del layer[key]
    elif key == "active":
        state["active"] = 1.5
    elif key == "tasks":
        state["tasks"] = None
    elif key == "site":
        state["sites"]["2"]["layer"] = "0"
    return state


@pytest.mark.parametrize("key", ["shape", "nan", "c", "applied", "H", "active", "tasks", "site"])
def test_a_damaged_state_is_named_and_leaves_the_learner_as_it_was(key: str) -> None:
    learner = learned(mlp(), tasks=2)
    before = {n: p.P for n, p in learner.projections.items()}
    with pytest.raises(ValueError, match=r"weight '2'|layer '2'|damaged"):
        learner.load_state_dict(damaged(key))
    assert learner.tasks == (0, 1)
    for name, p in learner.projections.items():
        assert torch.equal(p.P, before[name])


def test_a_detached_learner_gives_no_empty_state() -> None:
    learner = learned(mlp())
    learner.detach()
    for call in (learner.state_dict, learner.memory):
        with pytest.raises(RuntimeError, match="detached"):
            call()


def test_buffers_of_any_kind_survive_end_task() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)
            self.register_buffer("steps", torch.arange(4).expand(3, 4))
            self.register_buffer("lazy", None)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.lazy = x.mean(0)
            self.count += 1
            return self.fc(x)

    model = Buffered()
    learner = rgo.RGO(model)
    learner.begin_task(0)
    x, y = data()
    learner.end_task([(x, y)])
    assert model.lazy is None
    assert model.count == 0


def test_an_expert_that_gets_no_sample_is_no_trouble() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + F.pad(self.b(x[:0]), (0, 0, 0, len(x)))

    model = Routed()
    learner = rgo.RGO(model)
    learner.begin_task(0)
    x, y = data()
    learner.end_task([(x, y)])
    assert learner.projections["b"].free == 7


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_integer_type_will_do(dtype: torch.dtype) -> None:
    a, b = (rgo.RGO(mlp()) for _ in range(2))
    x, y = data()
    for learner, labels in ((a, y), (b, y.to(dtype))):
        learner.begin_task(0)
        learner.end_task([(x, labels)])
    assert torch.equal(a.projections["2"].P, b.projections["2"].P)


def test_errors_name_the_batches_they_come_from() -> None:
    learner = rgo.RGO(mlp())
    learner.begin_task(0)
    x, y = data(n=40)
    batches = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)]
    with pytest.raises(TypeError, match="batch 4 of end_task"):
        learner.end_task([*batches, {"x": x}])
    with pytest.raises(ValueError, match=r"one of the batches 0 to 4 of end_task.*labels lie in 0\.\.9"):
        learner.end_task([*batches, (x, torch.full_like(y, 9))])


def test_all_refused_layers_are_named_at_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"(?s)'1' \(BatchNorm1d\).*'3' \(BatchNorm1d\).*skip=\('1', '3',\)"):
        rgo.RGO(model)


def test_a_model_that_is_one_layer_can_skip_its_bias() -> None:
    model = nn.Linear(6, 3)
    learner = rgo.RGO(model, skip=["bias"])
    learner.begin_task(0)
    x, y = data()
    train(model, x, y, steps=2)
    learner.end_task([(x, y)])
    assert learner.projections["model"].dim == 6


def test_a_model_made_double_is_projected_in_double() -> None:
    model = mlp()
    learner = learned(model)
    model.double()
    learner.begin_task(1)
    x, y = data(1)
    model.zero_grad()
    F.cross_entropy(model(x.double()), y).backward()
    plain = mlp().double()
    plain.load_state_dict(model.state_dict())
    p = rgo.permutation(1, 16)
    h = F.relu(plain[0](x.double()))[:, p]
    F.cross_entropy(plain[4](F.relu(plain[2](h))[:, p]), y).backward()
    P = learner.projections["0"]
    G = torch.cat([plain[0].weight.grad, plain[0].bias.grad[:, None]], dim=1)
    torch.testing.assert_close(model[0].weight.grad, (P.c * G @ P.P)[:, :-1], rtol=1e-10, atol=1e-14)
