import contextlib
import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import references
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rgo
from rgo.encoding import Encoding, Index, gather, task_id, task_ids

FROZEN = {  # recipe 1, for ever: another answer here is another network
    (3, 8): [4, 7, 2, 1, 3, 5, 0, 6],
    ("3", 8): [7, 6, 2, 5, 0, 3, 4, 1],
    (-1, 5): [1, 4, 0, 2, 3],
    ("", 4): [0, 2, 1, 3],
    ("Aufgabe ä", 6): [4, 2, 0, 3, 1, 5],
    (10**20, 4): [3, 1, 2, 0],
    (0, 1): [0],
}


class Pool(nn.Module):
    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def forward(self, x):
        return (x.movedim(self.axis, -1) * torch.linspace(0.5, 2.0, x.shape[self.axis]).to(x)).mean(-1)


def mlp():
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))


def convnet():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 8, 3, groups=2, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


def tokens():
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), Pool(1), nn.Linear(8, 3))


MODELS = {"mlp": (mlp, (4,)), "convnet": (convnet, (2, 6, 6)), "tokens": (tokens, (3, 4))}


def data(shape, count=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=generator)


def make_model(make=mlp):
    torch.manual_seed(0)
    return make().double()


def train(learner, task, shape, steps=3, seed=0):
    """A few steps of SGD on `task`, and its end."""
    x, y = data(shape, seed=seed)
    optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.1)
    learner.begin_task(task)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(learner.model(x), y).backward()
        optimizer.step()
    learner.end_task([(x, y)])


def answer(learner, task, x):
    with learner.task(task), torch.no_grad():
        return learner.model(x)


def encoded(learner):
    return {layer.name: layer.encoded for layer in learner.summary().covered}


# ---- the recipe -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "width"), FROZEN)
def test_the_recipe_is_frozen(task, width):
    assert rgo.permutation(task, width).tolist() == FROZEN[task, width]
    assert rgo.permutation(task, width).dtype == torch.int64


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(st.integers() | st.text(st.characters(codec="utf-8"), max_size=8), st.integers(1, 300))
def test_the_recipe_is_the_stable_order_of_words_of_shake_256(task, width):
    stream = hashlib.shake_256(f"rgo/1/{type(task).__name__}:{task}/{width}".encode()).digest(8 * width)
    words = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(width)]
    assert rgo.permutation(task, width).tolist() == sorted(range(width), key=lambda i: (words[i], i))


def test_another_process_with_another_hash_seed_permutes_alike():
    code = f"import rgo; print([rgo.permutation(t, w).tolist() for t, w in {list(FROZEN)!r}])"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(list(FROZEN.values()))


def test_the_recipe_neither_reads_nor_moves_the_global_generators():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert rgo.permutation(3, 8).tolist() == FROZEN[3, 8]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_tasks_widths_and_types_of_ids_have_permutations_of_their_own():
    assert len({tuple(rgo.permutation(task, 20).tolist()) for task in [*range(50), "1", "2", "spam"]}) == 53
    assert rgo.permutation(1, 20).tolist() != rgo.permutation(1, 21)[:20].tolist()


def test_a_width_below_one_is_refused():
    with pytest.raises(ValueError, match="width"):
        rgo.permutation(0, 0)


@pytest.mark.parametrize("id", [3, np.int64(3), np.array(3), torch.tensor(3)], ids=repr)
def test_whole_numbers_of_any_kind_are_one_task(id):
    assert task_id(id) == 3
    assert type(task_id(id)) is int
    assert rgo.permutation(id, 8).tolist() == FROZEN[3, 8]


@pytest.mark.parametrize("id", ["3", np.str_("3"), type("Name", (str,), {})("3")], ids=lambda id: type(id).__name__)
def test_strings_of_any_kind_are_one_task(id):
    assert type(task_id(id)) is str
    assert rgo.permutation(id, 8).tolist() == FROZEN["3", 8]


@pytest.mark.parametrize(
    "id", [True, np.True_, torch.tensor(True), 3.0, np.float64(3), torch.tensor(3.0), None, (3,), b"3"], ids=repr
)
def test_what_is_neither_a_whole_number_nor_a_string_is_no_task(id):
    with pytest.raises(TypeError, match="a task id is an int or a str"):
        rgo.permutation(id, 8)
    learner = rgo.RGO(make_model())
    with pytest.raises(TypeError, match="a task id is an int or a str"):
        learner.begin_task(id)


