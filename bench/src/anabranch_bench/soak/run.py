"""The soak test: input, faults, comparisons and samples for a given time, and the verdict."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from anabranch.cluster import LocalCluster
from anabranch_bench.harness import machine, versions
from anabranch_bench.soak import growth, picture
from anabranch_bench.soak.compare import Order, compare, equal
from anabranch_bench.soak.driver import Driver, Hung
from anabranch_bench.soak.faults import NODES, Faults
from anabranch_bench.soak.feeder import Feeder
from anabranch_bench.soak.program import OUTPUTS
from anabranch_bench.soak.samples import Sampler
from anabranch_bench.soak.traffic import DELAY, SECOND, START, Traffic

_DRAIN = 900.0
_STUCK = 420.0
"""Seconds without a commit, while there is input, after which the query counts as hung."""
_LOOK = 1.0
_SAMPLED = 5.0
_KILLED_AGAIN = 0.95
_MOST_LAG = 240.0
_HEAP = "1g"
_FRUGAL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_SESSION: dict[str, str | int | bool] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": _HEAP,
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:-UsePerfData",
    "spark.executor.memory": "600m",
    "spark.executor.cores": 1,
    "spark.executor.extraJavaOptions": _FRUGAL,
    "spark.ui.enabled": False,
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    # Of finished jobs the driver keeps a fixed number, which it is to reach within minutes.
    "spark.ui.retainedJobs": 100,
    "spark.ui.retainedStages": 100,
    "spark.ui.retainedTasks": 1000,
    "spark.sql.ui.retainedExecutions": 50,
}


@dataclass(frozen=True)
class Plan:
    """What to do."""

    minutes: float = 120.0
    seed: int = 0
    rate: int = 2_500
    """Rows a second."""
    compare_every: float = 10.0
    """Minutes between two comparisons."""
    checkpoint_seconds: float = 4.0
    between: tuple[float, float] = (8.0, 35.0)
    """Seconds between two faults or changes."""
    folder: Path | None = None
    """Where to work; it must be new. It stays if it is given, or if something was wrong."""


@dataclass
class Verdict:
    """What came of it."""

    plan: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    scales: int = 0
    restarts: int = 0
    rows: int = 0
    growth: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


class Soak:
    """One run."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan, self._console = plan, console
        self._began = time.monotonic()
        self._traffic = Traffic(plan.seed, plan.rate)
        self._work = plan.folder or Path(tempfile.mkdtemp(prefix="anabranch-soak-"))
        self._work.mkdir(parents=True, exist_ok=True)
        self._compared: list[float] = []
        self._restarts: list[float] = []
        self._since, self._after = START, -1
        self._carried: list[Path] = []
        self._taken: list[Path] = []
        self._removable: list[Path] = []
        self._reached = START
        self.verdict = Verdict(asdict(plan) | {"folder": str(self._work)}, machine(), versions())

    def run(self) -> Verdict:
        """Run to the end, or to the first result that is wrong."""
        self._say(f"seed {self._plan.seed}, {self._plan.minutes:g} minutes, in {self._work}")
        try:
            with LocalCluster(NODES, memory="600m") as cluster:
                self._run_on(cluster)
        except Hung as error:
            self.verdict.problems.append(f"hung: {error}")
        if self.verdict.holds and self._plan.folder is None:
            shutil.rmtree(self._work)
        return self.verdict

    def draw(self, path: Path) -> None:
        """Draw what was sampled."""
        picture.draw(self.verdict.samples, self._compared, self._restarts, path)

    def _run_on(self, cluster: LocalCluster) -> None:
        driver = self._driver(cluster)
        feeder = Feeder(
            self._work / "input",
            self._traffic,
            random.Random(self._plan.seed + 1),
            lambda: self._lag(driver),
            _MOST_LAG,
        )
        faults = Faults(
            cluster,
            driver,
            random.Random(self._plan.seed + 2),
            self._plan.between,
            lambda: spares_driver(self._progress()),
            lambda: spares_node(self._progress()),
            self._say,
        )
        sampler = Sampler(
            cluster,
            self._work,
            lambda: driver.status,
            lambda: driver.starts,
            lambda: faults.spared,
            _SAMPLED,
        )
        sampler.began = self._began
        feeder.start()
        driver.start()
        sampler.start()
        try:
            self._await(lambda: bool(driver.status), 300.0, "the query to start", driver)
            faults.start()
            self._epochs(driver, feeder, faults, sampler)
        finally:
            faults.close()
            feeder.close()
            sampler.close()
            driver.stop()
            self._conclude(driver, feeder, faults, sampler)

    def _epochs(self, driver: Driver, feeder: Feeder, faults: Faults, sampler: Sampler) -> None:
        end = self._began + self._plan.minutes * 60
        while time.monotonic() < end and self.verdict.holds:
            until = min(end, time.monotonic() + self._plan.compare_every * 60)
            while time.monotonic() < until:
                self._watch(driver, feeder, faults, sampler)
                time.sleep(_LOOK)
            with self._standing(feeder, faults, driver):
                order = self._close_epoch(driver, feeder)
            self._compare(order)

    @contextmanager
    def _standing(self, feeder: Feeder, faults: Faults, driver: Driver) -> Iterator[None]:
        """No new input, everything that there is committed, and no fault."""
        self._say("the feeder stops; waiting for the query to be through with its input")
        feeder.hold()
        driver.insist("drain", _DRAIN)
        faults.hold(_DRAIN)
        yield
        faults.resume()
        feeder.resume()

    def _close_epoch(self, driver: Driver, feeder: Feeder) -> Order:
        boundary = self._traffic.close()
        # The first marker takes the watermark there; with the second all see it.
        for number in range(2):
            feeder.add(self._traffic.markers(number))
            driver.insist("drain", _DRAIN)
        folder = self._work / "dump"
        shutil.rmtree(folder, ignore_errors=True)
        version = int(driver.insist("dump", _DRAIN, folder=str(folder)))
        files = feeder.take_files()
        order = Order(
            str(self._work),
            self._since,
            boundary,
            self._after,
            version,
            tuple(str(file) for file in [*self._carried, *files]),
            str(folder),
        )
        self._carried, self._taken = files[-2:], files[:-2]
        self._since, self._after = boundary, version
        return order

    def _compare(self, order: Order) -> None:
        began = time.monotonic()
        found = compare(order)
        self._compared.append(time.monotonic() - self._began)
        self.verdict.comparisons.append(found)
        rows = sum(each["rows"] for each in found.values())
        number = len(self.verdict.comparisons)
        if not equal(found):
            wrong = {name: each for name, each in found.items() if not equal({name: each})}
            self.verdict.problems.append(f"comparison {number} differs: {json.dumps(wrong)}")
            self._say(f"comparison {number} DIFFERS: {json.dumps(wrong, indent=1)}")
            return
        self._say(
            f"comparison {number}: equal, {rows:,} rows up to version {order.version} "
            f"({time.monotonic() - began:.0f} s)"
        )
        self._clean(order)

    def _clean(self, order: Order) -> None:
        """Remove what was compared. Input stays one epoch longer: a recovery may need it."""
        for name in OUTPUTS:
            for path in (self._work / "out" / name).glob("part-*.parquet"):
                if int(path.name.split("-")[2]) <= order.version:
                    path.unlink()
        for path in self._removable:
            path.unlink()
        self._removable = self._taken

    def _watch(self, driver: Driver, feeder: Feeder, faults: Faults, sampler: Sampler) -> None:
        """Raise if a part of the soak has failed, or the query is stuck."""
        for part in (feeder, faults, sampler):
            if isinstance(part.failure, Hung):
                raise part.failure
            if part.failure is not None:
                raise RuntimeError(f"the soak's own {type(part).__name__} failed") from part.failure
        if driver.starts > len(self._restarts):
            self._restarts.append(time.monotonic() - self._began)
        stuck = time.monotonic() - driver.advanced
        if stuck > _STUCK:
            driver.show_stacks()
            raise Hung(
                f"no batch was committed for {stuck:.0f} s after version "
                f"{driver.status.get('version')}; the stacks are in {driver.log}"
            )

    def _await(
        self, condition: Callable[[], bool], seconds: float, what: str, driver: Driver
    ) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                driver.show_stacks()
                raise Hung(f"waited {seconds:.0f} s for {what}; see {driver.log}")
            time.sleep(_LOOK / 4)

    def _lag(self, driver: Driver) -> float:
        watermark = driver.status.get("watermark")
        # While the driver starts nobody knows: then what was known before holds.
        if watermark is not None:
            self._reached = max(self._reached, watermark + DELAY)
        return (self._traffic.clock - self._reached) / SECOND

    def _progress(self) -> float:
        """How much of the run is over, from 0 to 1."""
        return (time.monotonic() - self._began) / (self._plan.minutes * 60)

    def _driver(self, cluster: LocalCluster) -> Driver:
        local = self._work / "local"
        environment = os.environ | {
            "SPARK_LOCAL_DIRS": str(local),
            "ANABRANCH_STATE_FOLDER": str(self._work / "driver-state"),
            "TMPDIR": str(local),
        }

        def settings() -> dict[str, Any]:
            # What a driver leaves behind when it is killed is Spark's; it is not what is tested.
            shutil.rmtree(local, ignore_errors=True)
            local.mkdir(parents=True)
            return {
                "work": str(self._work),
                "master": cluster.master,
                "conf": _SESSION,
                "checkpoint_seconds": self._plan.checkpoint_seconds,
                "instances": 2,
            }

        return Driver(settings, environment, self._work / "driver.log", self._say)

    def _conclude(self, driver: Driver, feeder: Feeder, faults: Faults, sampler: Sampler) -> None:
        verdict = self.verdict
        verdict.samples = sampler.samples
        verdict.faults, verdict.refused = dict(faults.done), dict(faults.refused)
        verdict.scales, verdict.restarts = faults.scales, driver.starts - 1
        verdict.events = driver.events
        verdict.problems += [f"the query failed by itself: {why}" for why in driver.failures]
        verdict.problems += [f"a scale did not happen: {why}" for why in faults.false_scales]
        if faults.refused["scale"] > faults.scales:
            verdict.problems.append(
                f"{faults.refused['scale']} scales were refused, {faults.scales} happened"
            )
        for found in growth.judge(sampler.samples):
            verdict.growth.append(asdict(found) | {"flat": found.flat})
            if (problem := found.problem(self._plan.minutes)) is not None:
                verdict.problems.append(problem)
        self._say(
            f"backlogs: {feeder.backlogs}; the feeder waited {feeder.waited:.0f} s for the query"
        )

    def _say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self._console.print(f"{minutes:3d}:{seconds:02d} {text}", highlight=False, markup=False)


