"""The one loop: what it writes, and that nothing is lost when it is stopped, killed or started twice."""

import errno
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from rgo import results, runner
from rgo.benchmarks import BENCHMARKS, Task, batches, digits
from rgo.experiment import DTYPES, Experiment, experiment
from rgo.methods import METHODS, make
from rgo.models import load
from rgo.runner import BusyError, DivergedError, _locked, run
from rgo.suite import run_all

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_that_of_a_loop_written_by_hand(dtype: str, tmp_path: Path) -> None:
    e = experiment("digits", "sgd", 0, dtype=dtype, **SHORT)
    kind = getattr(torch, dtype)
    model = load("mlp", seed=0, **e.settings["model_options"]).to(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tasks, losses = digits(tasks=3, seed=0), list[float]()
    for task in tasks:
        for x, y in batches(task, batch_size=10, steps=30, seed=0):
            optimizer.zero_grad()
            logits = model(x.to(kind))
            if task.classes is not None:
                mask = torch.full_like(logits, -torch.inf)
                mask[:, list(task.classes)] = 0
                logits = logits + mask
            loss = torch.nn.functional.cross_entropy(logits, y)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    record = run(e, tmp_path)
    assert record["loss"] == [[round(statistics.fmean(losses[i : i + 30]), 5)] for i in (0, 30, 60)]
    last = record["accuracy"][-1]
    for task, accuracy in zip(tasks, last):
        logits = model(task.test[0].to(kind))
        if task.classes is not None:
            keep = torch.zeros(logits.shape[1], dtype=torch.bool)
            keep[list(task.classes)] = True
            logits = logits.masked_fill(~keep, -torch.inf)
        right = (logits.argmax(1) == task.test[1]).float().mean().item()
        assert accuracy == pytest.approx(100 * right, abs=0.01)


@pytest.mark.parametrize("method", ["sgd", "rgo"])
def test_the_loop_by_hand_that_the_laboratory_is_timed_against_learns_the_same(
    method: str, finished: dict[str, str]
) -> None:
    spec = importlib.util.spec_from_file_location("loop", Path(__file__).parents[1] / "performance/loop.py")
    assert spec is not None
    assert spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    by_hand = loop.ByHand(experiment("digits", method, 0, **SHORT), "cpu")
    for k in range(3):
        by_hand.train(k, 30)
    assert [by_hand.accuracy(k) for k in range(3)] == json.loads(finished[method])["accuracy"][-1]


def test_test_sets_are_built_once_however_often_they_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    class Watched(list[Task]):  # the last look, at the training sets, iterates
        def __getitem__(self, k: Any) -> Any:
            built.append(k)
            return super().__getitem__(k)

    e = experiment("digits", "sgd", 0, **SHORT)
    monkeypatch.setitem(BENCHMARKS, "digits", lambda **options: Watched(digits(**options)))
    run(e, tmp_path)
    assert built == [0, 0, 1, 2]  # whether tasks have classes, then each to be trained


MODEL = """
from torch import nn

def dropping(classes=10):
    return nn.Sequential(nn.Linear(196, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, classes))
"""


def test_a_run_stopped_after_its_last_task_answers_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_with_dropout.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    e = experiment("digits", "sgd", 0, model="model_with_dropout:dropping", **SHORT)

    def report(steps: int, line: str) -> None:
        if line.startswith("task 3  ACC"):
            raise StoppedError

    with pytest.raises(StoppedError):
        run(e, tmp_path / "stopped", report=report)
    assert same(run(e, tmp_path / "stopped")) == same(run(e, tmp_path / "whole"))


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


def stopped(e: Experiment, out: Path) -> Path:
    """A run that has finished a task and begun the next."""

    def report(steps: int, line: str) -> None:
        if steps >= 40:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(e, out, checkpoint_every=5, report=report, report_every=1)
    return e.path(out)


@pytest.mark.parametrize("ending", [".task", ".step"])
@pytest.mark.parametrize(
    "change",
    [
        lambda state: 5,
        lambda state: [1],
        lambda state: {},
        lambda state: {k: v for k, v in state.items() if k != "model"},
        lambda state: state | {"model": {}},
        lambda state: state | {"method": []},
        lambda state: state | {"random": [1]},
        lambda state: state | {"task": 99},
        lambda state: state | {"task": -1},
        lambda state: state | {"task": 1.0},
        lambda state: state | ({"done": {}} if "done" in state else {"step": 30}),
        lambda state: state | ({"done": state["done"] | {"loss": []}} if "done" in state else {"loss": [1.0]}),
    ],
)
def test_a_checkpoint_that_holds_something_else_is_refused(change: Any, ending: str, tmp_path: Path) -> None:
    e = experiment("digits", "ewc", 0, **SHORT)
    path = stopped(e, tmp_path).with_suffix(ending)
    torch.save(change(torch.load(path, weights_only=True)), path)
    with pytest.raises(ValueError, match=rf"seed-0\{ending} is damaged .* Delete it"):
        run(e, tmp_path)


def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path: Path) -> None:
    e = experiment("digits", "sgd", 0, **SHORT)
    path = stopped(e, tmp_path).with_suffix(".step")
    state = torch.load(path, weights_only=True)
    weight = next(iter(state["model"].values())).numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weight) + 100] ^= 1
    path.write_bytes(content)
    assert torch.load(path, weights_only=True).keys() == state.keys()  # torch takes it
    with pytest.raises(ValueError, match=r"seed-0\.step is damaged \(.*\)\. Delete it"):
        run(e, tmp_path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("sgd", 1, {}), "seed is 1, not 0"),
        (("stl", 0, {}), "method is 'stl', not 'sgd'"),
        (("sgd", 0, {"lr": 0.2}), "lr is 0.2, not 0.1"),
    ],
)
def test_files_of_another_run_are_not_taken_for_this_ones(
    other: tuple[str, int, dict[str, Any]], said: str, tmp_path: Path
) -> None:
    e, (method, seed, changes) = experiment("digits", "sgd", 0, **SHORT), other
    wrong = experiment("digits", method, seed, **SHORT, **changes)
    path, source = e.path(tmp_path / "here"), stopped(wrong, tmp_path / "there")
    path.parent.mkdir(parents=True)
    for ending in (".step", ".task"):
        file = shutil.copy(source.with_suffix(ending), path.with_suffix(ending))
        with pytest.raises(ValueError, match=rf"seed-0\{ending} belongs to another run: {said}.*Delete it"):
            run(e, tmp_path / "here")
        Path(file).unlink()
    run(wrong, tmp_path / "there")
    shutil.copy(source, path)
    for work in (lambda: run(e, tmp_path / "here"), lambda: run_all([e], tmp_path / "here")):
        with pytest.raises(ValueError, match=rf"seed-0\.json is the result of another run: {said}.*Move it away"):
            work()