@pytest.mark.parametrize("ids", [[0, 2, 2], (0, 2, 2), torch.tensor([0, 2, 2]), np.array([0, 2, 2])], ids=repr)
def test_the_ids_of_a_mixed_batch_come_in_any_sequence(ids):
    assert task_ids(ids) == (0, 2, 2)
    assert all(type(id) is int for id in task_ids(ids))


@pytest.mark.parametrize("ids", [[0, True], torch.tensor([True, False]), [0, 1.0], np.array([0.0, 1.0])], ids=repr)
def test_a_mixed_batch_refuses_what_is_no_id(ids):
    with pytest.raises(TypeError, match="a task id is an int or a str"):
        task_ids(ids)


def test_an_empty_mixed_batch_is_refused():
    with pytest.raises(ValueError, match="one id per row"):
        task_ids([])


# ---- reading through a permutation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "shape"), [(-1, (4, 5)), (-1, (4, 2, 5)), (-3, (4, 5, 2, 3)), (-2, (4, 5, 2))])
def test_gather_reads_feature_order_i_at_place_i_and_is_differentiable_twice(axis, shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    one = Index.of(rgo.permutation(1, 5), torch.device("cpu"))
    mixed = Index.of(torch.stack([rgo.permutation(t, 5) for t in (1, 2, 3, 1)]), torch.device("cpu"))
    expected = torch.stack([x.select(axis, int(i)) for i in rgo.permutation(1, 5)], dim=axis)
    assert torch.equal(gather(x, one, axis, "layer"), expected)
    rows = [gather(x[i : i + 1], Index(*(t[i] for t in mixed)), axis, "layer") for i in range(4)]
    assert torch.equal(gather(x, mixed, axis, "layer"), torch.cat(rows))
    for index in (one, mixed):
        assert torch.autograd.gradcheck(lambda x, index=index: gather(x, index, axis, "layer").square(), x)
        assert torch.autograd.gradgradcheck(lambda x, index=index: gather(x, index, axis, "layer").pow(3), x)


def test_an_input_of_another_width_is_refused_with_the_layers_name():
    learner = rgo.RGO(make_model(), raw=("0",))
    learner.begin_task(0)
    with pytest.raises(ValueError, match=r"layer '2' expects 9 features .* \(2, 7\)"):
        learner.model[2](torch.zeros(2, 7, dtype=torch.float64))


@pytest.mark.parametrize("kind", MODELS)
def test_every_layer_but_the_first_reads_its_input_in_the_tasks_order(kind):
    make, shape = MODELS[kind]
    model, plain = make_model(make), make_model(make)
    learner = rgo.RGO(model)
    x, y = data(shape)
    for task in (0, "b"):
        learner.begin_task(task)
        widths = {s.name: s.matrix.width for s in learner._sites.values() if s.name != "0"}
        orders = {name: rgo.permutation(task, width).tolist() for name, width in widths.items()}
        with references.wired(plain, orders):
            torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-14)
        assert not torch.allclose(model(x), plain(x))
        learner.end_task([(x, y)])


# ---- mixed batches --------------------------------------------------------------------------------------------------


@pytest.fixture(params=MODELS)
def three_tasks(request):
    """A model that has learned 0 and "b" and is being trained on 7."""
    make, shape = MODELS[request.param]
    learner = rgo.RGO(make_model(make), alpha=0.01)
    for seed, task in enumerate((0, "b")):
        train(learner, task, shape, seed=seed)
    learner.begin_task(7)
    return learner, shape


