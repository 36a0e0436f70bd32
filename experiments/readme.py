"""Fills the README's tables from committed results: `python experiments/readme.py` (a test compares them)."""

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
    runs = [run for run in runs if not run["changed"]]
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


def filled(text: str) -> str:
    """The README with its tables made anew."""
    for name, table in (("mnist", mnist), ("cost", cost)):
        marks = re.compile(rf"(<!-- table:{name} -->\n).*?(<!-- /table:{name} -->)", re.DOTALL)
        if len(marks.findall(text)) != 1:
            raise SystemExit(f"README.md must hold one pair of marks table:{name}")
        before, after = marks.findall(text)[0]
        text = marks.sub((before + table() + "\n" + after).replace("\\", r"\\"), text)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))
