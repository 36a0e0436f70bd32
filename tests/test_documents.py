"""What the documents say is true: their code runs, their numbers are those of the committed results."""

import doctest
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import rgo

ROOT = Path(__file__).parents[1]
MODULES = [f"rgo.{m.name}" for m in pkgutil.iter_modules(rgo.__path__)]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    import torch

    result = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@pytest.mark.parametrize("path", ["README.md", "docs/index.md"])
def test_the_python_of_the_documents_runs(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, path, "exec"), names)


@pytest.mark.parametrize("path", ["README.md", "docs/decisions.md", "docs/methods.md", "docs/protocol.md"])
def test_tables_are_those_of_the_committed_results(path: str) -> None:
    assert load(ROOT / "experiments/readme.py").filled(path) == (ROOT / path).read_text()


def test_all_public_names_exist_and_are_documented() -> None:
    api = (ROOT / "docs/api.md").read_text()
    for name in rgo.__all__:
        assert getattr(rgo, name).__doc__, name
        assert f"::: rgo.{name}\n" in api, name
    public = {n for n, v in vars(rgo).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert public == set(rgo.__all__)


def test_importing_rgo_needs_torch_and_numpy_only() -> None:
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import rgo; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "third = {m for m in new if m not in sys.stdlib_module_names} - {'rgo', 'torch', 'numpy'}; "
        "assert not third, third"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
