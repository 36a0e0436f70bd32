"""EWC, A-GEM, ER-Ring, RLL and STL against their definitions."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import (
    CLASSES,
    STEPS,
    WIDTH,
    accuracy,
    end,
    learn,
    mlp,
    moved,
    observe,
    pieces,
    shared_or_split,
    stream,
    vector,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from rgo.benchmarks import Task, batches
from rgo.methods.agem import AGEM, project
from rgo.methods.er_ring import ERRing
from rgo.methods.ewc import EWC
from rgo.methods.method import Method, cross_entropy, masked
from rgo.methods.ring import Ring, generator
from rgo.methods.rll import RLL, extractors
from rgo.methods.stl import STL

plain_or_encoded = pytest.mark.parametrize("encode", [False, True], ids=["plain", "encoded"])


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="'diagonal'"):
        EWC(mlp(), fisher="diagonal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        EWC(mlp(), every=0)
    with pytest.raises(ValueError, match="per_class=0"):
        AGEM(mlp(), per_class=0)
    with pytest.raises(ValueError, match="batch=0"):
        ERRing(mlp(), batch=0)


@pytest.mark.parametrize("kind", [EWC, AGEM, ERRing, RLL])
def test_a_task_cannot_end_without_its_data(kind: Any) -> None:
    method = kind(mlp(), **({"fisher": "sample"} if kind is EWC else {}))
    method.begin_task(stream()[0], STEPS, 0)
    observe(method, stream()[0], stop=2)
    with pytest.raises(ValueError, match=re.escape("end_task was given no batches")):
        method.end_task(stream()[0], [])


def test_memory_counts_what_is_kept() -> None:
    size = sum(p.nbytes for p in mlp().parameters())
    sample = 4 * WIDTH + 8 + 8  # pixels, label, owner
    for method, expected in (
        (EWC(mlp(), every=5), 4 * size + 8),  # and the counter
        (EWC(mlp(), fisher="sample"), 2 * size + 8),
        (AGEM(mlp()), 3 * CLASSES * sample + 8),
        (ERRing(mlp()), 3 * CLASSES * sample + 8),
        (RLL(mlp()), size + 4 * (17**2 + 25**2 + 25**2)),
        (STL(mlp(), fresh=mlp), 2 * size),  # the third is `model` itself
    ):
        assert learn(method, stream()).memory() == expected, type(method).__name__


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
    east = [2.0, 0.0]
    assert project(torch.tensor([-1.0, 1.0]), torch.tensor(east)).tolist() == [0.0, 1.0]
    assert project(torch.tensor([1.0, 1.0]), torch.tensor(east)).tolist() == [1.0, 1.0]
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


@shared_or_split
@plain_or_encoded
@pytest.mark.parametrize("kind", [AGEM, ERRing])
def test_old_samples_answer_in_their_own_wiring_among_their_own_classes(
    kind: type[AGEM] | type[ERRing], split: bool, encode: bool
) -> None:
    tasks = [moved(task, torch.float64) for task in stream(split)]
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


def crowded() -> list[Task]:
    """Clusters in a few dimensions that lie elsewhere in every task: plain SGD forgets them."""
    tasks = []
    for k in range(3):
        source, y = torch.Generator().manual_seed(99 + k), torch.arange(60) % CLASSES
        x = 2 * torch.randn(CLASSES, 8, generator=source)[y] + 0.3 * torch.randn(60, 8, generator=source)
        data = F.pad(x, (0, WIDTH - 8)), y
        tasks.append(Task(k, data, data))
    return tasks


def test_replay_and_penalties_forget_less_than_plain_sgd() -> None:
    def on_old_tasks(method: Method) -> float:
        learn(method, crowded())
        return sum(accuracy(method, task) for task in crowded()[:2]) / 2

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
    tasks, model = [moved(task, torch.float64) for task in stream(split)], mlp().double()
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
    tasks = [moved(task, torch.float64) for task in stream(split)]
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
