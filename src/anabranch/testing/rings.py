"""A ring of standing nodes on this machine: processes that can be killed and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import TracebackType

from anabranch.errors import AnabranchError, ClusterFailed
from anabranch.nodes.standing.client import Access, Ring
from anabranch.nodes.standing.file import RingFile
from anabranch.nodes.standing.store import RingStore
from anabranch.nodes.tls import Tls

_START = 120.0
_PAUSE = 0.05
# The kernel kills a node whose parent has died, however that has died.
_PROGRAM = """
import ctypes, signal
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
from anabranch.cli import main
main()
"""
_SERVING = "serving at "


class LocalRing:
    """Standing nodes at addresses of the loopback network, in folders below ``folder``.

    They end with this process at the latest.

    >>> hosts(3, start=20)
    ('127.0.0.20', '127.0.0.21', '127.0.0.22')
    """

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[str],
        *,
        period: float = 0.5,
        leaves: int = 32,
        tls: Tls | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """With ``tls`` the nodes encrypt. The certificate must name all hosts."""
        self.folder = folder
        self.hosts = tuple(hosts)
        self.file = folder / "ring.json"
        """The file of the ring."""
        self._options = ("--period", f"{period} s", "--leaves", str(leaves), *options)
        if tls is not None:
            files = ("--tls-certificate", tls.certificate, "--tls-key", tls.key)
            self._options += (*files, "--tls-root", tls.root)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._addresses: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.start(self.hosts[:1])
            self.start(self.hosts[1:])
            self.wait_closed()
        except BaseException:
            self.close()
            raise

    def start(self, hosts: Iterable[str], *, port: int = 0, options: Sequence[str] = ()) -> None:
        """Start nodes, or start them again, and wait until they serve."""
        started = list(hosts)
        for host in started:
            command = (
                "node", "--ring", str(self.file), "--host", host, "--port", str(port),
                "--folder", str(self.folder / host), *self._options, *options,
            )  # fmt: skip
            log = self._log(host)
            log.write_bytes(b"")
            with log.open("ab") as output:
                self._processes[host] = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        for host in started:
            self._addresses[host] = self._served(host)

    def address(self, host: str) -> str:
        """Where a node listens, or listened last."""
        return self._addresses[host]

    def pid(self, host: str) -> int:
        """The process of a node."""
        return self._processes[host].pid

    def log(self, host: str) -> str:
        """What a node has logged since it was started last."""
        return self._log(host).read_text(errors="replace")

    @property
    def alive(self) -> tuple[str, ...]:
        """The nodes whose processes run."""
        return tuple(h for h, process in self._processes.items() if process.poll() is None)

    def kill(self, hosts: Collection[str]) -> None:
        """Kill nodes, all at once."""
        self._end(hosts, signal.SIGKILL)

    def stop(self, hosts: Collection[str]) -> None:
        """Let nodes leave the ring and end."""
        self._end(hosts, signal.SIGTERM)

    def send(self, host: str, number: signal.Signals) -> None:
        """Send a signal to a node: SIGSTOP lets it hang, and SIGCONT go on."""
        self._processes[host].send_signal(number)

    def ring(self, query: str = "states", *, patience: float = 30.0) -> Ring:
        """A client of the ring, for the states of a query; with no query for the ring itself."""
        return Ring(Access.of(RingFile.read(self.file), query), patience=patience)

    def store(self, data: int, parity: int, query: str = "states") -> RingStore:
        """A store in the ring."""
        return RingStore(self.ring(query), data, parity)

    def wait_closed(self, seconds: float = _START) -> None:
        """Wait until each live node has all others in its leaf set, and nobody else."""
        with self.ring("") as ring:
            self.wait(lambda: self._is_closed(ring), "the ring is not closed", seconds)

    def wait(self, condition: Callable[[], object], what: str, seconds: float = _START) -> None:
        """Wait until a condition is true. ClusterFailed if it is not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterFailed(f"{what} after {seconds:g} s")
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Kill all nodes. Their folders stay."""
        self.kill(self.alive)

    def __enter__(self) -> LocalRing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _is_closed(self, ring: Ring) -> bool:
        alive = set(self.alive)
        for host in alive:
            try:
                view = ring.look(self._addresses[host])
            except AnabranchError:
                return False
            # A node that was started again is known where it was before, for a while.
            known = {each.contact.address for each in view.leaves}
            if known != {self._addresses[each] for each in alive - {host}}:
                return False
        return True

    def _log(self, host: str) -> Path:
        return self.folder / f"{host}.log"

    def _served(self, host: str) -> str:
        deadline = time.monotonic() + _START
        while True:
            for line in self.log(host).splitlines():
                if line.startswith(_SERVING):
                    return line.removeprefix(_SERVING)
            code = self._processes[host].poll()
            if code is not None or time.monotonic() > deadline:
                raise ClusterFailed(
                    f"node {host} of the ring did not start (exit code {code}): {self.log(host)}"
                )
            time.sleep(_PAUSE)

    def _end(self, hosts: Collection[str], number: signal.Signals) -> None:
        for host in hosts:
            self._processes[host].send_signal(number)
        for host in hosts:
            self._processes[host].wait()


def hosts(count: int, start: int = 2) -> tuple[str, ...]:
    """Addresses of this machine, for nodes of a :class:`LocalRing`."""
    return tuple(f"127.0.0.{number}" for number in range(start, start + count))
