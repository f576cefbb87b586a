"""The resources of a local cluster, from its start to its stop."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from anabranch.cluster import keeper, quotas
from anabranch.cluster.master import Master
from anabranch.cluster.node import Node
from anabranch.cluster.sessions import Sessions
from anabranch.cluster.sweep import sweep

_MEMORY = Path("/dev/shm")


class Resources:
    """The folder, the control groups, the master and the keeper of a cluster."""

    def __init__(self, folder: Path | None, cpus: float | None) -> None:
        self.sessions = Sessions()
        self._keep_logs = folder is not None
        self.folder = _make(folder)
        name = self.folder.name if folder is None else f"anabranch-cluster-{secrets.token_hex(4)}"
        self.groups = None if cpus is None else quotas.open_groups(name, cpus)
        self._group = None if self.groups is None else self.groups.folder
        self._keeper = self._start_keeper()
        try:
            self.master = Master(self.folder / "master")
        except BaseException:
            self._clear()
            raise

    def group(self, host: str) -> Path | None:
        """The control group for a node; None where there are none."""
        if self.groups is None:
            return None
        self.groups.add(host)
        return self.groups.folder / host

    def stop(self, nodes: Iterable[Node]) -> None:
        """End the session and all processes, and remove what they have written."""
        try:
            self.sessions.close()
        finally:
            self._clear()
            self.master.reap()
            for node in nodes:
                node.reap()

    def _start_keeper(self) -> subprocess.Popen[bytes]:
        rest = [str(self.folder), "keep" if self._keep_logs else "remove"]
        rest += [] if self._group is None else [str(self._group)]
        return subprocess.Popen(
            [sys.executable, keeper.__file__, str(os.getpid()), *rest],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _clear(self) -> None:
        sweep(self.folder, keep_logs=self._keep_logs, group=self._group)
        # Not before: what the sweep could not do is left to the keeper.
        self._keeper.kill()
        self._keeper.wait()


def _make(folder: Path | None) -> Path:
    if folder is None:
        place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        return Path(tempfile.mkdtemp(prefix="anabranch-cluster-", dir=place))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
