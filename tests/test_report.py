"""The report: its numbers, that it is whole in one file, and that the page works in a browser."""

import errno
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest

from rgo.report import collect, read_published, report
from rgo.results import FORMAT, read, write

PAPER = """
[[runs]]
benchmark = "permuted-mnist"
methods = ["rgo", "sgd", "ewc"]
seeds = 3

[[runs]]
benchmark = "permuted-mnist"
methods = ["rgo"]
seeds = 9
steps = 50

[paper.permuted-mnist]
rgo = { acc = 90.0, acc_std = 0.3, bwt = -1.0, bwt_std = 0.1 }
ewc = { acc = 67.79, acc_std = 1.6, bwt = -24.38 }
"""


def record(folder, method, seed, last, changed=None, benchmark="permuted-mnist", **more):
    """A run of two tasks that learns each to 95 and ends at `last`."""
    changed = changed or {}
    held = {
        "format": FORMAT,
        "benchmark": benchmark,
        "model": "mlp",
        "method": method,
        "seed": seed,
        "settings": {"model": "mlp", "tasks": 2, "steps": 1000, "batch_size": 10, "lr": 0.1, "threads": 1} | changed,
        "changed": changed,
        "accuracy": [[95.0], [2 * last - 95.0, 95.0]],
        "train_accuracy": {"diagonal": [97.0, 97.0], "final": [last, 97.0]},
        "loss": [[0.5], [0.4]],
        "timing": {"train": [1.0, 2.0], "end_task": [0.5, 0.5], "evaluate": [0.1, 0.2]},
        "memory": 2048,
        "parameters": 1000,
        "capacity": 100,
        "captured": False,
        "environment": {"torch": "2.13", "python": "3.12", "processor": "a CPU", "threads": 1, "device": "cpu"},
        "commit": "0123456789abcdef",
    } | more
    name = method + "".join(f"+{k}={v}" for k, v in changed.items())
    path = folder / benchmark / name / f"seed-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, held)
    return path


@pytest.fixture
def folder(tmp_path):
    """rgo with three seeds, sgd with two of three, stl, and rgo with fewer steps."""
    results = tmp_path / "results"
    for seed, last in enumerate((90.0, 91.0, 92.0)):
        record(results, "rgo", seed, last)
        record(results, "stl", seed, 95.0)
    for seed in (0, 2):
        record(results, "sgd", seed, 60.0 + seed)
    record(results, "rgo", 0, 99.0, {"steps": 50})
    return results


@pytest.fixture
def paper(tmp_path):
    file = tmp_path / "paper.toml"
    file.write_text(PAPER)
    return file


def rows(out, caption):
    """Of a table in Markdown, by method: dicts by column, where of columns with one title the first counts."""
    text = (out / "permuted-mnist.md").read_text().partition(caption + "\n\n")[2].partition("\n\n")[0]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {row[0]: dict(reversed([*zip(head, row)])) for row in body}


