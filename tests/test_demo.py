"""The demo: what a newcomer runs first."""

import importlib.util
import sys
from pathlib import Path


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


demo = load(Path(__file__).parent.parent / "examples" / "demo.py")


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
