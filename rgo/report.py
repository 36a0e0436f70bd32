"""The report on a folder of results: tables for Markdown and LaTeX, and one page for the browser.

It is a function of the files alone: the same results give the same bytes, wherever they lie. Beside
`index.html`, which loads nothing, each benchmark has its tables as `<benchmark>.md` and `<benchmark>.tex`, and its
curves as `<benchmark>.svg`.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import math
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any

import matplotlib.style
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from . import metrics
from .methods import METHODS
from .results import put, read, spread, table, writing

REFERENCE = "stl"  # a model per task cannot forget: shown, but not ranked among those that can
INK, LINE = "#1f262d", "#d3d9df"  # of the figures; the page puts its own in their place, light or dark
COLOURS = ("#2878d0", "#d9730d", "#1c9a63", "#d8434f", "#8f63d9", "#1496a6", "#cc559f", "#8c8a1c", "#7d8791")
DASHES = ("", "5 2", "1.5 1.5")
SHADES = "viridis"
STEPS = (1, 2, 5, 10)  # between ticks

Numbers = dict[str, float]
"""what a paper printed of one method: acc, acc_std, bwt, bwt_std"""


# ---- what was found ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The seeds of one method with one set of settings."""

    benchmark: str
    method: str
    changed: dict[str, Any]
    records: list[dict[str, Any]]
    variant: int = 1
    """counts the groups that have the same name but other settings"""

    @property
    def settings(self) -> str:
        text = ", ".join(f"{k}={v}" for k, v in sorted(self.changed.items()))
        return text + f" (settings {self.variant})" * (self.variant > 1)

    @property
    def label(self) -> str:
        return " ".join([self.method, *self.settings.split()])

    @property
    def seeds(self) -> list[int]:
        return [record["seed"] for record in self.records]

    @property
    def paper(self) -> bool:
        """Whether it ran as the protocol says."""
        return not self.changed and self.variant == 1

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return table(self.records)

    def values(self, key: str) -> list[float]:
        return [row[key] for row in self.rows]

    def mean(self, key: str) -> float:
        return statistics.fmean(self.values(key))

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Average accuracy after each task: mean and standard deviation over the seeds."""
        each = np.array([[statistics.fmean(row) for row in record["accuracy"]] for record in self.records])
        return each.mean(0), each.std(0, ddof=1) if len(each) > 1 else np.zeros(each.shape[1])

    def matrix(self) -> np.ndarray:
        """R, the mean over the seeds; nan above the diagonal."""
        tasks = len(self.records[0]["accuracy"])
        padded = [[row + [math.nan] * (tasks - len(row)) for row in record["accuracy"]] for record in self.records]
        mean: np.ndarray = np.array(padded).mean(0)
        return mean


@dataclass
class Found:
    """What a folder of results holds."""

    groups: list[Group] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Published:
    """A paper's numbers, and the seeds that the suite beside them asks for."""

    numbers: dict[str, dict[str, Numbers]] = field(default_factory=dict)
    seeds: dict[tuple[str, str], list[int]] = field(default_factory=dict)


