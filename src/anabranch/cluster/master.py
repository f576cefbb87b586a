"""The Spark master of a local cluster, and its list of workers."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import NamedTuple

from anabranch.cluster import spark
from anabranch.cluster.processes import last_lines, start
from anabranch.cluster.waiting import until
from anabranch.errors import ClusterFailed

_URL = re.compile(r"Starting Spark master at (spark://\S+)")
_PAGE = re.compile(r"started service 'MasterUI' on port (\d+)")
_SECONDS = 120.0
# The page is on this machine: a proxy in the environment must not be asked for it.
_web = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Registered(NamedTuple):
    """A worker that is registered with the master."""

    name: str
    host: str


class Master:
    """A running Spark master on an address of this machine."""

    def __init__(self, folder: Path, host: str) -> None:
        self._host = host
        self._log = folder / "master.log"
        spark.make_folders(folder)
        self._process: subprocess.Popen[bytes] = start(
            spark.master_command(host),
            environment=spark.environment(host, folder),
            log=self._log,
        )
        # Its page is there a little before there is anything on it.
        until(lambda: self._answers() or self._process.poll() is not None, _SECONDS)
        ports = self._ports()
        if ports is None or not self._answers():
            self._process.kill()
            self.reap()
            raise ClusterFailed(
                f"Spark's master did not start in {_SECONDS:.0f} s. "
                f"The end of {self._log}:\n{last_lines(self._log)}"
            )
        self.url, self._page = ports

    def workers(self) -> set[Registered]:
        """The workers that are registered and alive."""
        try:
            listed = _listed(self._page)
        except (OSError, ValueError) as error:
            raise ClusterFailed(
                f"Spark's master at {self.url} does not answer ({error}). "
                f"The end of {self._log}:\n{last_lines(self._log)}"
            ) from error
        return {
            Registered(worker["id"], worker["host"])
            for worker in listed
            if worker["state"] == "ALIVE"
        }

    def reap(self) -> None:
        """Collect the exit status of the killed process."""
        self._process.wait()

    def _answers(self) -> bool:
        ports = self._ports()
        try:
            return ports is not None and _listed(ports[1]) is not None
        except (OSError, ValueError):
            return False

    def _ports(self) -> tuple[str, str] | None:
        text = self._log.read_text(errors="replace")
        url, page = _URL.search(text), _PAGE.search(text)
        if not url or not page:
            return None
        return url[1], f"http://{self._host}:{page[1]}/json/"


def _listed(page: str) -> list[dict[str, str]]:
    with _web.open(page, timeout=10) as answer:
        workers: list[dict[str, str]] = json.load(answer)["workers"]
    return workers
