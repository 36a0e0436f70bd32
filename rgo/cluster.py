"""Many runs on many machines: each is a task of Ray, which finds it a place and starts it again if that is lost.

The machines share the folder of the results, so a run goes on from its checkpoints wherever it is started again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .experiment import Experiment
from .suite import Outcome, View, one_run, title

RETRIES = 3  # times that a run is started again after its process or machine was lost
PATIENCE = 120  # seconds; a server of NFS 4 gives up the locks of a machine that is gone after 90
ANSWER = 30  # seconds that a cluster has to answer in

_ASK = """
import sys, ray
try:
    ray.init(sys.argv[1])
except ConnectionError:
    sys.exit(1)
except Exception as error:
    print(error)
    sys.exit(1)
"""


class _Home(NamedTuple):
    """The process that does a run."""

    node: str
    host: str
    process: int


def on_cluster(todo: list[Experiment], out: Path, address: str, gpus: float, options: dict[str, Any]) -> int:
    """Do the runs on the cluster at the address; returns how many failed."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=out.resolve(), prefix=".shared-") as token, _connected(address):
        machines = ray.nodes()
        for e in todo:  # Ray would wait for ever
            if lacking := _lacking(e, gpus, machines):
                raise ValueError(lacking)
        # The one process besides the runs is here: where this one is lost, nobody is left to report to.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        messages = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        task = ray.remote(num_gpus=gpus, max_retries=RETRIES)(_on_a_machine)
        with View(len(todo)) as view:
            tasks = {
                task.options(name=title(e), num_cpus=e.settings["threads"]).remote(
                    i, e, Path(token.name), messages.actor, options
                ): i
                for i, e in enumerate(todo)
            }
            try:
                done = _watch(todo, gpus, tasks, messages, view)
            finally:  # by Ctrl-C: a KeyboardInterrupt in each run at work
                for ref in tasks:
                    ray.cancel(ref)
                if tasks:
                    ray.wait(list(tasks), num_returns=len(tasks), timeout=10)
    for e in (unseen := _unseen(done, out)):
        view.warn(f"{title(e)}: done, but {e.path(out)} is not to be seen here: make --out a folder that all share")
    return view.failed + len(unseen)


def _unseen(done: list[Experiment], out: Path) -> list[Experiment]:
    """The runs whose results do not appear: a network file system may tell late that a file is there."""
    until = time.monotonic() + PATIENCE
    while (unseen := [e for e in done if not e.path(out).exists()]) and time.monotonic() < until:
        time.sleep(1)
    return unseen


def _watch(
    todo: list[Experiment], gpus: float, tasks: dict[ray.ObjectRef[Outcome], int], messages: Queue, view: View
) -> list[Experiment]:
    """Show how the runs go until all have ended; returns those that did not fail."""
    homes: dict[int, _Home] = {}  # of the runs at work
    finished = []
    while tasks:
        ended, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=0.5)
        machines = ray.nodes()
        alive = {node["NodeID"] for node in machines if node["Alive"]}
        for i in [i for i, home in homes.items() if home.node not in alive]:
            view.remove(todo[i])
            lacking = _lacking(todo[i], gpus, machines)
            then = f"it waits: {lacking}" if lacking else "another goes on with it"
            view.warn(f"{title(todo[i])}: lost with the machine {homes.pop(i).host}; {then}")
        at_work = set(tasks.values())
        for i, home, steps, line in messages.get_nowait_batch(messages.qsize()):
            if i not in at_work or home.node not in alive:
                continue  # it was said before the run ended, or its machine
            if homes.setdefault(i, home) != home:
                view.warn(f"{title(todo[i])}: lost with its process on {homes[i].host}; {home.host} goes on with it")
            homes[i] = home
            view.update(todo[i], steps, f"{line}  {home.host}")
        for ref in ended:
            i = tasks.pop(ref)
            homes.pop(i, None)
            outcome = _outcome(ref)
            view.end(todo[i], outcome)
            if not isinstance(outcome, str):
                finished.append(todo[i])
    return finished


def _on_a_machine(number: int, experiment: Experiment, token: Path, messages: Any, options: dict[str, Any]) -> Outcome:
    """What a machine of the cluster does."""
    out, host = token.parent, socket.gethostname()
    if not token.exists():
        return f"{host} does not see {out} as it is here: give --out a folder that all machines share"
    home = _Home(ray.get_runtime_context().get_node_id(), host, os.getpid())
    last = -1.0

    def report(steps: int, line: str) -> None:
        nonlocal last
        if time.monotonic() > last + 0.5:
            last = time.monotonic()
            sent = messages.put_nowait.remote((number, home, steps, line))
            if not steps:  # who has it is known before anything can happen to it
                # Not by ray.wait(), with which a task gives its CPU to the next one.
                with contextlib.suppress(TimeoutError):
                    sent.future().result(timeout=10)

    return one_run(experiment, out, options, report, PATIENCE)


def _outcome(ref: ray.ObjectRef[Outcome]) -> Outcome:
    try:
        return ray.get(ref)
    except ray.exceptions.WorkerCrashedError:
        return f"its process died, {1 + RETRIES} times"
    except ray.exceptions.RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}".strip()
    except ray.exceptions.RayError as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _lacking(experiment: Experiment, gpus: float, nodes: list[dict[str, Any]]) -> str:
    """Why none of the cluster's machines will ever do the run; empty where one can."""
    cpus = experiment.settings["threads"]
    machines = [(n["Resources"].get("CPU", 0), n["Resources"].get("GPU", 0)) for n in nodes if n["Alive"]]
    if any(cpus <= c and gpus <= g for c, g in machines):
        return ""
    have = ", ".join(f"{c:g} and {g:g}" for c, g in sorted(set(machines)))
    needs = f"{cpus} CPUs (threads) and {gpus:g} GPUs"
    return f"a run takes {needs} of one machine, and those of the cluster have {have}"


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    # Where nobody answers ray.init() asks for ever, deaf to Ctrl-C for most of it: another process asks first.
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK, address], capture_output=True, text=True, timeout=ANSWER)
        answers, why = not asked.returncode, asked.stdout.strip()
    except subprocess.TimeoutExpired:
        answers, why = False, ""
    if not answers:
        hint = "Give --ray HOST:PORT as `ray start --head` printed it, or auto on a machine of the cluster"
        raise ValueError(f"no Ray cluster answers at {address}. {why or hint}")
    data = os.environ.get("RGO_DATA")
    ray.init(
        address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"RGO_DATA": str(Path(data).expanduser().absolute())}} if data else None,
    )
    try:
        yield
    finally:
        ray.shutdown()
