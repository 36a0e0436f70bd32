"""What one could use instead of RGO, on the same tensors in one process: what it costs, and the ACC it buys.

    python performance/peers.py PEERS             prints two tables and writes performance/peers.json
    python performance/peers.py PEERS --tasks 5   the first five of the twenty tasks
    python performance/peers.py PEERS --out X     writes X instead

Permuted MNIST, the MLP of the paper (784-256-256-10), 1000 steps of ten samples a task, SGD with learning rate 0.1, one
thread. All start from the same weights and meet the same batches in the same order. Each task is trained by one after
the other, so `ratio` compares times of the same minute: the median over the tasks of (steps and end of task) by plain
SGD's. The other implementations are not part of this repository and not required by it; where one is missing, its rows
are left out and the JSON says why. All of them, in an environment of their own:

    pip install -e ".[lab]" torch==2.13.0 avalanche-lib==0.6.0 tensorflow-cpu==2.21.0
    git clone https://github.com/sahagobinda/GPM PEERS/GPM
    git clone https://github.com/facebookresearch/agem PEERS/agem

The first is the library Avalanche; the others are what the authors of GPM and of A-GEM published, the latter with EWC
too. They are run as they are, the authors' loop of A-GEM (TensorFlow 1) without a clock.

`agreement` says how far two implementations end apart when what each draws at random (memory, replayed samples, labels
of a Fisher information) is the same too: |theirs - ours| / |theirs - start| over all weights, after ten tasks of 30
steps. They are so short because the authors of GPM look at 300 samples: with no more than that, ours looks at the same.
"""

import argparse
import importlib
import importlib.metadata
import io
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rgo import results
from rgo.benchmarks import Task, order, permuted_mnist
from rgo.experiment import experiment
from rgo.methods import make
from rgo.models import mlp

SEED, BATCH, STEPS, LR = 0, 10, 1000, 0.1
SHORT = 30  # steps of each of ten tasks, for `agreement`
BY_THE_BOOK = "ewc, fisher=sample"
# Their strengths: the best of 0.3, 1, 3, 10, 30 and 100, and for Avalanche 300, by ACC after these very tasks.
OURS: dict[str, dict[str, Any]] = {name: {} for name in ("sgd", "ewc", "a-gem", "er-ring", "gpm", "rgo-2", "rgo")}
OURS[BY_THE_BOOK] = {"fisher": "sample", "strength": 1.0}
AVALANCHE: dict[str, dict[str, Any]] = {  # what comes closest to our protocol
    "sgd": {},
    BY_THE_BOOK: {"ewc_lambda": 3.0},
    # It draws sample_size // k of each of k experiences: with our 10 that is none from the eleventh on, and it stops.
    "a-gem": {"patterns_per_exp": 10, "sample_size": 20},
    "er-ring": {"mem_size": 200},
}
AUTHORS = {"a-gem": "A-GEM", "ewc": "EWC"}  # as fc_permute_mnist.py calls them

Data = list[tuple[Task, Tensor, Tensor]]
"""tasks, with their training samples in the order in which they are met"""


class Contender:
    """One way to learn tasks; `learn` returns the seconds of the steps, and of what follows the last one."""

    model: nn.Module

    def learn(self, task: Task, x: Tensor, y: Tensor) -> tuple[float, float]:
        raise NotImplementedError

    def predict(self, x: Tensor, task: Task) -> Tensor:
        return self.model(x)