def test_the_same_results_give_the_same_bytes_wherever_they_lie(folder, paper, tmp_path):
    copy = tmp_path / "elsewhere" / "copy"
    (folder / "permuted-mnist" / "sgd" / "seed-9.json").write_text("{")
    shutil.copytree(folder, copy)
    report(folder, tmp_path / "a", paper)
    report(copy, tmp_path / "b", paper)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["index.html", "permuted-mnist.md", "permuted-mnist.svg", "permuted-mnist.tex"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_means_the_best_in_bold_and_the_reference_not_ranked(folder, tmp_path):
    report(folder, tmp_path / "out")
    table = rows(tmp_path / "out", "as the protocol says")
    assert table["rgo"]["ACC"] == "**91.00 ± 1.00**"
    assert table["rgo"]["BWT"] == "**-8.00 ± 2.00**"
    assert table["rgo"]["Forgetting"] == "**8.00 ± 2.00**"
    assert table["rgo"]["Learning"] == table["sgd"]["Learning"] == "**95.00 ± 0.00**"
    assert table["stl"]["ACC"] == "95.00 ± 0.00"
    assert table["sgd"]["ACC"] == "61.00 ± 1.41"
    assert "Paper" not in table["rgo"]
    assert "\\textbf{91.00 $\\pm$ 1.00}" in (tmp_path / "out" / "permuted-mnist.tex").read_text()


@pytest.mark.parametrize("nested", [True, False])
def test_the_gap_to_the_paper_in_points_and_sigmas(folder, paper, tmp_path, nested):
    if not nested:
        paper.write_text(PAPER.replace("[paper.", "["))
    report(folder, tmp_path / "out", paper)
    table = rows(tmp_path / "out", "as the protocol says")
    assert table["rgo"]["Paper"] == "90.00 ± 0.30"
    assert table["rgo"]["Gap"] == f"+1.00 ({1 / math.hypot(1.0, 0.3):+.1f} σ)"
    assert table["sgd"]["Gap"] == "–"


def test_one_seed_has_a_gap_but_no_sigmas(tmp_path, paper):
    record(tmp_path / "results", "rgo", 0, 89.5)
    report(tmp_path / "results", tmp_path / "out", paper)
    assert rows(tmp_path / "out", "as the protocol says")["rgo"]["Gap"] == "-0.50"


def test_changed_runs_are_kept_apart_and_set_against_the_protocol(folder, tmp_path, paper):
    report(folder, tmp_path / "out", paper)
    changed = rows(tmp_path / "out", "with changed settings")
    assert list(changed) == ["rgo"]
    assert changed["rgo"]["Changed"] == "steps=50"
    assert (changed["rgo"]["ACC"], changed["rgo"]["To protocol"]) == ("99.00", "+8.00")
    assert "99.00" not in str(rows(tmp_path / "out", "as the protocol says"))


def test_missing_seeds_are_named(folder, tmp_path, paper):
    report(folder, tmp_path / "a")
    report(folder, tmp_path / "b", paper)
    without, asked = (rows(tmp_path / out, "as the protocol says") for out in "ab")
    assert without["sgd"]["Seeds"] == asked["sgd"]["Seeds"] == "2/3 (missing 1)"
    assert without["rgo"]["Seeds"] == "3"
    assert asked["ewc"]["Seeds"] == "0/3 (missing 0–2)"
    assert asked["ewc"]["ACC"] == "–"


def test_cost(folder, tmp_path):
    report(folder, tmp_path / "out")
    cost = rows(tmp_path / "out", "cost")["sgd"]
    assert [cost[k] for k in ("Train, s", "End of task, s", "Evaluate, s")] == ["3.00", "1.00", "0.30"]
    assert (cost["Memory"], cost["Capacity"], cost["Device"]) == ("2.0 KiB", "100 %", "a CPU, 1 thread")


def test_what_cannot_be_used_is_named_on_the_page(folder, tmp_path):
    here = folder / "permuted-mnist"
    (here / "sgd" / "seed-5.json").write_text("{broken")
    (here / "sgd" / "seed-6.json").write_text('{"format": 1}')
    (here / "sgd" / "seed-7.json").write_text(json.dumps({"format": FORMAT, "accuracy": [[1.0]]}))
    record(folder, "sgd", 8, 50.0, accuracy=[[90.0]], train_accuracy={"diagonal": [1.0], "final": [1.0]})
    spoiled = record(folder, "sgd", 9, 50.0)
    spoiled.write_text(spoiled.read_text().replace("[[95.0]", "[[NaN]"))
    (here / "rgo" / "seed-4.task").touch()
    (here / "rgo" / "seed-0.lock").touch()  # of a run that is finished
    shutil.copy(here / "rgo" / "seed-0.json", here / "sgd" / "seed-11.json")
    found = collect(folder)
    assert [name for name, _ in found.unreadable] == [f"permuted-mnist/sgd/seed-{n}.json" for n in range(5, 10)]
    assert "holds 1 of 2 tasks" in found.unreadable[3][1]
    assert found.unfinished == ["permuted-mnist/rgo/seed-4"]
    assert "seed-11.json repeats" in found.notes[0]
    page = report(folder, tmp_path / "out").read_text()
    for name in (*(name for name, _ in found.unreadable), *found.unfinished, "sgd/seed-11.json"):
        assert name in page


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (None, '{"format": 2, "benchmark": "digits"}', "has no 'model'"),
        (None, "[" * 100_000, "recursion"),
        ("changed", [], "'changed' of the wrong type: list"),
        ("environment", [], "'environment' of the wrong type: list"),
        ("seed", "0", "'seed' of the wrong type: str"),
        ("benchmark", "\ud800", "surrogates not allowed"),
        ("accuracy", [], "holds 0 of 2 tasks"),
        ("accuracy", [[1.0], [1.0]], "another 'accuracy'"),
        ("accuracy", [1.0, 2.0], "'accuracy 1' that is no list of numbers"),
        ("train_accuracy", {}, "'train_accuracy diagonal'"),
        ("timing", {"train": ["a"], "end_task": [], "evaluate": []}, "'timing train'"),
    ],
)
def test_a_record_of_the_wrong_shape_is_named_and_the_rest_is_reported(folder, tmp_path, key, value, why):
    path = record(folder, "sgd", 5, 50.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}) if key else value)
    ((name, said),) = collect(folder).unreadable
    assert name == "permuted-mnist/sgd/seed-5.json"
    assert why in said
    assert str(tmp_path) not in said
    with pytest.raises(ValueError, match=r"seed-5\.json is no result of a run .* Delete it and run again"):
        read(path)
    assert name in report(folder, tmp_path / "out").read_text()


