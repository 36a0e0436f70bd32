"""The command line: `rgo list | run | suite | report | data | doctor | demo`.

Exit codes: 0 done, 1 some runs failed, 2 the command or its input is wrong, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import tomllib
import webbrowser
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from . import results
from .benchmarks import BENCHMARKS
from .cli_data import app as data_app
from .cli_doctor import cores_usable, doctor
from .experiment import DTYPES, Experiment, experiment, read_value
from .methods import METHODS
from .models import MODELS
from .suite import run_all

app = typer.Typer(
    help="Continual learning experiments: every method and benchmark of the RGO paper.",
    epilog="Exit codes: 0 done, 1 some runs failed, 2 the command or its input is wrong, 130 stopped by Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console, errors = Console(), Console(stderr=True)

DEMO = ("sgd", "ewc", "er-ring", "gpm", "rgo-2", "rgo")  # the methods of `rgo demo`

Out = Annotated[Path, typer.Option("--out", help="Folder of the results.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time, each in a process of its own.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")]
Capture = Annotated[bool, typer.Option("--capture/--no-capture", help="On CUDA, capture the step in a graph.")]
Every = Annotated[int, typer.Option("--checkpoint-every", min=1, help="Steps between checkpoints.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """For the shell to complete."""
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]  # the name typer knows it by


def _fail(message: object) -> typer.Exit:
    errors.print(str(message), style="red", markup=False, emoji=False, highlight=False, soft_wrap=True)
    return typer.Exit(2)


def _settings(pairs: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise _fail(f"--set {pair}: give name=value, for example --set lr=0.03")
        if name in settings:
            raise _fail(f"--set {pair}: {name} is set twice, give it one value")
        settings[name] = read_value(value)
    return settings


def _merged(named: dict[str, Any], settings: dict[str, Any], flag: str) -> dict[str, Any]:
    """Settings that have a place of their own, and the others; a setting in both is in neither."""
    if twice := sorted(named.keys() & settings.keys()):
        raise ValueError(f"{twice[0]!r} is given twice, in {flag} as well: give it one value")
    return named | settings


@app.command("list")
def list_names(as_json: AsJson = False) -> None:
    """The names of methods, benchmarks and models.

    Example: rgo list --json
    """
    names = {"methods": list(METHODS), "benchmarks": list(BENCHMARKS), "models": list(MODELS)}
    if as_json:
        print(json.dumps(names))
        return
    for kind, each in names.items():
        console.print(f"[bold]{kind}[/]: {', '.join(each)}", highlight=False)


@app.command()
def run(
    benchmark: Annotated[str, typer.Argument(help="See `rgo list`.", autocompletion=_names(BENCHMARKS))],
    method: Annotated[
        list[str],
        typer.Option(
            "--method", "-m", help="See `rgo list`; may be given several times.", autocompletion=_names(METHODS)
        ),
    ],
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="One seed.")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="The seeds 0 to N-1; by default 1.")] = None,
    tasks: Annotated[int | None, typer.Option("--tasks", min=1)] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Per task.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="A name, or package.module:function.", autocompletion=_names(MODELS)),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, float64 or bfloat16.", autocompletion=_names(DTYPES)),
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Any other setting, name=value.")] = None,
    out: Out = Path("results"),
    jobs: Jobs = 1,
    device: Device = "cpu",
    capture: Capture = True,
    checkpoint_every: Every = 500,
    as_json: AsJson = False,
) -> None:
    """Run methods on a benchmark; finished runs are read, interrupted ones go on.

    Example: rgo run permuted-mnist --method rgo --method sgd --seeds 5 --jobs 2
    """
    named = {"tasks": tasks, "steps": steps, "model": model, "dtype": dtype}
    if seed is not None and seeds is not None:
        raise _fail(f"--seed {seed} is one seed and --seeds {seeds} are several: give one of the two")
    chosen = [seed] if seed is not None else range(seeds or 1)
    try:
        changes = _merged({k: v for k, v in named.items() if v is not None}, _settings(settings or []), "--set")
        experiments = [_experiment(benchmark, m, s, changes) for s in chosen for m in method]
    except ValueError as error:
        raise _fail(error) from None
    _do(experiments, out, jobs, device, capture, checkpoint_every, as_json)


@app.command()
def suite(
    file: Annotated[Path, typer.Argument(help="A TOML file, with a table of `runs` for each group.")],
    out: Out = Path("results"),
    jobs: Jobs = 1,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="HOST:PORT|auto", help="Do the runs on this Ray cluster.")
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option("--gpus", min=0.01, max=1, help="With --ray: the share of a GPU that a run takes (1)."),
    ] = None,
    device: Device = "cpu",
    capture: Capture = True,
    checkpoint_every: Every = 500,
    as_json: AsJson = False,
) -> None:
    """Every run of a suite that is missing. Stop it any time, start it again.

    Example: rgo suite experiments/table1.toml --out experiments/results --jobs 2
    """
    try:
        experiments = read_suite(file)
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    _do(experiments, out, jobs, device, capture, checkpoint_every, as_json, ray=ray, gpus=gpus)


def _experiment(benchmark: str, method: str, seed: int, changes: dict[str, Any]) -> Experiment:
    for name in ("benchmark", "method", "seed"):
        if name in changes:
            raise ValueError(f"{name!r} is what a run is named by, not a setting of it")
    return experiment(benchmark, method, seed, **changes)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of the results.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the report.")] = Path("report"),
    published: Annotated[
        Path | None, typer.Option("--published", help="TOML with published numbers, as experiments/table1.toml.")
    ] = None,
) -> None:
    """Tables, curves and heat maps of all results below a folder, as one page.

    Example: rgo report experiments/results -o report/ --published experiments/table1.toml
    """
    from .report import report as write_report

    try:
        page = write_report(folder, out, published)
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    console.print(f"{page}", highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Of results; the page goes to report/ in it.")] = Path("demo"),
    tasks: Annotated[int, typer.Option("--tasks", min=1)] = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Per task, of ten samples each.")] = 1000,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time; by default as many as there are cores.")
    ] = None,
    show: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Show the page; by default where there is a display.")
    ] = None,
) -> None:
    """Five tasks of Permuted MNIST with six methods: plain SGD forgets, RGO does not. Then a page about it.

    Stop it any time: what is done is kept, and the same command goes on.

    Example: rgo demo --no-open
    """
    from .report import report as write_report

    runs = [experiment("permuted-mnist", method, 0, tasks=tasks, steps=steps) for method in DEMO]
    _do(runs, out, jobs=min(jobs or cores_usable(), len(runs)), device="cpu", capture=False, every=500, as_json=False)
    try:
        page = write_report(out, out / "report").resolve()
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    for line in (
        f"ACC: the mean accuracy (%) on the test data of all {tasks} tasks after the last one.",
        "BWT: how much all but the last have changed, on average, since each was learned; negative is forgetting.",
        f"The report: {page}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if (_display() if show is None else show) and not webbrowser.open(page.as_uri()):
        console.print("No browser could be started: open it yourself.")


def read_suite(file: Path) -> list[Experiment]:
    """The runs that a suite names, seed by seed, so that every cell gets its first seed first."""
    try:
        content = tomllib.loads(file.read_bytes().decode())
    except ValueError as error:  # of syntax or of encoding
        raise ValueError(f"{file} is no TOML: {error}") from None
    runs = content.pop("runs", None)
    content.pop("paper", None)  # published numbers, which are the report's
    if content:
        raise ValueError(f"{file}: unknown {sorted(content)}; a suite holds [[runs]], and [paper] for the report")
    if not runs or not isinstance(runs, list) or not all(isinstance(entry, dict) for entry in runs):
        raise ValueError(f"{file} holds no [[runs]]: give benchmark, methods and seeds for each")
    named: list[tuple[int, Experiment]] = []
    for number, entry in enumerate(runs, start=1):
        try:
            named += [(e.seed, e) for e in _entry(entry)]
        except ValueError as error:
            raise ValueError(f"{file}, runs number {number}: {error}") from None
    return [e for _, e in sorted(named, key=lambda pair: pair[0])]


def _entry(entry: dict[str, Any]) -> Iterator[Experiment]:
    keys = {
        "benchmark": str,
        "methods": list,
        "seeds": int | list,
        "model": str,
        "tasks": int,
        "steps": int,
        "set": dict,
    }
    for key, value in entry.items():
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            raise ValueError(
                f"unknown {key!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(keys)}")
            )
        if not isinstance(value, keys[key]) or isinstance(value, bool):
            raise ValueError(f"{key} = {value!r} is of the wrong type")
        if value in (0, []) or (key == "seeds" and isinstance(value, int) and value < 0):
            raise ValueError(f"{key} = {value!r} gives no run: name at least one")
    if missing := [key for key in ("benchmark", "methods") if key not in entry]:
        raise ValueError(f"missing {' and '.join(missing)}")
    seeds = entry.get("seeds", 1)
    changes = _merged({k: entry[k] for k in ("model", "tasks", "steps") if k in entry}, entry.get("set", {}), "set")
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        yield from (_experiment(entry["benchmark"], m, seed, changes) for m in entry["methods"])


def _do(
    experiments: list[Experiment],
    out: Path,
    jobs: int,
    device: str,
    capture: bool,
    every: int,
    as_json: bool,
    **cluster: Any,
) -> None:
    try:
        if not any(cluster.values()):  # a cluster's machines have their own devices
            _check_device(device)
        failed = run_all(experiments, out, jobs=jobs, device=device, capture=capture, checkpoint_every=every, **cluster)
        paths = dict.fromkeys(e.path(out) for e in experiments)
        done = [results.read(path) for path in paths if path.exists()]
    except KeyboardInterrupt:
        said = "Stopped. What is finished is kept and the rest has checkpoints: the same command goes on."
        errors.print(said, soft_wrap=True)
        raise typer.Exit(130) from None
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    if as_json:
        print(json.dumps(results.table(done)))
    elif done:
        console.print(summary(done))
    if failed:
        raise typer.Exit(1)


def _check_device(device: str) -> None:
    """Raise unless runs can be done on it here."""
    kind, colon, number = device.partition(":")
    if device != "cpu" and (kind != "cuda" or (colon and not number.isdecimal())):
        raise ValueError(f"--device {device}: give cpu, cuda or cuda:N")
    cards = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and int(number or 0) >= cards:
        raise ValueError(f"--device {device}: PyTorch finds {cards} CUDA devices here, counted from 0 (`rgo doctor`)")


def _display() -> bool:
    """Whether somebody sits before a screen that a browser can open on."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def summary(records: list[dict[str, Any]]) -> Table:
    """ACC and BWT of each method, mean and standard deviation over its seeds."""
    table = Table("benchmark", "method", "changed", "seeds", "ACC", "BWT", "seconds")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in results.table(records):
        changed = ", ".join(f"{k}={v}" for k, v in row["changed"].items())
        groups.setdefault((row["benchmark"], row["method"], changed), []).append(row)
    for (benchmark, method, changed), rows in groups.items():
        seconds = sum(sum(v for k, v in row.items() if k.startswith("seconds_")) for row in rows) / len(rows)
        cells = [results.spread([row[m] for row in rows]) for m in ("acc", "bwt")]
        table.add_row(benchmark, method, changed, str(len(rows)), *cells, f"{seconds:.0f}")
    return table


app.add_typer(data_app, name="data")
app.command()(doctor)


def main() -> None:
    """The entry point `rgo`."""
    sys.path.insert(0, "")  # `--model mymodule:function` finds a module in this folder, as `python -m` would
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
