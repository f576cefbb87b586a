"""Samples of the query's resources: memory, threads, open files, shared memory, folders."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.cluster import LocalCluster
from anabranch.cluster.processes import descendants, of_folder, running

ROLES = {
    "CoarseGrainedExecutorBackend": "executor",
    "deploy.worker.Worker": "spark worker",
    "deploy.master.Master": "spark master",
    "org.apache.spark.deploy.SparkSubmit": "driver jvm",
    "anabranch.nodes.agent": "agent",
    "anabranch.worker.daemon": "python worker",
    "anabranch_bench.soak.program": "driver",
    "anabranch_bench.soak.compare": "comparison",
    "anabranch.stores.merging": "merge",
}
"""What is in the command line of a process, and what it is."""
SPARED = {"executor": "executor", "agent": "agent", "python worker": "daemon"}
"""The roles of which the oldest process of a spared node is measured, and what that one is: the
oldest Python worker is the daemon that the others are forked from. Those end with every batch that
is cancelled because another node was lost."""
_SETTLED = ("driver", "driver jvm", "executor", "agent", "python worker")

Sample = dict[str, float]


@dataclass
class Sampler:
    """A thread that looks every few seconds."""

    cluster: LocalCluster
    work: Path
    status: Callable[[], dict[str, Any]]
    starts: Callable[[], int]
    spared: Callable[[], str | None]
    """The node to which nothing is done for now, if there is one."""
    every: float
    samples: list[Sample] = field(default_factory=list)
    failure: BaseException | None = None
    began: float = field(default_factory=time.monotonic)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="sampler", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _run(self) -> None:
        try:
            while not self._over.wait(self.every):
                self.samples.append(self._look())
        except BaseException as error:
            self.failure = error

    def _look(self) -> Sample:
        sample: Sample = {"at": time.monotonic() - self.began, "run": self.starts()}
        sample |= processes(self.cluster.folder)
        if (host := self.spared()) is not None:
            sample |= oldest(self.cluster.folder / host)
        sample |= self._folders()
        sample |= unlinked(self.cluster.folder)
        status = self.status()
        if status:
            for name in ("version", "state_rows", "state_bytes", "batch_seconds", "heap", "nodes"):
                sample[f"query {name}"] = status[name]
        return sample

    def _folders(self) -> Sample:
        found: Sample = {}
        nodes = list(self.cluster.folder.iterdir())
        for name, parts in {
            "state": [node / "state" for node in nodes],
            "shuffle": [node / "scratch" for node in nodes],
            "logs of nodes": [
                path for node in nodes for path in (node / "work", node / "worker.log")
            ],
            "driver's local": [self.work / "local"],
            "driver's state": [self.work / "driver-state"],
            "out": [self.work / "out"],
            "input": [self.work / "input"],
        }.items():
            found |= _named(name, parts)
        checkpoint = self.work / "checkpoint"
        if checkpoint.exists():
            found |= _named("checkpoint", [checkpoint])
            ours = [part for part in checkpoint.iterdir() if part.name != "spark"]
            found |= _named("checkpoint, ours", ours)
            for part in sorted(checkpoint.iterdir()):
                if part.is_dir():
                    found |= _named(f"checkpoint/{part.name}", [part])
        return found


def processes(folder: Path) -> Sample:
    """What the processes of a cluster and those of this program take up, by what they are."""
    everything = running()
    pids = of_folder(folder) | descendants([os.getpid()], everything) | {os.getpid()}
    totals: Sample = {f"{role} {what}": 0.0 for role in _SETTLED for what in _MEASURES}
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            role = "soak" if pid == os.getpid() else _role(pid)
            measured = _measure(pid)
            for what, value in measured.items():
                name = f"{role} {what}"
                totals[name] = totals.get(name, 0.0) + value
            largest = f"{role} largest"
            totals[largest] = max(totals.get(largest, 0.0), measured["private"])
    return totals


def oldest(node: Path) -> Sample:
    """What the oldest process of each kind takes up on a node, and when it was started."""
    found: dict[str, Sample] = {}
    for pid in of_folder(node):
        with suppress(OSError, ValueError, IndexError):
            name = SPARED.get(_role(pid))
            if name is None:
                continue
            measured = _measure(pid) | {"born": _born(pid)}
            if name not in found or measured["born"] < found[name]["born"]:
                found[name] = measured
    return {
        f"spared {name} {what}": value
        for name, measured in found.items()
        for what, value in measured.items()
        if what != "processes"
    }


def unlinked(folder: Path) -> Sample:
    """What is in use of the shared memory that a folder is in, and how much of it no file has.

    A table that is deleted while a process has it mapped takes up memory, and no folder shows it.
    Files of other users cannot all be seen, and count as well.
    """
    mount = next(each for each in (folder, *folder.parents) if each.is_mount())
    kinds = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    if [str(mount), "tmpfs"] not in kinds:
        return {}  # on a disk there is more than can be looked through
    system = os.statvfs(mount)
    used = (system.f_blocks - system.f_bfree) * system.f_frsize
    own = [each for each in mount.iterdir() if _is_own(each)]
    seen = sum(measure_folder(each)[1] for each in own)
    return {"shared memory bytes": used, "unlinked bytes": max(0, used - seen)}


def _is_own(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return path.lstat().st_uid == os.geteuid()
    return False


_MEASURES = ("processes", "rss", "private", "shared", "threads", "open files")


def _measure(pid: int) -> Sample:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    if "VmRSS" not in status:
        raise ValueError("it is ending")
    return {
        "processes": 1,
        "rss": int(status["VmRSS"].split()[0]) * 1024,
        "private": int(status["RssAnon"].split()[0]) * 1024,
        "shared": int(status["RssShmem"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "open files": len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208
    }


def _born(pid: int) -> float:
    """When a process was started, in ticks of the system since it was."""
    return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _role(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    if not command.startswith(("/", "python", "java")) and not command:
        return "other"
    # The driver's JVM and executors name the daemon among their settings.
    for text, role in ROLES.items():
        if text in command:
            return role
    return "other"


def _named(name: str, folders: Iterable[Path]) -> Sample:
    files = size = 0
    for folder in folders:
        more, larger = measure_folder(folder)
        files, size = files + more, size + larger
    return {f"{name} files": files, f"{name} bytes": size}


def measure_folder(folder: Path) -> tuple[int, int]:
    """How many files there are in a folder and below, and how much room they really take."""
    files = size = 0
    try:
        if folder.is_file():
            return 1, folder.stat().st_blocks * 512
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        more, larger = measure_folder(Path(entry.path))
                        files, size = files + more, size + larger
                    else:
                        files += 1
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
    except (FileNotFoundError, NotADirectoryError):
        return files, size
    return files, size
