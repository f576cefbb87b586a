"""Starting the processes of a node, finding all of them, and ending them.

A node is a folder. Every process of it carries :data:`MARK` in its environment, from the Spark
worker down to what a Python task has started, whoever its parent is by now. So nothing is found
by its name, and nothing of another node, cluster or user is ever touched.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from anabranch.errors import ClusterFailed

MARK = "ANABRANCH_STATE_FOLDER"
"""The environment variable that tells processes of a node where its state is."""

_EXECUTOR = b"CoarseGrainedExecutorBackend"
_SECONDS = 15.0
# A process that is just being replaced (exec) shows no environment for a moment.
_EMPTY_LOOKS = 2
_PAUSE = 0.02
# The shell joins the group before it becomes the program, so that no child is ever outside.
_JOIN = 'echo $$ > "$0" && exec "$@"'


class Process(NamedTuple):
    """What /proc says of a live process."""

    pid: int
    parent: int
    session: int


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    group: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, its output at the end of a log file.

    ``group`` is the file of a control group that takes process ids.
    """
    joined = ["/bin/sh", "-c", _JOIN, str(group), *command] if group else list(command)
    with log.open("ab") as output:
        return subprocess.Popen(
            joined,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def last_lines(log: Path, lines: int = 8) -> str:
    """The end of a log file, for an error message."""
    try:
        text = log.read_bytes()[-8192:].decode(errors="replace")
    except FileNotFoundError:
        return "(it has written no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(its log is empty)"


def running() -> dict[int, Process]:
    """Every live process of this machine, by its id. One that has only to be reaped is not live."""
    found = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        # The name of the program comes first, in parentheses, and may contain anything.
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        if fields and fields[0] not in b"ZX":
            found[pid] = Process(pid, parent=int(fields[1]), session=int(fields[3]))
    return found


def descendants(roots: Iterable[int], among: Mapping[int, Process]) -> set[int]:
    """The processes below these, without them."""
    children: dict[int, list[int]] = {}
    for process in among.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def of_folder(folder: Path, group: Path | None = None) -> set[int]:
    """The processes of a node, or of all nodes of a cluster, by the folder.

    These are the ones marked with it, those below them, and those in the control group. This
    process and the ones above it are never among them.
    """
    everything = running()
    found = {pid for pid in everything if _is_marked(pid, folder)}
    if group is not None:
        found |= _members(group) & everything.keys()
    return (found | descendants(found, everything)) - _lineage(everything)


def in_namespaces(network: Collection[Path]) -> set[int]:
    """The processes in some network namespaces, each given by a file that stands for it.

    This process and the ones above it are never among them.
    """
    wanted = {_identity(path) for path in network} - {None}
    if not wanted:
        return set()
    everything = running()
    found = {pid for pid in everything if _identity(Path(f"/proc/{pid}/ns/net")) in wanted}
    return found - _lineage(everything)


def executors(worker: int) -> set[int]:
    """The executors of a Spark worker with everything they would take along if they crashed.

    What has a session of its own, as a background service does, would live on.
    """
    everything = running()
    if worker not in everything:
        return set()
    below = descendants([worker], everything)
    backends = {pid for pid in below if _EXECUTOR in _read(pid, "cmdline")}
    return {
        pid
        for pid in backends | descendants(backends, everything)
        if everything[pid].session == everything[worker].session
    }


def end(find: Callable[[], set[int]], seconds: float = _SECONDS) -> None:
    """Kill what is found, again and again until nothing is found any more.

    A process id is only used through a handle that was confirmed by a second look, so that an id
    which has been given to a stranger meanwhile is not killed.
    """
    deadline = time.monotonic() + seconds
    empty = 0
    while empty < _EMPTY_LOOKS:
        with ExitStack() as handles:
            opened = _open(find(), handles)
            confirmed = [opened[pid] for pid in find() & opened.keys()] if opened else []
            for handle in confirmed:
                _kill(handle)
            _await(confirmed, deadline)
        empty = 0 if opened else empty + 1
        if opened and time.monotonic() > deadline:
            raise ClusterFailed(
                f"processes {sorted(opened)} still run {seconds:.0f} s after they were killed; "
                "see what they wait for with: ps -o pid,stat,wchan,args"
            )
        if empty and empty < _EMPTY_LOOKS:
            time.sleep(_PAUSE)


def _open(pids: set[int], handles: ExitStack) -> dict[int, int]:
    opened = {}
    for pid in pids:
        try:
            opened[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            continue  # it has ended by itself
        handles.callback(os.close, opened[pid])
    return opened


def _kill(handle: int) -> None:
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has ended by itself


def _await(handles: Sequence[int], deadline: float) -> None:
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _is_marked(pid: int, folder: Path) -> bool:
    name = f"{MARK}=".encode()
    for entry in _read(pid, "environ").split(b"\0"):
        if entry.startswith(name):
            return Path(os.fsdecode(entry[len(name) :])).is_relative_to(folder)
    return False


def _members(group: Path) -> set[int]:
    found: set[int] = set()
    for members in group.rglob("cgroup.procs"):
        try:
            found |= {int(pid) for pid in members.read_text().split()}
        except OSError:
            continue  # the group was removed while we looked
    return found


def _identity(namespace: Path) -> tuple[int, int] | None:
    try:
        found = namespace.stat()
    except OSError:
        return None  # it has ended, or belongs to another user
    return found.st_dev, found.st_ino


def _lineage(among: Mapping[int, Process]) -> set[int]:
    found = set()
    pid = os.getpid()
    while pid in among and pid not in found:
        found.add(pid)
        pid = among[pid].parent
    return found


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""  # it has ended, or belongs to another user
