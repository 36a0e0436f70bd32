"""EWC, A-GEM, ER-Ring, RLL and STL against their definitions, and what each of them owes to the runner."""

import copy
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode

from rgo.benchmarks import Task, batches
from rgo.methods.agem import AGEM, project
from rgo.methods.er_ring import ERRing
from rgo.methods.ewc import EWC
from rgo.methods.method import Method, cross_entropy, masked
from rgo.methods.ring import Ring, generator
from rgo.methods.rll import RLL, extractors
from rgo.methods.stl import STL

WIDTH, CLASSES, STEPS = 8, 6, 40


def mlp(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def stream(split: bool = False, tasks: int = 3, n: int = 60) -> list[Task]:
    """Clusters. Every task has all classes and they lie elsewhere, or (split) it has two classes of its own."""
    made = []
    for k in range(tasks):
        source = torch.Generator().manual_seed(k)
        centres = 2 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(99 + k * (not split)))
        parts = []
        for size in (n, 60):
            y = torch.arange(size) % 2 + 2 * k if split else torch.arange(size) % CLASSES
            parts.append((centres[y] + 0.3 * torch.randn(size, WIDTH, generator=source), y))
        made.append(Task(k, parts[0], parts[1], (2 * k, 2 * k + 1) if split else None))
    return made


