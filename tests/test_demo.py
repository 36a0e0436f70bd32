"""The demo: what a newcomer runs first."""

import webbrowser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import rgo.cli
from rgo import results
from rgo.experiment import experiment
from rgo.runner import run


def demo(out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(rgo.cli.app, ["demo", "--tasks", "2", "--steps", "20", "--out", str(out), *arguments])


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_all(wanted, out, *, jobs, **options):
        for e in wanted:
            run(e, out)
        return 0

    monkeypatch.setattr(rgo.cli, "run_all", run_all)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a browser was asked to show."""
    pages: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda page: bool(pages.append(page) or True))
    return pages


def test_the_demo_ends_with_a_table_and_a_page(tmp_path: Path, opened: list[str]) -> None:
    shown = demo(tmp_path, "--no-open", "--jobs", "2")
    assert shown.exit_code == 0, shown.output
    page = tmp_path / "report" / "index.html"
    assert f"The report: {page}\n" in shown.stdout
    assert "<svg" in page.read_text()
    table, text = shown.stdout.partition("ACC: ")[0], (tmp_path / "report" / "permuted-mnist.md").read_text()
    for method in rgo.cli.DEMO:
        e = experiment("permuted-mnist", method, 0, tasks=2, steps=20)
        acc = results.table([results.read(e.path(tmp_path))])[0]["acc"]
        assert f"{method} " in table
        assert f"{acc:.2f}" in table
        assert f"| {method} | steps=20, tasks=2 | 1 | {acc:.2f} |" in text
    # Settings are not the paper's, so its numbers have no place here.
    assert "nothing is set against a paper" in page.read_text()
    assert "Paper" not in text
    assert "as the protocol says" not in text
    assert not opened


def test_the_demo_stopped_by_ctrl_c_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    monkeypatch.setattr(rgo.cli, "DEMO", ("sgd", "rgo"))

    def run_all(wanted, out, **options):
        run(wanted[0], out)
        raise KeyboardInterrupt

    monkeypatch.setattr(rgo.cli, "run_all", run_all)
    shown = demo(tmp_path)
    assert shown.exit_code == 130
    assert "the same command goes on" in shown.stderr
    assert not (tmp_path / "report").exists()
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("seed-0.json")}
    assert len(first) == 1
    in_this_process(monkeypatch)
    assert demo(tmp_path).exit_code == 0
    assert len([*tmp_path.rglob("seed-0.json")]) == 2
    assert {path: path.stat().st_mtime_ns for path in first} == first


@pytest.mark.parametrize(
    ("screen", "arguments", "shows"),
    [(True, (), True), (False, (), False), (True, ("--no-open",), False), (False, ("--open",), True)],
)
def test_the_page_opens_where_there_is_a_display_or_as_asked(
    screen: bool, arguments: tuple[str, ...], shows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened
) -> None:
    monkeypatch.setattr(rgo.cli, "DEMO", ("sgd",))
    in_this_process(monkeypatch)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if screen:
        monkeypatch.setenv("DISPLAY", ":0")
    assert demo(tmp_path, *arguments).exit_code == 0
    assert opened == [(tmp_path / "report" / "index.html").as_uri()] * shows


def test_without_a_browser_the_demo_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rgo.cli, "DEMO", ("sgd",))
    monkeypatch.setattr(webbrowser, "open", lambda page: False)
    in_this_process(monkeypatch)
    shown = demo(tmp_path, "--open")
    assert shown.exit_code == 0
    assert "No browser could be started: open it yourself." in shown.stdout
