"""Removing what dead queries of this user have left on this machine.

A query is alive while a process has locked the file ``alive``, or ``driver.lock``, in its folder.
Only folders of this user are removed that are named like a query and have only the files of one.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from anabranch.nodes.captures import CAPTURES, OF, SPILLED
from anabranch.nodes.claims import ALIVE, ALONE, KEEP, try_alone
from anabranch.nodes.fence import EPOCH
from anabranch.nodes.folders import backup_folder
from anabranch.nodes.local import TABLES

DRIVER_LOCK = "driver.lock"
_LOG = "agent.log"
_QUERY = re.compile(r"[0-9a-f]{12}")
_SWEPT = re.compile(r"\.swept-[0-9a-f]{32}")
_FILES = {ALIVE, ALONE, KEEP, DRIVER_LOCK, EPOCH, "lock"}
_FOLDERS = {TABLES, CAPTURES}
_AGENT_LOCK = "lock"


def sweep(base: Path, *, spare: Collection[str] = (), kept: bool = False) -> list[Path]:
    """Remove the folders of dead queries below a state folder. Returns the removed folders.

    ``spare`` has the ids of queries that are starting, which are not removed. With ``kept``, the
    state of queries without checkpoints is removed too.
    """
    removed = []
    for folder in leftovers(base, kept=kept):
        if folder.name not in spare and _remove_query(folder):
            removed.append(folder)
            if folder.parent != base:
                _remove_if_empty(folder.parent)
    for half in [path for folder in (base, *_hosts(base)) for path in _swept(folder)]:
        shutil.rmtree(half, ignore_errors=True)
    for folder in lost_captures():
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
        _remove_if_empty(folder.parent)
    return removed


def lost_captures() -> Iterator[Path]:
    """The captures on a disk whose state was removed."""
    for above in _listed(backup_folder() / SPILLED):
        for folder in _listed(above):
            if _mine(folder) and _QUERY.fullmatch(folder.name):
                try:
                    of = Path((folder / OF).read_text())
                except OSError:
                    continue  # it is just being made
                if not of.exists():
                    yield folder


def leftovers(base: Path, *, kept: bool = False) -> Iterator[Path]:
    """The folders that :func:`sweep` would remove, unless they are claimed meanwhile."""
    for above in (base, *_hosts(base)):
        for folder in _listed(above):
            marked = (folder / KEEP).exists()
            if _is_query(folder) and (kept or not marked) and not _lives(folder):
                yield folder


def old_backups(base: Path, older: float) -> Iterator[Path]:
    """The backups of queries, below a backup folder, that were not used for some seconds."""
    before = time.time() - older
    for host in _listed(base):
        for folder in _listed(host):
            named = _mine(folder) and _QUERY.fullmatch(folder.name) is not None
            if named and not _held(folder / _AGENT_LOCK) and _newest(folder) < before:
                yield folder


def remove_backups(folder: Path) -> None:
    """Remove a folder that :func:`old_backups` found, unless an agent uses it again."""
    fd = try_alone(folder / _AGENT_LOCK)
    if fd is not None:
        try:
            away = _rename_locked(folder)
        finally:
            os.close(fd)
        if away is not None:
            shutil.rmtree(away, ignore_errors=True)
            _remove_if_empty(folder.parent)


def size(folder: Path) -> int:
    """The bytes that a folder takes."""
    return sum(found.st_blocks * 512 for found in _walk(folder))


def _remove_query(folder: Path) -> bool:
    """Remove the folder of a query if no process has claimed it. A later claim makes it again."""
    try:
        fd = try_alone(folder / ALIVE)
    except OSError:
        return False  # gone already, or not to be written
    if fd is None:
        return False
    try:
        if not _is_query(folder) or _held(folder / DRIVER_LOCK):
            return False
        away = _rename_locked(folder)
    finally:
        os.close(fd)
    if away is None:
        return False
    shutil.rmtree(away, ignore_errors=True)
    return True


def _rename_locked(folder: Path) -> Path | None:
    """Rename a locked folder, so that under its own name it is never incomplete.

    None if another process has removed it.
    """
    away = folder.with_name(f".swept-{uuid.uuid4().hex}")
    try:
        return folder.rename(away)
    except FileNotFoundError:
        return None


def _is_query(folder: Path) -> bool:
    """Whether a folder is this user's, named like a query, and has only the files of a query."""
    if _QUERY.fullmatch(folder.name) is None or not _mine(folder):
        return False
    for path in _listed(folder):
        kind = _mode(path)
        known = (stat.S_ISREG(kind) and (path.name in _FILES or path.name.startswith(_LOG))) or (
            stat.S_ISDIR(kind) and path.name in _FOLDERS
        )
        if not known:
            return False
    return True


def _hosts(base: Path) -> list[Path]:
    """The folders of nodes: below them are only folders that are named like queries."""
    return [
        folder
        for folder in _listed(base)
        if stat.S_ISDIR(_mode(folder))
        and _QUERY.fullmatch(folder.name) is None
        and (inside := _listed(folder))
        and all(_QUERY.fullmatch(p.name) or _SWEPT.fullmatch(p.name) for p in inside)
    ]


def _swept(folder: Path) -> list[Path]:
    return [p for p in _listed(folder) if _SWEPT.fullmatch(p.name) and _mine(p)]


def _lives(folder: Path) -> bool:
    return _held(folder / ALIVE) or _held(folder / DRIVER_LOCK)


def _held(path: Path) -> bool:
    """Whether a process has locked a file. A file that cannot be opened counts as locked."""
    if not path.exists():
        return False
    try:
        fd = try_alone(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    if fd is None:
        return True
    os.close(fd)
    return False


def _mine(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _listed(folder: Path) -> list[Path]:
    """The entries of a folder. Empty if it is none, or cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return  # not empty, or not there


def _newest(folder: Path) -> float:
    return max((found.st_mtime for found in _walk(folder)), default=0.0)


def _walk(folder: Path) -> Iterator[os.stat_result]:
    for path in (folder, *folder.rglob("*")):
        try:
            yield path.lstat()
        except OSError:
            continue
