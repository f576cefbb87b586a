"""What a cluster has on this machine beside its processes: a folder, control groups, a network.

A keeper, which is a process of its own, removes all of it if this process ends without doing so.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from anabranch.cluster import keeper, links, quotas
from anabranch.cluster.sweep import sweep

A = TypeVar("A")

LOOPBACK = "127.0.0.1"
_MEMORY = Path("/dev/shm")


class Site:
    """The folder, control groups and network of a cluster, and its keeper.

    ``cpus`` is the quota of a node, ``link`` the bits per second of its link; None for no limit.
    """

    def __init__(self, folder: Path | None, cpus: float | None, link: int | None) -> None:
        self._keep_logs = folder is not None
        self.folder = _make(folder)
        name = self.folder.name if folder is None else f"anabranch-cluster-{secrets.token_hex(4)}"
        self.groups = None if cpus is None else quotas.open_groups(name, cpus)
        self.network = None if link is None else links.open_network(link)
        self._keeper = self._start_keeper()

    @property
    def gateway(self) -> str:
        """The address of this process, as nodes see it."""
        return LOOPBACK if self.network is None else self.network.gateway

    def address(self, number: int) -> str:
        """The address of a node by its number, from 2 to 254."""
        return f"127.0.0.{number}" if self.network is None else self.network.address(number)

    def has(self, address: ipaddress.IPv4Address) -> bool:
        """Whether a node can have this address."""
        if self.network is None:
            return address.is_loopback and str(address) != LOOPBACK
        return self.network.has(address)

    def group(self, host: str) -> Path | None:
        """The control group for a node; None where there are none."""
        if self.groups is None:
            return None
        self.groups.add(host)
        return self.groups.folder / host

    def inside(self, host: str, function: Callable[[], A]) -> A:
        """Call a function in the network of a node, which is made if need be."""
        if self.network is None:
            return function()
        self.network.add(host)
        return self.network.inside(host, function)

    def clear(self) -> None:
        """End all processes, and remove what they have written."""
        network = None if self.network is None else self.network.number
        sweep(self.folder, keep_logs=self._keep_logs, group=self._group, network=network)
        # Not before: what the sweep could not do is left to the keeper.
        self._keeper.kill()
        self._keeper.wait()
        if self.network is not None:
            self.network.release()

    @property
    def _group(self) -> Path | None:
        return None if self.groups is None else self.groups.folder

    def _start_keeper(self) -> subprocess.Popen[bytes]:
        network = "" if self.network is None else str(self.network.number)
        rest = [str(self.folder), "keep" if self._keep_logs else "remove"]
        return subprocess.Popen(
            [
                *(sys.executable, keeper.__file__, str(os.getpid()), *rest),
                *(str(self._group or ""), network),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            # The number of the network stays with the keeper for as long as it clears up.
            pass_fds=() if self.network is None else (self.network.lock,),
        )


def _make(folder: Path | None) -> Path:
    if folder is None:
        place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        return Path(tempfile.mkdtemp(prefix="anabranch-cluster-", dir=place))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
