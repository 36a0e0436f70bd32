"""Suites on many machines by Ray, and in many processes on one card: what is said, and what is lost (nothing)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import ray
from ray import exceptions
from ray.cluster_utils import Cluster
from typer.testing import CliRunner, Result

import rgo.cli
from rgo import cluster, results, suite
from rgo.experiment import experiment
from rgo.runner import _locked, run
from rgo.suite import one_run

T = TypeVar("T")
MODELS = """
import os, time
from pathlib import Path
from rgo.models import mlp

HERE = Path(__file__).parent

def _counted(name):
    with (HERE / name).open("a") as file:
        file.write("x")
        return file.tell()

def raises(seed):
    _counted("raised")
    raise ValueError("no such layer in " + os.environ["RGO_DATA"])

def dies_once(seed):
    if _counted("died-once") == 1:
        os._exit(3)
    return mlp(seed=seed, inputs=196)

def waits(seed):
    steps = 0
    def wait(module, inputs):
        nonlocal steps
        steps += 1
        while steps == 50 and not (HERE / "go-on").exists():
            time.sleep(0.05)
    model = mlp(seed=seed, inputs=196)
    model.register_forward_pre_hook(wait)
    return model
"""


def same(path: Path) -> list[str]:
    """All of a result that the clock and the machine have no part in: it has a line for each key."""
    others = ('"timing"', '"environment"', '"commit"')
    return [line for line in path.read_text().splitlines() if not line.startswith(others)]


@pytest.fixture(scope="module")
def machines() -> Iterator[Cluster]:
    """A cluster with one CPU, on this machine."""
    # Its folder has a short name, for those of sockets have 107 letters at most.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", folder)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        yield made
        made.shutdown()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The models above, as a module of the test's own."""
    (tmp_path / f"{tmp_path.name}.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path.name + ":{}"


def start(folder: Path, machines: Cluster, *models: str, methods: str = "sgd") -> "subprocess.Popen[str]":
    """`rgo suite` in a folder, on the cluster: short runs of these models."""
    each = f"benchmark = 'digits'\nmethods = {methods.split()}\ntasks = 2\nsteps = 60\nmodel = "
    (folder / "suite.toml").write_text("".join(f"[[runs]]\n{each}'{name}'\n" for name in models))
    options = ("--ray", machines.address, "--out", "out", "--checkpoint-every", "20", "--json")
    command = [sys.executable, "-m", "rgo.cli", "suite", "suite.toml", *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(look: Callable[[], T | None], shell: "subprocess.Popen[str]") -> T:
    """What is to be seen while the suite is at work, as soon as it is."""
    deadline = time.monotonic() + 60
    while (seen := look()) is None:
        assert shell.poll() is None, shell.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return seen


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def process_on(raylet: int, path: Path) -> int | None:
    """The process that does this run, if it is one of this machine's and past a checkpoint."""
    if not path.with_suffix(".step").exists():
        return None
    process = int(path.with_suffix(".lock").read_text())
    return process if parent(process) == raylet else None


def at_work() -> list[str]:
    """What tasks of Ray, whose processes it names by them, are doing."""
    named = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            named.append(file.read_text().rstrip("\0"))
    return [name for name in named if name.startswith("ray::digits ")]


def test_a_suite_outlives_one_of_its_machines(machines: Cluster, model: str, tmp_path: Path) -> None:
    machine = machines.add_node(num_cpus=1)
    raylet = machine.all_processes["raylet"][0].process.pid
    waits = model.format("waits")
    experiments = [experiment("digits", m, 0, model=waits, tasks=2, steps=60) for m in ("rgo", "ewc")]
    paths = [e.path(tmp_path / "out") for e in experiments]
    with start(tmp_path, machines, waits, methods="rgo ewc") as shell:
        # Both wait in their fiftieth step, one on each machine.
        there = until(lambda: {path: p for path in paths if (p := process_on(raylet, path))} or None, shell)
        ((path, process),) = there.items()
        os.kill(raylet, signal.SIGKILL)
        os.kill(process, signal.SIGKILL)
        (tmp_path / "go-on").touch()
        said, warned = shell.communicate(timeout=120)
    machines.remove_node(machine, allow_graceful=False)
    assert shell.returncode == 0, warned
    assert warned.count(f"{path.parent.name} seed 0: lost with ") == warned.count("lost") == 1
    assert "raylet" not in said + warned  # what Ray itself would say, at length
    assert [row["method"] for row in json.loads(said)] == ["rgo", "ewc"]
    for e, path in zip(experiments, paths):
        run(e, tmp_path / "here")
        assert same(path) == same(e.path(tmp_path / "here"))
    assert {file.suffix for file in (tmp_path / "out").rglob("*") if file.is_file()} == {".json"}


def test_a_run_that_raises_is_not_tried_again_and_one_whose_process_dies_is(
    machines: Cluster, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RGO_DATA", "data")  # of this folder
    with start(tmp_path, machines, *(model.format(name) for name in ("raises", "dies_once")), "mlp") as shell:
        said, warned = shell.communicate(timeout=120)
    assert shell.returncode == 1, warned
    seed = "+steps=60+tasks=2 seed 0: "
    assert f":raises{seed}failed: ValueError: no such layer in {tmp_path / 'data'}\n" in warned
    assert warned.count(f":dies_once{seed}lost with its process on ") == warned.count("lost") == 1
    assert warned.count("failed") == 1
    assert (tmp_path / "raised").read_text() == "x"
    assert (tmp_path / "died-once").read_text() == "xx"
    assert [row["model"].rpartition(":")[2] for row in json.loads(said)] == ["dies_once", "mlp"]


def test_ctrl_c_stops_the_work_on_the_cluster_and_it_can_be_gone_on_with(
    machines: Cluster, model: str, tmp_path: Path
) -> None:
    e = experiment("digits", "sgd", 0, model=model.format("waits"), tasks=2, steps=60)
    path = e.path(tmp_path / "out")
    with start(tmp_path, machines, model.format("waits"), methods="sgd ewc") as shell:
        until(lambda: path.with_suffix(".step").exists() or None, shell)
        time.sleep(2)  # where the other run would begin if the cluster's one CPU were not taken
        named = at_work()
        shell.send_signal(signal.SIGINT)
        warned = shell.communicate(timeout=60)[1]
    assert shell.returncode == 130, warned
    assert "the same command goes on" in warned
    assert "Traceback" not in warned
    assert named == [f"ray::digits {e.name} seed 0"]
    with _locked(path.with_suffix(".lock")):  # nobody is at work on it any more
        assert path.with_suffix(".step").exists()
        assert not path.exists()
    (tmp_path / "go-on").touch()
    for out in ("out", "whole"):
        run(e, tmp_path / out)
    assert same(path) == same(e.path(tmp_path / "whole"))


def test_what_no_machine_has_room_for_is_refused(machines: Cluster, tmp_path: Path) -> None:
    shown = invoke(tmp_path, "--ray", machines.address, "--device", "cuda", "--gpus", "0.5")
    assert shown.exit_code == 2
    needs = "a run takes 1 CPUs (threads) and 0.5 GPUs of one machine, and those of the cluster have 1 and 0"
    assert needs in shown.stderr


# ---- without a cluster ------------------------------------------------------------------------------------------


def invoke(folder: Path, *options: str) -> Result:
    (folder / "suite.toml").write_text("[[runs]]\nbenchmark = 'digits'\nmethods = ['sgd']\nseeds = 2\n")
    return CliRunner().invoke(
        rgo.cli.app, ["suite", str(folder / "suite.toml"), "--out", str(folder / "out"), *options]
    )


def test_a_cluster_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER", 2)
    shown = invoke(tmp_path, "--ray", "127.0.0.1:1")
    assert shown.exit_code == 2
    assert "no Ray cluster answers at 127.0.0.1:1. Give --ray HOST:PORT as `ray start --head` printed" in shown.stderr


def test_without_ray_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rgo.cluster")
    monkeypatch.setitem(sys.modules, "ray", None)
    shown = invoke(tmp_path, "--ray", "auto")
    assert shown.exit_code == 2
    assert "--ray needs Ray, here and on all machines: pip install 'rgo[ray]'" in shown.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ray", "auto", "--jobs", "2"), "--jobs 2 is for this machine alone"),
        (("--ray", "auto", "--device", "cuda:1"), "--device cuda:1: with --ray give cpu or cuda"),
        (("--ray", "auto", "--gpus", "0.5"), "--gpus 0.5 is the share of a GPU that a run takes with --ray"),
        (("--device", "cuda", "--gpus", "0.5"), "--gpus 0.5 is the share of a GPU that a run takes with --ray"),
        (("--ray", "auto", "--device", "cuda", "--gpus", "2"), "--gpus"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    shown = invoke(tmp_path, *options)
    assert shown.exit_code == 2
    assert message in shown.stderr


def test_a_machine_that_does_not_share_the_folder_does_not_begin(tmp_path: Path) -> None:
    outcome = cluster._on_a_machine(0, experiment("digits", "sgd", 0), tmp_path / "elsewhere" / "token", None, {})
    assert outcome == (
        f"{socket.gethostname()} does not see {tmp_path / 'elsewhere'} as it is here: "
        "give --out a folder that all machines share"
    )


def test_results_that_do_not_appear_are_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PATIENCE", 0)
    seen, unseen = (experiment("digits", "sgd", seed) for seed in (0, 1))
    seen.path(tmp_path).parent.mkdir(parents=True)
    seen.path(tmp_path).touch()
    assert cluster._unseen([seen, unseen], tmp_path) == [unseen]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (exceptions.WorkerCrashedError(), "its process died, 4 times"),
        (
            exceptions.RayTaskError("f", "", ModuleNotFoundError("No module named 'rgo'")),
            "ModuleNotFoundError: No module",
        ),
        (
            exceptions.OutOfMemoryError("Task was killed.\nMemory on the node: ..."),
            "OutOfMemoryError: Task was killed.",
        ),
    ],
)
def test_what_ray_reports_of_a_run_is_one_line(error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(ref: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)
    said = cluster._outcome(None)
    assert said.startswith(outcome)
    assert "\n" not in said


def test_the_lock_of_a_process_that_is_about_to_die_is_waited_for(tmp_path: Path) -> None:
    e = experiment("digits", "sgd", 0, tasks=1, steps=5)
    said = []
    path = e.path(tmp_path)
    path.parent.mkdir(parents=True)
    with contextlib.ExitStack() as dying:
        dying.enter_context(_locked(path.with_suffix(".lock")))
        busy = one_run(e, tmp_path, {}, lambda steps, line: said.append(line))
        assert busy == f"BusyError: another process is at work on {path}"

        def report(steps: int, line: str) -> None:
            said.append(line)
            if line.startswith("waits"):
                dying.close()

        assert one_run(e, tmp_path, {}, report, patience=60) == results.read(path)["accuracy"]
    assert said[:3] == ["starts", "starts", "waits for the process that holds its lock"]


# ---- many processes on one card ---------------------------------------------------------------------------------


def test_mps_runs_where_its_process_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    file = tmp_path / "nvidia-cuda-mps-control.pid"
    assert not suite.mps_runs()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for content, runs in ((str(os.getpid()), True), ("1", True), (f"{ended.pid}\n", False), ("", False)):
        file.write_text(content)
        assert suite.mps_runs() is runs


@pytest.mark.parametrize(
    ("jobs", "device", "mps", "hint"),
    [
        (2, "cuda", False, True),
        (2, "cuda:1", False, True),
        (2, "cuda", True, False),
        (1, "cuda", False, False),
        (2, "cpu", False, False),
    ],
)
def test_jobs_that_would_take_turns_on_a_card_are_told_once_how_to_share_it(
    jobs: int, device: str, mps: bool, hint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if mps:
        (tmp_path / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    begun = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(suite, "_on_this_machine", lambda todo, out, jobs, options: begun.append(jobs) or 0)
    shown = invoke(tmp_path, "--jobs", str(jobs), "--device", device)
    assert begun == [jobs]
    assert shown.stderr.count("nvidia-cuda-mps-control -d") == hint
    assert (f"no MPS daemon is found in {tmp_path}" in shown.stderr) == hint