def test_benchmarks_and_labels_may_be_any_text(tmp_path):
    names = ["a b", "a-b", "a/b", "", "é" * 300, "a$b_{"]
    for i, name in enumerate(names):
        path = record(tmp_path / "results" / str(i), "rgo", 0, 90.0, {"note": "$x$ ${ \\frac"})
        path.write_text(path.read_text().replace('"permuted-mnist"', json.dumps(name)))
    page = report(tmp_path / "results", tmp_path / "out").read_text()
    heads = {path.read_text().partition("\n")[0] for path in (tmp_path / "out").glob("*.md")}
    assert heads == {f"# {name}" for name in names}
    assert "$x$ ${" in page
    assert (tmp_path / "out" / "a-b.md").read_text().startswith("# a-b\n")


def test_seeds_with_other_settings_under_one_name_are_not_averaged(folder, tmp_path):
    record(folder, "rgo", 3, 50.0, settings={"tasks": 2, "lr": 0.5})
    page = report(folder, tmp_path / "out").read_text()
    assert rows(tmp_path / "out", "as the protocol says")["rgo"]["ACC"] == "**91.00 ± 1.00**"
    assert "different settings under one name" in page
    assert "(settings 2)" in page


def test_runs_from_before_the_precision_was_a_setting_are_averaged_with_those_of_float32(folder, tmp_path):
    settings = {"model": "mlp", "tasks": 2, "steps": 1000, "batch_size": 10, "lr": 0.1, "threads": 1}
    record(folder, "rgo", 3, 93.0, settings=settings | {"dtype": "float32"})
    record(folder, "rgo", 4, 99.0, {"dtype": "float64"})
    report(folder, tmp_path / "out")
    assert rows(tmp_path / "out", "as the protocol says")["rgo"]["ACC"].startswith("**91.50 ")
    assert "dtype=float64" in (tmp_path / "out" / "permuted-mnist.md").read_text()


