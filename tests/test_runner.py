"""The one loop: what it writes, and that nothing is lost when it is stopped, killed or started twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rgo import results
from rgo.benchmarks import batches, digits
from rgo.experiment import experiment
from rgo.methods import METHODS, make
from rgo.models import load
from rgo.runner import BusyError, _locked, run

SHORT = {"tasks": 3, "steps": 30}


def same(record: dict[str, Any]) -> str:
    """All of a record that the clock and the machine have no part in."""
    return json.dumps({k: v for k, v in record.items() if k not in ("timing", "environment", "commit")})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An uninterrupted run of every method."""
    out = tmp_path_factory.mktemp("finished")
    return {m: same(run(experiment("digits", m, 0, **SHORT), out)) for m in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_says_all_that_is_promised(method: str, tmp_path: Path) -> None:
    e = experiment("digits", method, 1, **SHORT)
    record = run(e, tmp_path)
    assert record == results.read(tmp_path / f"digits/{method}+steps=30+tasks=3/seed-1.json")
    assert [len(row) for row in record["accuracy"]] == [1, 2, 3]
    assert all(row[-1] > 70 for row in record["accuracy"])  # every task is learned: chance is 50
    assert record["changed"] == {"tasks": 3, "steps": 30}
    assert record["seed"] == 1
    assert record["capacity"] == (300 if method == "stl" else 100)
    assert (record["memory"] == 0) == (method in ("sgd", "stl", "fel"))
    assert not record["captured"]
    assert [p.name for p in e.path(tmp_path).parent.iterdir()] == ["seed-1.json"]  # nothing else is left


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("method", METHODS)
def test_a_run_stopped_anywhere_ends_as_if_it_had_not_been(
    method: str, finished: dict[str, str], tmp_path: Path
) -> None:
    e = experiment("digits", method, 0, **SHORT)
    stops = [7, 30, 52, 75]
    for stop in stops:
        calls = 0

        def report(steps: int, line: str, stop: int = stop) -> None:
            nonlocal calls
            calls += 1
            if steps >= stop:
                raise StoppedError

        with pytest.raises(StoppedError):
            run(e, tmp_path, checkpoint_every=5, report=report, report_every=1)
    assert same(run(e, tmp_path, checkpoint_every=5)) == finished[method]


def test_the_result_is_that_of_a_loop_written_by_hand(finished: dict[str, str]) -> None:
    e = experiment("digits", "sgd", 0, **SHORT)
    model = load("mlp", seed=0, **e.settings["model_options"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tasks = digits(tasks=3, seed=0)
    for task in tasks:
        for x, y in batches(task, batch_size=10, steps=30, seed=0):
            optimizer.zero_grad()
            logits = model(x)
            if task.classes is not None:
                mask = torch.full_like(logits, -torch.inf)
                mask[:, list(task.classes)] = 0
                logits = logits + mask
            torch.nn.functional.cross_entropy(logits, y).backward()
            optimizer.step()
    last = json.loads(finished["sgd"])["accuracy"][-1]
    for task, accuracy in zip(tasks, last):
        logits = model(task.test[0])
        if task.classes is not None:
            keep = torch.zeros(logits.shape[1], dtype=torch.bool)
            keep[list(task.classes)] = True
            logits = logits.masked_fill(~keep, -torch.inf)
        right = (logits.argmax(1) == task.test[1]).float().mean().item()
        assert accuracy == pytest.approx(100 * right, abs=0.01)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_killed_at_a_random_moment_ends_as_if_it_had_not_been(seed: int, tmp_path: Path) -> None:
    changes = {"tasks": 3, "steps": 400}
    command = [
        *(sys.executable, "-c"),
        "import sys; from pathlib import Path; from rgo.experiment import experiment; from rgo.runner import run; "
        f"run(experiment('digits', 'rgo', 0, **{changes}), Path(sys.argv[1]), checkpoint_every=20)",
    ]
    start = time.perf_counter()
    subprocess.run([*command, str(tmp_path / "whole")], check=True, timeout=300)
    whole = time.perf_counter() - start
    for _ in range(2):
        process = subprocess.Popen([*command, str(tmp_path / "killed")])
        time.sleep(whole * random.Random(seed).uniform(0.3, 0.95))
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*command, str(tmp_path / "killed")], check=True, timeout=300)
    e = experiment("digits", "rgo", 0, **changes)
    a, b = (results.read(e.path(tmp_path / name)) for name in ("whole", "killed"))
    assert same(a) == same(b)


def test_two_processes_do_not_work_on_one_run(tmp_path: Path) -> None:
    e = experiment("digits", "sgd", 0, **SHORT)
    path = e.path(tmp_path)
    path.parent.mkdir(parents=True)
    with _locked(path.with_suffix(".lock")), pytest.raises(BusyError, match=r"another process is at work on .*seed-0"):
        run(e, tmp_path)
    run(e, tmp_path)


def test_a_damaged_checkpoint_is_named_and_nothing_is_done(tmp_path: Path) -> None:
    e = experiment("digits", "sgd", 0, **SHORT)
    path = e.path(tmp_path).with_suffix(".task")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"seed-0\.task is damaged .* Delete it"):
        run(e, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        run(experiment("digits", "sgd", 0, **SHORT), tmp_path)


def test_unknown_names_and_settings_are_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match="unknown method 'ewcc'; did you mean 'ewc'"):
        experiment("digits", "ewcc", 0)
    with pytest.raises(ValueError, match="unknown benchmark 'cifar'"):
        experiment("cifar", "ewc", 0)
    with pytest.raises(
        ValueError, match=r"ewc on digits has no setting 'strenght'; did you mean 'strength'.*batch_size"
    ):
        experiment("digits", "ewc", 0, strenght=3)


def test_settings_reach_the_method_the_model_and_the_run() -> None:
    e = experiment("digits", "rgo", 0, curvature="softmax", hidden=(32,), lr=0.05)
    assert e.settings["method_options"] == {"curvature": "softmax"}
    assert e.settings["model_options"]["hidden"] == [32]
    assert e.changed == {"curvature": "softmax", "hidden": [32], "lr": 0.05}
    assert e.name == "rgo+curvature=softmax+hidden=[32]+lr=0.05"
    method = make(e, load("mlp", **e.settings["model_options"]), lambda k: load("mlp"))
    assert method.lr == 0.05


@pytest.mark.parametrize("method", [m for m in METHODS if not m.startswith("rgo") and m != "fel"])
def test_baselines_see_no_feature_encoding_unless_asked(method: str) -> None:
    for encode in (False, True):
        e = experiment("digits", method, 0, **({"encode": True} if encode else {}))
        model = load("mlp", **e.settings["model_options"])
        held = make(e, model, lambda k: load("mlp"))
        assert any("forward" in m.__dict__ for m in model.modules()) == (encode or held.wiring is not None)
        if not encode and held.wiring is not None:  # RLL collects curvature by an RGO that encodes nothing
            assert held.wiring.encoding.encode is False