def test_a_mixed_batch_is_answered_row_by_row_as_each_task_would(three_tasks):
    learner, shape = three_tasks
    x, _ = data(shape, seed=9)
    ids = ["b", 0, 0, 7, "b", 7]
    mixed = answer(learner, ids, x)
    rows = torch.cat([answer(learner, task, x[i : i + 1]) for i, task in enumerate(ids)])
    torch.testing.assert_close(mixed, rows, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(mixed, answer(learner, 0, x))
    torch.testing.assert_close(answer(learner, [0] * 6, x), answer(learner, 0, x), rtol=1e-12, atol=1e-14)


def test_the_gradients_of_a_mixed_batch_are_the_sums_over_its_rows(three_tasks):
    learner, shape = three_tasks
    x, y = data(shape, seed=9)
    ids = ["b", 0, 0, 7, "b", 7]
    results = []
    for rows in ([slice(0, 6)], [slice(i, i + 1) for i in range(6)]):
        learner.model.zero_grad()
        leaf = x.clone().requires_grad_()
        for part in rows:
            with learner.task(ids[part]):
                F.cross_entropy(learner.model(leaf[part]), y[part], reduction="sum").backward()
        results.append([leaf.grad, *(p.grad.clone() for p in learner.model.parameters())])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_ids_of_a_mixed_batch_may_be_a_tensor():
    learner = rgo.RGO(make_model())
    for task in (0, 1):
        train(learner, task, (4,), seed=task)
    x, _ = data((4,))
    ids = [0, 1, 1, 0, 0, 1]
    assert torch.equal(answer(learner, torch.tensor(ids), x), answer(learner, ids, x))
    assert torch.equal(answer(learner, torch.tensor(1), x), answer(learner, 1, x))


@pytest.mark.parametrize("count", [5, 7, 1])
def test_a_wrong_number_of_ids_is_refused_naming_the_layer(three_tasks, count):
    learner, shape = three_tasks
    x, _ = data(shape)
    with pytest.raises(ValueError, match=rf"{count} task ids, one per row, but the input of layer '2' has shape \(6,"):
        answer(learner, [0] * count, x)


def test_a_mixed_batch_without_a_batch_dimension_is_refused():
    learner = rgo.RGO(make_model())
    train(learner, 0, (4,))
    with pytest.raises(ValueError, match="its first dimension is not the batch"):
        answer(learner, [0], data((4,))[0][0])
    with pytest.raises(ValueError, match="its first dimension is not the batch"):
        answer(learner, [0] * 9, data((4,))[0][0])  # as many as layer '2' has features


def test_a_mixed_batch_names_the_first_unknown_task():
    learner = rgo.RGO(make_model())
    train(learner, 0, (4,))
    with pytest.raises(KeyError, match="task '0' has not been learned"), learner.task([0, "0"]):
        pass


# ---- encode= --------------------------------------------------------------------------------------------------------


def test_encode_false_reads_everything_as_it_lies():
    model, plain = make_model(), make_model()
    learner = rgo.RGO(model, encode=False)
    x, _ = data((4,))
    for task in (0, 1):
        learner.begin_task(task)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        learner.end_task([data((4,))])
    assert set(encoded(learner).values()) == {"no"}


def test_after_first_leaves_the_first_task_the_identity_and_permutes_the_others():
    model, plain = make_model(), make_model()
    learner = rgo.RGO(model, encode="after-first")
    x, y = data((4,))
    learner.begin_task("first")
    assert torch.equal(model(x), plain(x))
    learner.end_task([(x, y)])
    learner.begin_task("second")
    with references.wired(plain, {"2": rgo.permutation("second", 9), "4": rgo.permutation("second", 8)}):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(answer(learner, "first", x), plain(x), rtol=1e-12, atol=1e-14)
    mixed = answer(learner, ["first", "second"] * 3, x)
    torch.testing.assert_close(mixed[::2], answer(learner, "first", x)[::2], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(mixed[1::2], answer(learner, "second", x)[1::2], rtol=1e-12, atol=1e-14)


def test_a_function_decides_for_each_task_and_layer_and_none_is_the_identity():
    asked = set()

    def reverse(task, name, width):
        asked.add((task, name, width))
        return None if (task, name) == (1, "4") else list(range(width))[::-1]

    model, plain = make_model(), make_model()
    learner = rgo.RGO(model, encode=reverse)
    x, y = data((4,))
    learner.begin_task(0)
    with references.wired(plain, {"2": range(8, -1, -1), "4": range(7, -1, -1)}):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-14)
    learner.end_task([(x, y)])
    learner.begin_task(1)
    with references.wired(plain, {"2": range(8, -1, -1)}):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-14)
    assert {(0, "2", 9), (0, "4", 8), (1, "2", 9), (1, "4", 8)} <= asked


