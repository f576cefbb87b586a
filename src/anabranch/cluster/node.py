"""One node of a local cluster: a Spark worker and all processes that it has started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from anabranch.cluster import spark
from anabranch.cluster.processes import end, executors, last_lines, of_folder, start
from anabranch.cluster.site import Site
from anabranch.cluster.sweep import lose
from anabranch.errors import ClusterFailed


class Node:
    """A worker on an address of its own. Making one starts it and does not wait."""

    def __init__(
        self,
        master: str,
        host: str,
        folder: Path,
        *,
        cores: int,
        memory: str,
        site: Site,
    ) -> None:
        self.host = host
        self._folder = folder
        self._group = group = site.group(host)
        self._log = folder / "worker.log"
        spark.make_folders(folder)
        spark.limit_logs(folder)
        command = spark.worker_command(master, host, folder / "work", cores=cores, memory=memory)
        self._process: subprocess.Popen[bytes] = site.inside(
            host,
            lambda: start(
                command,
                environment=spark.environment(host, folder),
                log=self._log,
                group=group and group / "cgroup.procs",
            ),
        )

    @property
    def is_up(self) -> bool:
        """Whether the worker is running."""
        return self._process.poll() is None

    def kill(self, *, keep_state: bool) -> None:
        """Kill every process of the node at once, and remove its state."""
        end(lambda: of_folder(self._folder, self._group))
        self.reap()
        lose(self._folder, keep_state=keep_state)

    def kill_executors(self) -> None:
        """End the executors of the node that are running now."""
        found = executors(self._process.pid) if self.is_up else set()
        if not found:
            raise ClusterFailed(f"no executor is running on {self.host}; start a session first")
        end(lambda: found & executors(self._process.pid))

    def reap(self) -> None:
        """Collect the exit status of the killed worker."""
        self._process.wait()

    def complaint(self) -> str:
        """The end of the logs of the worker and of its newest executor."""
        logs = [self._log]
        written = self._folder.glob("work/*/*/stderr")
        logs += sorted(written, key=lambda log: log.stat().st_mtime)[-1:]
        return "\n".join(f"The end of {log}:\n{last_lines(log)}" for log in logs)