def spares_driver(progress: float) -> bool:
    """From the first third of a run almost to its end: what it gains in a long life is to be seen.

    Then it is killed again, after that life.
    """
    return 1 / 3 <= progress < _KILLED_AGAIN


def spares_node(progress: float) -> bool:
    """In the last third, as long as the driver is spared: all executors end with the driver."""
    return 2 / 3 <= progress < _KILLED_AGAIN


def soak(plan: Plan, console: Console, json_file: Path | None, plot: Path | None) -> bool:
    """Run, save and draw what was found, print the verdict; whether all was well."""
    run = Soak(plan, console)
    try:
        verdict = run.run()
    finally:
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(asdict(run.verdict)))
            console.print(f"written: {json_file}")
        if plot is not None and run.verdict.samples:
            run.draw(plot)
            console.print(f"written: {plot}")
    _report(verdict, console)
    return verdict.holds


def _report(verdict: Verdict, console: Console) -> None:
    done = ", ".join(f"{name} {count}" for name, count in sorted(verdict.faults.items()))
    console.print(f"done: {done}; restarts of the driver: {verdict.restarts}")
    console.print(f"refused: {verdict.refused or 'nothing'}; events: {verdict.events}")
    console.print(f"scales that happened, by routing and event: {verdict.scales}")
    judged = [each for each in verdict.growth if each["gained"] is not None]
    unclear = [each["series"] for each in verdict.growth if each["gained"] is None]
    flat = [each for each in judged if each["flat"]]
    console.print(
        f"growth after the first ten minutes: {len(flat)} of {len(judged)} series flat "
        f"(a gain of at most {growth.TOLERANCE:.0%} of the level, or the least that is allowed)"
        + (f"; too short to say: {', '.join(unclear)}" if unclear else "")
    )
    for problem in verdict.problems:
        console.print(f"WRONG: {problem[:2000]}", markup=False)
    right = sum(equal(found) for found in verdict.comparisons)
    console.print(
        f"comparisons equal: {right} of {len(verdict.comparisons)}. "
        + ("Nothing was wrong" if verdict.holds else "Something is wrong")
        + ("." if judged else ", as far as was looked: growth takes 40 minutes to be judged.")
    )
