"""The examples run, the pages about extending run, and the pages about methods and protocol say what the code does."""

import inspect
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rgo import layers, results
from rgo.benchmarks import BENCHMARKS, PROTOCOLS, rotation_angles, split_cifar100
from rgo.benchmarks.split import _order
from rgo.experiment import RUN, experiment
from rgo.methods import METHODS
from rgo.rgo import RGO
from rgo.runner import run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = sorted((ROOT / "examples").glob("own_*.py"))
EXTENDING = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)


def lines_of_code(source: str) -> int:
    source = re.sub(r'^"""[\s\S]*?"""', "", source)
    return sum(1 for line in source.splitlines() if line.strip() and not line.strip().startswith("#"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_it_is(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not list(tmp_path.iterdir())  # nothing is left behind


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert lines_of_code(path.read_text()) < 40


def test_examples_show_that_forgetting_goes(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/own_model.py"), run_name="__main__")
    plain, protected = (float(line.split()[-2]) for line in capsys.readouterr().out.splitlines())
    assert protected > plain


@pytest.fixture
def own_names() -> Any:
    """What a script adds to the laboratory goes again."""
    kept = [(d, dict(d)) for d in (METHODS, BENCHMARKS, PROTOCOLS, layers._TYPES)]  # type: ignore[arg-type]
    yield
    for d, before in kept:
        d.clear()
        d.update(before)


def test_the_code_about_extending_runs_as_it_is_and_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_names: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert (DOCS / "extending.md").read_text().count("```python") == len(EXTENDING) == 5
    for name, source in EXTENDING:
        (tmp_path / name).write_text(source)
    for name, source in EXTENDING:
        assert lines_of_code(source) < 40, name
        runpy.run_path(name, run_name="__main__")
    sys.modules.pop("my_model")
    found = {str(p.relative_to("results").parent) for p in Path("results").rglob("seed-0.json")}
    assert found == {
        "digits/averaged+steps=50+tasks=3",
        "digits/rgo+model=my_model:mixer+steps=50+width=24",
        "turned-points/rgo+noise=0.5",
        "turned-points/sgd+noise=0.5",
    }


def table(page: str, name: str) -> list[str]:
    found = re.search(rf"<!-- table:{name} -->\n(.*?)<!-- /table:{name} -->", (DOCS / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def section(method: str) -> str:
    found = re.search(rf"^## {re.escape(method)}\n(.*?)(?=^## |\Z)", (DOCS / "methods.md").read_text(), re.S | re.M)
    assert found is not None, f"docs/methods.md has no section {method}"
    return found[1]


def options_of(method: str) -> dict[str, str]:
    """Every option of a method with its default, as the code has them."""
    kind, names = METHODS[method].kind, METHODS[method].options
    known = {**inspect.signature(RGO).parameters, **inspect.signature(kind).parameters}
    if method == "rll":
        names = names - {"project"}  # it never projects
    if METHODS[method].fixed:
        return {}  # another name of a method whose section has them
    return {name: repr(known[name].default) for name in names}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_section_with_all_its_options(method: str) -> None:
    text = section(method)
    assert dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", text, re.M)) == options_of(method)
    for name, value in METHODS[method].fixed.items():
        assert f"`{name}={value}`" in text


def test_no_section_is_about_a_method_that_does_not_exist() -> None:
    headings = re.findall(r"^## (.*)$", (DOCS / "methods.md").read_text(), re.M)
    assert headings == ["What a name sets", "Checked against other implementations", *METHODS]


def test_the_table_of_what_names_set_is_that_of_the_code() -> None:
    def settings(values: dict[str, Any]) -> str:
        return ", ".join(f"`{name}={json.dumps(value)}`" for name, value in values.items())

    rows = ["| method | where | sets |", "|---|---|---|"]
    for method, recipe in METHODS.items():
        if recipe.fixed:
            rows.append(f"| `{method}` | everywhere | {settings(recipe.fixed)} |")
        for where, values in [*recipe.benchmarks.items(), *recipe.models.items()]:
            rows.append(f"| `{method}` | `{where}` | {settings(values)} |")
    assert table("methods.md", "recipes") == rows


def test_the_tables_of_the_protocol_are_those_of_the_code() -> None:
    names = list(BENCHMARKS)
    tasks = [inspect.signature(BENCHMARKS[name]).parameters["tasks"].default for name in names]
    rows = {"tasks": tasks}
    keys = {"steps of a task": "steps", "batch": "batch_size", "learning rate": "lr"}
    rows |= {row: [PROTOCOLS[name][key] for name in names] for row, key in keys.items()}
    rows["model"] = [f"`{PROTOCOLS[name]['model']}`" for name in names]
    head = ["| | " + " | ".join(f"`{name}`" for name in names) + " |", "|---|" + "---|" * len(names)]
    body = ["| " + " | ".join([row, *map(str, values)]) + " |" for row, values in rows.items()]
    assert table("protocol.md", "benchmarks") == head + body

    rows_of_classes = ["| seed | task 1 | task 2 | task 3 |", "|---|---|---|---|"]
    for seed in range(5):
        order = _order("seed", seed, 15)
        cells = [", ".join(map(str, sorted(order[i : i + 5]))) for i in (0, 5, 10)]
        rows_of_classes.append(f"| {seed} | {' | '.join(cells)} |")
    assert table("protocol.md", "classes") == rows_of_classes

    angles = ", ".join(f"{angle:.2f}" for angle in rotation_angles())
    assert angles in " ".join((DOCS / "protocol.md").read_text().split())
    assert len(split_cifar100()) == 20


def test_the_protocol_explains_every_key_of_a_record_and_every_metric(tmp_path: Path) -> None:
    text = (DOCS / "protocol.md").read_text()
    record = run(experiment("digits", "sgd", 0, tasks=2, steps=2), tmp_path)
    rows = " ".join(re.findall(r"^\|(.*?)\|", text.split("## A record")[1], re.M))
    assert set(re.findall(r"`(\w+)`", rows)) == set(record)
    for name in (*RUN, *record["timing"], *record["train_accuracy"]):
        assert f"`{name}`" in text
    metrics = {k for k in results.table([record])[0] if k not in record and not k.startswith("seconds_")}
    assert set(re.findall(r"^\| `(\w+)` \|", text.split("## Metrics")[1].split("## A record")[0], re.M)) == metrics
