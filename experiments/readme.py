"""Fills the documents' tables from committed results: `python experiments/readme.py` (a test compares them)."""

import json
import re
import statistics
import tomllib
from pathlib import Path

from rgo.metrics import average_accuracy, backward_transfer

ROOT = Path(__file__).parents[1]
PAPER = tomllib.loads((ROOT / "experiments/table1.toml").read_text())
METHODS = {
    "rgo": "RGO",
    "rgo-2": "RGO without FEL",
    "fel": "FEL alone",
    "sgd": "plain SGD",
    "stl": "a model per task (STL)",
}
BENCHMARKS = {"permuted-mnist": "Permuted MNIST", "rotated-mnist": "Rotated MNIST"}


def cell(benchmark: str, method: str) -> tuple[str, int]:
    """ACC and BWT over the seeds at hand, and their number."""
    runs = [
        json.loads(p.read_text()) for p in sorted((ROOT / "experiments/results" / benchmark / method).glob("*.json"))
    ]
    runs = [run for run in runs if not run["changed"].keys() & {"tasks", "steps", "samples"}]
    if not runs:
        return "-", 0
    columns = []
    for metric in (average_accuracy, backward_transfer):
        values = [metric(run["accuracy"]) for run in runs]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        columns.append(f"{statistics.fmean(values):.2f}{spread}")
    return " / ".join(columns), len(runs)


def mnist() -> str:
    """ACC / BWT of every method on both benchmarks, beside the paper's."""
    head = "".join(f" {name} | paper |" for name in BENCHMARKS.values())
    lines = [f"| ACC / BWT |{head} seeds |", "|---|" + "---|" * (2 * len(BENCHMARKS) + 1)]
    for method, label in METHODS.items():
        cells, seeds = "", set()
        for benchmark in BENCHMARKS:
            ours, n = cell(benchmark, method)
            seeds.add(n)
            paper = PAPER[benchmark].get(method)
            cells += f" {ours} | {paper['acc']:.2f} / {paper['bwt']:.2f} |" if paper else f" {ours} | - |"
        lines.append(f"| {label} |{cells} {' and '.join(map(str, sorted(seeds)))} |")
    return "\n".join(lines)


def cost() -> str:
    """Step, end_task and memory relative to plain SGD."""
    record = json.loads((ROOT / "performance/step.json").read_text())
    lines = [
        "| | training step | `end_task`, as a share of a 1000-step task of plain SGD | kept, MB |",
        "|---|---|---|---|",
    ]
    for name, row in record["result"].items():
        share = f"{100 * row['end_task_share_of_1000_sgd_steps']:.0f} %" if row["bytes_kept"] else "-"
        lines.append(f"| {name} | {row['step_ratio']:.2f} x | {share} | {row['bytes_kept'] / 1e6:.1f} |")
    where = record["environment"]
    lines.append(f"\n{where['processor']} ({where['capability']}), torch {where['torch']}, one thread.")
    return "\n".join(lines)


def alternatives() -> str:
    """Every run that departs from the protocol, beside the protocol's own."""
    folders = sorted(
        {p.parent.name for b in BENCHMARKS for p in (ROOT / "experiments/results" / b).glob("rgo*/*.json")}
    )
    lines = ["| setting | " + " | ".join(BENCHMARKS.values()) + " | seeds |", "|---|" + "---|" * (len(BENCHMARKS) + 1)]
    for folder in sorted(folders, key=lambda name: (name.split("+")[0], name)):
        method, *marks = folder.split("+")
        cells, seeds = zip(*(cell(benchmark, folder) for benchmark in BENCHMARKS))
        label = METHODS[method] + (f", {', '.join(f'`{m}`' for m in marks)}" if marks else ", as chosen")
        lines.append(f"| {label} | {' | '.join(cells)} | {' and '.join(map(str, sorted(set(seeds))))} |")
    return "\n".join(lines)


def cifar() -> str:
    """ACC / BWT on Split CIFAR-100 of what has been run so far."""
    lines = ["| ACC / BWT | here | seeds | paper |", "|---|---|---|---|"]
    rows = {**METHODS, "sgd+norm=None": "plain SGD, no BatchNorm", "sgd": "plain SGD, BatchNorm"}
    for folder, label in rows.items():
        ours, seeds = cell("split-cifar100", folder)
        paper = PAPER["split-cifar100"].get(folder)
        published = f"{paper['acc']:.2f} / {paper['bwt']:.2f}" if paper else "-"
        lines.append(f"| {label} | {ours} | {seeds} | {published} |")
    return "\n".join(lines)


TABLES = {
    "README.md": {"mnist": mnist, "cifar": cifar, "cost": cost},
    "docs/decisions.md": {"alternatives": alternatives},
}


def filled(name: str) -> str:
    """The document with its tables made anew."""
    text = (ROOT / name).read_text()
    for mark, table in TABLES[name].items():
        pattern = re.compile(rf"(<!-- table:{mark} -->\n).*?(<!-- /table:{mark} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"{name} must hold one pair of marks table:{mark}")
        before, after = pattern.findall(text)[0]
        text = pattern.sub((before + table() + "\n" + after).replace("\\", r"\\"), text)
    return text


if __name__ == "__main__":
    for document in TABLES:
        (ROOT / document).write_text(filled(document))
