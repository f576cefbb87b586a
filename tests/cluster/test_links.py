"""Links: their rate holds both ways, networks do not meet, and nothing of them is left behind."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import LocalAgents, LocalCluster, links
from anabranch.cluster.links import Network, open_network, remove, remove_leftovers
from anabranch.cluster.processes import in_namespaces, running
from anabranch.cluster.waiting import until
from anabranch.errors import PlanError
from anabranch.nodes import Deadline, NodeStore, RemoteNode, Signer
from anabranch.nodes.requests import Epoch
from anabranch.units import bits_per_second

pytestmark = pytest.mark.chaos
MBIT = 20
RATE = MBIT * 1_000_000
SECONDS = 1.0


@pytest.fixture
def network() -> Iterator[Network]:
    made = open_network(RATE)
    if made is None:
        pytest.skip("network namespaces cannot be made here")
    yield made
    remove(made.number)
    made.release()
    assert traces(made.number) == []


def traces(number: int) -> list[str]:
    named = f"anabranch-{number}"
    spaces = [each.name for each in links.NAMESPACES.glob(f"{named}*")]
    found = [each for each in spaces if each == named or each.startswith(f"{named}-")]
    devices = [each.name for each in Path("/sys/class/net").iterdir()]
    return found + [each for each in devices if each == f"anabranch{number}"]


def pass_bytes(network: Network, sender: str, receiver: str) -> float:
    """How many bits per second pass from one node to another within some time."""

    def at(address: str) -> socket.socket:
        serve = lambda: socket.create_server((address, 0))  # noqa: E731
        return serve() if address == network.gateway else network.inside(address, serve)

    with at(receiver) as server:
        where = server.getsockname()
        reach = lambda: socket.create_connection(where, 10)  # noqa: E731
        from_here = sender == network.gateway
        with reach() if from_here else network.inside(sender, reach) as end:
            taken, _ = server.accept()
            with taken:
                return _count(end, taken)


def _count(end: socket.socket, taken: socket.socket) -> float:
    over = threading.Event()

    def send() -> None:
        end.settimeout(0.1)
        while not over.is_set():
            try:
                end.send(bytes(1 << 16))
            except TimeoutError:
                continue

    sender = threading.Thread(target=send)
    sender.start()
    # What may pass at once does not count, nor does what it took to begin.
    taken.recv(1 << 16)
    began, received = time.monotonic(), 0
    while time.monotonic() < began + SECONDS:
        received += len(taken.recv(1 << 16))
    rate = 8 * received / (time.monotonic() - began)
    over.set()
    sender.join()
    return rate


def test_the_rate_holds_both_ways(network: Network) -> None:
    one, other = network.address(2), network.address(3)
    for address in (one, other):
        network.add(address)
        network.add(address)  # as for a node that returns
    for sender, receiver in ((one, network.gateway), (network.gateway, one), (one, other)):
        rate = pass_bytes(network, sender, receiver)
        assert 0.3 * RATE < rate < 1.3 * RATE


def test_two_networks_do_not_meet(network: Network) -> None:
    other = open_network(RATE)
    assert other is not None
    try:
        assert other.number != network.number
        network.add(network.address(2))
        other.add(other.address(2))
        with other.inside(other.address(2), lambda: socket.create_server(("", 0))) as server:
            port = server.getsockname()[1]

            def reach() -> None:
                socket.create_connection((other.address(2), port), 5).close()

            reach()  # from here
            with pytest.raises(OSError, match=r"unreachable|No route"):
                network.inside(network.address(2), reach)
    finally:
        remove(other.number)
        other.release()
    assert traces(other.number) == []
    assert traces(network.number)


def test_what_is_called_inside_starts_its_processes_there(network: Network) -> None:
    host = network.address(2)
    network.add(host)
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    process = network.inside(host, lambda: subprocess.Popen(command))
    assert in_namespaces([links.NAMESPACES / f"anabranch-{network.number}-{host}"]) == {process.pid}
    names = lambda: {name for _, name in socket.if_nameindex()}  # noqa: E731
    assert network.inside(host, names) == {"lo", "eth0"}
    assert f"anabranch{network.number}" in names()
    remove(network.number)
    assert process.wait(10) == -signal.SIGKILL


def test_an_error_inside_is_raised_here(network: Network) -> None:
    network.add(network.address(2))
    with pytest.raises(ZeroDivisionError):
        network.inside(network.address(2), lambda: 1 // 0)


LEAVES = """
import sys, subprocess
from anabranch.cluster.links import open_network
network = open_network(1_000_000)
network.add(network.address(2))
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
process = network.inside(network.address(2), lambda: subprocess.Popen(sleeper, close_fds=True,
    stdout=subprocess.DEVNULL))
