"""The scripts people run and copy from, on a short stream."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rgo.benchmarks import Task

ROOT = Path(__file__).parent.parent


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


core = load(ROOT / "experiments" / "core.py")
demo = load(ROOT / "examples" / "demo.py")


@pytest.fixture
def short():
    return core.PROTOCOL | {"tasks": 2, "steps": 150, "samples": 2000}


def run(method, settings, out=Path("nowhere"), seed=0):
    return core.Run("permuted-mnist", method, seed, settings, out, commit=None)


def quiet(steps, line):
    pass


@pytest.mark.parametrize("method", core.METHODS)
def test_a_run_records_a_full_accuracy_matrix_and_how_it_was_made(method, short):
    record = json.loads(json.dumps(run(method, short).record(quiet)))
    assert [len(row) for row in record["accuracy"]] == [1, 2]
    assert all(60 < row[-1] < 100 for row in record["accuracy"])  # each task is learned
    assert record["train_accuracy"]["diagonal"][1] == record["train_accuracy"]["final"][1]
    assert [len(losses) for losses in record["loss"]] == [2, 2]  # 150 steps: means of 100 and of 50
    assert record["settings"]["lr"] == 0.1
    assert record["changed"] == {"tasks": 2, "steps": 150, "samples": 2000}
    assert record["parameters"] == 269_322
    assert record["environment"]["torch"] == torch.__version__
    assert (record["memory"] == 0) == (method in ("fel", "sgd"))  # FEL's permutations come from the task's id


def test_a_run_is_repeated_digit_for_digit(short):
    first, second = (run("rgo", short).record(quiet) for _ in range(2))
    for key in "accuracy", "train_accuracy", "loss", "memory":
        assert first[key] == second[key]


def test_separate_models_do_not_forget_and_start_as_sgd_does(short):
    sgd, stl = (run(method, short).record(quiet)["accuracy"] for method in ("sgd", "stl"))
    assert stl[0] == sgd[0]
    assert stl[1][0] == stl[0][0]
    assert stl[1][1] != sgd[1][1]


def test_a_file_is_skipped_when_done_and_refused_when_of_another_experiment(short, tmp_path):
    done = run("sgd", short, tmp_path)
    assert not done.is_done()
    core.write(done.path, {"settings": short, "accuracy": [[90.0], [80.0, 92.0]]})
    assert done.is_done()
    assert [path.name for path in done.path.parent.iterdir()] == ["seed-0.json"]  # nothing temporary is left
    assert core.summary([done]) == "86.00 / -10.00"
    assert not run("sgd", short, tmp_path, seed=1).is_done()
    with pytest.raises(SystemExit, match=r"other settings \(\{'tasks': 2\}\): give another --out"):
        run("sgd", short | {"tasks": 3}, tmp_path).is_done()


def test_renaming_labels_is_gathering_logits():
    generator = torch.Generator().manual_seed(0)
    logits, y = torch.randn(50, 10, generator=generator), torch.randint(10, (50,), generator=generator)
    renamed = core.permute_logits(Task(3, (logits, y), (logits, y)))
    p = core.rgo.permutation(3, 10)
    for _, label in renamed.train, renamed.test:
        assert torch.allclose(F.cross_entropy(logits, label), F.cross_entropy(logits[:, p], y))
        assert torch.equal(logits.argmax(1) == label, logits[:, p].argmax(1) == y)


def test_permuted_logits_change_a_run(short):
    plain, permuted = (run("fel", short | {"permute_logits": on}) for on in (False, True))
    assert permuted.path.parent.name == "fel+permute-logits"
    assert permuted.changed["permute_logits"] is True
    assert permuted.record(quiet)["accuracy"] != plain.record(quiet)["accuracy"]


def test_the_demo_ends_with_a_table_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "demo.png"
    assert demo.main(["--tasks", "2", "--steps", "20", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(method in printed for method in demo.METHODS)
    assert "demo.png" in printed.replace("\n", "")


def test_the_demo_stopped_by_ctrl_c_says_so(tmp_path, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "learn", interrupted)
    assert demo.main(["--out", str(tmp_path / "demo.png")]) == 130
    assert "Stopped before the end; nothing was written." in capsys.readouterr().out
    assert not (tmp_path / "demo.png").exists()
