"""What every method of the laboratory owes: one table, and a method that is added to METHODS is in it."""

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode

from rgo.benchmarks import Task, batches, order
from rgo.experiment import DTYPES, experiment
from rgo.methods import METHODS, Method, make
from rgo.runner import _Captured, _Eager, _on

SIDE, CLASSES, STEPS = 4, 6, 60
WIDTH = SIDE * SIDE

# RGO says that it leaves the norm of `convnet` to plain training.
pytestmark = pytest.mark.filterwarnings("ignore:2 parameters are trained without protection")


# ---- a toy stream, and a method on it ----------------------------------------------------------------------------


def mlp(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, CLASSES))


def convnet(seed: int = 0) -> nn.Sequential:
    """Pictures in the flat inputs' place; a grouped convolution; a norm that no projection covers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Unflatten(1, (1, SIDE, SIDE)),
            nn.Conv2d(1, 12, 3, padding=1),
            nn.GroupNorm(4, 12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, groups=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(96, 24, bias=False),
            nn.ReLU(),
            nn.Linear(24, CLASSES),
        )


def stream(split: bool = False, tasks: int = 3, n: int = 60) -> list[Task]:
    """Clusters. Every task has all classes and inputs in an order of its own, or (split) two classes of its own."""
    made = []
    centres = 2 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    for k in range(tasks):
        source = torch.Generator().manual_seed(k)
        order = torch.arange(WIDTH) if split else torch.randperm(WIDTH, generator=source)
        parts = []
        for size in (n, 60):
            y = torch.arange(size) % 2 + 2 * k if split else torch.arange(size) % CLASSES
            parts.append(((centres[y] + 0.3 * torch.randn(size, WIDTH, generator=source))[:, order], y))
        made.append(Task(k, parts[0], parts[1], (2 * k, 2 * k + 1) if split else None))
    return made


def moved(task: Task, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Task:
    return _on(task, torch.device(device), dtype)


def pieces(task: Task, size: int = 25) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(task.train[0].split(size), task.train[1].split(size))


def observe(method: Method, task: Task, start: int = 0, stop: int = STEPS, seed: int = 0) -> list[float]:
    method.model.train()
    met = list(batches(task, batch_size=10, steps=STEPS, seed=seed))[start:stop]
    return [float(method.observe(x, y, task)) for x, y in met]


def end(method: Method, task: Task) -> None:
    method.model.eval()
    method.end_task(task, pieces(task))


def learn(method: Method, tasks: Sequence[Task], seed: int = 0, steps: int = STEPS) -> Method:
    for task in tasks:
        method.begin_task(task, STEPS, seed)
        observe(method, task, seed=seed, stop=steps)
        end(method, task)
    return method


def predict(method: Method, task: Task) -> Tensor:
    with torch.no_grad():
        return method.predict(task.test[0], task)


def accuracy(method: Method, task: Task) -> float:
    return float((predict(method, task).argmax(1) == task.test[1]).double().mean())


def vector(method: Method) -> Tensor:
    return parameters_to_vector(method.model.parameters()).detach().clone()


# ---- the table ---------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    method: str
    network: Callable[[int], nn.Module] = mlp
    options: dict[str, Any] = {}  # noqa: RUF012


CASES = {name: Case(name) for name in METHODS} | {  # as its name stands for, and what else of it is another algorithm
    "ewc-sample": Case("ewc", mlp, {"fisher": "sample"}),
    "gpm-bias-conv": Case("gpm", convnet, {"bias": True, "samples": 20}),
    "los-stiefel": Case("los", convnet, {"memory": 2}),
    "owm-momentum-conv": Case("owm", convnet, {"momentum": 0.5, "clip": 1.0, "bias": True, "lr": 0.1}),
    "rgo-recursive-conv": Case("rgo", convnet, {"solver": "recursive"}),
}
ENCODED = ("rgo", "fel")  # with feature encoding unless it is turned off; all others only if it is asked for


def made(
    case: Case, split: bool = False, encode: bool | None = None, dtype: str = "float32", where: str = "cpu"
) -> Method:
    """The method as a run of the laboratory has it, on a network of the toy stream's size."""
    wanted = {} if encode is None else {"encode": encode}
    e = experiment("digits", case.method, 0, tasks=3, dtype=dtype, **case.options, **wanted)

    def fresh(k: int) -> nn.Module:
        return case.network(k).to(where, getattr(torch, dtype))

    return make(e, fresh(0), fresh, split)


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_method = pytest.mark.parametrize("case", [Case(name) for name in METHODS], ids=METHODS)
shared_or_split = pytest.mark.parametrize("split", [False, True], ids=["shared-head", "split-head"])
plain_or_encoded = pytest.mark.parametrize(
    ("case", "encode"),
    [
        pytest.param(case, encode, id=f"{name}-{'encoded' if encode else 'plain'}")
        for name, case in CASES.items()
        for encode in ((False, True) if "encode" in METHODS[case.method].options else (None,))
    ],
)


