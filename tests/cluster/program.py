"""A query of five stateful operators, on one machine or on a cluster, with faults on the way.

Usage: python -m cluster.program INPUT WORK PLAN. PLAN is JSON:
{"nodes": 3, "instances": 2, "backup": "files", "seconds": 0.5, "groups": [1, 4, 1],
"acts": {"5": ["kill 0", "scale users 3"]}}. Files are given to the stream in groups, a group once
everything before it is committed; without ``groups`` one by one. What is under a number is done
when the file with that number was committed; with ``~`` before it in a thread of its own, while
batches run. Nodes are counted among those in use:

- ``kill N ...`` nodes, ``kill all``, ``kill-idle N`` of the others; ``executor N``, ``agent N``,
  ``both N``, the Python ``worker N``; ``everything`` with the driver (once: WORK/killed says so);
- ``hang N SECONDS`` of an executor, ``hang-agent N SECONDS``; ``cut N M SECONDS`` between two
  nodes; ``fill SECONDS`` of the disk WORK/disk; ``damage N``: a node is killed, and then
  the files of the newest checkpoint are damaged;
- ``add`` a node and wait for it, ``start`` one, ``retire`` an idle executor, ``wait N`` for N;
- ``kill-holders OPERATOR SEED WHEN``: the node of a slice of an operator, and two others that have
  fragments of its state, at once: ``now``, or inside a ``batch``, a ``checkpoint``, a ``scale``, or
  a ``recovery`` (the two others while the slice is recovered);
- ``scale OPERATOR N``, ``rebalance``, ``checkpoint``, ``merge`` (wait for one), ``protected``
  (wait until all slices have a backup at another node).

Results are in WORK/out and WORK/state, scales and what was seen of them in WORK/scales.

``chain`` is how many files of changes a checkpoint has before they are merged, ``slices`` how many
slices an instance has before its smallest are. What was done to tables is in WORK/upkeep, a line
for each batch. Without nodes it runs on this machine with its state in WORK/memory.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from pyspark.sql import functions as F

import anabranch as ab
from anabranch.cluster import LocalCluster, processes
from anabranch.coordinator import assembly
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import Ping
from anabranch.protocols import coverage
from anabranch.protocols.model import serving
from anabranch.protocols.query import Owner, Query
from anabranch.queries.running_query import RunningQuery
from cluster import faults

FRUGAL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""For processes that do not live long enough for an optimising compiler to be worth its while."""
OPERATORS = ("users", "cities", "sizes", "once", "windows")
SCHEMA = "at timestamp, user string, city int, fare double, cents bigint, ride string"
DELAY, TTL, WINDOW = 2, 4, 3
"""Seconds of event time: of the watermark, of a ride's id, of a window."""
MOMENTS: dict[str, Callable[[Query], bool]] = {
    "batch": lambda query: query.running,
    "checkpoint": lambda query: any(
        waiting.owner is Owner.CHECKPOINT for waiting in query.outstanding.values()
    ),
    "scale": lambda query: any(move.transfers for move in query.moves.values()),
}
"""Moments of a query at which nodes are killed."""


def build(spark, work: Path, *, ordered: bool, files: int) -> ab.Query:
    """``ordered``: with results that depend on the order of rows; ``files`` at most in a batch."""
    rides = ab.stream(
        spark.readStream.schema(SCHEMA)
        .option("maxFilesPerTrigger", files)
        .parquet(str(work / "feed"))
    )
    per_user = rides.key_by("user").aggregate(
        name="users",
        n=ab.count(),
        # Sums of floating-point numbers depend on the order as well.
        spent=ab.sum("fare" if ordered else "cents"),
        city=ab.last("city") if ordered else ab.max("city"),
        most=ab.max("fare"),
    )
    per_city = (
        per_user.transform(lambda df: df.where(F.col("n") % 3 != 0))
        .key_by("city")
        .aggregate(
            name="cities",
            updates=ab.count(),
            top=ab.max("most"),
            # Over other instances rows come in another order: then it must not count.
            last=ab.last("user") if ordered else ab.max("n"),
        )
    )
    # Straight from one operator to the next, so these rows are packed and those before are not.
    per_size = per_city.key_by("updates").aggregate(
        name="sizes", n=ab.count(), highest=ab.max("top")
    )
    delay = f"{DELAY} seconds"
    once = (
        rides.transform(lambda df: df.select("ride", "at", "user", "cents"))
        .key_by("ride")
        .deduplicate(name="once", ttl=f"{TTL} seconds", on="at", watermark=delay)
    )
    windows = (
        once.key_by("user")
        .window(ab.tumbling(f"{WINDOW} seconds", on="at"), watermark=delay)
        .aggregate(name="windows", n=ab.count(), cents=ab.sum("cents"))
    )
    sinks = {"users": per_user, "sizes": per_size, "once": once, "windows": windows}
    return ab.query(*(each.to_parquet(work / "out" / name) for name, each in sinks.items()))