print(network.number, process.pid, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_program_has_left_is_swept_by_the_next_start(network: Network) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", LEAVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    number, sleeper = map(int, program.stdout.readline().split())
    remove_leftovers()
    assert len(traces(number)) == 3, "its user lives"
    assert len(traces(network.number)) == 2
    program.kill()
    program.communicate()
    assert sleeper in running()
    remove_leftovers()
    assert traces(number) == []
    assert sleeper not in running()
    assert len(traces(network.number)) == 2


AS_NOBODY = """
import logging, os, sys
from anabranch.cluster.links import open_network
logging.basicConfig(format="%(message)s")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(open_network(1_000_000))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the user is not root already")
def test_without_root_there_is_one_warning_and_no_network() -> None:
    done = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True)
    assert done.stdout == "None\n"
    (line,) = done.stderr.splitlines()
    assert "link of 1000000 bits per second for each node is not applied" in line
    assert "ermi" in line


def test_without_the_programs_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert open_network(RATE) is None
    (record,) = caplog.records
    assert "no program ip; install iproute2" in record.getMessage()


@pytest.mark.parametrize(
    "wrong", ["fast", "100", "100 MB", "0 Mbit", "-1 Mbit", "99 kbit", "1e9 bit", ""]
)
def test_what_is_no_rate_of_a_link_is_refused(wrong: str) -> None:
    with pytest.raises(PlanError, match="link"):
        LocalCluster(link=wrong)
    with pytest.raises(PlanError, match="link"):
        LocalAgents(2, link=wrong)


@given(st.integers(1, 999), st.sampled_from(["bit", "kbit", "Mbit", "Gbit"]))
def test_rates_are_in_decimal_units(count: int, unit: str) -> None:
    factor = 1000 ** ["bit", "kbit", "Mbit", "Gbit"].index(unit)
    assert bits_per_second(f"{count} {unit}") == count * factor
    assert bits_per_second(f" {count}{unit.upper()} /s") == count * factor


def test_subnets_of_this_machine_are_left_alone() -> None:
    mine = links._subnet(3)
    assert links._overlaps("198.18.3.0/25 dev eth0 proto kernel", mine)
    assert links._overlaps("unreachable 198.18.0.0/16 dev lo", mine)
    assert not links._overlaps("198.18.2.0/24 dev eth0", mine)
    assert not links._overlaps("default via 10.0.0.1 dev eth0", mine)


def number_of(agents: LocalAgents) -> int | None:
    network = agents._site.network
    return None if network is None else network.number


def stores(agents: LocalAgents) -> dict[str, NodeStore]:
    signer = Signer(agents.secret)
    return {
        host: NodeStore(RemoteNode(str(address), signer), Epoch(1), lambda: Deadline(60))
        for host, address in agents.addresses.items()
    }


@pytest.mark.parametrize("link", [None, f"{MBIT} Mbit"])
def test_agents_keep_backups_and_find_them_again(link: str | None) -> None:
    with LocalAgents(2, link) as agents:
        if link is not None and not agents.linked:
            pytest.skip("network namespaces cannot be made here")
        number = number_of(agents)
        one, other = agents.hosts
        data = os.urandom(RATE // 8)
        began = time.monotonic()
        stores(agents)[one].put("part", data)
        if agents.linked:
            assert 0.9 < time.monotonic() - began < 20
        agents.kill(one)
        assert set(agents.addresses) == {other}
        agents.start(one)
        assert stores(agents)[one].size("part") == len(data)
        agents.send(other, signal.SIGKILL)  # it ends by itself, as far as the program knows
        with pytest.raises(PlanError, match="running already"):
            agents.start(one)
        with pytest.raises(PlanError, match=r"there is no agent of '10\.0\.0\.1'"):
            agents.kill("10.0.0.1")
        folder, pids = agents.folder, {each.pid for each in agents.addresses.values()}
    assert not folder.exists()
    assert not pids & running().keys()
    assert number is None or traces(number) == []


KILLED = """
import sys
from anabranch.cluster import LocalAgents
with LocalAgents(2, sys.argv[1] or None) as agents:
    network = agents._site.network
    print(agents.folder, network.number if network else -1, flush=True)
    print(*(each.pid for each in agents.addresses.values()), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("link", ["", f"{MBIT} Mbit"])
def test_nothing_stays_when_the_program_with_the_agents_is_killed(link: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", KILLED, link],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    folder, number = program.stdout.readline().split()
    pids = program.stdout.readline().split()
    assert Path(folder).is_dir()
    program.kill()
    program.communicate()
    assert until(lambda: not Path(folder).exists(), 30)
    assert until(lambda: not {int(pid) for pid in pids} & running().keys(), 30)
    assert until(lambda: not traces(int(number)), 30)