def test_layers_of_one_width_get_orders_of_their_own_from_a_function():
    def rotate(task, name, width):
        return [(i + int(name)) % width for i in range(width)]

    def make():
        return nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))

    model, plain = make_model(make), make_model(make)
    learner = rgo.RGO(model, encode=rotate, raw=("0",))
    learner.begin_task(0)
    x, _ = data((5,))
    with references.wired(plain, {name: rotate(0, name, 5) for name in "123"}):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "order",
    [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1]), torch.tensor([2, 0, 1], dtype=torch.int32)],
    ids=repr,
)
def test_a_function_may_return_any_sequence(order):
    assert Encoding(lambda *_: order).order(0, "layer", 3, None).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    "order",
    [
        [0, 1],
        [0, 1, 1],
        [1, 2, 3],
        [-1, 0, 1],
        [[0, 1, 2]],
        [0, 1, 2, 3],
        5,
        [0.4, 1.6, 2.2],
        torch.tensor([0.5, 0.1, 0.9]),
    ],
    ids=repr,
)
def test_a_function_that_returns_no_permutation_is_caught_with_task_layer_and_width(order):
    def encode(task, name, width):
        return order if name == "2" else None

    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    learner = rgo.RGO(model, encode=encode)
    with pytest.raises(ValueError, match=r"encode\('a', '2', 3\) must return a permutation of range\(3\) or None"):
        learner.begin_task("a")


@pytest.mark.parametrize("encode", ["yes", 1, 0, None, "after first"])
def test_other_values_of_encode_are_refused(encode):
    with pytest.raises(ValueError, match="encode is True, False"):
        rgo.RGO(make_model(), encode=encode)


def test_many_tasks_do_not_fill_the_memory_with_permutations():
    encoding = Encoding(True)
    for task in range(2000):
        encoding.index(task, "layer", 3, None, torch.device("cpu"))
    assert len(encoding._cache) <= 512


# ---- which layers read the raw input --------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two layers read the input, one reads both and the input again, one reads a residual sum."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.both, self.residual = nn.Linear(12, 4), nn.Linear(4, 4)
        self.twice, self.head = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.both(torch.cat([self.left(x).tanh(), self.right(2 * x - 1).tanh(), x], dim=1))
        h = self.residual(x + h) + self.twice(torch.cat([x, x.square()], dim=1))
        return self.head(h.tanh())


def first_forward(model, x, **options):
    learner = rgo.RGO(model, **options)
    learner.begin_task(0)
    model(x)
    return encoded(learner)


def test_in_a_chain_the_first_layer_alone_reads_the_raw_input():
    assert encoded(rgo.RGO(make_model())) == {"0": "?", "2": "?", "4": "?"}
    assert first_forward(make_model(), data((4,))[0]) == {"0": "raw input", "2": "yes", "4": "yes"}


def test_an_input_computed_from_the_raw_input_alone_is_raw_and_one_mixed_with_features_is_not():
    found = first_forward(make_model(Branches), data((4,))[0])
    assert [name for name, how in found.items() if how == "raw input"] == ["left", "right", "twice"]
    assert [name for name, how in found.items() if how == "yes"] == ["both", "residual", "head"]


def test_behind_a_frozen_prefix_the_input_counts_as_raw():
    model = make_model()
    model[0].requires_grad_(False)
    assert first_forward(model, data((4,))[0]) == {"2": "raw input", "4": "yes"}


def test_an_adversarial_input_is_raw_all_the_same():
    x = data((4,))[0].requires_grad_()
    found = {"0": "raw input", "2": "yes", "4": "yes"}
    assert first_forward(make_model(), x) == found
    assert first_forward(make_model(), x + 0.1 * (x * 2).tanh()) == found


def test_a_trained_prompt_is_no_raw_input_and_a_free_tensor_is():
    class Prompted(nn.Module):
        def __init__(self, trained):
            super().__init__()
            self.prompt = nn.Parameter(torch.ones(4), requires_grad=trained)
            self.mixed, self.alone = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.mixed(x + self.prompt) + self.alone(self.prompt)

    with pytest.warns(UserWarning, match="prompt"):  # it is trained without protection
        assert first_forward(Prompted(True), torch.zeros(2, 4)) == {"mixed": "yes", "alone": "yes"}
    assert first_forward(Prompted(False), torch.zeros(2, 4)) == {"mixed": "raw input", "alone": "raw input"}