def collect(folder: Path) -> Found:
    """Every record below a folder; what cannot be used is named, never passed over."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: give the one that `rgo run --out` wrote to")
    found, groups, seen = Found(), dict[str, Group](), dict[tuple[str, int], str]()
    for path in sorted(folder.rglob("seed-*.json")):
        name = path.relative_to(folder).as_posix()
        try:
            record = read(path)
        except ValueError as error:
            found.unreadable.append((name, str(error).replace(str(path), "it")))
            continue
        settings = {**record["settings"], "threads": None, "tasks": len(record["accuracy"])}
        key = json.dumps([record["benchmark"], record["method"], record["changed"], settings], sort_keys=True)
        if (first := seen.setdefault((key, record["seed"]), name)) != name:
            found.notes.append(f"{name} repeats the run of {first}: only the first counts")
            continue
        group = Group(record["benchmark"], record["method"], record["changed"], [])
        groups.setdefault(key, group).records.append(record)
    names = Counter[str]()
    for group in groups.values():
        name = f"{group.benchmark}: {group.label}"
        names[name] += 1
        if names[name] > 1:
            group = replace(group, variant=names[name])
            found.notes.append(
                f"{name} was run with different settings under one name, so its seeds are not averaged: "
                f"“settings {group.variant}” stands among the changed runs"
            )
        group.records.sort(key=lambda record: record["seed"])
        found.groups.append(group)
    stems = {path.with_suffix("") for end in ("lock", "task", "step") for path in folder.rglob(f"seed-*.{end}")}
    left = sorted(stem for stem in stems if not stem.with_suffix(".json").exists())
    found.unfinished = [stem.relative_to(folder).as_posix() for stem in left]
    return found


def read_published(file: Path | None) -> Published:
    """`[paper.BENCHMARK] METHOD = { acc, acc_std, bwt, bwt_std }`, and `[[runs]]` as `rgo suite` takes them."""
    if file is None:
        return Published()
    try:
        data = tomllib.loads(file.read_text())
        seeds: dict[tuple[str, str], list[int]] = {}
        for entry in _all(dict, data.pop("runs", []), "runs"):
            if not entry.keys() & {"model", "tasks", "steps", "set"}:
                (benchmark,) = _all(str, [entry.get("benchmark")], "benchmark")
                wanted = entry.get("seeds", 1)
                wanted = list(range(wanted)) if isinstance(wanted, int) else _all(int, wanted, "seeds")
                seeds |= {(benchmark, method): wanted for method in _all(str, entry.get("methods"), "methods")}
        numbers: Any = data["paper"] if "paper" in data else {k: v for k, v in data.items() if isinstance(v, dict)}
        for methods in _all(dict, numbers, "paper"):
            for printed in _all(dict, methods, "paper"):
                if not all(math.isfinite(number) for number in _all(int | float, printed, "paper")):
                    raise ValueError("a number of the paper is not finite")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}; give what experiments/table1.toml has") from None
    return Published(numbers, seeds)


def _all(kind: type | UnionType, values: Any, key: str) -> list[Any]:
    """The values of a list or a table, all of this kind."""
    each = [*values.values()] if isinstance(values, dict) else values
    if not isinstance(each, list) or not all(isinstance(value, kind) for value in each):
        raise ValueError(f"{key} = {values!r} is of the wrong type")
    return each


# ---- tables -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    title: str
    definition: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    text: str = ""
    order: float | str | None = None
    """what it is sorted by; None goes last"""
    note: str = ""
    best: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table, before it is Markdown, LaTeX or HTML."""

    caption: str
    columns: list[Column]
    rows: list[list[Cell]]
    sorted_by: int | None = None

    def markdown(self) -> str:
        def cell(c: Cell) -> str:
            text = f"**{c.text}**" if c.best else c.text
            return (text + f" ({c.note})" * bool(c.note)).replace("|", "\\|").replace("\n", " ")

        lines = [[c.title for c in self.columns], ["---:" if c.numeric else ":---" for c in self.columns]]
        lines += [[cell(c) for c in row] for row in self.rows]
        return f"{self.caption}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def latex(self) -> str:
        def cell(c: Cell) -> str:
            text = f"\\textbf{{{_tex(c.text)}}}" if c.best else _tex(c.text)
            return text + f" ({_tex(c.note)})" * bool(c.note)

        head = " & ".join(_tex(c.title) for c in self.columns)
        body = "".join(" & ".join(map(cell, row)) + " \\\\\n" for row in self.rows)
        spec = "".join("r" if c.numeric else "l" for c in self.columns)
        return (
            f"% {self.caption}\n% needs \\usepackage{{booktabs}}\n\\begin{{tabular}}{{{spec}}}\n\\toprule\n"
            f"{head} \\\\\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n"
        )


def _sentence(function: Callable[..., Any]) -> str:
    """What a metric is: the first sentence of its docstring, without the name that may begin it."""
    text = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    return re.sub(r"^[A-Z]+ = ", "", text)


# key in results.table -> its column, and which way is better (0: neither)
MEASURES: dict[str, tuple[Column, int]] = {
    "acc": (Column("ACC", _sentence(metrics.average_accuracy)), 1),
    "bwt": (Column("BWT", _sentence(metrics.backward_transfer)), 1),
    "forgetting": (Column("Forgetting", _sentence(metrics.forgetting)), -1),
    "learning": (Column("Learning", _sentence(metrics.learning_accuracy)), 1),
    "train_acc": (Column("Train", "The mean accuracy over the training data of all tasks after the last one."), 0),
}
SEEDS = Column("Seeds", "Runs that the mean is over, of those asked for, and the seeds that are missing.")
METHOD = Column("Method", numeric=False)
CHANGED = Column("Changed", "The settings in which the run departs from the protocol.", numeric=False)
PAPER = Column("Paper", "The number that the paper prints.")
GAP = Column("Gap", "Ours less the paper's, in points; and in σ, the root of both variances over seeds added.")
AGAINST = Column("To protocol", "ACC less the ACC of the same method as the protocol runs it, in points.")