def test_every_committed_result_is_that_of_its_run() -> None:
    folder = Path(__file__).parents[1] / "experiments" / "results"
    paths = sorted(folder.rglob("seed-*.json"))
    assert len(paths) >= 150
    for path in paths:
        record = results.read(path)
        e = experiment(record["benchmark"], record["method"], record["seed"], **record["changed"])
        assert e.path(folder) == path
        assert runner.finished(e, path) == record


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 1e30}, r"the loss of task 1 is nan at step \d+ of 30"),
        ({"lr": 1e38, "steps": 1}, "after task 1 the outputs for 500 samples of task 0 are not finite"),
    ],
)
def test_a_run_that_diverges_is_a_failed_one(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    e = experiment("digits", "sgd", 0, **SHORT | changes)
    with pytest.raises(DivergedError, match=rf"it diverged: {said}\. Give a lower lr than 1e\+"):
        run(e, tmp_path)
    assert list(e.path(tmp_path).parent.iterdir()) == []


def test_a_run_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    for changes, said in (({"batch_size": 1001}, "batch_size=1001"), ({"samples": 9001}, "samples=9001")):
        e = experiment("digits", "sgd", 0, **SHORT, **changes)
        with pytest.raises(ValueError, match=said):
            run(e, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    e = experiment("digits", "sgd", 0, steps=10**6)
    command = "import sys; from pathlib import Path; from rgo.experiment import experiment; "
    command += "from rgo.suite import run_all; "
    command += "run_all([experiment('digits', 'sgd', 0, steps=10**6)], Path(sys.argv[1]), checkpoint_every=20)"
    parent = subprocess.Popen([sys.executable, "-c", command, str(tmp_path)], stderr=subprocess.DEVNULL)
    path, deadline = e.path(tmp_path), time.monotonic() + 60
    while not path.with_suffix(".step").exists():
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while True:
        try:
            with _locked(path.with_suffix(".lock")):
                return
        except BusyError:
            assert time.monotonic() < deadline, "the worker goes on"
            time.sleep(0.05)


# ---- what cannot be written --------------------------------------------------------------------------------------


def refused(monkeypatch: pytest.MonkeyPatch, ending: str, how: str, after: int = 0, code: int = errno.ENOSPC) -> None:
    """All files of this ending after the first `after` fail at being opened, written, synced or renamed."""
    opened, renamed = Path.open, Path.replace
    count = 0

    def fail(*arguments: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    def open_(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += f"{ending}." in f"{path.name}." and mode != "r"
        if count <= after or f"{ending}." not in f"{path.name}.":
            return opened(path, mode, *arguments, **named)
        monkeypatch.setattr(os, "fsync", fail if how == "sync" else (lambda number: None))
        monkeypatch.setattr(Path, "replace", fail if how == "rename" else renamed)
        if how == "open":
            fail()
        path.touch()
        return opened(Path("/dev/full") if how == "write" else path, mode)  # where the kernel itself has no space

    monkeypatch.setattr(Path, "open", open_)


@pytest.mark.parametrize(
    "how",
    [
        "open",
        pytest.param("write", marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")),
        "sync",
        "rename",
    ],
)
@pytest.mark.parametrize(
    ("ending", "after", "following"),  # and the step with which the run goes on
    [(".step", 0, [1]), (".step", 7, [41]), (".task", 0, [26]), (".task", 1, [56]), (".json", 0, [])],
)
def test_on_a_full_disk_nothing_is_lost_and_the_run_goes_on_when_there_is_space(
    ending: str, after: int, following: list[int], how: str, finished: dict[str, str], tmp_path: Path
) -> None:
    e = experiment("digits", "rgo", 0, **SHORT)
    path = e.path(tmp_path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        refused(monkeypatch, ending, how, after)
        message = re.escape(f"{path.with_suffix(ending)} cannot be written: No space left on device. Free some space")
        with pytest.raises(OSError, match=message):
            run(e, tmp_path, checkpoint_every=5)
    assert not path.exists()
    assert not list(path.parent.glob(".seed*"))  # nothing under a temporary name
    steps: list[int] = []
    record = run(e, tmp_path, checkpoint_every=5, report=lambda step, line: steps.append(step), report_every=1)
    assert steps[:1] == following
    assert same(record) == finished["rgo"]
    assert [file.name for file in path.parent.iterdir()] == ["seed-0.json"]


@pytest.mark.parametrize("where", ["mkdir", ".lock"])
def test_a_run_that_cannot_begin_says_why(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e = experiment("digits", "sgd", 0, **SHORT)
    if where == "mkdir":
        (tmp_path / "digits").write_text("a file where a folder is to be")
        expected = "Make it a place that can be written, or name another"
    else:
        refused(monkeypatch, ".lock", "open")
        expected = "Free some space there"
    with pytest.raises(OSError, match=rf"{tmp_path}.* cannot be written: .*{expected}"):
        run(e, tmp_path)


def test_an_unwritable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may write everywhere: the refusal is the same, but made here
        refused(monkeypatch, ".lock", "open", code=errno.EACCES)
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match=rf"{tmp_path}.* cannot be written: Permission denied\. Make it a place"):
        run(experiment("digits", "sgd", 0, **SHORT), tmp_path)


def test_what_a_killed_process_was_writing_goes_with_the_run(tmp_path: Path) -> None:
    e = experiment("digits", "sgd", 0, **SHORT)
    e.path(tmp_path).parent.mkdir(parents=True)
    for name in (".seed-0.task.4711", ".seed-1.task.4711"):
        (e.path(tmp_path).parent / name).write_text("half of it")
    run(e, tmp_path)
    assert sorted(p.name for p in e.path(tmp_path).parent.iterdir()) == [".seed-1.task.4711", "seed-0.json"]


# ---- settings ----------------------------------------------------------------------------------------------------


def test_unknown_names_and_settings_are_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match="unknown method 'ewcc'; did you mean 'ewc'"):
        experiment("digits", "ewcc", 0)
    with pytest.raises(ValueError, match="unknown benchmark 'cifar'"):
        experiment("cifar", "ewc", 0)
    with pytest.raises(
        ValueError, match=r"ewc on digits has no setting 'strenght'; did you mean 'strength'.*batch_size"
    ):
        experiment("digits", "ewc", 0, strenght=3)


def test_the_precision_is_a_setting_that_departs_from_the_protocol(tmp_path: Path) -> None:
    plain, double = (experiment("digits", "ewc", 0, dtype=dtype, **SHORT) for dtype in ("float32", "float64"))
    assert plain == experiment("digits", "ewc", 0, **SHORT)
    assert (plain.settings["dtype"], double.settings["dtype"]) == ("float32", "float64")
    assert double.changed == {"dtype": "float64", **SHORT}
    assert double.name == "ewc+dtype=float64+steps=30+tasks=3"
    in_float32, in_float64 = (run(e, tmp_path)["memory"] for e in (plain, double))
    assert in_float64 - 8 == 2 * (in_float32 - 8) > 0  # the counter aside
    with pytest.raises(ValueError, match=r"unknown dtype 'float16'; did you mean 'bfloat16'\? Known: float32, float64"):
        experiment("digits", "ewc", 0, dtype="float16")
    with pytest.raises(ValueError, match="dtype is a floating-point type of torch or None, got 'bflot16'"):
        run(experiment("digits", "rgo", 0, projection_dtype="bflot16"), tmp_path)
    narrow = make(experiment("digits", "rgo", 0, projection_dtype="bfloat16"), load("mlp"), load)
    assert narrow.learner.dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_files_from_before_the_precision_was_a_setting_are_of_float32(finished: dict[str, str], tmp_path: Path) -> None:
    e = experiment("digits", "rgo", 0, **SHORT)
    path = stopped(e, tmp_path)
    for checkpoint in (path.with_suffix(".task"), path.with_suffix(".step")):
        state = torch.load(checkpoint, weights_only=True)
        del state["run"]["settings"]["dtype"]
        torch.save(state, checkpoint)
    double = {"benchmark": "digits", "method": "rgo", "seed": 0, "settings": e.settings | {"dtype": "float64"}}
    with pytest.raises(ValueError, match="belongs to another run: dtype is 'float32', not 'float64'"):
        results.restore(path.with_suffix(".step"), double, torch.device("cpu"))
    record = run(e, tmp_path, checkpoint_every=5)
    assert same(record) == finished["rgo"]
    old = {**record, "settings": {k: v for k, v in record["settings"].items() if k != "dtype"}}
    results.write(path, old)
    assert '"dtype"' not in path.read_text()
    assert results.read(path) == run(e, tmp_path) == record


@pytest.mark.parametrize(
    "value", ["a/b", "../..", "a b", "a\nb", "é" * 300, list(range(200)), {"a": ["/", None]}, ".", "a\\b", ""]
)
def test_a_folder_can_be_made_for_any_setting(value: Any, tmp_path: Path) -> None:
    def name(value: Any) -> str:
        return experiment("split-cifar100", "sgd", 0, folder=value).name

    path = tmp_path / name(value) / "seed-0.json"
    path.parent.mkdir()
    path.write_text("{}")
    assert path.resolve().parents[1] == tmp_path.resolve()
    assert name(value) == name(value) != name("a_b")  # and no two settings share one
    assert name("a/b") != name("a_b") != name("a b")


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        *(("sgd", {n: v}, f"{n}=") for n in ("tasks", "steps", "batch_size", "threads") for v in (0, 1.0, True, "1")),
        *(("sgd", {"lr": v}, "lr=") for v in (0, -0.1, float("nan"), float("inf"), True, "0.1", None)),
        ("sgd", {"threads": 1025}, "threads=1025: give at most 1024"),
        ("sgd", {"dtype": 32}, "dtype=32: give text"),
        ("sgd", {"encode": "False"}, "encode='False': give true or false"),
        ("rgo", {"alpha": "abc"}, "alpha='abc': give a number"),
        ("rgo", {"block": 1.5}, "block=1.5: give a whole number"),
        ("rgo", {"project": 1}, "project=1: give true or false"),
        ("rgo", {"curvature": 5}, "curvature=5: give text"),
        ("rgo", {"solver": "qr"}, "solver='qr': give 'cholesky' or 'recursive'"),
        ("ewc", {"fisher": True}, "fisher=True: give 'batch' or 'sample'"),
        ("gpm", {"samples": "abc"}, "samples='abc': give a whole number or a list of which each is a whole number"),
        ("gpm", {"until": "1"}, "until='1': give a number or none"),
        ("sgd", {"hidden": 5}, "hidden=5: give a list of which each is a whole number"),
        ("sgd", {"hidden": [5, "6"]}, "hidden=.*: give a list"),
        ("sgd", {"side": 8.0}, "side=8.0: give 8 or 14"),
        ("sgd", {"samples": Path("here")}, "samples=here: a setting is text, a finite number"),
    ],
)  # fmt: skip
def test_a_setting_of_the_wrong_kind_is_refused_by_name(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        experiment("digits", method, 0, **settings)


@pytest.mark.parametrize("seed", [-1, 2**63, True, 1.0, "0", None])
def test_a_seed_is_a_whole_number_that_generators_take(seed: Any) -> None:
    with pytest.raises(ValueError, match=f"^seed={seed!r}: give a whole number"):
        experiment("digits", "sgd", seed)


def test_a_setting_that_the_protocol_does_not_name_is_changed_whenever_it_is_given() -> None:
    assert experiment("digits", "gpm", 0, until=None).changed == {"until": None}
    assert experiment("digits", "rgo", 0, project=True, stem_relu=True, model="resnet18").changed == {
        "project": True, "stem_relu": True, "model": "resnet18"
    }  # fmt: skip
    assert experiment("digits", "sgd", 0, hidden=[64, 64], lr=0.1).changed == {}  # the protocol has these
    other = {"model": "builtins:dict", "hidden": [64, 64]}  # of another model it has nothing
    assert experiment("digits", "sgd", 0, **other).changed == other


def test_no_two_settings_share_a_folder() -> None:
    """`anything` takes any argument, as a model of the user's may."""
    values = [
        1,
        "1",
        1.5,
        "1.5",
        True,
        "True",
        None,
        "none",
        "a",
        "'a'",
        "1+other=2",
        ["a"],
        "['a']",
        [1],
        ["1"],
        ["a b"],
    ]
    several = [{"day": value} for value in [*values, ["ab"]]] + [{"day": "1", "other": 2}, {"day": 1, "other": 2}]
    several += [{"day": "'1", "other": "2'"}]
    names = [experiment("digits", "sgd", 0, model="builtins:dict", **each).name for each in several]
    assert len(set(names)) == len(several), names
    assert experiment("digits", "sgd", 0, model="builtins:dict", day="a-b").name == "sgd+day=a-b+model=builtins:dict"


def test_the_committed_results_lie_where_their_settings_say() -> None:
    out = Path(__file__).parents[1] / "experiments/results"
    records = results.load(out)
    assert records
    for record in records:
        e = experiment(record["benchmark"], record["method"], record["seed"], **record["changed"])
        assert (str(e.path(out)), e.changed) == (record["path"], record["changed"])


def test_a_model_that_is_its_own_head_is_left_to_plain_training() -> None:
    e = experiment("digits", "rgo", 0, model="torch.nn:Linear", in_features=196, out_features=10)
    method = make(e, torch.nn.Linear(196, 10), lambda k: torch.nn.Linear(196, 10), split=True)
    assert method.learner.skip == ("",)  # type: ignore[attr-defined]
    assert not method.learner.summary().covered  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "option"), [("sgd", "encode"), ("rgo", "encode"), ("rgo", "project"), ("rgo", "permute_logits")]
)
def test_what_is_no_boolean_is_refused_by_methods_in_a_script(method: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} is True"):
        METHODS[method].kind(load("mlp"), **{option: "False"})


def test_settings_reach_the_method_the_model_and_the_run() -> None:
    e = experiment("digits", "rgo", 0, curvature="softmax", hidden=(32,), lr=0.05)
    assert e.settings["method_options"] == {"curvature": "softmax"}
    assert e.settings["model_options"]["hidden"] == [32]
    assert e.changed == {"curvature": "softmax", "hidden": [32], "lr": 0.05}
    assert e.name == "rgo+curvature=softmax+hidden=[32]+lr=0.05"
    method = make(e, load("mlp", **e.settings["model_options"]), lambda k: load("mlp"))
    assert method.lr == 0.05
