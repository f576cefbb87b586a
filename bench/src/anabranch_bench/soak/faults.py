"""Random faults and changes while the query runs: what, when and to whom is drawn from a seed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from anabranch.cluster import LocalCluster
from anabranch.cluster.processes import of_folder
from anabranch.errors import AnabranchError, ClusterFailed, PlanError, QueryFailed
from anabranch_bench.soak.driver import Driver, Gone, Hung
from anabranch_bench.soak.program import OPERATORS

NODES = 3
_MOST_INSTANCES = 4
_BACK = (1.0, 12.0)
"""Seconds until a node that was killed is there again."""
_PAUSE = (3.0, 12.0)
_SECONDS = 240.0
_ADDRESSES = range(2, 30)
DAEMON = "anabranch.worker.daemon"
AGENT = "anabranch.nodes.agent"

WEIGHTS = {
    "scale": 6.0,
    "worker": 4.0,
    "executor": 3.0,
    "node": 3.0,
    "agent": 2.0,
    "checkpoint": 2.0,
    "rebalance": 1.0,
    "two nodes": 0.7,
    "pause": 0.7,
}
"""How often each comes, relative to the others."""
OF_DRIVER = {"driver": 1.0, "everything": 0.8}
"""What ends the driver, and how often that comes. It is left alone for most of a run."""


@dataclass
class Faults:
    """A thread that does one thing after the other."""

    cluster: LocalCluster
    driver: Driver
    chance: random.Random
    between: tuple[float, float]
    spares_driver: Callable[[], bool]
    """Whether the driver is to be left alone for now."""
    spares_node: Callable[[], bool]
    """Whether one of the nodes is to be left alone for now, with everything that runs there."""
    say: Callable[[str], None]
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    scales: int = 0
    """Scales that were ordered and have happened: the routing and an event say so."""
    false_scales: list[str] = field(default_factory=list)
    """Scales that were reported as done and are not to be seen."""
    failure: BaseException | None = None
    spared: str | None = None
    """The node that is left alone."""
    _go: threading.Event = field(default_factory=threading.Event)
    _idle: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _refilling: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Begin."""
        self._go.set()
        threading.Thread(target=self._run, name="faults", daemon=True).start()

    def hold(self, seconds: float) -> None:
        """Do nothing from now on; what was begun is over, and all nodes are up, on return."""
        self._go.clear()
        if not self._idle.wait(seconds):
            raise Hung(f"a fault or a scale did not end within {seconds:.0f} s")
        self._refill()

    def resume(self) -> None:
        """Go on."""
        self._go.set()

    def close(self) -> None:
        """End."""
        self._over.set()
        self._go.set()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                if not self._go.is_set():
                    self._idle.set()
                    self._go.wait()
                    continue
                self._idle.clear()
                if not self._wait(self.chance.uniform(*self.between)):
                    continue
                self.spare()
                self.do(self._choose())
        except BaseException as error:
            self.failure = error
        finally:
            self._idle.set()

    def spare(self) -> None:
        """Choose the node that is left alone, when it is time."""
        if not self.spares_node():
            self.spared = None
        elif self.spared is None:
            self.spared = self.chance.choice(self.cluster.nodes)
            self.say(f"{self.spared} is spared from now on")

    def _exposed(self) -> list[str]:
        """The nodes that are up and not spared."""
        return [host for host in self.cluster.nodes if host != self.spared]

    def _choose(self) -> str:
        weights = WEIGHTS | ({} if self.spares_driver() else OF_DRIVER)
        return self.chance.choices(list(weights), list(weights.values()))[0]

    def _wait(self, seconds: float) -> bool:
        """Wait so long; whether there is still something to be done."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._over.wait(min(left, 0.2)) or not self._go.is_set():
                return False
        return True

    def do(self, kind: str) -> None:
        """Do one thing now, and say what came of it."""
        actions: dict[str, Callable[[], str]] = {
            "scale": self._scale,
            "checkpoint": lambda: f"version {self.driver.ask('checkpoint', _SECONDS)}",
            "rebalance": lambda: str(self.driver.ask("rebalance", _SECONDS) or ""),
            "worker": lambda: self._kill_one(DAEMON, forked=True),
            "agent": lambda: self._kill_one(AGENT, forked=False),
            "executor": self._executor,
            "node": lambda: self._nodes(1),
            "two nodes": lambda: self._nodes(2),
            "pause": self._stand_still,
            "driver": self._driver,
            "everything": self._everything,
        }
        began = time.monotonic()
        try:
            what = actions[kind]()
        except Hung:
            raise
        except (Gone, QueryFailed, ClusterFailed, PlanError, LookupError) as error:
            self.refused[kind] += 1
            self.say(f"{kind}: did not happen: {str(error)[:300]}")
            return
        self.done[kind] += 1
        self.say(f"{kind} {what} ({time.monotonic() - began:.1f} s)")

    def _scale(self) -> str:
        operator = self.chance.choice(OPERATORS)
        wanted = self.chance.randint(1, _MOST_INSTANCES)
        before = self.driver.status.get("instances", {}).get(operator)
        if wanted == before:
            wanted = wanted % _MOST_INSTANCES + 1
        meanwhile = self.chance.choice([None, None, "worker", "executor", "node"])
        other = threading.Timer(self.chance.uniform(0, 8), self._quietly, args=[meanwhile])
        if meanwhile is not None:
            other.start()
        try:
            found = self.driver.ask("scale", _SECONDS, operator=operator, instances=wanted)
        finally:
            if meanwhile is not None:
                other.join()
        if found["routed"] == wanted and found["told"] == [wanted]:
            self.scales += 1
        else:
            self.false_scales.append(f"{operator} from {before} to {wanted}: {found}")
        return f"{operator} from {before} to {wanted}" + (f", with {meanwhile}" * bool(meanwhile))

    def _quietly(self, kind: str) -> None:
        """A fault in the middle of something else."""
        if self._go.is_set() and not self._over.is_set():
            with suppress(AnabranchError, LookupError):
                if kind == "worker":
                    self._kill_one(DAEMON, forked=True)
                elif kind == "executor":
                    self._executor()
                else:
                    self._nodes(1)
                self.done[f"{kind} while scaling"] += 1

    def _kill_one(self, module: str, *, forked: bool) -> str:
        """A process of a node that runs this module, or one that such a process has forked."""
        host = self.chance.choice(self._exposed())
        found = []
        for pid in of_folder(self.cluster.folder / host):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                named = process.parent() if forked else process
                if named is not None and module in named.cmdline()[1:4]:
                    found.append(process)
        if not found:
            raise LookupError(f"there is no such process on {host}")
        chosen = self.chance.choice(sorted(found, key=lambda process: process.pid))
        with suppress(psutil.Error):
            chosen.kill()
        return f"on {host}"

    def _executor(self) -> str:
        host = self.chance.choice(self._exposed())
        self.cluster.kill_executor(host)
        return f"on {host}"

    def _nodes(self, count: int) -> str:
        up = self._exposed()
        chosen = self.chance.sample(up, min(count, len(up)))
        for host in chosen:
            self.cluster.kill(host)
        self._wait(self.chance.uniform(*_BACK))
        self._refill()
        return f"{', '.join(chosen)}; there are {', '.join(self.cluster.nodes)}"

    def _refill(self) -> None:
        """Start nodes until there are enough; some come back at the address that they had."""
        with self._refilling:
            self._start_nodes()

    def _start_nodes(self) -> None:
        while len(self.cluster.nodes) < NODES:
            free = [f"127.0.0.{n}" for n in _ADDRESSES]
            free = [host for host in free if host not in self.cluster.nodes]
            # Most often one of the first: an address that was used before.
            self.cluster.add(free[min(int(self.chance.expovariate(1.0)), len(free) - 1)])

    def _stand_still(self) -> str:
        seconds = self.chance.uniform(*_PAUSE)
        self.driver.pause(seconds)
        return f"of the driver for {seconds:.0f} s"

    def _driver(self) -> str:
        self.driver.kill()
        self._settle()
        return "killed"

    def _everything(self) -> str:
        self.driver.kill()
        for host in self.cluster.nodes:
            self.cluster.kill(host)
        self._refill()
        self._settle()
        return "killed: driver and all nodes"

    def _settle(self) -> None:
        """Wait until the query runs again; it may take all the nodes a while to be back."""
        deadline = time.monotonic() + _SECONDS
        while not self.driver.status and not self._over.is_set():
            if time.monotonic() > deadline:
                self.driver.show_stacks()
                raise Hung(f"the query did not run {_SECONDS:.0f} s after the driver was killed")
            time.sleep(0.2)