def paper_sheet(benchmark: str, groups: Sequence[Group], published: Published) -> Sheet:
    """The runs as the protocol says, best in bold, with the paper's numbers beside them."""
    printed = published.numbers.get(benchmark, {})
    by_method = {g.method: g for g in groups if g.paper}
    asked = [m for b, m in published.seeds if b == benchmark]
    methods = list(dict.fromkeys([*sorted(by_method, key=lambda m: -by_method[m].mean("acc")), *printed, *asked]))
    union = sorted({seed for g in by_method.values() for seed in g.seeds})
    ranked = {method: g for method, g in by_method.items() if method != REFERENCE}
    columns, rows = [METHOD, SEEDS], []
    for key, (column, _) in MEASURES.items():
        columns += [column, PAPER, GAP] if printed and key in ("acc", "bwt") else [column]
    best = {
        k: max((sign * round(g.mean(k), 2) for g in ranked.values()), default=0) for k, (_, sign) in MEASURES.items()
    }
    for method in methods:
        group = by_method.get(method)
        row = [Cell(method, method), _seeds(group, published.seeds.get((benchmark, method), union))]
        for key, (_, sign) in MEASURES.items():
            wins = bool(sign) and method in ranked and sign * round(ranked[method].mean(key), 2) == best[key]
            row.append(replace(_measure(group, key), best=wins))
            if printed and key in ("acc", "bwt"):
                row += _beside(group, key, printed.get(method, {}))
        rows.append(row)
    return Sheet(f"{benchmark}: as the protocol says", columns, rows, columns.index(MEASURES["acc"][0]))


def changed_sheet(benchmark: str, groups: Sequence[Group]) -> Sheet:
    """The runs that depart from the protocol, each against the same method that does not."""
    base = {g.method: g.mean("acc") for g in groups if g.paper}
    rows = []
    for g in sorted((g for g in groups if not g.paper), key=lambda g: g.label):
        gap = g.mean("acc") - base[g.method] if g.method in base else None
        against = Cell("–") if gap is None else Cell(_signed(gap), gap)
        measures = [_measure(g, key) for key in MEASURES]
        rows.append([Cell(g.method, g.method), Cell(g.settings, g.settings), _seeds(g, g.seeds), *measures, against])
    columns = [METHOD, CHANGED, SEEDS, *(column for column, _ in MEASURES.values()), AGAINST]
    return Sheet(f"{benchmark}: with changed settings", columns, rows)


def cost_sheet(benchmark: str, groups: Sequence[Group]) -> Sheet:
    """Time, memory and capacity: means over the seeds."""
    columns = [
        METHOD,
        CHANGED,
        Column("Train, s", "Seconds in training steps, all tasks together."),
        Column("End of task, s", "Seconds between tasks, in which a method takes in what it must remember."),
        Column("Evaluate, s", "Seconds answering the test data of all tasks so far, after each task."),
        Column("Memory", "What the method keeps besides the models that it answers with."),
        Column("Capacity", "The parameters it answers with, relative to the one model."),
        Column("Parameters", "Of the one model."),
        Column("Device", "Times compare only on the same one.", numeric=False),
    ]
    rows = []
    for g in sorted(groups, key=lambda g: (not g.paper, g.label)):
        seconds = [g.mean(f"seconds_{part}") for part in ("train", "end_task", "evaluate")]
        memory, capacity = g.mean("memory"), g.mean("capacity")
        parameters = statistics.fmean(r["parameters"] for r in g.records)
        device = ", ".join(sorted({_device(r["environment"]) for r in g.records}))
        rows.append(
            [
                Cell(g.method, g.method),
                Cell(g.settings or "–", g.settings),
                *(Cell(f"{s:.1f}" if s >= 10 else f"{s:.2f}", s) for s in seconds),
                Cell(_bytes(memory), memory),
                Cell(f"{capacity:.0f} %", capacity),
                Cell(f"{parameters:,.0f}", parameters),
                Cell(device, device),
            ]
        )
    return Sheet(f"{benchmark}: cost", columns, rows)


def _seeds(group: Group | None, wanted: Iterable[int]) -> Cell:
    have = group.seeds if group else []
    missing = sorted({*wanted} - {*have})
    if not missing:
        return Cell(str(len(have)), len(have))
    return Cell(f"{len(have)}/{len(have) + len(missing)}", len(have), f"missing {_ranges(missing)}")


def _measure(group: Group | None, key: str) -> Cell:
    return Cell(spread(group.values(key)), group.mean(key)) if group else Cell("–")