Make = Callable[..., Method]
METHODS: dict[str, Make] = {
    "ewc": lambda model, **o: EWC(model, **{"every": 5, **o}),
    "ewc-sample": lambda model, **o: EWC(model, fisher="sample", **o),
    "a-gem": AGEM,
    "er-ring": ERRing,
    "rll": RLL,
    "stl": lambda model, **o: STL(model, fresh=mlp, **o),
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
shared_or_split = pytest.mark.parametrize("split", [False, True], ids=["shared-head", "split-head"])
plain_or_encoded = pytest.mark.parametrize("encode", [False, True], ids=["plain", "encoded"])


def pieces(task: Task, size: int = 25) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(task.train[0].split(size), task.train[1].split(size))


def observe(method: Method, task: Task, start: int = 0, stop: int = STEPS, seed: int = 0) -> list[float]:
    method.model.train()
    stream = list(batches(task, batch_size=10, steps=STEPS, seed=seed))[start:stop]
    return [float(method.observe(x, y, task)) for x, y in stream]


def end(method: Method, task: Task) -> None:
    method.model.eval()
    method.end_task(task, pieces(task))


def learn(method: Method, tasks: list[Task], seed: int = 0) -> Method:
    for task in tasks:
        method.begin_task(task, STEPS, seed)
        observe(method, task, seed=seed)
        end(method, task)
    return method


def accuracy(method: Method, task: Task) -> float:
    with torch.no_grad():
        return float((method.predict(task.test[0], task).argmax(1) == task.test[1]).double().mean())


def vector(method: Method) -> Tensor:
    return parameters_to_vector(method.model.parameters()).detach().clone()


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


# ---- what every method owes --------------------------------------------------------------------------------------


@every_method
@shared_or_split
@plain_or_encoded
def test_a_method_learns_every_task_of_a_toy_stream(make: Make, split: bool, encode: bool) -> None:
    method = make(mlp(), encode=encode)
    chance = 1 / 2 if split else 1 / CLASSES
    for task in stream(split):
        learn(method, [task])
        assert accuracy(method, task) > (1 + chance) / 2
    logits = method.predict(task.test[0], task)
    assert logits.isinf().any() == split


@every_method
def test_a_run_is_a_function_of_its_seed(make: Make) -> None:
    a, b = (learn(make(mlp()), stream()) for _ in range(2))
    assert torch.equal(vector(a), vector(b))
    torch.manual_seed(7)  # nothing is drawn from the global generator
    state = torch.get_rng_state()
    assert torch.equal(vector(learn(make(mlp()), stream())), vector(a))
    assert torch.equal(torch.get_rng_state(), state)


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """As a file would hold it: tensors and plain types only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@every_method
@shared_or_split
@plain_or_encoded
def test_a_run_killed_inside_a_task_goes_on_bit_for_bit(make: Make, split: bool, encode: bool) -> None:
    tasks = stream(split)
    first = learn(make(mlp(), encode=encode), tasks[:2])
    boundary = saved({"model": first.model.state_dict(), "method": first.state_dict()})
    first.begin_task(tasks[2], STEPS, 0)
    observe(first, tasks[2], stop=13)
    inside = saved({"model": first.model.state_dict(), "method": first.state_dict(inside=True)})
    whole = saved(first.state_dict())
    expected = observe(first, tasks[2], start=13)
    end(first, tasks[2])

    for from_boundary in (True, False):
        second = make(mlp(seed=5), encode=encode)
        if from_boundary:  # what the task before left, and what has changed inside this one since
            second.model.load_state_dict(boundary["model"])
            second.load_state_dict(boundary["method"])
        second.begin_task(tasks[2], STEPS, 0)
        second.load_state_dict(*((inside["method"], True) if from_boundary else (copy.deepcopy(whole),)))
        second.model.load_state_dict(inside["model"])
        assert observe(second, tasks[2], start=13) == expected
        end(second, tasks[2])
        assert torch.equal(vector(second), vector(first))
        assert second.memory() == first.memory()
        with torch.no_grad():
            for task in tasks:
                assert torch.equal(second.predict(task.test[0], task), first.predict(task.test[0], task))


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


@every_method
@shared_or_split
@plain_or_encoded
def test_a_step_never_waits_for_the_host(make: Make, split: bool, encode: bool) -> None:
    tasks = stream(split)
    method = learn(make(mlp(), encode=encode), tasks[:2])
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


@every_method
def test_baselines_see_no_feature_encoding_unless_it_is_asked_for(make: Make) -> None:
    def attached(method: Method) -> list[bool]:
        return ["forward" in layer.__dict__ for layer in method.model if isinstance(layer, nn.Linear)]

    task, bare = stream()[0], mlp()
    plain, encoded = make(mlp()), make(mlp(), encode=True)
    for method in (plain, encoded):
        method.begin_task(task, STEPS, 0)
    x = task.test[0]
    assert torch.equal(plain.model(x), bare(x))
    assert not torch.equal(encoded.model(x), bare(x))
    assert attached(encoded) == [True] * 3
    if not isinstance(plain, RLL):  # which holds on to its layers for their curvature
        assert attached(plain) == [False] * 3


@every_method
def test_unknown_options_are_refused_by_name(make: Make) -> None:
    with pytest.raises(TypeError, match="strenght"):
        make(mlp(), strenght=3)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="'diagonal'"):
        EWC(mlp(), fisher="diagonal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        EWC(mlp(), every=0)
    with pytest.raises(ValueError, match="per_class=0"):
        AGEM(mlp(), per_class=0)
    with pytest.raises(ValueError, match="batch=0"):
        ERRing(mlp(), batch=0)


@pytest.mark.parametrize("name", ["ewc-sample", "a-gem", "er-ring", "rll"])
def test_a_task_cannot_end_without_its_data(name: str) -> None:
    method = METHODS[name](mlp())
    method.begin_task(stream()[0], STEPS, 0)
    observe(method, stream()[0], stop=2)
    with pytest.raises(ValueError, match=re.escape("end_task was given no batches")):
        method.end_task(stream()[0], [])


@every_method
def test_memory_counts_what_is_kept(make: Make) -> None:
    method = make(mlp())
    learn(method, stream())
    size = sum(p.nbytes for p in method.model.parameters())
    layers = [layer for layer in method.model if isinstance(layer, nn.Linear)]
    sample = 4 * WIDTH + 8 + 8  # pixels, label, owner
    expected = {
        "EWC": (4 if getattr(method, "fisher", "") == "batch" else 2) * size + 8,
        "AGEM": 3 * CLASSES * sample + 8,  # and the counter
        "ERRing": 3 * CLASSES * sample + 8,
        "RLL": size + sum(4 * (layer.in_features + 1) ** 2 for layer in layers),
        "STL": 2 * size,  # the third is `model` itself
    }
    assert method.memory() == expected[type(method).__name__]


# ---- the ring memory ---------------------------------------------------------------------------------------------


def filled(per_class: int = 2, batch: int = 10, seed: int = 0, split: bool = False) -> tuple[Ring, list[Task]]:
    ring, seen = Ring(per_class, batch, torch.device("cpu")), list[Task]()
    for task in stream(split):
        ring.begin(seen, [*seen, task], 5, seed)
        seen = [*seen, task]
        ring.end(seen, pieces(task))
    return ring, seen


@shared_or_split
def test_the_ring_keeps_as_many_samples_of_every_class_of_every_task(split: bool) -> None:
    ring, tasks = filled(per_class=2, split=split)
    for slot, task in enumerate(tasks):
        x, y = ring.x[ring.slots == slot], ring.y[ring.slots == slot]
        assert sorted(y.tolist()) == [c for c in sorted(set(task.train[1].tolist())) for _ in range(2)]
        rows = [int((task.train[0] == one).all(1).nonzero()) for one in x]  # each is a sample of the task, met once
        assert len(set(rows)) == len(rows)
        assert task.train[1][rows].tolist() == y.tolist()


def test_the_ring_chooses_uniformly_by_seed() -> None:
    task = Task(0, (torch.arange(10.0)[:, None], torch.zeros(10, dtype=torch.int64)), (torch.empty(0), torch.empty(0)))
    counts = torch.zeros(10)
    for seed in range(300):
        ring = Ring(1, 10, torch.device("cpu"))
        ring.begin([], [task], 1, seed)
        ring.end([task], pieces(task, size=4))
        counts[int(ring.x)] += 1
    assert (counts - 30).abs().max() < 20  # 4 sigma


def test_samples_are_drawn_without_replacement_and_all_of_them_while_they_are_few() -> None:
    few, seen = filled(per_class=1, batch=100)
    few.begin(seen, [*seen, Task("new", seen[0].train, seen[0].test)], 4, 0)
    assert [sorted(row) for row in few.draws.tolist()] == [list(range(3 * CLASSES))] * 4
    many, seen = filled(per_class=1, batch=10)
    counter = many.begin(seen, [*seen, Task("new", seen[0].train, seen[0].test)], 400, 0)
    assert all(len(set(row)) == 10 for row in many.draws.tolist())
    assert many.draws.flatten().bincount().min() > 150  # of 222 expected: all old tasks take part
    x, y, slots = many.sample(counter)
    assert torch.equal(x, many.x[many.draws[0]])
    assert torch.equal(y, many.y[many.draws[0]])
    assert torch.equal(slots, many.slots[many.draws[0]])
    assert torch.equal(many.sample(counter)[0], many.x[many.draws[1]])


def test_a_task_met_again_replaces_its_own_samples() -> None:
    method = learn(ERRing(mlp()), stream())
    again = Task(0, (stream()[0].train[0] + 100, stream()[0].train[1]), stream()[0].test)
    method.begin_task(again, STEPS, 0)
    ring = method.ring
    assert [t.id for t in method.seen] == [1, 2, 0]
    for slot, k in enumerate([1, 2, 0]):
        assert (ring.x[ring.slots == slot][:, None] == stream()[k].train[0]).all(2).any(1).all()
    observe(method, again)
    end(method, again)
    assert ring.slots.bincount().tolist() == [CLASSES] * 3
    assert (ring.x[ring.slots == 2] > 50).all()


# ---- A-GEM -------------------------------------------------------------------------------------------------------


def test_a_gem_projects_only_what_would_hurt() -> None:
    east = torch.tensor([2.0, 0.0])
    assert project(torch.tensor([-1.0, 1.0]), east).tolist() == [0.0, 1.0]
    assert project(torch.tensor([1.0, 1.0]), east).tolist() == [1.0, 1.0]
    assert project(torch.tensor([-3.0, 1.0]), torch.tensor([1.0, 1.0])).tolist() == [-2.0, 2.0]
    assert project(torch.tensor([-3.0, 1.0]), torch.zeros(2)).tolist() == [-3.0, 1.0]


numbers = st.floats(-10, 10, allow_nan=False).map(lambda v: round(v, 3))


@settings(max_examples=200, deadline=None)
@given(st.tuples(numbers, numbers), st.tuples(numbers, numbers).filter(lambda r: r[0] ** 2 + r[1] ** 2 > 1e-3))
def test_a_gem_solves_its_quadratic_programme(g: tuple[float, float], r: tuple[float, float]) -> None:
    """min |z - g|^2 / 2 with z . r >= 0: g itself where it is feasible, else the best point of the line z . r = 0."""
    z, (a, b) = torch.tensor(g, dtype=torch.float64), r
    if a * g[0] + b * g[1] < 0:
        along = torch.tensor([-b, a], dtype=torch.float64)
        z = along * (along @ z) / (along @ along)
    found = project(torch.tensor(g, dtype=torch.float64), torch.tensor(r, dtype=torch.float64))
    torch.testing.assert_close(found, z, rtol=1e-9, atol=1e-9)


def old_loss(method: AGEM | ERRing, tasks: list[Task], step: int) -> tuple[Tensor, int]:
    """The summed loss of a step's old samples, one by one: each in its own task's wiring, among its own classes."""
    ring, total = method.ring, torch.zeros((), dtype=torch.float64)
    for i in ring.draws[step].tolist():
        owner = tasks[int(ring.slots[i])]
        if method.wiring is None:
            logits = method.model(ring.x[i : i + 1])
        else:
            with method.wiring.task(owner.id):
                logits = method.model(ring.x[i : i + 1])
        total = total + cross_entropy(logits, ring.y[i : i + 1], owner)
    return total, ring.draws.shape[1]


def doubled(tasks: list[Task]) -> list[Task]:
    return [Task(t.id, (t.train[0].double(), t.train[1]), (t.test[0].double(), t.test[1]), t.classes) for t in tasks]


@shared_or_split
@plain_or_encoded
@pytest.mark.parametrize("kind", [AGEM, ERRing])
def test_old_samples_answer_in_their_own_wiring_among_their_own_classes(
    kind: type[AGEM] | type[ERRing], split: bool, encode: bool
) -> None:
    tasks = doubled(stream(split))
    method = kind(mlp().double(), encode=encode, per_class=2, batch=5)
    learn(method, tasks[:2])
    method.begin_task(tasks[2], STEPS, 0)
    projected = 0
    for step, (x, y) in enumerate(batches(tasks[2], batch_size=10, steps=STEPS, seed=0)):
        before = vector(method)
        new, (old, n) = cross_entropy(method.model(x), y, tasks[2]), old_loss(method, tasks, step)
        if kind is ERRing:
            g = gradient((10 * new + old) / (10 + n), method.model)
        else:
            g, g_ref = gradient(new, method.model), gradient(old / n, method.model)
            if g @ g_ref < 0:
                g, projected = g - (g @ g_ref) / (g_ref @ g_ref) * g_ref, projected + 1
        loss = method.observe(x, y, tasks[2])
        torch.testing.assert_close(vector(method), before - 0.1 * g, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(loss, (10 * new + old).detach() / (10 + n) if kind is ERRing else new.detach())
        if step == 15:
            break
    assert projected > 0 or kind is ERRing or split
    assert n == 5


@pytest.mark.parametrize("kind", [AGEM, ERRing])
def test_without_a_memory_yet_the_first_task_is_plain_sgd(kind: type[AGEM] | type[ERRing]) -> None:
    task, plain = stream()[0], mlp()
    method = learn(kind(mlp()), [task])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in batches(task, batch_size=10, steps=STEPS, seed=0):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert torch.equal(vector(method), parameters_to_vector(plain.parameters()))


def test_replay_and_penalties_forget_less_than_plain_sgd() -> None:
    def on_old_tasks(method: Method) -> float:
        learn(method, stream())
        return sum(accuracy(method, task) for task in stream()[:2]) / 2

    bare = on_old_tasks(EWC(mlp(), strength=0.0))
    for method in (
        AGEM(mlp()),
        ERRing(mlp()),
        EWC(mlp(), every=5),
        EWC(mlp(), fisher="sample"),
        RLL(mlp(), strength=5),
    ):
        assert on_old_tasks(method) > bare + 0.1, type(method).__name__


# ---- EWC ---------------------------------------------------------------------------------------------------------


@shared_or_split
def test_ewc_is_what_the_table_was_made_with(split: bool) -> None:
    tasks, model = doubled(stream(split)), mlp().double()
    method = learn(EWC(copy.deepcopy(model), strength=3.0, every=7), tasks)
    running = importance = torch.zeros_like(vector(method))
    anchor, parameters = importance, list(model.parameters())
    for task in tasks:
        pending = torch.zeros_like(running)
        for step, (x, y) in enumerate(batches(task, batch_size=10, steps=STEPS, seed=0), start=1):
            loss = cross_entropy(model(x), y, task)
            pending = pending + gradient(loss, model) ** 2
            if step % 7 == 0:
                running, pending = 0.1 * running + 0.9 * pending / 7, torch.zeros_like(running)
            loss = cross_entropy(model(x), y, task)
            loss = loss + 3.0 * (importance * (parameters_to_vector(parameters) - anchor) ** 2).sum()
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters)):
                p.data -= 0.1 * g
        importance = (running - running.min()) / (running.max() - running.min())
        anchor = parameters_to_vector(parameters).detach().clone()
    torch.testing.assert_close(vector(method), anchor, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(method.importance, importance, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(method.anchor, anchor, rtol=1e-10, atol=1e-12)
    assert (float(method.importance.min()), float(method.importance.max())) == (0.0, 1.0)


@shared_or_split
def test_ewc_by_the_book_sums_one_penalty_per_task(split: bool) -> None:
    tasks = doubled(stream(split))
    method, terms = EWC(mlp().double(), fisher="sample", strength=3.0), list[tuple[Tensor, Tensor]]()
    for task in tasks[:2]:
        method.begin_task(task, STEPS, 0)
        observe(method, task)
        F_k, source = torch.zeros_like(vector(method)), generator(0, task, "fisher")
        for x in task.train[0]:
            log_p = masked(method.model(x[None]), task).log_softmax(1)
            drawn = torch.multinomial(log_p.detach().exp(), 1, generator=source)
            F_k += gradient(log_p[0, drawn].sum(), method.model) ** 2 / len(task.train[0])
        terms.append((F_k, vector(method)))
        end(method, task)
    torch.testing.assert_close(method.importance, terms[0][0] + terms[1][0], rtol=1e-10, atol=1e-14)
    method.begin_task(tasks[2], STEPS, 0)
    for x, y in batches(tasks[2], batch_size=10, steps=5, seed=0):
        before, parameters = vector(method), list(method.model.parameters())
        loss = cross_entropy(method.model(x), y, tasks[2])
        for F_k, theta_k in terms:
            loss = loss + 3.0 / 2 * (F_k * (parameters_to_vector(parameters) - theta_k) ** 2).sum()
        g = gradient(loss, method.model)
        method.observe(x, y, tasks[2])
        torch.testing.assert_close(vector(method), before - 0.1 * g, rtol=1e-10, atol=1e-12)


def test_the_loss_ewc_returns_holds_the_penalty() -> None:
    tasks = stream()
    method = learn(EWC(mlp(), every=5), tasks[:1])
    method.begin_task(tasks[1], STEPS, 0)
    observe(method, tasks[1], stop=3)
    x, y = tasks[1].train[0][:10], tasks[1].train[1][:10]
    penalty = 10 * (method.importance * (vector(method) - method.anchor) ** 2).sum()
    expected = (F.cross_entropy(method.model(x), y) + penalty).detach()
    assert penalty > 0
    torch.testing.assert_close(method.observe(x, y, tasks[1]), expected)


# ---- RLL ---------------------------------------------------------------------------------------------------------


def convnet() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.Flatten(), nn.Linear(24, 3)
        ).double()


def images(k: int) -> Task:
    source = torch.Generator().manual_seed(k)
    x = torch.randn(20, 1, 6, 6, generator=source, dtype=torch.float64)
    return Task(k, (x, torch.arange(20) % 3), (x, torch.arange(20) % 3))


def quadratic(model: nn.Sequential, tasks: dict[int, Task]) -> Callable[[nn.Sequential], Tensor]:
    """1/2 (w - w*)^T H (w - w*) for every extractor, H summed over the samples' own gradients by autograd."""

    def rows(layer: Any, *like: Tensor) -> list[Tensor]:
        """Each extractor's weights and bias as one row, group by group; of tensors `like` the layer's if given."""
        weight, *bias = like or tuple(layer.parameters())
        W = weight.reshape(getattr(layer, "groups", 1), -1, weight[0].numel())
        return list(torch.cat([W, *(b.reshape(1, -1, 1) for b in bias)], dim=2))

    layers = [layer for layer in model if hasattr(layer, "weight")]
    H = [[torch.zeros(r.shape[1], r.shape[1], dtype=torch.float64) for r in rows(layer)] for layer in layers]
    for task in tasks.values():
        for x, y in zip(*task.train):
            f = model(x[None])[0]
            a = f.softmax(0)[y].detach()
            for layer, of_layer in zip(layers, H):
                found = torch.autograd.grad(f[y], list(layer.parameters()), retain_graph=True)
                for G, total in zip(rows(layer, *found), of_layer):
                    total += a * (1 - a) * (G.T @ G).detach() / len(G) / len(task.train[0])
    stars = [[r.detach().clone() for r in rows(layer)] for layer in layers]

    def at(other: nn.Sequential) -> Tensor:
        result = torch.zeros((), dtype=torch.float64)
        for layer, star, of_layer in zip([m for m in other if hasattr(m, "weight")], stars, H):
            for r, r_star, h in zip(rows(layer), star, of_layer):
                for w, w_star in zip(r, r_star):
                    result = result + 0.5 * (w - w_star) @ h @ (w - w_star)
        return result

    return at


def test_the_penalty_of_rll_is_the_quadratic_form_of_its_layers() -> None:
    model = convnet()
    method = RLL(model, strength=5.0)
    task, following = images(0), images(1)
    method.begin_task(task, 5, 0)
    for _ in range(5):
        method.observe(*task.train, task)
    explicit = quadratic(model, {0: task})
    end(method, task)
    assert float(method.forgetting().detach()) == 0
    method.begin_task(following, 5, 0)
    for _ in range(5):
        before, (x, y) = vector(method), following.train
        penalty = explicit(model)
        torch.testing.assert_close(method.forgetting(), penalty, rtol=1e-9, atol=1e-15)
        g = gradient(F.cross_entropy(model(x), y) + 5.0 * penalty, model)
        method.observe(x, y, following)
        torch.testing.assert_close(vector(method), before - 0.1 * g, rtol=1e-9, atol=1e-12)
    assert float(method.forgetting().detach()) > 0


def test_rll_adds_the_curvature_of_every_task_and_pulls_towards_the_latest_weights() -> None:
    model = mlp()
    method, found = RLL(model), list[dict[str, Tensor]]()
    for task in stream():
        learn(method, [task])
        found.append(dict(method.H))
        alone = RLL(mlp())  # the same weights meet this task alone
        alone.model.load_state_dict(model.state_dict())
        alone.begin_task(task, STEPS, 0)
        end_without_training(alone, task)
        for name, H in alone.H.items():
            before = found[-2][name] if len(found) > 1 else torch.zeros_like(H)
            torch.testing.assert_close(found[-1][name], before + H)
        for layer in method.curvature._layers():
            assert torch.equal(method.anchor[layer.name], extractors(layer))


def end_without_training(method: Method, task: Task) -> None:
    method.model(task.train[0][:2])  # with gradients: which layers read raw input is known now
    end(method, task)


def test_rll_leaves_a_split_head_alone() -> None:
    method = learn(RLL(mlp(), split_head="4"), stream(split=True))
    assert list(method.H) == ["0", "2"]


# ---- STL ---------------------------------------------------------------------------------------------------------


@plain_or_encoded
def test_stl_never_forgets(encode: bool) -> None:
    tasks, model = stream(), mlp()
    parameters = list(model.parameters())
    method, answers = STL(model, fresh=lambda k: mlp(seed=k), encode=encode), list[Tensor]()
    for task in tasks:
        method.begin_task(task, STEPS, 0)
        assert torch.equal(vector(method), parameters_to_vector(mlp(seed=task.id).parameters()))
        observe(method, task)
        with torch.no_grad():
            answers.append(method.predict(task.test[0], task))
        end(method, task)
        with torch.no_grad():
            for old, answer in zip(tasks, answers):
                assert torch.equal(method.predict(old.test[0], old), answer)
    assert all(p is q for p, q in zip(model.parameters(), parameters))  # optimizer and captured steps stay valid


# ---- CUDA --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_method
@shared_or_split
@plain_or_encoded
def test_a_captured_step_trains_as_the_eager_one_does(make: Make, split: bool, encode: bool) -> None:
    tasks = [
        Task(t.id, (t.train[0].cuda(), t.train[1].cuda()), (t.test[0].cuda(), t.test[1].cuda()), t.classes)
        for t in stream(split)
    ]
    eager, captured = (make(mlp().cuda(), encode=encode) for _ in range(2))
    for task in tasks:
        for method in (eager, captured):
            method.begin_task(task, STEPS, 0)
        stream_ = [(x.clone(), y.clone()) for x, y in batches(task, batch_size=10, steps=STEPS, seed=0)]
        expected = [float(eager.observe(x, y, task)) for x, y in stream_]
        found, side, (x, y) = list[float](), torch.cuda.Stream(), (t.clone() for t in stream_[0])
        for i in range(3):
            x.copy_(stream_[i][0])
            y.copy_(stream_[i][1])
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = captured.observe(x, y, task)
            torch.cuda.current_stream().wait_stream(side)
            found.append(float(loss))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = captured.observe(x, y, task)
        for a, b in stream_[3:]:
            x.copy_(a)
            y.copy_(b)
            graph.replay()
            found.append(float(loss))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-4)
        for method in (eager, captured):
            end(method, task)
        torch.testing.assert_close(vector(captured), vector(eager), rtol=1e-3, atol=1e-4)