class Acts:
    def __init__(self, cluster: LocalCluster | None, query: RunningQuery, work: Path) -> None:
        self.cluster, self.query, self.work = cluster, query, work
        self.threads: list[threading.Thread] = []
        self.failures: list[str] = []
        self._noted = -1

    def do(self, act: str) -> None:
        if act.startswith("~"):
            thread = threading.Thread(target=self._safely, args=(act[1:],))
            thread.start()
            self.threads.append(thread)
        else:
            self._safely(act)

    def note_upkeep(self) -> None:
        """Write down what was done to tables before the batches since the last call."""
        with (self.work / "upkeep").open("a") as file:
            for batch in self.query.recent_progress:
                if batch.version > self._noted:
                    every = [each for of in batch.operators for each in of.instances]
                    done = {
                        "compacted_rows": sum(each.compacted_rows for each in every),
                        "cleaned_bytes": sum(each.cleaned_bytes for each in every),
                    }
                    file.write(json.dumps({"version": batch.version, **done}) + "\n")
                    self._noted = batch.version

    def _safely(self, act: str) -> None:
        try:
            self._act(*act.split())
            print("did", act, flush=True)
        except Exception as error:
            self.failures.append(f"{act}: {type(error).__name__}: {error}")

    def _act(self, what: str, *how: str) -> None:
        print("act", what, *how, flush=True)
        if what == "scale":
            self._scale(how[0], int(how[1]))
        elif what == "rebalance":
            self.query.rebalance()
        elif what == "checkpoint":
            self.query.checkpoint()
        elif what == "add":
            host = self.cluster.add()
            self._await(lambda: host in self.query.nodes)
        elif what == "start":
            self.cluster.add()
        elif what == "everything":
            self._kill_everything()
        elif what == "retire":
            before = len(self.query.nodes)
            self._retire(self._idle()[0])
            self._await(lambda: len(self.query.nodes) < before)
        elif what in ("hang", "hang-agent", "cut", "fill"):
            self._for_a_while(what, [int(n) for n in how[:-1]], float(how[-1]))
        elif what == "protected":
            self._await_protection()
        elif what == "kill-idle":
            self.cluster.kill(self._idle()[int(how[0])])
        elif what == "damage":
            self.cluster.kill(self._used(int(how[0])))
            self._damage()
        elif what == "kill-holders":
            self._kill_holders(how[0], random.Random(int(how[1])), how[2])
        elif what == "merge":
            self._await(lambda: any(event.kind == "merge" for event in self.query.events))
        elif what == "wait":
            self._await(lambda: len(self.query.nodes) == int(how[0]))
        else:
            used = [host for host, has in self.query.nodes.items() if has]
            chosen = {used[int(n) % len(used)] for n in how} if how != ("all",) else set(used)
            fault = {
                "kill": self.cluster.kill,
                "executor": self.cluster.kill_executor,
                "agent": self._kill_agent,
                "both": self._kill_both,
                "worker": self._kill_worker,
            }[what]
            for host in sorted(chosen):
                fault(host)

    def _used(self, number: int) -> str:
        used = [host for host, has in self.query.nodes.items() if has]
        return used[number % len(used)]

    def _await_protection(self) -> None:
        def protected(query: Query) -> bool:
            served = list(serving(query.slices.values()))
            nodes = {each.node for each in served}
            parts = (part for of in query.inventory.values() for part in of.parts)
            substitutes = query.policies.backup.substitutes
            return all(coverage.protected(query, each) is not None for each in served) and not any(
                substitutes(part, nodes, query.nodes.keys()) for part in parts
            )

        if self.query._parts.loop.wait_for(protected, 240) is None:
            raise TimeoutError("there are slices without a backup at another node")

    def _kill_holders(self, operator: str, chance: random.Random, when: str) -> None:
        """Kill the node of a slice, and two of the holders of its newest stored part."""
        loop = self.query._parts.loop
        if when in MOMENTS and loop.wait_for(MOMENTS[when], 60) is None:
            raise TimeoutError(f"there was no {when}")
        query = loop.query
        slices = [each for each in serving(query.slices.values()) if each.operator == operator]
        chosen = chance.choice(sorted(slices, key=lambda each: str(each.id)))
        parts = [part for part in query.inventory[operator].parts if part.groups & chosen.groups]
        newest = max(parts, key=lambda part: part.version)
        others = sorted(set(newest.holders) & query.nodes.keys() - {chosen.node})
        victims = chance.sample(others, 2)
        if when == "recovery":
            self.cluster.kill(chosen.node)
            if loop.wait_for(lambda query: query.recovery is not None, 60) is None:
                raise TimeoutError("nothing was recovered")
        else:
            victims.insert(chance.randint(0, 2), chosen.node)
        with ThreadPoolExecutor(len(victims)) as pool:
            list(pool.map(self.cluster.kill, victims))

    def _idle(self) -> list[str]:
        return [host for host, has in self.query.nodes.items() if not has]

    def _for_a_while(self, what: str, numbers: list[int], seconds: float) -> None:
        fault = self._fault(what, *numbers)
        with fault:
            # How long a fault lasts is a part of it.
            time.sleep(seconds)

    def _fault(self, what: str, *numbers: int) -> AbstractContextManager[None]:
        if what == "fill":
            return faults.full(self.work / "disk")
        host = self._used(numbers[0])
        if what == "hang-agent":
            return faults.stopped([self._agent(host)])
        if what == "hang":
            return faults.stopped(processes.executors(self.cluster._nodes[host]._process.pid))
        others = sorted(set(self.cluster.nodes) - {host})
        folders = [self.cluster.folder / each for each in (host, others[numbers[1] % len(others)])]
        return faults.cut(*((folder.name, processes.of_folder(folder)) for folder in folders))

    def _damage(self) -> None:
        """Damage the files of the newest version that was stored."""
        stored: dict[str, list[Path]] = {}
        for path in (self.work / "checkpoint").glob("*/parts/*-*.arrow"):
            stored.setdefault(path.name.split("-")[0], []).append(path)
        faults.damage(stored[max(stored)])

    def _scale(self, operator: str, wanted: int) -> None:
        """Scale, and note what is to be seen of it: the routing, and an event."""
        before = self.query.routing[operator].instances
        self.query.scale(operator, wanted)
        told = [
            event.details["after"]
            for event in self.query.events
            if event.kind == "scale" and event.details["operator"] == operator
        ]
        routed = self.query.routing[operator].instances
        seen = {"operator": operator, "before": before, "wanted": wanted}
        with (self.work / "scales").open("a") as file:
            file.write(json.dumps({**seen, "routed": routed, "told": told[-1:]}) + "\n")

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the nodes are {self.query.nodes}")
            time.sleep(0.05)

    def _retire(self, host: str) -> None:
        """Have the cluster manager take an executor back, as it may do with one that is idle."""
        context = self.query._spark.sparkContext._jsc.sc()
        executors = context.statusStore().executorList(True)
        for at in range(executors.size()):
            executor = executors.apply(at)
            if executor.hostPort().startswith(f"{host}:"):
                context.killExecutor(executor.id())

    def _agent(self, host: str) -> int:
        return self.query._parts.nodes.ask(host, Ping(), Deadline(5.0)).pid

    def _kill_agent(self, host: str) -> None:
        os.kill(self._agent(host), signal.SIGKILL)

    def _kill_both(self, host: str) -> None:
        self._kill_agent(host)
        self.cluster.kill_executor(host)

    def _kill_worker(self, host: str) -> None:
        """A Python worker of a node: what the daemon there has forked."""
        folder = str(self.cluster.folder / host)
        for process in psutil.Process().children(recursive=True):
            try:
                parent = process.parent()
                if parent is None or parent.cmdline()[1:3] != ["-m", "anabranch.worker.daemon"]:
                    continue
                if process.cwd().startswith(folder):
                    process.kill()
                    return
            except psutil.NoSuchProcess:
                continue
        raise LookupError(f"no Python worker runs on {host}")

    def _kill_everything(self) -> None:
        killed = self.work / "killed"
        if not killed.exists():
            killed.touch()
            print("did everything", flush=True)
            os.killpg(os.getpgid(0), signal.SIGKILL)

    def wait(self) -> None:
        for thread in self.threads:
            thread.join()