def test_raw_names_decide_without_a_forward():
    learner = rgo.RGO(make_model(), raw=("0", "4"))
    assert encoded(learner) == {"0": "raw input", "2": "yes", "4": "raw input"}
    assert encoded(rgo.RGO(make_model(), raw=())) == {"0": "yes", "2": "yes", "4": "yes"}
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 3))
    assert encoded(rgo.RGO(nested, raw=("0",))) == {"0.0": "raw input", "0.1": "raw input", "1": "yes"}


def test_raw_names_are_checked():
    with pytest.raises(ValueError, match="raw names '1x'"):
        rgo.RGO(make_model(), raw=("1x",))


def test_under_no_grad_what_is_not_known_yet_is_raised_with_the_name_to_give():
    learner = rgo.RGO(make_model())
    learner.begin_task(0)
    x, _ = data((4,))
    with pytest.raises(RuntimeError, match=r"layer '0' needs to know"), torch.no_grad():
        learner.model(x)
    learner.model(x)
    with torch.no_grad():
        learner.model(x)  # known by now


def test_end_task_is_a_forward_with_gradients_too():
    learner = rgo.RGO(make_model())
    learner.begin_task(0)
    with torch.no_grad():
        learner.end_task([data((4,))])
    assert encoded(learner) == {"0": "raw input", "2": "yes", "4": "yes"}


def test_what_was_found_is_kept_when_the_prefix_is_frozen_later():
    learner = rgo.RGO(make_model())
    train(learner, 0, (4,))
    learner.model[0].requires_grad_(False)
    learner.begin_task(1)
    learner.model(data((4,))[0])
    assert encoded(learner)["2"] == "yes"


def test_what_was_found_is_part_of_the_state():
    learner = rgo.RGO(make_model(Branches))
    train(learner, 0, (4,))
    restored = rgo.RGO(make_model(Branches))
    restored.model.load_state_dict(learner.model.state_dict())
    restored.load_state_dict(learner.state_dict())
    assert encoded(restored) == encoded(learner)
    x, _ = data((4,))
    assert torch.equal(answer(restored, 0, x), answer(learner, 0, x))


def test_other_parameters_of_a_functional_call_are_no_raw_input():
    model = make_model()
    learner = rgo.RGO(model)
    learner.begin_task(0)
    other = {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    # Where it cannot be decided, raising is right as well; calling features raw is not.
    with contextlib.suppress(RuntimeError):
        torch.func.functional_call(model, other, (data((4,))[0],))
    assert encoded(learner)["2"] in ("yes", "?")


# ---- determinism ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_training_through_permutations_is_deterministic_to_the_bit(kind):
    make, shape = MODELS[kind]
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            learner = rgo.RGO(make_model(make))
            for task in (0, "b"):
                train(learner, task, shape)
            learner.begin_task(2)
            x, y = data(shape)
            with learner.task([0, "b", 2, 2, 0, "b"]):
                F.cross_entropy(learner.model(x), y).backward()
            results.append([p.detach() for p in learner.model.parameters()])
            results[-1] += [p.grad for p in learner.model.parameters()]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("count", [3, 40])  # fewer rows than outputs, and more: both ways to project
@pytest.mark.parametrize("encode", [False, True])
def test_a_penalty_on_gradients_of_weights_is_differentiated_through_the_wiring(encode, count):
    torch.manual_seed(0)
    widths = ((6, 12), (12, 12), (12, 4))
    model = nn.Sequential(*(part for n, o in widths for part in (nn.Linear(n, o), nn.Tanh()))).double()
    learner = rgo.RGO(model, encode=encode)
    x, y = torch.randn(count, 6).double(), torch.randint(4, (count,))

    def penalty(x):
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()), create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    learner.begin_task(0)
    F.cross_entropy(model(x), y).backward()
    learner.end_task([(x, y)])
    learner.begin_task(1)
    leaf, direction = x.clone().requires_grad_(), torch.randn_like(x)
    (found,) = torch.autograd.grad(penalty(leaf), leaf)
    ahead, behind = (penalty(x + step * direction).detach() for step in (1e-5, -1e-5))
    torch.testing.assert_close((found * direction).sum(), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-9)