@plain_or_encoded
@shared_or_split
def test_every_task_of_a_toy_stream_is_learned(case: Case, split: bool, encode: bool | None) -> None:
    method = made(case, split, encode)
    for task in stream(split):
        learn(method, [task])
        assert accuracy(method, task) > (0.8 if split else 0.4)  # chance is 1/2 and 1/6
    assert predict(method, task).isinf().any() == split


@every_case
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_task_is_learned_in_every_precision(case: Case, dtype: str) -> None:
    method = made(case, dtype=dtype)
    for task in stream():
        learn(method, [moved(task, getattr(torch, dtype))])
        assert accuracy(method, moved(task, getattr(torch, dtype))) > 0.4
    assert {p.dtype for p in method.model.parameters()} == {getattr(torch, dtype)}


@every_case
def test_what_is_learned_is_a_function_of_the_seed(case: Case) -> None:
    first = vector(learn(made(case), stream(), steps=25))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert torch.equal(vector(learn(made(case), stream(), steps=25)), first)
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn from the global generator


# ---- saving and going on -----------------------------------------------------------------------------------------


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """As a file has it: tensors and plain types only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@plain_or_encoded
@shared_or_split
def test_a_run_killed_inside_a_task_goes_on_bit_for_bit(case: Case, split: bool, encode: bool | None) -> None:
    tasks = stream(split)
    first = learn(made(case, split, encode), tasks[:2], steps=15)
    boundary = saved({"model": first.model.state_dict(), "method": first.state_dict()})
    first.begin_task(tasks[2], STEPS, 0)
    observe(first, tasks[2], stop=7)
    inside = saved({"model": first.model.state_dict(), "method": first.state_dict(inside=True)})
    whole = saved(first.state_dict())
    expected = observe(first, tasks[2], start=7, stop=20)
    end(first, tasks[2])

    for from_boundary in (True, False):
        second = made(case, split, encode)
        with torch.no_grad():  # another initialisation, which the saved one must replace
            for p in second.model.parameters():
                p.add_(0.1)
        if from_boundary:  # what the task before left, and what has changed inside this one since
            second.model.load_state_dict(boundary["model"])
            second.load_state_dict(boundary["method"])
            assert same(second.state_dict(), boundary["method"])
        second.begin_task(tasks[2], STEPS, 0)
        second.load_state_dict(*((inside["method"], True) if from_boundary else (copy.deepcopy(whole),)))
        second.model.load_state_dict(inside["model"])
        assert same(second.state_dict(), whole)
        assert observe(second, tasks[2], start=7, stop=20) == expected
        end(second, tasks[2])
        assert torch.equal(vector(second), vector(first))
        assert same(second.state_dict(), first.state_dict())
        for task in tasks:
            assert torch.equal(predict(second, task), predict(first, task))


@every_case
def test_a_state_of_another_method_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match=r"remembers .* the state has"):
        made(case).load_state_dict({"something": torch.zeros(1)})


@every_case
@shared_or_split
def test_memory_is_what_the_saved_state_holds(case: Case, split: bool) -> None:
    method = learn(made(case, split), stream(split))

    def held(value: Any) -> int:
        if isinstance(value, dict):
            value = value.values()
        elif isinstance(value, Tensor):
            return value.numel() * value.element_size()
        elif not isinstance(value, list | tuple):
            return 0
        return sum(map(held, value))

    state = saved(method.state_dict())
    assert set(state) - {"seen", "wiring"} == set(method.remembers)
    besides = sum(p.nbytes for p in method.model.parameters()) if case.method == "stl" else 0  # its last is the model
    assert method.memory() == sum(held(state[name]) for name in method.remembers) - besides


# ---- options -----------------------------------------------------------------------------------------------------


@every_method
def test_an_unknown_option_is_refused_with_the_legal_names(case: Case) -> None:
    with pytest.raises(ValueError, match=f"{case.method} on digits has no setting 'strenght'") as refused:
        experiment("digits", case.method, 0, strenght=3)
    legal = str(refused.value).partition("Settings: ")[2].split(", ")
    assert METHODS[case.method].options <= set(legal)
    assert {"lr", "steps", "hidden"} <= set(legal)


def computes_as_bare(method: Method, case: Case, task: Task) -> bool:
    """Whether the model gives, bit for bit, what the same weights give without any method."""
    bare = case.network(0)
    bare.load_state_dict(method.model.state_dict())
    return torch.equal(method.model(task.test[0]), bare(task.test[0]))


@every_case
@pytest.mark.parametrize("encode", [None, False, True], ids=["as-named", "off", "on"])
def test_feature_encoding_is_there_where_it_is_asked_for_and_nowhere_else(case: Case, encode: bool | None) -> None:
    if encode is not None and "encode" not in METHODS[case.method].options:
        pytest.skip(f"{case.method} has no feature encoding to turn {'on' if encode else 'off'}")
    method = made(case, encode=encode)
    for task in stream()[:2]:
        method.begin_task(task, STEPS, 0)
        assert computes_as_bare(method, case, task) != (case.method in ENCODED if encode is None else encode)
        observe(method, task, stop=3)
        end(method, task)


# ---- on CUDA -----------------------------------------------------------------------------------------------------


class HostTrips(TorchDispatchMode):
    """Operations that on a GPU would wait for the host, or copy from it: a captured step must have none."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "lift_fresh", "unique", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else []
        if name.startswith(self.WAITING) or any(i is not None and i.dtype == torch.bool for i in indices):
            self.met.append(name)
        return func(*args, **(kwargs or {}))