def main() -> None:
    source, work, plan = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    (work / "feed").mkdir(exist_ok=True)
    conf = {
        "spark.ui.enabled": False,
        "spark.log.level": "ERROR",
        "spark.driver.extraJavaOptions": FRUGAL,
        "spark.executor.extraJavaOptions": FRUGAL,
    }
    if plan["nodes"] == 0:
        run(None, ab.session("local[2]", **conf), source, work, plan)
        return
    if "master" in plan:
        own = {"spark.driver.host": "127.0.0.1", "spark.executor.memory": "600m"}
        if "cores" in plan:  # as many as this driver may have, one in each of its executors
            own |= {"spark.executor.cores": 1, "spark.cores.max": plan["cores"]}
        run(None, ab.session(plan["master"], **conf, **own), source, work, plan)
        return
    with LocalCluster(nodes=plan["nodes"], memory="600m", link=plan.get("link")) as cluster:
        assert cluster.linked or not plan.get("link")
        run(cluster, cluster.session(**conf), source, work, plan)


BACKUPS = {
    "files": None,
    "upstream": ab.Upstream(),
    "fragments": ab.Fragments(data=2, parity=2),
    "4 + 2": ab.Fragments(data=4, parity=2),
    "adapting": ab.Fragments(
        data=2, parity=2, adapt=ab.Adapt(prefer=ab.Prefer.STORAGE, reliability=0.99)
    ),
}


