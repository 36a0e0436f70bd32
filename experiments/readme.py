"""Fills the documents' tables from committed results: `python experiments/readme.py` (a test compares them)."""

import json
import re
import statistics
import tomllib
from pathlib import Path
from typing import Any

from rgo import results

ROOT = Path(__file__).parents[1]
PAPER = tomllib.loads((ROOT / "experiments/table1.toml").read_text())["paper"]
METHODS = {
    "rgo": "RGO",
    "rgo-2": "RGO without FEL",
    "fel": "FEL alone",
    "los": "LOS",
    "gpm": "GPM",
    "er-ring": "ER-Ring (replay)",
    "a-gem": "A-GEM (replay)",
    "ewc": "EWC",
    "sgd": "plain SGD",
    "stl": "a model per task (STL)",
}
NETWORKS = {"mlp": "MLP", "lenet5": "LeNet-5", "alexnet6": "AlexNet-6", "resnet18": "ResNet-18"}
MNIST = {"permuted-mnist": "Permuted MNIST", "rotated-mnist": "Rotated MNIST"}

Rows = dict[tuple[str, str, str], list[dict[str, Any]]]


def rows() -> Rows:
    """The committed runs by (benchmark, method, what departs from the protocol)."""
    found: Rows = {}
    for row in results.table(results.load(ROOT / "experiments/results")):
        changed = ", ".join(f"{k}={v}" for k, v in sorted(row["changed"].items()))
        found.setdefault((row["benchmark"], row["method"], changed), []).append(row)
    return found


def cell(runs: list[dict[str, Any]]) -> str:
    """ACC / BWT over seeds."""
    return " / ".join(results.spread([run[m] for run in runs]) for m in ("acc", "bwt")) if runs else "-"


def published(benchmark: str, method: str) -> str:
    """The paper's ACC / BWT."""
    value = PAPER[benchmark].get(method)
    return f"{value['acc']:.2f} / {value['bwt']:.2f}" if value else "-"


def seeds(*groups: list[dict[str, Any]]) -> str:
    return " and ".join(map(str, sorted({len(group) for group in groups})))


def mnist(found: Rows) -> str:
    """Every method on both MNIST benchmarks, beside the paper's figures."""
    head = "".join(f" {name} | paper |" for name in MNIST.values())
    lines = [f"| ACC / BWT |{head} seeds |", "|---|" + "---|" * 5]
    for method, label in METHODS.items():
        groups = [found.get((benchmark, method, ""), []) for benchmark in MNIST]
        cells = "".join(f" {cell(group)} | {published(b, method)} |" for b, group in zip(MNIST, groups))
        lines.append(f"| {label} |{cells} {seeds(*groups)} |")
    return "\n".join(lines)


def cifar(found: Rows) -> str:
    """Split CIFAR-100: what has been run so far."""
    lines = ["| ACC / BWT | here | seeds | paper |", "|---|---|---|---|"]
    here = [key for key in found if key[0] == "split-cifar100" and "model=" not in key[2]]
    for benchmark, method, changed in sorted(here, key=lambda key: list(METHODS).index(key[1])):
        group = found[benchmark, method, changed]
        norm = {("sgd", ""): ", BatchNorm", ("sgd", "norm=None"): ", no BatchNorm"}.get((method, changed), "")
        paper = "-" if changed else published(benchmark, method)
        lines.append(f"| {METHODS[method]}{norm} | {cell(group)} | {len(group)} | {paper} |")
    return "\n".join(lines)