def _beside(group: Group | None, key: str, printed: Numbers) -> list[Cell]:
    """The paper's number, and how far ours is from it."""
    if key not in printed:
        return [Cell("–"), Cell("–")]
    std = printed.get(f"{key}_std")
    paper = Cell(f"{printed[key]:.2f}" + ("" if std is None else f" ± {std:.2f}"), printed[key])
    if group is None:
        return [paper, Cell("–")]
    gap, values = group.mean(key) - printed[key], group.values(key)
    sigma = math.hypot(statistics.stdev(values), std or 0) if len(values) > 1 else 0  # one run has no spread
    return [paper, Cell(_signed(gap), gap, f"{gap / sigma:+.1f} σ" if sigma else "")]


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"


def _ranges(numbers: Sequence[int]) -> str:
    """0, 2, 3, 4 as "0, 2–4"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def _device(environment: dict[str, Any]) -> str:
    device = environment.get("device", "cpu")
    if device != "cpu":
        return str(device)
    threads = environment.get("threads", 1)
    return f"{environment.get('processor', 'cpu')}, {threads} thread{'s' * (threads != 1)}"


def _tex(text: str) -> str:
    text = re.sub(r"\\|[&%$#_{}~^]", lambda m: TEX.get(m[0], "\\" + m[0]), text)
    text = re.sub(r"(?<![\w.])-(?=\d)", "$-$", text)
    return text.replace("±", "$\\pm$").replace("σ", "$\\sigma$")


TEX = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}


# ---- figures ----------------------------------------------------------------------------------------------------


def styles(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Colour and dash of each curve: a method has its own on all benchmarks, changed runs go by their place."""
    names = [name for name in reversed(METHODS) if name != REFERENCE]

    def style(place: int, group: Group) -> tuple[str, str]:
        if group.paper and group.method == REFERENCE:
            return INK, DASHES[2]
        if group.paper:
            place = names.index(group.method) if group.method in names else len(names) + place
        return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]

    return [style(place, group) for place, group in enumerate(groups)]


def curves(groups: Sequence[Group], legend: bool = False) -> str:
    """Average accuracy against the number of tasks, with a band of one standard deviation over the seeds."""

    def draw() -> Figure:
        figure = Figure(figsize=(7.2 if legend else 5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for group, (colour, dash) in zip(groups, styles(groups)):
            (mean, std), style = group.curve(), (0, tuple(map(float, dash.split()))) if dash else "-"
            tasks = np.arange(1, len(mean) + 1)
            axes.plot(tasks, mean, color=colour, ls=style, lw=1.6, marker="o", ms=2.4, label=group.label)
            if len(group.records) > 1:
                axes.fill_between(tasks, mean - std, mean + std, color=colour, alpha=0.18, lw=0)
        axes.set(xlabel="number of tasks learned", ylabel="average accuracy, %")
        axes.xaxis.set_major_locator(MaxNLocator(steps=STEPS, integer=True, min_n_ticks=1))
        axes.grid(lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if legend:
            figure.legend(loc="outside right upper", frameon=False)
        return figure

    return _svg(draw)


def heat_map(group: Group, low: float, high: float) -> str:
    """The accuracy matrix: row k, counted from 1, has the tasks 1 to k after task k."""

    def draw() -> Figure:
        figure = Figure(figsize=(2.1, 2.1), layout="constrained")
        axes = figure.subplots()
        matrix = group.matrix()
        edges = (0.5, len(matrix) + 0.5)
        axes.imshow(matrix, cmap=SHADES, vmin=low, vmax=high, interpolation="none", extent=(*edges, edges[1], edges[0]))
        axes.set(xlabel="accuracy of task", ylabel="after task")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=5, steps=STEPS, integer=True, min_n_ticks=1))
        axes.spines[["top", "right"]].set_visible(False)
        return figure

    return _svg(draw)


def _svg(draw: Callable[[], Figure]) -> str:
    """The same bytes everywhere: the default style, no date, names of elements from their contents."""
    own = {"svg.hashsalt": "rgo", "svg.fonttype": "none", "font.size": 9, "grid.color": LINE, "text.parse_math": False}
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    buffer = io.StringIO()
    with matplotlib.style.context(["default", own | ink]):
        nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw().savefig(buffer, format="svg", metadata=nothing, transparent=True)
    return buffer.getvalue()


def _inline(svg: str, name: str, label: str) -> Markup:
    """For the page: in its colours, with a label, and element names that no other figure has."""
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :])
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = svg.replace(INK, "currentColor").replace(LINE, "var(--line)")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1).strip())


# ---- the page ---------------------------------------------------------------------------------------------------


