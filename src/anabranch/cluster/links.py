"""Links of a limited rate between the nodes of a local cluster, by network namespaces of Linux.

Every node has a namespace with one link, to a switch in a namespace of its own. Both ends of the
link send at its rate at most. The switch has one more link, without a limit, to this process, so
that what the firewall of the machine forwards does not matter to the nodes.

Networks are numbered. Whoever uses a number has locked its file, the process that runs the cluster
and the one that clears up after it. A number whose file nobody has locked was left behind, and the
next start removes its network.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from anabranch.cluster.processes import end, in_namespaces
from anabranch.cluster.waiting import until
from anabranch.errors import ClusterFailed, PlanError
from anabranch.units import bits_per_second

A = TypeVar("A")

SLOWEST, FASTEST = 100_000, 100_000_000_000
"""Bits per second that a link can have."""
LOCKS = Path("/run/anabranch-links")
NAMESPACES = Path("/run/netns")
_SUBNETS = ipaddress.IPv4Network("198.18.0.0/15")
"""Set aside for measurements of networks (RFC 2544): nothing that is in use has these."""
_COUNT = 256
_NET = 0x40000000  # CLONE_NEWNET
_REMOVAL = 10.0
# What may pass at once after a pause, and what a port of a switch keeps before it drops packets.
_BURST_SECONDS, _LEAST_BURST = 0.005, 16 << 10
_QUEUE_SECONDS, _LEAST_QUEUE = 0.1, 256 << 10

_log = logging.getLogger(__name__)


def check_link(link: str) -> int:
    """The bits per second of a link, if nodes can have such a one.

    >>> check_link("100 Mbit")
    100000000
    """
    rate = bits_per_second(link, what="link")
    if not SLOWEST <= rate <= FASTEST:
        raise PlanError(f"link={link!r}: a link has from 100 kbit to 100 Gbit per second")
    return rate


def open_network(rate: int) -> Network | None:
    """A network whose links have this rate in bits per second; None if it is not permitted here.

    It has a number, and thereby a subnet, that no other network of this machine has.
    """
    try:
        for program in ("ip", "tc"):
            if shutil.which(program) is None:
                raise ClusterFailed(f"there is no program {program}; install iproute2")
        LOCKS.mkdir(mode=0o700, exist_ok=True)
        remove_leftovers()
        for number in range(_COUNT):
            lock = _claim(number)
            if lock is not None and not _is_taken(_subnet(number)):
                return Network(number, rate, lock)
            if lock is not None:
                os.close(lock)
        why = f"all {_COUNT} networks are in use"
    except (OSError, ClusterFailed) as error:
        why = str(error)
    _log.warning("The link of %s bits per second for each node is not applied: %s", rate, why)
    return None


class Network:
    """Namespaces of nodes, joined by a switch. :func:`open_network` makes one."""

    def __init__(self, number: int, rate: int, lock: int) -> None:
        self.number = number
        self.lock = lock
        """The descriptor of the locked file. The network is kept while a process has it open."""
        self._rate = rate
        self._nodes: set[str] = set()
        try:
            self._make_switch()
        except BaseException:
            remove(number)
            self.release()
            raise

    @property
    def gateway(self) -> str:
        """The address of this process, as nodes see it."""
        return self.address(1)

    def address(self, number: int) -> str:
        """The address of a node by its number, from 2 to 254."""
        return str(_subnet(self.number)[number])

    def has(self, address: ipaddress.IPv4Address) -> bool:
        """Whether a node can have this address."""
        return address in _subnet(self.number).hosts() and str(address) != self.gateway

    def add(self, address: str) -> None:
        """Make the namespace and the link of a node; nothing happens if they are there."""
        if address in self._nodes:
            return
        port = f"node{address.rpartition('.')[2]}"
        switch, node = _switch(self.number), _namespace(self.number, address)
        _ip("netns", "add", node)
        _ip(
            *("link", "add", "eth0", "netns", node),
            *("type", "veth", "peer", "name", port, "netns", switch),
        )
        _ip("-n", node, "addr", "add", f"{address}/24", "dev", "eth0")
        self._limit(node, "eth0")
        self._limit(switch, port)
        _ip("-n", switch, "link", "set", port, "master", "switch", "up")
        for device in ("lo", "eth0"):
            _ip("-n", node, "link", "set", device, "up")
        self._nodes.add(address)

    def inside(self, address: str, function: Callable[[], A]) -> A:
        """Call a function in the namespace of a node.

        Sockets that it opens are there, and so are processes and threads that it starts.
        """
        result: Future[A] = Future()
        path = NAMESPACES / _namespace(self.number, address)

        def call() -> None:
            try:
                _enter(path)
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        # The thread ends with the call: none of this process stays there.
        thread = threading.Thread(target=call, name=f"inside {address}")
        thread.start()
        thread.join()
        return result.result()

    def release(self) -> None:
        """Give the number to others, once the network is removed."""
        os.close(self.lock)

    def _make_switch(self) -> None:
        switch, device = _switch(self.number), _device(self.number)
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("link", "add", device, "type", "veth", "peer", "name", "driver", "netns", switch)
        _ip("-n", switch, "link", "set", "driver", "master", "switch", "up")
        _ip("-n", switch, "link", "set", "switch", "up")
        _ip("addr", "add", f"{self.gateway}/24", "dev", device)
        _ip("link", "set", device, "up")
        # Whether the kernel can limit a rate is known now, and not when a node is made.
        self._limit(switch, "driver")
        _run("tc", "-n", switch, "qdisc", "del", "dev", "driver", "root")

    def _limit(self, namespace: str, device: str) -> None:
        in_bytes = self._rate / 8
        burst = max(_LEAST_BURST, round(in_bytes * _BURST_SECONDS))
        queue = max(_LEAST_QUEUE, round(in_bytes * _QUEUE_SECONDS))
        limits = ("rate", f"{self._rate}bit", "burst", f"{burst}b", "limit", f"{queue}b")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def remove(number: int) -> None:
    """End the processes in a network and remove it; nothing happens if there is none."""
    end(lambda: in_namespaces(_namespaces(number)))
    # Links end with their namespaces, and that to this process with the one of the switch.
    until(lambda: _is_removed(number), _REMOVAL)
    if _namespaces(number):
        raise ClusterFailed(
            f"the network namespaces {', '.join(path.name for path in _namespaces(number))} "
            "cannot be removed; try: ip netns del NAME"
        )


def remove_leftovers() -> None:
    """Remove the networks of clusters whose processes have ended, all of them."""
    for path in LOCKS.glob("*.lock"):
        if path.stem.isdecimal():
            lock = _claim(int(path.stem))
            if lock is not None:
                os.close(lock)


def _claim(number: int) -> int | None:
    """Lock a number, and remove what its last user has left; None if it is in use."""
    lock = os.open(LOCKS / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(number)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _is_removed(number: int) -> bool:
    for path in _namespaces(number):
        _try_ip("netns", "del", path.name)
    if (Path("/sys/class/net") / _device(number)).exists():
        _try_ip("link", "del", _device(number))
    return not _namespaces(number) and not (Path("/sys/class/net") / _device(number)).exists()


def _namespaces(number: int) -> list[Path]:
    switch = NAMESPACES / _switch(number)
    return [*NAMESPACES.glob(f"{switch.name}-*"), *([switch] if switch.exists() else [])]


def _is_taken(subnet: ipaddress.IPv4Network) -> bool:
    """Whether this machine knows a way into a subnet that is not its default one."""
    return any(_overlaps(line, subnet) for line in _ip("-o", "-4", "route", "show").splitlines())


def _overlaps(route: str, subnet: ipaddress.IPv4Network) -> bool:
    for word in route.split()[:2]:  # some begin with their kind, such as blackhole
        with suppress(ValueError):
            return ipaddress.IPv4Network(word).overlaps(subnet)
    return False


def _subnet(number: int) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network((int(_SUBNETS.network_address) + (number << 8), 24))


def _switch(number: int) -> str:
    return f"anabranch-{number}"


def _namespace(number: int, address: str) -> str:
    return f"{_switch(number)}-{address}"


def _device(number: int) -> str:
    return f"anabranch{number}"  # the kernel takes 15 letters


def _enter(namespace: Path) -> None:
    """Let this thread be in a namespace, and those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(file, _NET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(namespace))
    finally:
        os.close(file)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _try_ip(*words: str) -> None:
    with suppress(ClusterFailed):  # someone else may have removed it
        _ip(*words)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ClusterFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