def test_a_report_that_cannot_be_written_leaves_the_last_one_whole(folder, tmp_path, monkeypatch):
    index = report(folder, tmp_path / "out")
    before = {path: path.read_bytes() for path in index.parent.iterdir()}
    record(folder, "rgo", 7, 10.0)

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"permuted-mnist\.md cannot be written: No space left on device\. Free some space"
    ):
        report(folder, tmp_path / "out")
    assert {path: path.read_bytes() for path in index.parent.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/out cannot be written: Not a directory\. Make it a place"):
        report(folder, tmp_path / "file" / "out")


def test_the_page_loads_nothing_and_shows_every_figure(folder, tmp_path):
    page = report(folder, tmp_path / "out").read_text()
    assert not re.search(r"https?://", page)
    assert not re.search(r"<(?:script|img|iframe|link)[^>]*(?:src|href)=\"(?!data:)", page)
    assert all(target.startswith(("data:", "#")) for target in re.findall(r"(?:src|xlink:href)=\"([^\"]*)", page))
    assert page.count('<svg role="img"') == (1 + 3) + (1 + 1)  # curves and heat maps: the protocol's, the changed
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert "Date" not in (tmp_path / "out" / "permuted-mnist.svg").read_text()
    assert "the mean accuracy over all tasks after the last one" in page


def test_what_a_record_says_is_text(tmp_path):
    record(tmp_path / "results", "rgo", 0, 90.0, {"note": "<script>alert(1)</script>&|_"})
    page = report(tmp_path / "results", tmp_path / "out").read_text()
    assert "<script>alert" not in page
    assert "\\_" in (tmp_path / "out" / "permuted-mnist.tex").read_text()


def test_an_empty_folder_says_what_to_do_and_a_missing_one_is_an_error(tmp_path):
    (tmp_path / "results").mkdir()
    page = report(tmp_path / "results", tmp_path / "out").read_text()
    assert "No results yet" in page
    assert "rgo run digits" in page
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        report(tmp_path / "nowhere", tmp_path / "out")


def test_the_papers_own_file_is_understood():
    published = read_published(Path(__file__).parent.parent / "experiments" / "table1.toml")
    assert published.numbers["permuted-mnist"]["rgo"]["acc"] == 91.15
    assert published.seeds["permuted-mnist", "rgo"] == [0, 1, 2, 3, 4]
    assert "runs" not in published.numbers


@pytest.mark.parametrize(
    "text",
    [
        "paper = 5",
        "[paper]\ndigits = 5",
        "[paper.digits]\nsgd = 5",
        "[paper.digits]\nsgd = { acc = 'a' }",
        "[paper.digits]\nsgd = { acc = nan }",
        "runs = 5",
        "runs = [5]",
        "[[runs]]\nbenchmark = 'digits'",
        "[[runs]]\nmethods = ['sgd']",
        "[[runs]]\nbenchmark = 'digits'\nmethods = ['sgd']\nseeds = 'a'",
        "not TOML",
    ],
)
def test_published_numbers_of_the_wrong_shape_are_refused(tmp_path, text):
    (tmp_path / "paper.toml").write_text(text)
    with pytest.raises(ValueError, match=r"paper\.toml: .*; give what experiments/table1\.toml has"):
        read_published(tmp_path / "paper.toml")


FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]


@pytest.fixture
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[*FLAGS, "--disable-component-update"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(browser, folder, paper, tmp_path, scheme):
    page = browser.new_page(viewport={"width": 375, "height": 800}, color_scheme=scheme)
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    index = report(folder, tmp_path / "out", paper).as_uri()
    page.goto(index)

    table = page.locator("table").first
    column = table.locator("thead th").nth(2)
    methods = table.locator("tbody th")
    assert column.get_attribute("aria-sort") == "descending"
    assert methods.all_inner_texts() == ["stl", "rgo", "sgd", "ewc"]
    column.get_by_role("button").click()
    assert column.get_attribute("aria-sort") == "ascending"
    assert methods.all_inner_texts() == ["sgd", "rgo", "stl", "ewc"]  # what is missing stays last
    table.locator("thead button").first.focus()
    page.keyboard.press("Enter")
    assert methods.all_inner_texts() == ["ewc", "rgo", "sgd", "stl"]
    page.keyboard.press("Space")
    assert methods.all_inner_texts() == ["stl", "sgd", "rgo", "ewc"]
    assert column.get_attribute("aria-sort") == "none"

    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    figures = page.locator("svg[role=img]")
    assert figures.count() == 6
    for i in range(6):
        box = figures.nth(i).bounding_box()
        assert box["width"] > 100
        assert box["height"] > 80
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways on a phone"
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 249)"
    assert light == (scheme == "light")
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [index]
