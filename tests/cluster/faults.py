"""Faults that are no kills: processes that stop for a while, full disks, damaged files, cut links.

All of them are real and end by themselves: signals, a file system without room, packets that the
kernel drops. What this machine cannot do is said by :func:`can_mount` and :func:`can_cut`.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup/unified")
_PIECE = 1 << 20


@contextmanager
def stopped(processes: Collection[int]) -> Iterator[None]:
    """Processes that neither run nor end meanwhile, as those of a machine that was suspended."""
    signal_all(processes, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(processes, signal.SIGCONT)


def signal_all(processes: Iterable[int], what: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, what)


@cache
def can_mount() -> bool:
    """Whether file systems of a limited size can be mounted here."""
    return os.geteuid() == 0 and _runs("unshare", "--mount", "mount", "-t", "tmpfs", "x", "/mnt")


@contextmanager
def disk(at: Path, megabytes: int) -> Iterator[None]:
    """A small disk that is mounted at a folder."""
    at.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "anabranch-test", str(at))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(at))


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """A disk on which there is no room left."""
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for piece in (_PIECE, 4096):
                _fill(file.fileno(), piece)
        yield
    finally:
        filler.unlink(missing_ok=True)


def _fill(file: int, piece: int) -> None:
    while True:
        try:
            if os.write(file, bytes(piece)) < piece:
                return
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return


def damage(files: Collection[Path]) -> None:
    """Flip a bit in the middle of each file."""
    for path in files:
        with path.open("r+b") as file:
            middle = path.stat().st_size // 2
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 0x10]))


@cache
def can_cut() -> bool:
    """Whether packets can be dropped by the control group of the process that sends them."""
    group = _GROUPS / f"anabranch-{os.getpid()}-look"
    try:
        group.mkdir()
    except OSError:
        return False
    rule = _rule(group, "127.0.0.254")
    try:
        return _runs("iptables", "-A", *rule) and _runs("iptables", "-D", *rule)
    finally:
        group.rmdir()


@contextmanager
def cut(one: tuple[str, Collection[int]], other: tuple[str, Collection[int]]) -> Iterator[None]:
    """No packet passes between two nodes, each given by its address and its processes.

    Both are reached by everyone else, the driver included.
    """
    groups, rules = [], []
    try:
        for (host, processes), (to, _) in ((one, other), (other, one)):
            group = _GROUPS / f"anabranch-{os.getpid()}-{host}-{time.monotonic_ns()}"
            group.mkdir()
            groups.append(group)
            for process in processes:
                with suppress(ProcessLookupError):
                    (group / "cgroup.procs").write_text(str(process))
            rules.append(_rule(group, to))
            _run("iptables", "-A", *rules[-1])
        yield
    finally:
        for rule in rules:
            _runs("iptables", "-D", *rule)
        for group in groups:
            for process in (group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    (_GROUPS / "cgroup.procs").write_text(process)
            group.rmdir()


def _rule(group: Path, to: str) -> tuple[str, ...]:
    path = str(group.relative_to(_GROUPS))
    return ("OUTPUT", "-d", to, "-m", "cgroup", "--path", path, "-j", "DROP")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _runs(*command: str) -> bool:
    try:
        _run(*command)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True
