"""The resources of a local cluster, from its start to its stop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from anabranch.cluster.master import Master
from anabranch.cluster.node import Node
from anabranch.cluster.sessions import Sessions
from anabranch.cluster.site import Site


class Resources:
    """The site of a cluster, its master and its session."""

    def __init__(self, folder: Path | None, cpus: float | None, link: int | None) -> None:
        self.site = Site(folder, cpus, link)
        self.sessions = Sessions(self.site.gateway)
        try:
            self.master = Master(self.site.folder / "master", self.site.gateway)
        except BaseException:
            self.site.clear()
            raise

    def stop(self, nodes: Iterable[Node]) -> None:
        """End the session and all processes, and remove what they have written."""
        try:
            self.sessions.close()
        finally:
            self.site.clear()
            self.master.reap()
            for node in nodes:
                node.reap()