def report(results: Path, out: Path, published: Path | None = None) -> Path:
    """Write the report on the runs below `results` into the folder `out`; returns its page.

    `published` is a TOML file with a paper's numbers, as experiments/table1.toml.
    """
    found, numbers = collect(results), read_published(published)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    by_benchmark: dict[str, list[Group]] = {}
    for group in found.groups:
        by_benchmark.setdefault(group.benchmark, []).append(group)
    sections = [
        _section(name, groups, numbers, out, f"b{i}") for i, (name, groups) in enumerate(sorted(by_benchmark.items()))
    ]
    waiting = sorted(({*numbers.numbers} | {b for b, _ in numbers.seeds}) - {*by_benchmark})
    environment = Environment(
        loader=PackageLoader("rgo"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["minus"] = lambda text: re.sub(r"(?<![\w.])-(?=\d)", "−", text)
    page = environment.get_template("report.html").render(
        found=found,
        sections=sections,
        waiting=waiting if sections else [],
        runs=sum(len(g.records) for g in found.groups),
        methods=len({g.method for g in found.groups}),
    )
    index = out / "index.html"
    put(index, page)
    return index


def _section(name: str, groups: list[Group], published: Published, out: Path, id: str) -> dict[str, Any]:
    """What the template shows of a benchmark; its Markdown, LaTeX and SVG files on the way."""
    by_accuracy = sorted(groups, key=lambda g: (-g.mean("acc"), g.label))
    paper, changed = [g for g in by_accuracy if g.paper], [g for g in by_accuracy if not g.paper]
    sheets = {
        "paper": paper_sheet(name, groups, published) if paper else None,
        "changed": changed_sheet(name, groups) if changed else None,
        "cost": cost_sheet(name, groups),
    }
    file = _file(name)
    written = [sheet for sheet in sheets.values() if sheet]
    put(out / f"{file}.md", f"# {name}\n\n" + "\n".join(s.markdown() for s in written))
    put(out / f"{file}.tex", "\n".join(s.latex() for s in written))
    put(out / f"{file}.svg", curves(paper or changed, legend=True))
    return {
        "name": name,
        "id": id,
        "file": file,
        "sheets": sheets,
        "known": [column.title for column in sheets["paper"].columns] if sheets["paper"] else [],
        "paper": _figures(paper, f"{id}p") if paper else None,
        "changed": _figures(changed, f"{id}c") if changed else None,
        "protocols": sorted({_protocol(g.records[0]["settings"]) for g in paper}),
        "made": sorted({_made(r) for g in groups for r in g.records}),
    }


def _file(benchmark: str) -> str:
    """What its files are called; a name that cannot be one is cut and told by a digest."""
    name = re.sub(r"[^\w-]+", "-", benchmark)
    if name and name == benchmark and len(name.encode()) <= 200:
        return name
    return name.encode()[:180].decode(errors="ignore") + "~" + hashlib.sha256(benchmark.encode()).hexdigest()[:12]


def _figures(groups: list[Group], id: str) -> dict[str, Any]:
    """Curves and heat maps of some runs of a benchmark."""
    matrices = [g.matrix() for g in groups]
    low = 10 * math.floor(min(float(np.nanmin(m)) for m in matrices) / 10)
    high = max(10 * math.ceil(max(float(np.nanmax(m)) for m in matrices) / 10), low + 10)
    ends = "; ".join(f"{g.label} ends at {g.mean('acc'):.1f}" for g in groups)
    return {
        "curves": _inline(curves(groups), id, f"Average accuracy against number of tasks: {ends}"),
        "legend": [
            (g.label, spread(g.values("acc")), c.replace(INK, "currentColor"), d)
            for g, (c, d) in zip(groups, styles(groups))
        ],
        "maps": [
            (
                g.label,
                len(g.records),
                _inline(
                    heat_map(g, low, high),
                    f"{id}{i}",
                    f"Accuracy matrix of {g.label}: task 1 at {m[0, 0]:.1f} once learned, at {m[-1, 0]:.1f} in the end",
                ),
            )
            for i, (g, m) in enumerate(zip(groups, matrices))
        ],
        "low": low,
        "high": high,
        "shades": ", ".join(to_hex(colormaps[SHADES](i / 8)) for i in range(9)),
    }


def _protocol(settings: dict[str, Any]) -> str:
    lr = settings.get("lr")
    return (
        f"{settings.get('model')}, {settings.get('tasks')} tasks, {settings.get('steps')} steps of "
        f"{settings.get('batch_size')} a task, learning rate {lr}"
    )


def _made(record: dict[str, Any]) -> str:
    e = record["environment"]
    return f"commit {str(record.get('commit'))[:12]} · torch {e.get('torch')} · Python {e.get('python')} · {_device(e)}"
