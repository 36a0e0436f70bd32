"""The command line: what it does, what it says when it cannot, and its exit codes (0, 1, 2, 130)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import rgo.cli
from rgo import cli_data, cli_doctor, data, results
from rgo.benchmarks import BENCHMARKS
from rgo.experiment import Experiment, experiment
from rgo.methods import METHODS
from rgo.models import MODELS
from rgo.runner import run

doctor_app = typer.Typer(pretty_exceptions_enable=False)
doctor_app.command()(cli_doctor.doctor)

ONE_RUN = "[[runs]]\nbenchmark = 'digits'\nmethods = ['sgd']\n"
MODEL = "import os\n\n\ndef dies(seed):\n    os._exit(3)\n"


def invoke(*arguments: object, app: typer.Typer = rgo.cli.app) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def same(record: dict[str, Any]) -> dict[str, Any]:
    """All of a record that the clock and the machine have no part in."""
    return {k: v for k, v in record.items() if k not in ("timing", "environment", "commit")}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """The runs that a command asks for; none is done."""
    experiments: list[Experiment] = []

    def run_all(wanted: list[Experiment], out: Path, **options: object) -> int:
        experiments.extend(wanted)
        return 0

    monkeypatch.setattr(rgo.cli, "run_all", run_all)
    return experiments


# ---- help -------------------------------------------------------------------------------------------------------


def commands(command: Any, *name: str) -> Iterator[tuple[str, ...]]:
    if hasattr(command, "commands"):
        for each, inner in command.commands.items():
            yield from commands(inner, *name, each)
    else:
        yield name


@pytest.mark.parametrize(
    ("app", "before", "name"),
    [
        pytest.param(app, before, name, id=" ".join(("rgo", *before, *name)))
        for app, before in ((rgo.cli.app, ()), (cli_data.app, ("data",)), (doctor_app, ("doctor",)))
        for name in commands(typer.main.get_command(app))
    ],
)
def test_every_command_explains_itself_with_an_example(
    app: typer.Typer, before: tuple[str, ...], name: tuple[str, ...]
) -> None:
    shown = invoke(*name, "--help", app=app)
    assert shown.exit_code == 0
    assert f"Example: {' '.join(('rgo', *before, *name))}" in shown.output


@pytest.mark.parametrize(
    ("begun", "offered"),
    [
        ("rgo su", ["suite"]),
        ("rgo data ve", ["verify"]),
        ("rgo run perm", ["permuted-mnist"]),
        ("rgo run digits -m rg", ["rgo", "rgo-2"]),
        ("rgo run digits --method sgd --model le", ["lenet5"]),
        ("rgo run digits --dtype f", ["float32", "float64"]),
        ("rgo run digits --checkp", ["--checkpoint-every"]),
        ("rgo demo --no", ["--no-open"]),
    ],
)
def test_the_shell_completes_commands_options_and_names(begun: str, offered: list[str]) -> None:
    asked = {"_RGO_COMPLETE": "complete_bash", "COMP_WORDS": begun, "COMP_CWORD": str(begun.count(" "))}
    shown = CliRunner().invoke(rgo.cli.app, env=asked, prog_name="rgo")
    assert shown.stdout.split() == offered


def test_the_shell_is_told_how_to_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # none may have started the tests
    shown = CliRunner().invoke(rgo.cli.app, ["--show-completion"], prog_name="rgo")
    assert shown.exit_code == 0
    assert "_RGO_COMPLETE=complete_bash" in shown.stdout


def test_an_unknown_command_or_option_is_told_the_nearest() -> None:
    for arguments, nearest in (
        (("siute",), "suite"),
        (("data", "verfy"), "verify"),
        (("demo", "--step", "3"), "--steps"),
    ):
        shown = invoke(*arguments)
        assert shown.exit_code == 2
        assert nearest in shown.stderr


def test_exit_codes_are_in_the_help_and_in_the_documents() -> None:
    help_, text = invoke("--help").stdout, (Path(__file__).parents[1] / "docs/protocol.md").read_text()
    for code in (0, 1, 2, 130):
        assert f"| {code} | " in text
        assert f"{code} " in " ".join(help_.partition("Exit codes:")[2].split())


# ---- list, run --------------------------------------------------------------------------------------------------


def test_list_names_everything() -> None:
    shown = invoke("list", "--json")
    assert shown.exit_code == 0
    names = {"methods": list(METHODS), "benchmarks": list(BENCHMARKS), "models": list(MODELS)}
    assert json.loads(shown.stdout) == names
    plain = invoke("list").stdout
    assert all(name in plain for each in names.values() for name in each)


def test_runs_side_by_side_write_their_files_and_print_their_rows(tmp_path: Path) -> None:
    # A method that is named twice is done once.
    what = ("run", "digits", "--method", "sgd", "--method", "sgd", "--seeds", 2, "--jobs", 2)
    shown = invoke(*what, "--tasks", 2, "--steps", 20, "--set", "hidden=[32]", "--out", tmp_path, "--json")
    assert shown.exit_code == 0, shown.output
    assert "2 runs, 0 of them done before" in shown.stderr
    changed = {"tasks": 2, "steps": 20, "hidden": [32]}
    folder = tmp_path / "digits" / "sgd+hidden=[32]+steps=20+tasks=2"
    assert sorted(p.name for p in folder.iterdir()) == ["seed-0.json", "seed-1.json"]
    rows = json.loads(shown.stdout)
    assert [row["seed"] for row in rows] == [0, 1]
    for row in rows:
        record = json.loads((folder / f"seed-{row['seed']}.json").read_text())
        assert list(record) == [
            *("format", "benchmark", "model", "method", "seed", "settings", "changed", "accuracy", "train_accuracy"),
            *("loss", "timing", "memory", "parameters", "capacity", "captured", "environment", "commit"),
        ]
        assert row["changed"] == record["changed"] == changed
        assert record["settings"]["model_options"]["hidden"] == [32]
        assert row["acc"] == pytest.approx(sum(record["accuracy"][-1]) / 2)
        assert same(record) == same(run(experiment("digits", "sgd", row["seed"], **changed), tmp_path / "here"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.03", 0.03),
        ("1e-3", 1e-3),
        ("7", 7),
        ("true", True),
        ("[32, 16]", [32, 16]),
        ("full", "full"),
        ("'7'", "7"),
        ("False", False),
        ("TRUE", True),
        ("None", None),
        ("0.1 # hi", "0.1 # hi"),
        ("0.1\nx=3", "0.1\nx=3"),
        ("[1, # hi\n 2]", [1, 2]),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_a_setting_is_what_it_looks_like(text: str, value: Any) -> None:
    assert rgo.cli._settings([f"name={text}"]) == {"name": value}


def test_settings_reach_the_runs(asked: list[Experiment]) -> None:
    changes = ("--set", "lr=0.03", "--set", "hidden=[32, 16]", "--set", "encode=true", "--set", "curvature=softmax")
    assert invoke("run", "digits", "-m", "rgo", "--seed", 4, *changes).exit_code == 0
    expected = experiment("digits", "rgo", 4, lr=0.03, hidden=[32, 16], encode=True, curvature="softmax")
    assert asked == [expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digit", "-m", "sgd"), "unknown benchmark 'digit'; did you mean 'digits'?"),
        (("digits", "-m", "ewcc"), "unknown method 'ewcc'; did you mean 'ewc'?"),
        (("digits", "-m", "ewc", "--set", "strenght=3"), "no setting 'strenght'; did you mean 'strength'?"),
        (("digits", "-m", "ewc", "--set", "strength"), "--set strength: give name=value, for example --set lr=0.03"),
        (("digits", "-m", "ewc", "--set", "seed=3"), "'seed' is what a run is named by, not a setting of it"),
        (("digits", "-m", "rgo", "--set", "project=none"), "project=None: give true or false"),
        (("digits", "-m", "rgo", "--set", "encode=no"), "encode='no': give true or false or 'after-first'"),
        (("digits", "-m", "rgo", "--set", "lr=0.1 # hi"), "lr='0.1 # hi': give a number"),
        (("digits", "-m", "rgo", "--set", "day=1979-05-27"), "day=1979-05-27: a setting is text, a finite number"),
        (("digits", "-m", "rgo", "--set", "model=5"), "model=5: give text"),
        (("digits", "-m", "rgo", "--set", "model=none"), "model=None: give text"),
        (("digits", "-m", "rgo", "--set", "lr=1", "--set", "lr=2"), "--set lr=2: lr is set twice"),
        (("digits", "-m", "rgo", "--tasks", "3", "--set", "tasks=2"), "'tasks' is given twice, in --set as well"),
        (("digits", "-m", "rgo", "--seed", "3", "--seeds", "2"), "--seed 3 is one seed and --seeds 2 are several"),
        (("digits", "-m", "rgo", "--seed", str(2**63)), "give a whole number from 0 to 2**63 - 1"),
        (("digits", "-m", "rgo", "--device", "foo"), "--device foo: give cpu, cuda or cuda:N"),
        (("digits", "-m", "rgo", "--device", "meta"), "--device meta: give cpu, cuda or cuda:N"),
        (("digits", "-m", "rgo", "--device", "cuda:x"), "--device cuda:x: give cpu, cuda or cuda:N"),
        (("digits", "-m", "rgo", "--device", "cuda:99"), "--device cuda:99: PyTorch finds"),
        (("digits",), "--method"),
        (("digits", "-m", "sgd", "--steps", "many"), "--steps"),
    ],
)
def test_a_wrong_command_is_told_what_is_right(
    arguments: tuple[str, ...], message: str, asked: list[Experiment]
) -> None:
    shown = invoke("run", *arguments)
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert not asked


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    path = experiment("digits", "sgd", 0).path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    shown = invoke("run", "digits", "-m", "sgd", "--out", tmp_path)
    assert shown.exit_code == 2
    assert f"{path} is no result of a run" in shown.stderr


# ---- suite ------------------------------------------------------------------------------------------------------


def test_a_suite_is_gone_on_with_and_a_worker_that_dies_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    file, out = tmp_path / "suite.toml", tmp_path / "out"
    runs = [
        'benchmark = "digits"\nmethods = ["sgd"]\nmodel = "of_mine:dies"\ntasks = 2\nsteps = 20',
        # Long enough to be at work when the other process dies: it must not be lost with it.
        'benchmark = "digits"\nmethods = ["rgo"]\ntasks = 2\nsteps = 300',
        'benchmark = "digits"\nmethods = ["ewc"]\nseeds = [5]\ntasks = 2\nsteps = 20\nset = { strength = 3 }',
    ]
    file.write_text("".join(f"[[runs]]\n{each}\n" for each in runs))
    shown = invoke("suite", file, "--out", out, "--jobs", 2, "--json")
    assert shown.exit_code == 1
    assert "digits sgd+model=of_mine:dies+steps=20+tasks=2 seed 0: failed: its process died" in shown.stderr
    assert shown.stderr.count("failed") == 1
    assert [(row["method"], row["seed"]) for row in json.loads(shown.stdout)] == [("rgo", 0), ("ewc", 5)]

    file.write_text("".join(f"[[runs]]\n{each}\n" for each in runs[1:]))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.json")}
    assert len(before) == 2
    again = invoke("suite", file, "--out", out)
    assert again.exit_code == 0
    assert "2 runs, 2 of them done before" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.json")} == before
    assert "strength=3" in again.stdout


def test_an_error_in_a_run_is_a_line_and_not_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RGO_DATA", str(tmp_path / "[nothing]"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shown = invoke("run", "split-cifar100", "-m", "sgd", "--out", tmp_path)
    assert shown.exit_code == 1
    assert "split-cifar100 sgd seed 0: failed: DataError: cifar-100-binary: expected train.bin" in shown.stderr
    assert f"into {tmp_path}/[nothing]" in shown.stderr
    assert "Traceback" not in shown.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no [[runs]]: give benchmark, methods and seeds for each"),
        ("runs = 3", "holds no [[runs]]"),
        ("runs = [1]", "holds no [[runs]]"),
        ("[[run]]\nbenchmark = 'digits'", "unknown ['run']; a suite holds [[runs]], and [paper]"),
        ("[[runs]", "suite.toml is no TOML: Expected"),
        (b"\xff", "suite.toml is no TOML: 'utf-8' codec"),
        (ONE_RUN + "seeds = 0", "number 1: seeds = 0 gives no run"),
        (ONE_RUN + "seeds = -2", "number 1: seeds = -2 gives no run"),
        (ONE_RUN + "seeds = []", "number 1: seeds = [] gives no run"),
        (ONE_RUN + "seeds = true", "number 1: seeds = True is of the wrong type"),
        (ONE_RUN + "seeds = [-1]", "number 1: seed=-1: give a whole number"),
        (ONE_RUN + "seeds = ['a']", "number 1: seed='a': give a whole number"),
        (ONE_RUN + "seeds = [1.5]", "number 1: seed=1.5: give a whole number"),
        (ONE_RUN + "seeds = [true]", "number 1: seed=True: give a whole number"),
        (ONE_RUN + "tasks = 2\nset = {tasks = 3}", "number 1: 'tasks' is given twice, in set as well"),
        (ONE_RUN + "set = {model = 5}", "number 1: model=5: give text"),
        (ONE_RUN + "set = {day = 1979-05-27}", "number 1: day=1979-05-27: a setting is text"),
        ("[[runs]]\nbenchmark = 'digits'\nmethods = []", "number 1: methods = [] gives no run"),
        ("[[runs]]\nbenchmark = 'digits'\nmethods = [['sgd']]", "number 1: unknown method ['sgd']"),
        ("[[runs]]\nbenchmark = 'digits'\nmethod = ['sgd']", "number 1: unknown 'method'; did you mean 'methods'?"),
        ("[[runs]]\nmethods = ['sgd']", "number 1: missing benchmark"),
        ("[[runs]]\nbenchmark = 'digits'\nmethods = 'sgd'", "number 1: methods = 'sgd' is of the wrong type"),
        ("[[runs]]\nbenchmark = 'digits'\nmethods = ['sdg']", "number 1: unknown method 'sdg'; did you mean 'sgd'?"),
        ("[[runs]]\nbenchmark = 'digits'\nmethods = ['sgd']\nset = {seed = 1}", "number 1: 'seed' is what a run is"),
    ],
)
def test_a_wrong_suite_is_told_what_is_right(
    content: str | bytes, message: str, tmp_path: Path, asked: list[Experiment]
) -> None:
    file = tmp_path / "suite.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    shown = invoke("suite", file)
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert not asked


def test_a_suite_that_is_not_there(tmp_path: Path) -> None:
    shown = invoke("suite", tmp_path / "none.toml")
    assert shown.exit_code == 2
    assert "none.toml" in shown.stderr


def test_a_suite_takes_the_first_seed_of_every_cell_first(tmp_path: Path, asked: list[Experiment]) -> None:
    file = tmp_path / "suite.toml"
    file.write_text(
        "[[runs]]\nbenchmark = 'digits'\nmethods = ['sgd', 'ewc']\nseeds = 2\n"
        "[[runs]]\nbenchmark = 'digits'\nmethods = ['gpm']\n"
    )
    assert invoke("suite", file).exit_code == 0
    assert [(e.seed, e.method) for e in asked] == [(0, "sgd"), (0, "ewc"), (0, "gpm"), (1, "sgd"), (1, "ewc")]


@pytest.mark.parametrize(("name", "runs"), [("table1", 175), ("table3", 20)])
def test_the_suites_of_the_papers_tables_are_suites(
    name: str, runs: int, tmp_path: Path, asked: list[Experiment]
) -> None:
    assert invoke("suite", Path(__file__).parents[1] / "experiments" / f"{name}.toml").exit_code == 0
    assert len(asked) == runs


# ---- a full disk ------------------------------------------------------------------------------------------------


def fill_and_free(disk: Path) -> None:
    """Runs and a report on a small disk, which is mounted here: in a name space that other processes do not see."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], check=True)
    e = experiment("digits", "rgo", 0, tasks=2, steps=30, hidden=[64])
    path = e.path(disk)
    what = ("run", "digits", "-m", "rgo", "--tasks", 2, "--steps", 30, "--set", "hidden=[64]", "--checkpoint-every", 10)
    shown = invoke(*what, "--out", disk)
    assert shown.exit_code == 1, shown.output
    assert f"{path.with_suffix('.task')} cannot be written: No space left on device. Free some space" in shown.stderr
    assert sorted(file.name for file in path.parent.iterdir()) == ["seed-0.lock", "seed-0.step"]
    with suppress(OSError):
        (disk / "rest").write_bytes(bytes(10**6))
    shown = invoke("report", disk, "--out", disk / "report")
    assert shown.exit_code == 2, shown.output
    assert "index.html cannot be written: No space left on device. Free some space" in shown.stderr
    assert not list((disk / "report").iterdir())
    subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
    steps: list[int] = []
    record = run(e, disk, report=lambda step, line: steps.append(step), report_every=1)
    assert steps[0] == 21
    assert same(record) == same(run(e, disk / "whole"))