@plain_or_encoded
@shared_or_split
def test_a_step_never_waits_for_the_host(case: Case, split: bool, encode: bool | None) -> None:
    tasks = stream(split)
    method = learn(made(case, split, encode), tasks[:2], steps=5)
    method.begin_task(tasks[2], STEPS, 0)
    observe(method, tasks[2], stop=1)  # tables of classes and permutations are made at the first step
    x, y = tasks[2].train[0][:10], tasks[2].train[1][:10]
    with HostTrips() as trips:
        for _ in range(6):
            method.observe(x, y, tasks[2])
    assert trips.met == []


def test_the_watch_for_host_trips_sees_them() -> None:
    x = torch.arange(3.0)
    with HostTrips() as trips:
        float(x[0])
        x[x > 1]
        torch.tensor([1.0, 2.0])
    assert trips.met == ["_local_scalar_dense", "index", "lift_fresh"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@plain_or_encoded
@shared_or_split
def test_a_captured_step_does_what_an_eager_one_does(case: Case, split: bool, encode: bool | None) -> None:
    tasks = [moved(task, device="cuda") for task in stream(split)]

    def trained(kind: type[_Captured] | type[_Eager]) -> tuple[Method, Tensor]:
        method, losses = made(case, split, encode, where="cuda"), torch.zeros(len(tasks), STEPS, device="cuda")
        for task, of_task in zip(tasks, losses):
            method.begin_task(task, STEPS, 0)
            method.model.train()
            step = kind(method, task, order(task.id, len(task.train[0]), 10, STEPS, 0).cuda(), of_task, 0)
            for _ in range(STEPS):
                step()
            end(method, task)
        return method, losses

    (eager, expected), (captured, found) = trained(_Eager), trained(_Captured)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(vector(captured), vector(eager), rtol=1e-3, atol=1e-3)
    for task in tasks:
        assert (predict(captured, task).argmax(1) == predict(eager, task).argmax(1)).float().mean() > 0.95