class Ours(Contender):
    def __init__(self, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
        self.model = mlp(seed=SEED).to(dtype)
        chosen = experiment("permuted-mnist", name.partition(",")[0], SEED, **changes)
        self.method: Any = make(chosen, self.model, lambda k: self.model)

    def learn(self, task: Task, x: Tensor, y: Tensor) -> tuple[float, float]:
        start = time.perf_counter()
        self.begin(task, x)
        self.steps(task, x, y)
        middle = time.perf_counter()
        self.end(task, x, y)
        return middle - start, time.perf_counter() - middle

    def begin(self, task: Task, x: Tensor) -> None:
        self.method.begin_task(task, len(x) // BATCH, SEED)
        self.model.train()

    def steps(self, task: Task, x: Tensor, y: Tensor) -> None:
        for part in zip(x.split(BATCH), y.split(BATCH)):
            self.method.observe(*part, task)

    def end(self, task: Task, x: Tensor, y: Tensor) -> None:
        self.model.eval()
        self.method.end_task(task, zip(x.split(500), y.split(500)))

    def predict(self, x: Tensor, task: Task) -> Tensor:
        return self.method.predict(x, task)


class OursAnyClass(Ours):
    """ER-Ring, but with ten samples of each task whatever their classes, as Avalanche keeps them."""

    draw = random.Random(SEED)

    def end(self, task: Task, x: Tensor, y: Tensor) -> None:
        super().end(task, x, y)
        ring, kept = self.method.ring, self.draw.sample(range(len(x)), 10)
        ring.x[-10:], ring.y[-10:] = x[kept], y[kept]


class Avalanche(Contender):
    """A strategy of the library Avalanche on data in memory, without its metrics and loggers."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        # Its torchvision may be made for another build of torch. Only operators are missing then; none is used here.
        sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
        self.benchmarks = importlib.import_module("avalanche.benchmarks")
        training = importlib.import_module("avalanche.training")
        plugins, stopwatch = training.plugins, training.plugins.SupervisedPlugin()
        stopwatch.after_training_epoch = lambda strategy, **_: setattr(self, "middle", time.perf_counter())
        self.model, arguments, self.shuffle = mlp(seed=SEED).to(dtype), AVALANCHE[name], name == "er-ring"
        kind = {BY_THE_BOOK: training.EWC, "a-gem": training.AGEM}.get(name, training.Naive)
        own = []
        if name == "er-ring":  # the same room for each of twenty experiences from the first on, as in a ring
            kept = training.storage_policy.ExperienceBalancedBuffer(200, adaptive_size=False, num_experiences=20)
            own, arguments = [plugins.ReplayPlugin(**arguments, storage_policy=kept)], {}
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.strategy = kind(
            model=self.model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=BATCH,
            plugins=[stopwatch, *own],
            evaluator=None,
            **arguments,
        )
        self.plugin = self.strategy.plugins[1]  # the method, where it is one

    def learn(self, task: Task, x: Tensor, y: Tensor) -> tuple[float, float]:
        data = self.benchmarks.utils.AvalancheDataset(TensorDataset(x, y))
        (experience,) = self.benchmarks.benchmark_from_datasets(train=[data]).train_stream
        with warnings.catch_warnings(record=True):  # what its next version will change is said whatever the filter
            start = time.perf_counter()
            self.strategy.train(experience, shuffle=self.shuffle)  # replay shuffles the task and its memory, or neither
            return self.middle - start, time.perf_counter() - self.middle


class AuthorsGPM(Contender):
    """The functions of main_pmnist.py, in the order in which its `main` calls them."""

    def __init__(self, peers: Path, dtype: torch.dtype = torch.float32) -> None:
        importlib.import_module("threadpoolctl").threadpool_limits(1)  # numpy has threads of its own
        with foreign(peers / "GPM", "torchvision", "matplotlib", "matplotlib.pyplot", "seaborn", "pandas"):
            self.theirs = importlib.import_module("main_pmnist")
        self.model = self.theirs.MLPNet(n_hidden=256).to(dtype)
        with torch.no_grad():
            for p, start in zip(self.model.parameters(), weights(mlp(seed=SEED))):
                p.copy_(start)
        self.bases: list[Any] = []
        np.random.seed(SEED)

    def learn(self, task: Task, x: Tensor, y: Tensor) -> tuple[float, float]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        arguments = (SimpleNamespace(batch_size_train=BATCH), self.model, "cpu", x, y, optimizer, nn.CrossEntropyLoss())
        start = time.perf_counter()
        with in_order():
            if self.bases:
                self.theirs.train_projected(*arguments, [torch.from_numpy(M @ M.T) for M in self.bases])
            else:
                self.theirs.train(*arguments)
        middle = time.perf_counter()
        with redirect_stdout(io.StringIO()):
            inputs = self.theirs.get_representation_matrix(self.model, "cpu", x, y)
            self.bases = self.theirs.update_GPM(self.model, inputs, np.array([0.95, 0.99, 0.99]), self.bases)
        return middle - start, time.perf_counter() - middle


def authors_agem(
    peers: Path, name: str, data: Data, draws: Iterator[Any] | None = None
) -> tuple[list[list[float]], list[Tensor]]:
    """The loop of fc_permute_mnist.py: row k the accuracies after task k, and the weights after the last task.

    `draws`: which samples of the memory each step replays while there are more than ten; by default its own choice.
    """
    tf = importlib.import_module("tensorflow.compat.v1")
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    unused = ("utils.data_utils", "utils.vis_utils", "IPython", "matplotlib", "matplotlib.pyplot")
    with foreign(peers / "agem", *unused), patch.dict(sys.modules, tensorflow=tf):
        theirs = importlib.import_module("fc_permute_mnist")

    class InTurn(tf.Session):
        """Done at once, the squares of EWC's gradients are sometimes of weights that the same step has changed."""

        def run(self, fetches: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(fetches, list):
                return [super(InTurn, self).run(one, *arguments, **options) for one in fetches]
            return super().run(fetches, *arguments, **options)

    def arrays(x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"images": x.numpy(), "labels": nn.functional.one_hot(y, 10).float().numpy()}

    # Its loop returns to the first batch one batch before the end: given that one twice, it meets each batch once.
    datasets = [
        {"train": arrays(torch.cat([x, x[:BATCH]]), torch.cat([y, y[:BATCH]])), "test": arrays(*task.test)}
        for task, x, y in data
    ]
    samples = len(data[0][1])
    arguments = SimpleNamespace(
        **{"num_runs": 1, "random_seed": SEED, "batch_size": BATCH, "mem_size": 1, "eps_mem_batch": 10},
        **{"train_iters": samples // BATCH, "examples_per_task": samples + BATCH},
        **{"train_single_epoch": False, "cross_validate_mode": False, "online_cross_val": False},
    )
    with tf.Graph().as_default():
        x, y = tf.placeholder(tf.float32, [None, 784]), tf.placeholder(tf.float32, [None, 10])
        strength, every, decay = 10.0, 10, 0.9  # of EWC
        optimizer = tf.train.GradientDescentOptimizer(LR)
        model = theirs.Model(x, y, len(data), optimizer, name, strength, every, decay, network_arch="FC-S")
        remember_weights = model.init_updates  # called before the first task, and after each

        def start_as_ours(session: Any) -> None:
            for variable, p in zip(model.trainable_vars, mlp(seed=SEED).parameters()):
                variable.load(p.detach().numpy().T, session)
            model.init_updates = remember_weights
            remember_weights(session)

        model.init_updates = start_as_ours
        one = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        choice = np.random.choice if draws is None else lambda *_, **__: next(draws)
        with (
            InTurn(config=one) as session,
            patch.object(theirs, "construct_permute_mnist", lambda tasks: datasets),
            patch("numpy.random.choice", choice),
            in_order(),
            redirect_stdout(io.StringIO()),
        ):
            (R,) = theirs.train_task_sequence(model, session, arguments)
            end = session.run(model.trainable_vars)
    return [[100 * float(a) for a in row[: k + 1]] for k, row in enumerate(R)], [torch.from_numpy(w.T) for w in end]


@contextmanager
def foreign(folder: Path, *unused: str) -> Iterator[None]:
    """Import from a folder that is no package, with stand-ins for modules that it imports and does not need here."""
    stand_ins = {name: MagicMock() for name in unused}
    with patch.object(sys, "path", [str(folder), *sys.path]), patch.dict(sys.modules, stand_ins):
        yield


@contextmanager
def in_order() -> Iterator[None]:
    """Samples are met in the order in which they are given: the authors' code shuffles with numpy."""
    with patch("numpy.random.shuffle", lambda rows: None):
        yield


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters() if p.dim() > 1]


# ---- agreement ----------------------------------------------------------------------------------------------


def apart(theirs: Iterable[Tensor], ours: Iterable[Tensor], start: Iterable[Tensor]) -> float:
    a, b, c = (torch.cat([p.detach().double().flatten() for p in tensors]) for tensors in (theirs, ours, start))
    return float(f"{(a - b).norm() / (a - c).norm():.1e}")


def gpm_and_its_authors(peers: Path, data: Data) -> float:
    ours, theirs = Ours("gpm", torch.float64), AuthorsGPM(peers, torch.float64)
    for task, x, y in data:
        ours.learn(task, x.double(), y)
        theirs.learn(task, x.double(), y)
        assert [M.shape[-1] for M in ours.method.bases.values()] == [M.shape[-1] for M in theirs.bases], "other ranks"
    return apart(weights(theirs.model), weights(ours.model), weights(mlp(seed=SEED)))


def agem_and_its_authors(peers: Path, data: Data) -> float:
    ours, draws = Ours("a-gem"), list[Any]()
    ring = ours.method.ring
    for task, x, y in data:
        ours.begin(task, x)
        draws += list(ring.draws.numpy()) if len(ring) > 10 else []
        ours.steps(task, x, y)
        ours.end(task, x, y)
        last = [int((y == label).nonzero()[-1]) for label in range(10)]  # what is left in theirs
        ring.x[-10:], ring.y[-10:] = x[last], y[last]
    _, end = authors_agem(peers, "A-GEM", data, iter(draws))
    return apart(end, ours.model.parameters(), mlp(seed=SEED).parameters())


def agem_and_avalanche(peers: Path, data: Data) -> float:
    ours, theirs = Ours("a-gem", torch.float64), Avalanche("a-gem", torch.float64)
    ring = ours.method.ring
    for task, x, y in data:
        ours.begin(task, x)
        replayed = [(ring.x[drawn], ring.y[drawn], 0) for drawn in ring.draws] if len(ring) else []
        ours.steps(task, x.double(), y)
        ours.end(task, x.double(), y)
        theirs.plugin.buffer_dliter = iter(replayed)
        theirs.learn(task, x.double(), y)
    return apart(theirs.model.parameters(), ours.model.parameters(), mlp(seed=SEED).parameters())


def ewc_and_its_table(peers: Path, data: Data) -> float:
    ours = Ours("ewc")
    for task, x, y in data:
        ours.begin(task, x)
        ours.method.counter.fill_(1)  # theirs averages before it adds a step's squares, so one step earlier than ours
        ours.steps(task, x, y)
        ours.end(task, x, y)
    _, end = authors_agem(peers, "EWC", data)
    return apart(end, ours.model.parameters(), mlp(seed=SEED).parameters())


def ewc_and_avalanche(peers: Path, data: Data) -> float:
    """Theirs has no factor 1/2, and takes true labels, batch by batch: here our labels, one by one."""
    theirs = Avalanche(BY_THE_BOOK, torch.float64)
    ours = Ours(BY_THE_BOOK, torch.float64, fisher="sample", strength=2 * theirs.plugin.ewc_lambda)
    compute, multinomial, labels = theirs.plugin.compute_importances, torch.multinomial, list[Tensor]()

    def drawn(*arguments: Any, **options: Any) -> Tensor:
        labels.append(multinomial(*arguments, **options))
        return labels[-1]

    for task, x, y in data:
        labels.clear()
        with patch.object(torch, "multinomial", drawn):
            ours.learn(task, x.double(), y)
        seen = TensorDataset(x.double(), torch.cat(labels).view(-1))
        theirs.plugin.compute_importances = lambda m, loss, sgd, *_, **__: compute(m, loss, sgd, seen, "cpu", 1)  # noqa: B023
        torch.set_default_dtype(torch.float64)  # that of the importances and anchors it keeps
        theirs.learn(task, x.double(), y)
        torch.set_default_dtype(torch.float32)
    return apart(theirs.model.parameters(), ours.model.parameters(), mlp(seed=SEED).parameters())


AGREEMENT: dict[tuple[str, str, str], Callable[[Path, Data], float]] = {
    ("gpm", "authors", "float64"): gpm_and_its_authors,
    ("a-gem", "authors", "float32"): agem_and_its_authors,
    ("a-gem", "avalanche", "float64"): agem_and_avalanche,
    ("ewc", "authors", "float32"): ewc_and_its_table,
    (BY_THE_BOOK, "avalanche", "float64"): ewc_and_avalanche,
}


# ---- the run ------------------------------------------------------------------------------------------------


def ordered(tasks: int, steps: int) -> Data:
    found = []
    for task in permuted_mnist(tasks=tasks, seed=SEED):
        rows = order(task.id, len(task.train[0]), BATCH, steps, SEED).flatten()
        found.append((task, task.train[0][rows], task.train[1][rows]))
    return found


@torch.no_grad()
def accuracy(contender: Contender, task: Task) -> float:
    x, y = task.test
    return 100 * float((contender.predict(x, task).argmax(1) == y).double().mean())


def row(name: str, by: str, learned: list[float], final: list[float], **seconds: Any) -> dict[str, Any]:
    changes = [after - before for before, after in zip(learned[:-1], final)]
    acc, bwt = statistics.fmean(final), statistics.fmean(changes) if changes else 0.0
    return {"method": name, "by": by, "acc": round(acc, 2), "bwt": round(bwt, 2), **seconds}


def version(peers: Path, name: str) -> str:
    """Of a package, or the commit of a clone."""
    if (peers / name).is_dir():
        git = ["git", "-C", str(peers / name), "rev-parse", "HEAD"]
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "no clone"
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path, nargs="?", default=Path("peers"), help="the folder with the two clones")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.simplefilter("ignore")  # the others'
    torch.set_num_threads(1)
    random.seed(SEED)
    torch.manual_seed(SEED)  # Avalanche's memories; the others have generators of their own
    left_out: dict[str, str] = {}

    def attempt(name: str, by: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except ImportError as error:
            left_out[f"{name} by {by}"] = f"{type(error).__name__}: {error}"
            return None

    makers: dict[tuple[str, str], Callable[[], Contender]] = {
        **{(name, "rgo"): lambda name=name: Ours(name, **OURS[name]) for name in OURS},
        **{(name, "avalanche"): lambda name=name: Avalanche(name) for name in AVALANCHE},
        ("gpm", "authors"): lambda: AuthorsGPM(given.peers),
        ("er-ring", "rgo, any class"): lambda: OursAnyClass("er-ring"),
    }
    made = {key: attempt(*key, maker) for key, maker in makers.items()}
    contenders: dict[tuple[str, str], Contender] = {key: one for key, one in made.items() if one is not None}
    learned: dict[tuple[str, str], list[float]] = {key: [] for key in contenders}
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in contenders}
    agreement, rows = [], []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        total = given.tasks * (len(contenders) + len(AUTHORS)) + 5 * len(AGREEMENT)
        bar = progress.add_task("tasks of MNIST", total=total)
        data = ordered(given.tasks, STEPS)
        for task, x, y in data:
            for key, contender in contenders.items():
                progress.update(bar, description=f"task {task.id}: {key[0]} by {key[1]}")
                seconds[key].append(contender.learn(task, x, y))
                learned[key].append(accuracy(contender, task))
                progress.advance(bar)
        sgd = [sum(pair) for pair in seconds["sgd", "rgo"]]
        for key, contender in contenders.items():
            steps, ends = zip(*seconds[key])
            times = {
                "train_seconds": round(sum(steps), 1),
                "end_task_seconds": round(sum(ends), 1),
                "ratio": round(statistics.median(sum(pair) / one for pair, one in zip(seconds[key], sgd)), 2),
            }
            rows.append(row(*key, learned[key], [accuracy(contender, task) for task, _, _ in data], **times))
        for name, theirs in AUTHORS.items():
            progress.update(bar, description=f"{name} by authors")
            done = attempt(name, "authors", lambda theirs=theirs: authors_agem(given.peers, theirs, data))
            if done is not None:
                rows.append(row(name, "authors", [r[-1] for r in done[0]], done[0][-1]))
            progress.advance(bar, given.tasks)
        short = ordered(10, SHORT)
        for (name, by, dtype), compare in AGREEMENT.items():
            progress.update(bar, description=f"agreement: {name} by {by}")
            distance = attempt(name, by, lambda compare=compare: compare(given.peers, short))
            if distance is not None:
                agreement.append({"method": name, "by": by, "dtype": dtype, "apart": distance})
            progress.advance(bar, 5)
    record = {
        "model": "mlp 784-256-256-10, batch 10, torch initialisation",
        "tasks": given.tasks,
        "steps": STEPS,
        "seed": SEED,
        "settings": {"rgo": OURS, "avalanche": AVALANCHE},
        "environment": results.environment(1, torch.device("cpu")),
        "peers": {name: version(given.peers, name) for name in ("avalanche-lib", "GPM", "agem", "tensorflow-cpu")},
        "commit": results.commit(),
        "rows": rows,
        "agreement": agreement,
        "left_out": left_out,
    }
    results.write(given.out, record)
    for line in (*rows, *agreement):
        print("  ".join(f"{key} {value}" for key, value in line.items()))
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")


if __name__ == "__main__":
    main()
