"""The learner's life: tasks in order, answers for all of them, states that resume bit for bit."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rgo
from rgo.benchmarks import rotated_mnist
from rgo.models import mlp as digits_mlp


def mlp(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def convnet() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(32, 3)
        )


def data(task: int = 0, n: int = 40, shape: tuple[int, ...] = (6,)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + task)
    x = torch.randn(n, *shape, generator=generator)
    return x, (x.flatten(1)[:, task % 2 : task % 2 + 3]).argmax(1)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 10, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for i in range(steps):
        optimizer.zero_grad()
        part = slice(i * 10 % len(x), i * 10 % len(x) + 10)
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


def learned(model: nn.Module, tasks: int = 1, shape: tuple[int, ...] = (6,), **options: object) -> rgo.RGO:
    learner = rgo.RGO(model, **options)  # type: ignore[arg-type]
    for k in range(tasks):
        x, y = data(k, shape=shape)
        learner.begin_task(k)
        train(model, x, y)
        learner.end_task([(x, y)])
    return learner


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    for s, t in zip(a, b, strict=True):
        assert torch.equal(s, t)


# ---- training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, convnet])
def test_without_encoding_the_first_task_is_bitwise_plain_training(make: object) -> None:
    plain, attached = make(), make()  # type: ignore[operator]
    x, y = data(shape=(6,) if make is mlp else (1, 6, 6))
    torch.manual_seed(3)
    train(plain, x, y)
    learner = rgo.RGO(attached, encode=False)
    learner.begin_task(0)
    torch.manual_seed(3)
    train(attached, x, y)
    assert_equal(parameters(plain), parameters(attached))


def test_projection_protects_digits_that_plain_training_forgets() -> None:
    tasks = rotated_mnist(tasks=3, samples=3000, angles=[0, 60, 120])
    accuracy = {}
    for project in (True, False):
        model = digits_mlp(hidden=(64,), seed=0)
        learner = rgo.RGO(model, encode=False, project=project)
        for k, task in enumerate(tasks):
            learner.begin_task(k)
            train(model, *task.train, steps=300)
            learner.end_task([task.train])
        x, y = tasks[0].test
        with learner.task(0), torch.no_grad():
            accuracy[project] = (model(x).argmax(1) == y).float().mean().item()
    assert accuracy[True] > accuracy[False] + 0.15, accuracy


def test_project_false_is_feature_encoding_alone() -> None:
    model, twin = mlp(), mlp()
    learner = learned(model, tasks=2, project=False)
    order = rgo.permutation(1, 16)
    x, _ = data(1)
    expected = twin  # the permutation as explicit indexing, trained by hand
    for k in range(2):
        xs, ys = data(k)
        p = rgo.permutation(k, 16)
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
        for i in range(10):
            part = slice(i * 10 % 40, i * 10 % 40 + 10)
            h = F.relu(expected[0](xs[part]))[:, p]
            h = F.relu(expected[2](h))[:, p]
            optimizer.zero_grad()
            F.cross_entropy(expected[4](h), ys[part]).backward()
            optimizer.step()
    for a, b in zip(parameters(model), parameters(expected)):
        torch.testing.assert_close(a, b)
    with learner.task(1), torch.no_grad():
        h = F.relu(expected[0](x))[:, order]
        torch.testing.assert_close(model(x), expected[4](F.relu(expected[2](h))[:, order]))
    assert learner.memory() == 0


def test_the_same_seed_gives_the_same_result_bitwise() -> None:
    first, second = mlp(), mlp()
    learned(first, tasks=3)
    learned(second, tasks=3)
    assert_equal(parameters(first), parameters(second))


def test_a_task_met_again_is_restrained_by_itself_and_counted_once_more() -> None:
    model = mlp()
    learner = learned(model, tasks=1)
    before = learner.projections["2"]
    learner.begin_task(0)
    x, y = data(0)
    train(model, x, y, steps=3)
    learner.end_task([(x, y)])
    after = learner.projections["2"]
    assert learner.tasks == (0,)
    assert torch.linalg.eigvalsh(after.H - before.H).min() > -1e-9
    assert after.free < before.free


def test_begin_task_for_the_task_in_training_goes_on_with_it() -> None:
    model, twin = mlp(), mlp()
    x, y = data()
    learner, other = rgo.RGO(model), rgo.RGO(twin)
    learner.begin_task(0)
    other.begin_task(0)
    train(model, x, y, steps=4)
    learner.begin_task(0)
    train(model, x, y, steps=4)
    train(twin, x, y, steps=4)
    train(twin, x, y, steps=4)
    assert_equal(parameters(model), parameters(twin))


# ---- answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False])
def test_every_learned_task_is_answered_in_either_mode_nested_or_not(mode: bool) -> None:
    model = mlp()
    learner = learned(model, tasks=3)
    model.train(mode)
    x, _ = data()

    def by_hand(task: int) -> Tensor:
        p = rgo.permutation(task, 16)
        return model_plain[4](F.relu(model_plain[2](F.relu(model_plain[0](x))[:, p]))[:, p])

    model_plain = mlp()
    model_plain.load_state_dict(model.state_dict())
    with learner.task(0):
        torch.testing.assert_close(model(x), by_hand(0))
        with learner.task(2):
            torch.testing.assert_close(model(x), by_hand(2))
        torch.testing.assert_close(model(x), by_hand(0))
    learner.begin_task(7)
    torch.testing.assert_close(model(x), by_hand(7))
    with learner.task(1):
        torch.testing.assert_close(model(x), by_hand(1))
    with learner.task(7):
        torch.testing.assert_close(model(x), by_hand(7))


def test_the_wiring_is_put_back_after_an_exception_inside_the_block() -> None:
    model = mlp()
    learner = learned(model, tasks=2)
    with pytest.raises(ZeroDivisionError), learner.task(0):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="outside any task"):
        model(data()[0])


def test_string_ids_and_int_ids_are_different_tasks() -> None:
    model = mlp()
    learner = rgo.RGO(model)
    for k in (1, "1"):
        learner.begin_task(k)
        x, y = data()
        train(model, x, y, steps=1)
        learner.end_task([(x, y)])
    x, _ = data()
    with learner.task(1), torch.no_grad():
        one = model(x)
    with learner.task("1"), torch.no_grad():
        assert not torch.equal(one, model(x))


def test_the_gradient_of_a_replayed_sample_passes_under_its_own_task_and_is_projected() -> None:
    model = mlp()
    learner = learned(model, tasks=1)
    learner.begin_task(1)
    model.zero_grad()
    x, y = data(0)
    with learner.task(0):
        F.cross_entropy(model(x), y).backward()
    found = parameters_grad(model)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    p = rgo.permutation(0, 16)
    h1 = F.relu(plain[0](x))[:, p]
    h2 = F.relu(plain[2](h1))[:, p]
    F.cross_entropy(plain[4](h2), y).backward()
    for i in (0, 2, 4):
        P = learner.projections[str(i)]
        G = torch.cat([plain[i].weight.grad, plain[i].bias.grad[:, None]], dim=1).double()
        expected = P.c * G @ P.P
        torch.testing.assert_close(found[i], expected[:, :-1].float(), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(found[i + 1], expected[:, -1].float(), rtol=1e-4, atol=1e-7)


def parameters_grad(model: nn.Module) -> dict[int, Tensor]:
    grads = {}
    for name, p in model.named_parameters():
        layer, kind = name.split(".")
        assert p.grad is not None
        grads[int(layer) + (kind == "bias")] = p.grad
    return grads


# ---- end_task -------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Keeps a buffer that changes with every forward, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(6, 16), nn.Linear(16, 3), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.drop(F.relu(self.first(x))))


def test_end_task_leaves_the_model_as_it_found_it() -> None:
    model = Counting()
    model.drop.eval()
    learner = rgo.RGO(model)
    learner.begin_task(0)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    model.first.weight.grad = None  # whatever the user did
    before = {n: t.clone() for n, t in model.state_dict().items()}
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    learner.end_task(DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True))
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for p, grad in zip(model.parameters(), grads):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)  # type: ignore[arg-type]


def test_end_task_takes_dicts_through_forward_and_gives_the_same_P() -> None:
    a, b = mlp(), mlp()
    first, second = rgo.RGO(a), rgo.RGO(b)
    x, y = data()
    for learner, model in ((first, a), (second, b)):
        learner.begin_task(0)
        train(model, x, y)
    first.end_task([(x, y)])
    second.end_task(
        [{"pixels": x[:20], "label": y[:20]}, {"pixels": x[20:], "label": y[20:]}],
        forward=lambda batch: (b(batch["pixels"]), batch["label"]),
    )
    for name, p in first.projections.items():
        torch.testing.assert_close(p.P, second.projections[name].P, rtol=1e-5, atol=1e-7)


def test_a_frozen_layer_costs_nothing_and_is_named_when_it_thaws() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    learner = learned(model, tasks=1)
    assert "0" not in learner.projections
    assert learner.summary().frozen == ("0",)
    assert "forward" not in model[0].__dict__
    assert learner.summary().covered[0].encoded == "raw input"  # the frozen prefix counts as input
    model[0].requires_grad_(True)
    with pytest.warns(UserWarning, match="layer '0' is trained from now on; what the tasks 0 made of it"):
        learner.begin_task(1)
    with learner.task(0), torch.no_grad():  # task 0 still reads layer 0's input as it was
        model(data()[0])
    x, y = data(1)
    train(model, x, y)
    learner.end_task([(x, y)])
    assert learner.projections["0"].free < 7


def test_a_layer_frozen_later_keeps_its_P_and_warns_when_it_thaws() -> None:
    model = mlp()
    learner = learned(model, tasks=1)
    P = learner.projections["2"].P
    model[2].requires_grad_(False)
    learner.begin_task(1)
    x, y = data(1)
    train(model, x, y)
    learner.end_task([(x, y)])
    torch.testing.assert_close(learner.projections["2"].P, P)
    model[2].requires_grad_(True)
    with pytest.warns(UserWarning, match="layer '2' is trained from now on; what the tasks 1 made of it"):
        learner.begin_task(2)


def test_layers_added_after_attachment_are_picked_up() -> None:
    model = mlp()
    learner = learned(model, tasks=1)
    model.append(nn.ReLU())
    model.append(nn.Linear(3, 3))
    with pytest.warns(UserWarning, match="layer '6' is trained from now on"):
        learner.begin_task(1)
    assert "6" in learner.projections
    x, y = data(1)
    train(model, x, y)
    learner.end_task([(x, y)])
    assert learner.projections["6"].c > 1


def test_a_frozen_bias_is_left_out_of_P() -> None:
    model = mlp()
    model[2].bias.requires_grad_(False)
    learner = learned(model)
    assert learner.projections["2"].dim == 16
    assert learner.projections["0"].dim == 7


def test_detach_gives_the_model_back_as_it_was() -> None:
    model = mlp()
    learner = learned(model)
    keys, kind = list(mlp().state_dict()), type(model)
    assert list(model.state_dict()) == keys
    assert type(model) is kind
    learner.detach()
    assert all("forward" not in m.__dict__ and not m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())
    model(data()[0])
    with pytest.raises(RuntimeError, match="detached"):
        learner.begin_task(1)
    rgo.RGO(model)


# ---- state ----------------------------------------------------------------------------------------------------

RESUME = """
import sys, torch
from tests.test_rgo import data, mlp, train
import rgo
model, learner_file, model_file, out = mlp(), *sys.argv[1:]
torch.set_num_threads(1)
model.load_state_dict(torch.load(model_file, weights_only=True))
learner = rgo.RGO(model)
learner.load_state_dict(torch.load(learner_file, weights_only=True))
assert learner.active == 1 and learner.tasks == (0,)
x, y = data(1)
train(model, x, y, steps=7)
learner.end_task([(x, y)])
learner.begin_task("last")
train(model, x, y, steps=3)
torch.save([p.detach() for p in model.parameters()], out)
"""


def test_a_state_saved_inside_a_task_goes_on_bit_for_bit_in_a_fresh_process(tmp_path: Path) -> None:
    model = mlp()
    learner = learned(model, tasks=1)
    learner.begin_task(1)
    x, y = data(1)
    train(model, x, y, steps=5)
    torch.save(learner.state_dict(), tmp_path / "learner.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    train(model, x, y, steps=7)
    learner.end_task([(x, y)])
    learner.begin_task("last")
    train(model, x, y, steps=3)
    files = [str(tmp_path / name) for name in ("learner.pt", "model.pt", "out.pt")]
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", RESUME, *files], check=True, cwd=root, timeout=120)
    assert_equal(torch.load(tmp_path / "out.pt", weights_only=True), parameters(model))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"solver": "recursive"},
        {"tolerance": 0.2},
        {"dtype": torch.bfloat16},
        {"encode": False, "alpha": 0.3},
        {"encode": "after-first", "curvature": "softmax"},
        {"project": False},
    ],
)
def test_a_loaded_state_is_the_saved_one_whatever_the_options(options: dict[str, object], tmp_path: Path) -> None:
    model, twin = mlp(), mlp()
    learner = learned(model, tasks=2, **options)
    torch.save(learner.state_dict(), tmp_path / "state.pt")
    twin.load_state_dict(model.state_dict())
    other = rgo.RGO(twin, **options)  # type: ignore[arg-type]
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.tasks == learner.tasks
    x, y = data(2)
    for each, net in ((learner, model), (other, twin)):
        each.begin_task(2)
        train(net, x, y)
        each.end_task([(x, y)])
    assert_equal(parameters(model), parameters(twin))
    assert other.memory() == learner.memory()


def test_a_state_of_another_architecture_or_version_names_each_mismatch() -> None:
    state = learned(mlp()).state_dict()
    wider = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    learner = rgo.RGO(wider, alpha=2.0, encode=False)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        learner.load_state_dict({**state, "recipe": 0})
    for part in (
        "alpha: saved with 1.0, this learner has 2.0",
        "encode: saved with True, this learner has False",
        "recipe: the state has 0",
        "weight '0': outputs 16 in the state, 20 in this model",
        "weight '2': inputs 16 in the state, 20 in this model",
        "weight '4' is covered in the state and not in this model",
    ):
        assert part in str(error.value)
    assert learner.tasks == ()
    with pytest.raises(ValueError, match="no state of an RGO learner"):
        learner.load_state_dict(wider.state_dict())


def test_an_encode_function_that_changed_is_noticed_when_a_state_is_loaded() -> None:
    def reverse(task: int | str, name: str, width: int) -> list[int]:
        return list(range(width))[::-1]

    state = learned(mlp(), encode=reverse).state_dict()
    rgo.RGO(mlp(), encode=reverse).load_state_dict(state)
    other = rgo.RGO(mlp(), encode=lambda task, name, width: None)
    with pytest.raises(ValueError, match="answers task 0 with other permutations"):
        other.load_state_dict(state)


def test_memory_does_not_grow_with_the_number_of_tasks() -> None:
    model = mlp()
    learner = learned(model, tasks=1)
    one = learner.memory()
    summary = learner.summary()
    assert one == summary.bytes
    for k in range(1, 4):
        x, y = data(k)
        learner.begin_task(k)
        train(model, x, y, steps=2)
        learner.end_task([(x, y)])
        assert learner.memory() == one
    assert str(summary).count("\n") > 4


# ---- errors ---------------------------------------------------------------------------------------------------


def test_wrong_order_of_calls() -> None:
    model = mlp()
    learner = rgo.RGO(model)
    x, y = data()
    with pytest.raises(RuntimeError, match="layer '0' was called outside any task"):
        model(x)
    with pytest.raises(RuntimeError, match="end_task without begin_task"):
        learner.end_task([(x, y)])
    learner.begin_task(0)
    with pytest.raises(RuntimeError, match="task 0 is still being trained"):
        learner.begin_task(1)
    train(model, x, y, steps=2)
    learner.end_task([(x, y)])
    with learner.task(0):
        loss = F.cross_entropy(model(x), y)
    with pytest.raises(RuntimeError, match="outside a task"):
        loss.backward()
    learner.begin_task(1)
    loss = F.cross_entropy(model(x), y)
    learner.end_task([(x, y)])
    learner.begin_task(2)
    with pytest.raises(RuntimeError, match="a task that has ended since"):
        loss.backward()
    train(model, x, y, steps=2)
    learner.end_task([(x, y)])


def test_inputs_gradients_between_tasks_are_fine() -> None:
    model = mlp()
    learner = learned(model)
    x, _ = data()
    x.requires_grad_()
    with learner.task(0):
        (grad,) = torch.autograd.grad(model(x).sum(), x)
    assert grad.abs().sum() > 0


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    learner = learned(mlp(), tasks=2)
    with pytest.raises(KeyError, match="task '0' has not been learned; known: 0, 1"):
        learner.task("0")
    with pytest.raises(KeyError, match="task 5 has not been learned"):
        learner.task([0, 5, 1])
    with pytest.raises(TypeError, match="int or a str"):
        learner.task(1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got True"):
        learner.begin_task(True)


def empty() -> Iterator[tuple[Tensor, Tensor]]:
    yield from ()


x0, y0 = data()
BAD_BATCHES = [
    (empty(), ValueError, "no batches"),
    ([x0], TypeError, r"batch 0 of end_task \(task 0\) is a Tensor, expected a pair"),
    ([(x0, y0, y0)], TypeError, "tuple of Tensor, Tensor, Tensor"),
    ([{"x": x0}], TypeError, "is a dict"),
    ([(x0, y0 + 1)], ValueError, r"labels lie in 1\.\.3, but the model has 3 outputs"),
    ([(x0, y0 - 1)], ValueError, r"labels lie in -1\.\."),
    ([(x0, y0.float())], ValueError, "labels must be integers"),
    ([(x0, y0[:5])], ValueError, "one per sample"),
    ([(x0, F.one_hot(y0))], ValueError, "labels must be integers"),
    ([(x0.long(), y0)], TypeError, "layer '0' got an input of torch.int64"),
    ([(x0 * torch.nan, y0)], FloatingPointError, "outputs are not finite"),
    ([(x0[:0], y0[:0])], ValueError, "is empty"),
]


@pytest.mark.parametrize(("batches", "kind", "message"), BAD_BATCHES)
def test_bad_batches_are_named_and_leave_the_learner_usable(
    batches: object, kind: type[Exception], message: str
) -> None:
    model = mlp()
    learner = rgo.RGO(model)
    learner.begin_task(0)
    train(model, x0, y0, steps=2)
    model.train()
    with pytest.raises(kind, match=message):
        learner.end_task(batches)  # type: ignore[arg-type]
    assert learner.active == 0
    assert learner.tasks == ()
    assert model.training
    assert all(p.c == 1.0 for p in learner.projections.values())
    train(model, x0, y0, steps=2)
    learner.end_task([(x0, y0)])
    assert learner.tasks == (0,)


def test_classes_that_do_not_fit_are_named() -> None:
    model = mlp()
    learner = rgo.RGO(model)
    learner.begin_task(0)
    for classes, message in (
        ([0, 7], r"names outputs 0\.\.7, the model has 0\.\.2"),
        ([True, False], r"as a mask has shape \(3,\)"),
        ([0], r"labels \[1, 2\] are not among classes"),
        ([False] * 3, "selects no output"),
        ([], "is a mask of 3 booleans or a list"),
    ):
        with pytest.raises(ValueError, match=message):
            learner.end_task([(x0, y0)], classes=classes)
    learner.end_task([(x0, y0)], classes=range(3))


def test_a_non_finite_curvature_is_raised_by_the_layers_name_and_changes_nothing() -> None:
    model = mlp()
    learner = rgo.RGO(model, curvature=lambda f, y, classes: [torch.full_like(f, torch.inf)], encode=False)
    learner.begin_task(0)
    with pytest.raises(FloatingPointError, match=r"layer '\d': the curvature of this task is not finite"):
        learner.end_task([(x0, y0)])
    assert all(p.c == 1.0 for p in learner.projections.values())


def test_models_that_cannot_be_protected_are_refused_with_what_to_use_instead() -> None:
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\): .* Use GroupNorm or LayerNorm instead"):
        rgo.RGO(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match="recurrent layers"):
        rgo.RGO(nn.LSTM(3, 3))
    with pytest.raises(ValueError, match="transposed convolutions"):
        rgo.RGO(nn.Sequential(nn.ConvTranspose2d(3, 3, 2)))
    with pytest.raises(ValueError, match="shape is not known yet"):
        rgo.RGO(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device"):
        rgo.RGO(nn.Sequential(nn.Linear(3, 3, device="meta")))
    with pytest.raises(ValueError, match=r"skip names 'haed', .* did you mean 'head'"):
        rgo.RGO(nn.ModuleDict({"head": nn.Linear(2, 2)}), skip=["haed"])
    with pytest.raises(TypeError, match=r"skip is a sequence of names such as \('head',\)"):
        rgo.RGO(nn.ModuleDict({"head": nn.Linear(2, 2)}), skip="head")
    model = mlp()
    rgo.RGO(model)
    with pytest.raises(RuntimeError, match="another RGO is attached"):
        rgo.RGO(model)
    rgo.RGO(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), skip=["1"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"curvature": "fisher"}, "curvature is one of true-class"),
        ({"extractors": "median"}, "extractors is one of mean"),
        ({"solver": "lu"}, 'solver is "cholesky" or'),
        ({"encode": "first"}, "encode is True, False"),
        ({"tolerance": 1.0}, r"tolerance is in \[0, 1\)"),
        ({"dtype": torch.int8}, "floating-point type"),
        ({"solver": "recursive", "tolerance": 0.1}, "which the recursion does not keep"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rgo.RGO(mlp(), **options)  # type: ignore[arg-type]


def test_a_P_too_large_for_memory_is_refused_before_anything_is_allocated() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(2**20, 2, bias=False))
    with pytest.raises(MemoryError, match=r"layer '1': P of 1048576 x 1048576, .* bytes .* skip=\('1',\)"):
        rgo.RGO(model)
    rgo.RGO(model, skip=["1"])


def test_a_full_layer_is_announced() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3))
    learner = rgo.RGO(model, curvature="inputs", encode=False, skip=["2"])
    learner.begin_task(0)
    learner.end_task([(100 * torch.randn(200, 4), torch.zeros(200, dtype=torch.long))])
    with pytest.warns(UserWarning, match="layer '0' is nearly full"):
        learner.begin_task(1)


def test_unprotected_parameters_are_named_once() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match=r"2 parameters .* 1\.weight, 1\.bias"):
        learner = rgo.RGO(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.begin_task(0)
        rgo.RGO(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), skip=["1"])
    assert set(learner.summary().unprotected) == {"1.weight", "1.bias"}
    head = learner.summary()
    assert head.parameters == sum(p.numel() for p in model.parameters())


def test_skip_leaves_a_head_to_plain_training() -> None:
    model = mlp()
    learner = learned(model, skip=["4"])
    assert set(learner.projections) == {"0", "2"}
    assert learner.summary().skipped == ("4.weight", "4.bias")
    assert "forward" not in model[4].__dict__


def test_what_inference_mode_has_cached_can_be_trained_with() -> None:
    model = mlp()
    state, weights = learned(model).state_dict(), model.state_dict()
    model = mlp()
    model.load_state_dict(weights)
    learner = rgo.RGO(model)
    learner.load_state_dict(state)
    x, y = data()
    with learner.task(0), torch.inference_mode():
        model(x)
    with learner.task([0] * 40), torch.inference_mode():
        model(x)
    learner.begin_task(0)
    train(model, x, y, steps=2)
    with learner.task([0] * 40):
        F.cross_entropy(model(x), y).backward()


def test_tasks_may_begin_and_end_under_inference_mode() -> None:
    model = mlp()
    learner = rgo.RGO(model)
    x, y = data()
    with torch.inference_mode():
        learner.begin_task(0)
    train(model, x, y, steps=2)
    with torch.inference_mode():
        learner.end_task([(x, y)])
        learner.begin_task(1)
    train(model, x, y, steps=2)
    learner.end_task([(x, y)])
    assert learner.tasks == (0, 1)