def test_on_a_full_disk_commands_say_so_and_go_on_when_there_is_space(tmp_path: Path) -> None:
    """`tests/test_runner.py` has every file and every way it can fail; this is the real thing."""
    alone = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("this system lets nobody mount a file system of their own")
    code = f"import pathlib, test_cli; test_cli.fill_and_free(pathlib.Path({str(tmp_path)!r}))"
    command = [*alone, sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# ---- Ctrl-C -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["as it starts", "in the middle"])
def test_ctrl_c_stops_and_the_same_command_goes_on(moment: str, tmp_path: Path) -> None:
    e = experiment("digits", "sgd", 3, tasks=2, steps=1500)
    arguments = ["run", "digits", "-m", "sgd", "--seed", "3", "--tasks", "2", "--steps", "1500"]
    arguments += ["--checkpoint-every", "100", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "rgo.cli", *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    said = process.stderr.readline()  # "1 runs, ...": from here on Ctrl-C is understood
    path = e.path(tmp_path / "out")
    if moment == "in the middle":
        deadline = time.monotonic() + 60
        while not path.with_suffix(".step").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    else:
        time.sleep(0.5)  # the worker is importing torch
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the worker as well
    said += process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "the same command goes on" in said
    assert "Traceback" not in said
    assert not path.exists()
    assert path.with_suffix(".step").exists() == (moment == "in the middle")
    if moment == "in the middle":
        assert invoke(*arguments).exit_code == 0
        assert same(results.read(path)) == same(run(e, tmp_path / "whole"))


# ---- data -------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data set but MNIST is found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("RGO_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_data_list_says_where_each_is_or_what_to_do(nothing: Path) -> None:
    rows = {row["name"]: row for row in json.loads(invoke("list", "--json", app=cli_data.app).stdout)}
    assert list(rows) == list(data.sources())
    assert (Path(rows["mnist"]["found"]) / "train-images-idx3-ubyte.gz").exists()
    assert (rows["cifar100"]["found"], rows["cifar100"]["todo"]) == (None, "rgo data fetch cifar100")
    assert rows["miniimagenet"]["todo"].endswith(str(nothing / "miniimagenet"))
    (nothing / "miniimagenet").mkdir(parents=True)
    rows = {row["name"]: row for row in json.loads(invoke("list", "--json", app=cli_data.app).stdout)}
    assert (rows["miniimagenet"]["found"], rows["miniimagenet"]["todo"]) == (str(nothing / "miniimagenet"), "")
    plain = invoke("list", app=cli_data.app).stdout
    assert "cifar100: missing\n" in plain
    assert "169 MB; none stated" in plain
    assert f"Searched: {nothing} then {nothing.parent / 'caches' / 'rgo'}" in plain


def test_data_verify_names_what_is_missing_or_damaged(nothing: Path) -> None:
    whole = invoke("verify", "mnist", app=cli_data.app)
    assert (whole.exit_code, whole.stdout) == (0, "mnist: 4 ok\n")
    archive = nothing / "cifar-100-binary.tar.gz"
    missing = invoke("verify", "mnist", "cifar100", app=cli_data.app)
    assert missing.exit_code == 1
    assert f"cifar100: 1 missing\n  missing: {archive}\n" in missing.stdout
    nothing.mkdir()
    archive.write_bytes(b"another file")
    damaged = invoke("verify", "cifar100", "--json", app=cli_data.app)
    assert damaged.exit_code == 1
    assert json.loads(damaged.stdout) == {"cifar100": {str(archive): "damaged"}}
    elsewhere = invoke("verify", "mnist", "--folder", nothing, app=cli_data.app)
    assert elsewhere.exit_code == 1
    assert "mnist: 4 missing" in elsewhere.stdout


def test_data_fetch_downloads_keeps_and_says_where(nothing: Path, tmp_path: Path) -> None:
    packaged = Path(cli_data.found()[0]["found"])
    folder = tmp_path / "elsewhere"
    (folder / "mnist").mkdir(parents=True)
    for file in packaged.glob("*.gz"):
        (folder / "mnist" / file.name).symlink_to(file)
    kept = invoke("fetch", "mnist", "--folder", folder, "--mirror", "http://127.0.0.1:9", app=cli_data.app)
    assert kept.exit_code == 0, kept.output
    assert f"ok: {folder / 'mnist' / 'train-images-idx3-ubyte.gz'}\n" in kept.stdout
    assert f"export RGO_DATA={folder}\n" in kept.stdout
    paths = json.loads(invoke("fetch", "mnist", "--folder", folder, "--json", app=cli_data.app).stdout)
    assert [Path(path).name for path in paths] == [Path(file.name).name for file in data.sources()["mnist"].files]


def test_data_fetch_passes_on_what_it_is_given(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(data, "fetch", lambda *arguments, **named: given.append((arguments, named)) or [Path("/x")])
    shown = invoke("fetch", "cifar100", "--mirror", "http://here", app=cli_data.app)
    assert (shown.exit_code, shown.stdout) == (0, "ok: /x\n")
    assert given == [(("cifar100", None), {"mirror": "http://here"})]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("verify", "minst"), 2, "'minst' is not a data set: give one of 'mnist', 'cifar100', 'miniimagenet'"),
        (("fetch", "minst"), 2, "; did you mean 'mnist'?"),
        (("fetch", "miniimagenet"), 1, "ask for access to ImageNet at https://image-net.org"),
        (("verify",), 2, "NAME"),
    ],
)
def test_data_errors_are_a_line(nothing: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    shown = invoke(*arguments, app=cli_data.app)
    assert shown.exit_code == code
    assert message in shown.stderr
    assert "Traceback" not in shown.output


def test_data_fetch_without_pooch_says_what_to_install(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    shown = invoke("fetch", "cifar100", app=cli_data.app)
    assert shown.exit_code == 2
    assert "pip install 'rgo[lab]'" in shown.stderr


# ---- doctor -----------------------------------------------------------------------------------------------------


def look(*arguments: object) -> tuple[int, dict[str, dict[str, str]]]:
    shown = invoke("--json", *arguments, app=doctor_app)
    return shown.exit_code, {each["about"]: each for each in json.loads(shown.stdout)}


def test_doctor_finds_what_is_there(nothing: Path, tmp_path: Path) -> None:
    code, seen = look("--out", tmp_path / "results" / "deep")
    assert code == 0
    assert seen["torch"]["found"] == torch.__version__
    assert seen["results"]["state"] == seen["mnist"]["state"] == seen["rich"]["state"] == "ok"
    assert seen["cifar100"] == {
        "about": "cifar100",
        "state": "note",
        "found": "missing",
        "todo": "rgo data fetch cifar100",
    }
    assert not (tmp_path / "results").exists()  # it only looks
    assert "processor" in seen
    assert "memory" in seen
    plain = invoke("--out", tmp_path, app=doctor_app)
    assert plain.exit_code == 0
    assert "note   cifar100: missing\n       → rgo data fetch cifar100\n" in plain.stdout


def test_doctor_says_what_is_broken_and_goes_on(nothing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    code, seen = look("--out", tmp_path / "file" / "results")
    assert code == 1
    assert seen["results"]["state"] == "broken"
    assert "--out" in seen["results"]["todo"]
    monkeypatch.setattr(cli_doctor, "memory_available", lambda: 1 / 0)
    monkeypatch.setattr(data, "verify", lambda name: {"/some/file.gz": "damaged"})
    code, seen = look("--out", tmp_path)
    assert code == 1
    assert seen["memory"]["found"] == "ZeroDivisionError: division by zero"
    assert seen["mnist"]["state"] == "broken"
    assert "/some/file.gz" in seen["mnist"]["found"]
    assert seen["results"]["state"] == "ok"


def test_doctor_says_what_an_extra_is_needed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli_doctor.EXTRAS, "matplotlib", ("no_such_module", "figures"))
    code, seen = look()
    assert code == 0
    assert seen["matplotlib"]["state"] == "note"
    assert seen["matplotlib"]["found"] == "missing: needed for figures"
    assert seen["matplotlib"]["todo"] == "pip install 'rgo[lab]' (or pip install matplotlib)"


@pytest.mark.parametrize("mps", [False, True])
def test_doctor_looks_at_gpus_and_at_mps(mps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in look()[1]["CUDA"]["found"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (2**30, 2**31))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None: zeros(*sizes))
    monkeypatch.setattr(cli_doctor, "mps_runs", lambda: mps)
    code, seen = look()
    assert code == 0
    assert seen["cuda:0"]["found"] == "GPU, 1 of 2 GiB free"
    assert seen["MPS"]["state"] == ("ok" if mps else "note")
    assert mps or seen["MPS"]["todo"].endswith("nvidia-cuda-mps-control -d")


def test_memory_is_what_the_machine_and_the_container_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert cli_doctor.memory_available(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:       9000 kB\nMemAvailable:   4000 kB\n")
    assert cli_doctor.memory_available(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert cli_doctor.memory_available(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert cli_doctor.memory_available(meminfo, tmp_path) == 2000