def networks(found: Rows) -> str:
    """Split CIFAR-100 with the networks of the paper's Table 3, 20 epochs a task."""
    printed = tomllib.loads((ROOT / "experiments/table3.toml").read_text())["paper"]
    lines = [
        "| network | method | ACC / BWT | learned / train ACC | seeds | paper: ACC / BWT, train |",
        "|---|---" * 3 + "|",
    ]
    for model, methods in printed.items():
        for method, paper in methods.items():
            group = found.get(("split-cifar100", method, f"model={model}, steps=5000"), [])
            learned = " / ".join(results.spread([run[m] for run in group]) for m in ("learning", "train_acc"))
            row = f"| {NETWORKS[model]} | {METHODS[method]} | {cell(group)} | {learned} | {len(group)}"
            lines.append(f"{row} | {paper['acc']:.2f} / {paper['bwt']:.2f}, {paper['train']:.2f} |")
    return "\n".join(lines)


def alternatives(found: Rows) -> str:
    """RGO's runs on MNIST that depart from the protocol, beside the protocol's own."""
    lines = ["| setting | " + " | ".join(MNIST.values()) + " | seeds |", "|---|" + "---|" * 3]
    for method in ("rgo", "rgo-2"):
        for changed in sorted({c for b, m, c in found if b in MNIST and m == method}):
            groups = [found.get((benchmark, method, changed), []) for benchmark in MNIST]
            what = f"`{changed}`" if changed else "as chosen"
            lines.append(f"| {METHODS[method]}, {what} | {' | '.join(map(cell, groups))} | {seeds(*groups)} |")
    return "\n".join(lines)


def cost(_: Rows) -> str:
    """Step, end_task and memory relative to plain SGD, network by network."""
    record = json.loads((ROOT / "performance/step.json").read_text())
    lines = [
        "| | step after tasks | of them without FEL | with P in float32 | `end_task` | P and H, MB |",
        "|---|---|---|---|---|---|",
    ]
    for network, measured in record["networks"].items():
        states = [(name.removeprefix("after "), row) for name, row in measured.items() if name.startswith("after ")]
        last = states[-1][1]["RGO"]

        def ratios(configuration: str, states: Any = states) -> str:
            return " / ".join(f"{row[configuration]['step_ratio']:.2f}" for _, row in states if configuration in row)

        share = " / ".join(
            f"{100 * r['RGO']['end_task_share']:.0f} %" for _, r in states if "end_task_share" in r["RGO"]
        )
        steps = measured["setting"]["task"]
        lines.append(
            f"| {NETWORKS[network]} | {ratios('RGO')} ({' / '.join(name for name, _ in states)}) "
            f"| {ratios('RGO without FEL')} | {ratios('RGO, P in float32')} "
            f"| {f'{share} of {steps} steps' if share else '-'} | {(last['bytes_P'] + last['bytes_H']) / 1e6:.0f} |"
        )
    where = record["environment"]
    lines.append(f"\n{where['processor']} ({where['capability']}), torch {where['torch']}, one thread.")
    return "\n".join(lines)


def loop(_: Rows) -> str:
    """Steps a second of loops by hand and of the laboratory's, which on CUDA is captured; what several jobs gain."""
    lines = ["| | loop by hand, steps a second | `rgo run` | ratio |", "|---|---|---|---|"]
    below, where = [], []
    for path in sorted((ROOT / "performance").glob("loop*.json"), reverse=True):
        record = json.loads(path.read_text())
        e = record["environment"]
        on = "CPU" if e["device"] == "cpu" else e["device"].removeprefix("NVIDIA ")
        where.append(f"{on}: {e['processor']}, torch {e['torch']}, one thread.")
        for row in record.get("loop", []) + record.get("step", []):
            what = f"{METHODS[row['method']]}, {NETWORKS[row['model']]}, {on}"
            lines.append(f"| {what} | {row['by_hand']} | {row['run']} | {row['ratio']:.2f} |")
        for model, jobs in dict.fromkeys((row["model"], row["jobs"]) for row in record.get("jobs", [])):
            gain = statistics.median(row["throughput"] for row in record["jobs"] if row["model"] == model)
            below.append(f"- `--jobs {jobs}`, {NETWORKS[model]}, {on}: {gain:.2f} times the throughput of one job")
        if "permuted" in record:
            first, *others = (f"{row['seconds']:.1f} s" for row in record["permuted"])
            below.append(
                f"- 20 tasks of Permuted MNIST with RGO, {on}, all included: {' and '.join(others)}; "
                f"{first} in a process that has to start CUDA"
            )
        if "agreement" in record:
            rows = [r for r in record["agreement"] if r["model"] == "mlp"]  # made-up pictures are all learned to 100 %
            captured, eager = (max(r[key] for r in rows) for key in ("differ", "eager_twice_differ"))
            said = f"- accuracies on MNIST of {', '.join(METHODS[r['method']] for r in rows)}, captured against eager: "
            below.append(f"{said}at most {captured} points apart; eager twice: {eager}")
    return "\n".join([*lines, "", *below, "", *where])


