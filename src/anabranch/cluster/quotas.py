"""CPU quotas for nodes, by control groups of Linux (version 1 or 2)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from anabranch.cluster.waiting import until

_PERIOD = 100_000  # microseconds; the kernel's default
SMALLEST = 0.01
"""The least share of a core that the kernel accepts with this period."""
_REMOVAL = 5.0

_log = logging.getLogger(__name__)


class Groups(Protocol):
    """Control groups that limit CPU time, below one folder of the kernel's file system."""

    @property
    def folder(self) -> Path:
        """The group that all of them are in."""

    def add(self, name: str) -> None:
        """Make a group without a limit; nothing happens if it is there."""

    def limit(self, name: str, cpus: float | None) -> None:
        """Let a group have this many cores; None lifts the limit."""

    def remove(self) -> None:
        """Remove all of the groups. Their processes must have ended."""


@dataclass(frozen=True)
class GroupsV1:
    """Groups of the ``cpu`` hierarchy of version 1."""

    folder: Path

    def add(self, name: str) -> None:
        """Make a group without a limit; nothing happens if it is there."""
        (self.folder / name).mkdir(parents=True, exist_ok=True)

    def limit(self, name: str, cpus: float | None) -> None:
        """Let a group have this many cores; None lifts the limit."""
        quota = -1 if cpus is None else round(cpus * _PERIOD)
        (self.folder / name / "cpu.cfs_period_us").write_text(str(_PERIOD))
        (self.folder / name / "cpu.cfs_quota_us").write_text(str(quota))

    def remove(self) -> None:
        """Remove all of the groups. Their processes must have ended."""
        remove(self.folder)


@dataclass(frozen=True)
class GroupsV2:
    """Groups of version 2, whose controllers are enabled level by level."""

    folder: Path

    def add(self, name: str) -> None:
        """Make a group without a limit; nothing happens if it is there."""
        self.folder.mkdir(exist_ok=True)
        for above in (self.folder.parent, self.folder):
            (above / "cgroup.subtree_control").write_text("+cpu")
        (self.folder / name).mkdir(exist_ok=True)

    def limit(self, name: str, cpus: float | None) -> None:
        """Let a group have this many cores; None lifts the limit."""
        quota = "max" if cpus is None else str(round(cpus * _PERIOD))
        (self.folder / name / "cpu.max").write_text(f"{quota} {_PERIOD}")

    def remove(self) -> None:
        """Remove all of the groups. Their processes must have ended."""
        remove(self.folder)


def open_groups(name: str, cpus: float) -> Groups | None:
    """Groups of this name that can limit CPU time to this many cores; None if not permitted.

    They are below the group of this process. Version 2 refuses a group that has processes itself;
    the group above is tried then, as it may be the user's own slice.
    """
    refusals = []
    mounts = Path("/proc/self/mounts").read_text()
    membership = Path("/proc/self/cgroup").read_text()
    for groups in candidates(name, mounts, membership):
        try:
            groups.add("probe")
            groups.limit("probe", cpus)
        except OSError as error:
            refusals.append(f"{groups.folder}: {error.strerror}")
            groups.remove()
            continue
        return groups
    reason = "; ".join(refusals) or "no cpu controller is mounted"
    _log.warning("The limit of %s CPUs for each node is not applied: %s", cpus, reason)
    return None


def candidates(name: str, mounts: str, membership: str) -> Iterator[Groups]:
    """The groups that could be used, the best first.

    ``mounts`` and ``membership`` are the texts of /proc/self/mounts and /proc/self/cgroup.
    """
    mine = dict(_memberships(membership))
    for _, mount, kind, options, *_ in (line.split() for line in mounts.splitlines()):
        if kind == "cgroup" and "cpu" in options.split(","):
            yield GroupsV1(_below(Path(mount), mine.get("cpu", "/")) / name)
        if kind == "cgroup2":
            own = _below(Path(mount), mine.get("", "/"))
            yield GroupsV2(own / name)
            if own != Path(mount):
                yield GroupsV2(own.parent / name)


def remove(folder: Path) -> None:
    """Remove a group and those below it; nothing happens if there is none."""
    if not folder.exists():
        return
    for below in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        _remove_one(below)
    _remove_one(folder)


def _remove_one(folder: Path) -> None:
    # A group is busy until the kernel has buried the last process of it.
    if not until(lambda: _remove_folder(folder), _REMOVAL):
        _log.warning("Control group %s was not removed: processes still run in it.", folder)


def _remove_folder(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _below(mount: Path, path: str) -> Path:
    # In a container the path can be the one of the host, which is not there.
    inside = mount / path.lstrip("/")
    return inside if inside.is_dir() else mount