def backup_of(plan: dict) -> Any:
    if "ring" in plan:
        return ab.Fragments(data=2, parity=2, ring=plan["ring"])
    return BACKUPS[plan.get("backup", "files")]


def run(cluster, spark, source: Path, work: Path, plan: dict) -> None:
    groups = plan.get("groups")
    if "chain" in plan:
        # Runs are short: with the default hardly any chain would be long enough to be merged.
        assembly.LONGEST_CHAIN = plan["chain"]
    if "slices" in plan:
        assembly.MOST_SLICES = plan["slices"]
    query = build(spark, work, ordered=plan.get("ordered", False), files=3 if groups else 1).start(
        work / "checkpoint",
        checkpointing=ab.Periodic(plan.get("seconds", 0.5), plan.get("incremental", True)),
        backup=backup_of(plan),
        instances=plan.get("instances", 2),
        placement=ab.Even(pool=plan.get("pool", 0)),
        movement=ab.FromCheckpoint(plan.get("parallelism", 1)),
        tls=ab.Tls(*plan["tls"]) if "tls" in plan else None,
        state_folder=work / "memory" if plan["nodes"] == 0 else None,
    )
    acts = Acts(cluster, query, work)
    feed(query, acts, source, work, plan)
    acts.wait()
    (work / "state").mkdir(exist_ok=True)
    for operator in OPERATORS:
        pq.write_table(query.state_table(operator), work / "state" / f"{operator}.parquet")
    events = [json.loads(event.to_json()) for event in query.events]
    fragments = query.progress.fragments if query.progress else None
    (work / "fragments.json").write_text(json.dumps(fragments and asdict(fragments)))
    (work / "events.json").write_text(json.dumps(events))
    (work / "failures.json").write_text(json.dumps(acts.failures))
    query.stop()
    print("done", flush=True)


def feed(query: RunningQuery, acts: Acts, source: Path, work: Path, plan: dict) -> None:
    """Give the files to the stream, and do what is to be done after each group."""
    files = sorted(source.iterdir())
    groups = plan.get("groups") or [1] * len(files)
    noted = work / "committed"
    before = int(noted.read_text()) if noted.exists() else -1
    last = -1
    for count in groups:
        first, last = last + 1, last + count
        for file in files[first : last + 1]:
            with suppress(FileExistsError):  # another driver gave it to the stream
                os.link(file, work / "feed" / file.name)
        if plan.get("groups"):
            query.process_all_available()
        else:
            # One file is one batch: the next is not there before this one is committed.
            while query.version < last:
                query.await_termination(0.01)
        acts.note_upkeep()
        print(f"committed {last}", flush=True)
        if last > before:
            # At once: the process may be killed at any moment.
            unfinished = noted.with_suffix(".unfinished")
            unfinished.write_text(str(last))
            unfinished.replace(noted)
            for number in range(first, last + 1):
                for act in plan.get("acts", {}).get(str(number), []):
                    acts.do(act)


if __name__ == "__main__":
    main()