def peers(_: Rows) -> str:
    """Methods of the laboratory and other implementations: seconds, and the accuracy that they buy."""
    record = json.loads((ROOT / "performance/peers.json").read_text())
    by = {"rgo": "", "avalanche": f", Avalanche {record['peers']['avalanche-lib']}", "authors": ", its authors' code"}
    lines = ["| | seconds | of them at ends of tasks | plain SGD = 1 | ACC / BWT |", "|---|---|---|---|---|"]
    for row in sorted((r for r in record["rows"] if "ratio" in r and r["by"] in by), key=lambda r: r["ratio"]):
        seconds = f"{row['train_seconds'] + row['end_task_seconds']:.0f} | {row['end_task_seconds']:.1f}"
        method, _, variant = row["method"].partition(", ")
        name = f"{METHODS[method]}{f', `{variant}`' if variant else ''}{by[row['by']]}"
        lines.append(f"| {name} | {seconds} | {row['ratio']:.2f} | {row['acc']:.2f} / {row['bwt']:.2f} |")
    where = record["environment"]
    lines.append(f"\n{where['processor']} ({where['capability']}), torch {where['torch']}, one thread.")
    return "\n".join(lines)


def checked(_: Rows) -> str:
    """The same methods by others on the same tensors, and how far apart the two end under the same draws."""
    record = json.loads((ROOT / "performance/peers.json").read_text())
    result = {(row["method"], row["by"]): f"{row['acc']:.2f} / {row['bwt']:.2f}" for row in record["rows"]}
    apart = {(row["method"], row["by"]): row for row in record["agreement"]}
    lines = ["| | by | ACC / BWT here | theirs | apart under the same draws |", "|---|---|---|---|---|"]
    for method, by in sorted(result):
        if by != "rgo":
            authors = "A-GEM's authors" if method == "ewc" else "its authors"
            whose = {"avalanche": "Avalanche", "authors": authors, "rgo, any class": "ours, Avalanche's memory"}[by]
            same = apart.get((method, by))
            distance = f"{same['apart']:.0e}, {same['dtype']}".replace("0e+00", "0") if same else "-"
            lines.append(f"| `{method}` | {whose} | {result[method, 'rgo']} | {result[method, by]} | {distance} |")
    return "\n".join(lines)


TABLES = {
    "README.md": {"mnist": mnist, "cifar": cifar, "cost": cost, "peers": peers},
    "docs/methods.md": {"checked": checked},
    "docs/decisions.md": {"alternatives": alternatives, "networks": networks},
    "docs/protocol.md": {"loop": loop},
}


def filled(name: str) -> str:
    """The document with its tables made anew."""
    text, found = (ROOT / name).read_text(), rows()
    for mark, table in TABLES[name].items():
        pattern = re.compile(rf"(<!-- table:{mark} -->\n).*?(<!-- /table:{mark} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"{name} must hold one pair of marks table:{mark}")
        before, after = pattern.findall(text)[0]
        text = pattern.sub((before + table(found) + "\n" + after).replace("\\", r"\\"), text)
    return text


if __name__ == "__main__":
    for document in TABLES:
        (ROOT / document).write_text(filled(document))
