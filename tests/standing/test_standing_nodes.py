"""A ring of real standing nodes, which are killed, hang, fill up and return."""

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from anabranch.cli import main
from anabranch.errors import (
    AnabranchError,
    CheckpointNotFound,
    Deposed,
    DidNotHappen,
    Fenced,
    PlanError,
    Refused,
    StoreError,
)
from anabranch.fragments import Fragment, encode, recompute
from anabranch.nodes import Signer, codec
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import (
    BackupName,
    Block,
    Checksum,
    Delete,
    Epoch,
    List,
    Ping,
    Put,
    Stop,
)
from anabranch.nodes.server import MOST_FRIENDS
from anabranch.nodes.standing.client import Ring
from anabranch.nodes.standing.file import RingFile
from anabranch.nodes.standing.names import FragmentName, generation_of, under_owner
from anabranch.nodes.standing.process import Standing, serve
from anabranch.nodes.standing.requests import Describe, Reigning, Tell
from anabranch.nodes.standing.retrieving import retrieve
from anabranch.nodes.standing.saving import save
from anabranch.nodes.standing.store import RingStore, check, where
from anabranch.nodes.standing.succession import take_over
from anabranch.nodes.standing.survey import survey
from anabranch.ring import Leaving, Peer, Settings
from anabranch.stores.meter import Meter
from anabranch.testing import LocalRing
from anabranch.testing.rings import hosts

HOSTS = hosts(7, start=50)
OWNER = "10.0.0.1"
PERIOD = 0.5

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRing]:
    with LocalRing(tmp_path_factory.mktemp("ring"), HOSTS, period=PERIOD) as ring:
        yield ring


@pytest.fixture
def ring(started: LocalRing) -> LocalRing:
    """All nodes alive, and known to each other."""
    started.start(set(HOSTS) - set(started.alive))
    started.wait_closed()
    return started


def named(number: int = 1) -> str:
    return f"words/{under_owner(OWNER)}parts/{number}"


def holders(store: RingStore, name: str) -> dict[int, str]:
    """The hosts that have fragments now, by index."""
    store.ring.forget()
    found = survey(store.ring, OWNER, name)
    return {piece.name.index: piece.node.host for piece in found.pieces}


def test_any_parity_holders_are_killed_and_all_return(ring: LocalRing) -> None:
    store, data = ring.store(3, 3, "killed"), os.urandom(3_000_000)
    store.put(named(), data)
    at = holders(store, named())
    assert sorted(at) == list(range(6))
    assert len(set(at.values())) == 6, "each is at another host"
    ring.kill([at[0], at[2], at[4]])
    assert store.get(named()).to_pybytes() == data
    assert store.get(named(), 1_234_567, 1000).to_pybytes() == data[1_234_567:][:1000]
    ring.kill(ring.alive)
    store.ring.patience = 1
    with pytest.raises(StoreError):
        store.get(named())
    ring.start(HOSTS)
    ring.wait_closed()
    again = ring.store(3, 3, "killed")
    assert again.get(named()).to_pybytes() == data
    assert again.list() == [named()]
    assert holders(again, named()) == at, "none was moved, and none was made again"


def test_lost_fragments_are_made_again_after_a_while(ring: LocalRing) -> None:
    store, data = ring.store(2, 2, "mended"), os.urandom(500_000)
    for number in range(5):
        store.put(named(number), data + bytes([number]))
    before = {number: holders(store, named(number)) for number in range(5)}
    lost = before[0][0]
    ring.kill([lost])
    ring.wait(
        lambda: all(len(set(holders(store, named(n)).values()) - {lost}) == 4 for n in range(5)),
        "the fragments of a killed node were not made again",
    )
    # Those that are left give it again, whichever they are: also those whose labels are old.
    again = holders(store, named(0))
    ring.kill([host for host in again.values() if host != again[0]][:2])
    for number in range(5):
        assert store.get(named(number)).to_pybytes() == data + bytes([number])


def test_a_node_that_is_soon_back_costs_no_repair(tmp_path: Path) -> None:
    # Ten periods are longer than a busy machine takes to start a process.
    with LocalRing(tmp_path, hosts(5, start=70), period=4.0) as ring:
        store, data = ring.store(2, 2, "restarted"), os.urandom(100_000)
        store.put(named(), data)
        before = holders(store, named())
        ring.stop([before[1]])
        assert store.get(named()).to_pybytes() == data
        ring.start([before[1]])
        ring.wait_closed()
        assert holders(store, named()) == before


def test_a_node_that_hangs_costs_little_time(ring: LocalRing) -> None:
    store, data = ring.store(2, 2, "hangs"), os.urandom(2_000_000)
    store.put(named(), data)
    silent = holders(store, named())[0]
    ring.send(silent, signal.SIGSTOP)
    try:
        began = time.monotonic()
        fresh = ring.store(2, 2, "hangs")
        assert fresh.get(named()).to_pybytes() == data
        fresh.put(named(2), data)
        assert fresh.get(named(2)).to_pybytes() == data
        assert time.monotonic() - began < fresh.ring.silence, "nobody waited for it to the end"
    finally:
        ring.send(silent, signal.SIGCONT)


def test_a_full_node_is_replaced_by_another(tmp_path: Path) -> None:
    with LocalRing(
        tmp_path, hosts(5, start=70), period=PERIOD, options=["--capacity", "2 MB"]
    ) as ring:
        full = hosts(5, start=70)[1]
        ring.stop([full])
        ring.start([full], options=["--capacity", "1 kB"])
        ring.wait_closed()
        store, data = ring.store(2, 2), os.urandom(1_000_000)
        store.put(named(), data)
        assert set(holders(store, named()).values()) == set(ring.hosts) - {full}
        assert store.get(named()).to_pybytes() == data
        store.put(named(2), data)
        # Three fragments are stored: as many as count, and fewer than may be asked for.
        ring.stop([hosts(5, start=70)[2]])
        store.put(named(20), data[:1000])
        with pytest.raises(StoreError, match="3 of its 4 fragments were stored, and 4 are needed"):
            RingStore(ring.ring(), 2, 2, at_least=4).put(named(21), data[:1000])
        ring.start([hosts(5, start=70)[2]])
        ring.wait_closed()
        with pytest.raises(StoreError, match=r"of its 4 fragments were stored.*no room"):
            put_many(store, data)
        assert all(len(holders(store, name)) >= 3 for name in store.list()), "none is a rest"
        assert named(21) not in store.list()
        # What was stored before is as it was, and there is room again when some is deleted.
        assert store.get(named()).to_pybytes() == data
        store.delete(named(2))
        store.put(named(10), data[: 10**5])


def put_many(store: RingStore, data: bytes) -> None:
    for number in range(3, 9):
        store.put(named(number), data)


def test_a_late_zombie_changes_nothing(ring: LocalRing) -> None:
    data = os.urandom(10_000)
    old, new = ring.store(2, 2, "driven").at(4), ring.store(2, 2, "driven").at(5)
    old.put(named(), data)
    new.put(named(), data[::-1])
    for act in (lambda: old.put(named(), data), lambda: old.delete(named())):
        with pytest.raises(Fenced):
            act()
    assert new.get(named()).to_pybytes() == data[::-1]
    # Another query has drivers of its own.
    ring.store(2, 2, "another").at(1).put(named(), data)


def test_a_deposed_owner_that_saves_late_is_refused(ring: LocalRing) -> None:
    data = os.urandom(10_000)

    def opened(epoch: int) -> RingStore:
        return RingStore(ring.ring("late").at(epoch), 2, 2)

    late, new = opened(4), opened(5)
    late.put(named(), data)
    assert take_over(new.ring) == len(HOSTS)
    new.put(named(2), data[::-1])
    before = {n: holders(new, named(n)) for n in (1, 2)}
    fragments = encode(2, 2, data, name=named(3), owner=OWNER)
    acts = {
        "a name that is not there": lambda: opened(4).put(named(3), data),
        "a name that the new owner has stored": lambda: opened(4).put(named(2), data),
        "by the calls of the paper": lambda: save(fragments, ring.ring("late").at(4)),
        "a deletion of what the new owner restores": lambda: opened(4).delete(named()),
    }
    for _ in range(2):
        for act in acts.values():
            with pytest.raises(Deposed, match=r"driver 5 has taken the query over.*; driver 4"):
                act()
        new = opened(5)
        assert {n: holders(new, named(n)) for n in (1, 2)} == before
        assert holders(new, named(3)) == {}, "nothing of it was stored"
        assert new.get(named()).to_pybytes() == data
        assert new.get(named(2)).to_pybytes() == data[::-1]
        # The nodes know it again, when all of them have ended and are back.
        ring.kill(ring.alive)
        ring.start(HOSTS)
        ring.wait_closed()
    with pytest.raises(Deposed):
        take_over(ring.ring("late").at(4))


def test_a_deposed_owner_at_nodes_that_have_not_heard_of_it(ring: LocalRing) -> None:
    """Three of the nodes take what it stores, which is enough to compute it; nobody reads it."""
    data, client = os.urandom(10_000), ring.ring("unheard")
    new = RingStore(client.at(5), 2, 2)
    place = survey(client, OWNER, named())
    new.put(named(), data)
    fragment = encode(2, 2, data[::-1], name=named(), owner=OWNER)
    late = client.at(4)
    heard = set(holders(new, named()).values())
    for each, node in zip(
        fragment, (each.contact for each in place.near.members if each.contact.host not in heard),
        strict=False,
    ):  # fmt: skip
        name = FragmentName(named(), generation_of(4, (1 << 64) - 1), each.label.index, 2, 4)
        late.store(node.address).put(str(name), each.to_bytes())
    new.ring.forget()
    assert len(survey(new.ring, OWNER, named()).pieces) == 7
    assert ring.store(2, 2, "unheard").get(named()).to_pybytes() == data


def test_what_is_lost_is_made_again_at_nodes_that_know_a_later_driver(ring: LocalRing) -> None:
    data, client = os.urandom(10_000), ring.ring("later")
    store = RingStore(client.at(4), 2, 2)
    store.put(named(), data)
    at = set(holders(store, named()).values())
    for host in set(HOSTS) - at:
        client.ask(ring.address(host), Delete(epoch=Epoch(5), names=()))
    ring.kill([lost := min(at)])
    ring.wait(
        lambda: len(set(holders(store, named()).values()) - {lost}) == 4,
        "the fragments were not made again at a node that refuses driver 4",
    )


def test_a_fragment_that_cannot_be_looked_at_keeps_none_from_being_made_again(
    ring: LocalRing,
) -> None:
    """A query writes what it likes, at every node, and before all others in their order."""
    bad = encode(1, 1, b"x", name="x")[0]
    poison = Fragment(replace(bad.label, owner="\ud800"), bad.rows).to_bytes()
    evil = ring.ring("a-first")
    for host in HOSTS:
        evil.store(ring.address(host)).put(str(FragmentName("x", 1, 0, 1, 2)), poison)
    store = ring.store(2, 2, "beside")
    store.put(named(), b"y" * 1000)
    ring.kill([lost := holders(store, named())[0]])
    ring.wait(
        lambda: len(set(holders(store, named()).values()) - {lost}) == 4,
        "the fragments were not made again",
    )


def test_a_full_node_is_passed_over_when_fragments_are_made_again(tmp_path: Path) -> None:
    named_hosts = hosts(6, start=70)
    with LocalRing(tmp_path, named_hosts, period=PERIOD) as ring:
        store = ring.store(2, 2)
        store.put(named(), b"y" * 100_000)
        at = set(holders(store, named()).values())
        near = [each.contact.host for each in survey(store.ring, OWNER, named()).near.members]
        full, other = [host for host in near if host not in at]
        ring.stop([full])
        ring.start([full], options=["--capacity", "1 kB"])
        ring.wait_closed()
        ring.kill([lost := min(at)])
        ring.wait(
            lambda: set(holders(store, named()).values()) == {other, *at} - {lost},
            "the fragment was not made again at the other node",
        )


def test_a_node_that_returns_without_its_disk_has_its_fragments_made_again(tmp_path: Path) -> None:
    with LocalRing(tmp_path, hosts(5, start=70), period=PERIOD) as ring:
        store = ring.store(2, 2)
        store.put(named(), b"y" * 100_000)
        lost = holders(store, named())[0]
        ring.kill([lost])
        shutil.rmtree(ring.folder / lost)
        ring.start([lost])
        ring.wait(lambda: len(holders(store, named())) == 4, "the fragment was not made again")
        ring.wait_closed()
        for host in ring.hosts:
            for path in (ring.folder / host).rglob("*"):
                assert path.stat().st_mode & 0o077 == 0, f"{path} is for its user alone"


def test_what_was_lost_while_all_nodes_were_away_is_made_again(tmp_path: Path) -> None:
    """Nobody has seen the node fail, of all who are left."""
    with LocalRing(tmp_path, hosts(5, start=70), period=PERIOD) as ring:
        store = ring.store(2, 2)
        store.put(named(), b"y" * 100_000)
        lost = holders(store, named())[0]
        ring.kill(ring.alive)
        ring.start(set(ring.hosts) - {lost})
        ring.wait_closed()
        again = ring.store(2, 2)  # all are at other ports
        ring.wait(
            lambda: len(set(holders(again, named()).values())) == 4,
            "the fragment of the node that did not return was not made again",
        )


def test_a_query_reaches_nothing_of_another(ring: LocalRing) -> None:
    mine, others = ring.store(2, 2, "mine"), ring.store(2, 2, "others")
    mine.put(named(), b"mine" * 1000)
    others.put("theirs", b"theirs" * 1000)
    assert mine.list() == [named()]
    assert others.list() == ["theirs"]
    for act in (lambda: others.get(named()), lambda: others.size(named())):
        with pytest.raises(CheckpointNotFound):
            act()
    others.delete(named())
    assert mine.get(named()).to_pybytes() == b"mine" * 1000
    fragment = str(survey(mine.ring, OWNER, named()).pieces[0].name)
    address = survey(mine.ring, OWNER, named()).pieces[0].node.address
    for name in (f"mine/{fragment}", fragment):
        with pytest.raises(CheckpointNotFound):
            others.ring.store(address).get(name)
    # Whoever claims to be another query than that of the key is refused.
    access = others.ring.access
    forged = Ring(type(access)(access.nodes, access.key, "mine", access.settings))
    with pytest.raises(Refused, match="not signed with the key of query mine"):
        forged.store(address).list()


def test_what_needs_the_key_of_the_ring(ring: LocalRing) -> None:
    query, whole = ring.ring("words"), ring.ring("")
    address = ring.address(HOSTS[0])
    me = whole.look(address).me
    epoch = Reigning(query="unheard-of")
    leaving = Tell(message=Leaving(whole.look(ring.address(HOSTS[1])).me, 1 << 60, ()))
    for request in (leaving, epoch, Stop(epoch=Epoch(1))):
        with pytest.raises(Refused, match="does not take the request"):
            query.ask(address, request)
    for request in (
        Stop(epoch=Epoch(1)),
        Put(
            epoch=Epoch(1),
            blocks=(Block(name=BackupName("a/b"), bytes=0, checksum=Checksum("0" * 16)),),
        ),
    ):
        with pytest.raises(Refused, match="does not take the request"):
            whole.ask(address, request)
    assert isinstance(whole.ask(address, List(prefix="")), tuple)
    assert whole.ask(address, epoch) == 0
    assert whole.ask(address, Ping()).pid == ring.pid(HOSTS[0])
    assert {each.contact.host for each in whole.look(address).leaves} == set(HOSTS) - {me.host}


def test_a_request_is_not_taken_again_after_a_restart_at_the_same_port(ring: LocalRing) -> None:
    store = ring.store(2, 2, "replayed")
    store.put(named(), b"x" * 1000)
    piece = survey(store.ring, OWNER, named()).pieces[0]
    name = BackupName(str(piece.name))
    host, port = piece.node.host, int(piece.node.address.rpartition(":")[2])
    signer = Signer(store.ring.access.key, by="replayed")
    captured = signer.sign(
        codec.encode(Delete(epoch=Epoch(0), names=(name,)), 5.0), f"{host}:{port}"
    )
    ring.kill([host])
    ring.start([host], port=port)
    with socket.create_connection((host, port), 10) as sock:
        sock.sendall(captured)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while more := sock.recv(4096):
            answer += more
    assert b"Refused" in answer
    assert b"was not there" in answer
    assert list(store.ring.store(f"{host}:{port}").list()) == [name]


def test_no_query_has_the_name_of_what_a_node_keeps_for_itself(ring: LocalRing) -> None:
    """What is under it is deleted when others need the room, after a restart."""
    with pytest.raises(PlanError, match="'own' cannot be the id of a query"):
        ring.ring("own")
    access = ring.ring("").access
    forged = Ring(replace(access, key=access.key.of_query("own"), query="own"))
    with pytest.raises(Refused, match="'own' cannot be the id of a query"):
        forged.store(ring.address(HOSTS[0])).put(named(), b"x")


def test_a_query_whose_transfers_stall_keeps_no_other_one_waiting(ring: LocalRing) -> None:
    slow, other = ring.ring("stalls"), ring.ring("beside")
    address = ring.address(HOSTS[0])
    host, _, port = address.rpartition(":")
    signer = Signer(slow.access.key, by="stalls")
    with ExitStack() as opened:
        for number in range(MOST_FRIENDS // 2):
            block = Block(name=BackupName(f"a/{number}"), bytes=1000, checksum=Checksum("0" * 16))
            sock = opened.enter_context(socket.create_connection((host, int(port)), 10))
            put = codec.encode(Put(epoch=Epoch(0), blocks=(block,)), 600.0)
            sock.sendall(signer.sign(put, address))
            if number == 0:
                assert sock.recv(1), "the node waits for the bytes"
        for request in (List(prefix=""), Delete(epoch=Epoch(0), names=())):
            began = time.monotonic()
            other.node(address).ask(request, Deadline(20.0))
            assert time.monotonic() - began < 10
        with pytest.raises(DidNotHappen, match="requests of this query already"):
            slow.node(address).ask(List(prefix=""), Deadline(20.0))

    def is_served() -> bool:
        try:
            return slow.node(address).ask(Describe(), Deadline(20.0)).joined
        except DidNotHappen:
            return False

    ring.wait(is_served, "the query is not served again once its transfers were given up")


def test_halves_that_have_lost_each_other_join_again(ring: LocalRing) -> None:
    halves = HOSTS[:3], HOSTS[3:]

    def alone(half: tuple[str, ...]) -> bool:
        with ring.ring("") as whole:
            seen = [
                {each.contact.host for each in whole.look(ring.address(host)).leaves}
                for host in half
            ]
        return all(found <= set(half) for found in seen)

    store, data = ring.store(2, 2, "cut"), os.urandom(100_000)
    store.put(named(), data)
    for here, there in (halves, halves[::-1]):
        for host in there:
            ring.send(host, signal.SIGSTOP)
        for host in here:
            ring.send(host, signal.SIGCONT)
        ring.wait(lambda half=here: alone(half), "a half still knows the other one")
    for host in HOSTS:
        ring.send(host, signal.SIGCONT)
    ring.wait_closed()
    assert store.get(named()).to_pybytes() == data


def test_a_node_that_returns_at_another_port_has_its_place(ring: LocalRing) -> None:
    with ring.ring("") as whole:
        before = whole.look(ring.address(HOSTS[2])).me
        ring.kill([HOSTS[2]])
        ring.start([HOSTS[2]])
        ring.wait_closed()
        after = whole.look(ring.address(HOSTS[2])).me
    assert (after.id, after.host) == (before.id, before.host)
    assert after.address != before.address
    assert after.incarnation > before.incarnation


def test_the_four_calls(ring: LocalRing) -> None:
    client, state = ring.ring("calls"), os.urandom(1_000_000)
    fragments = encode(3, 2, state, name="words/7", owner=OWNER)
    assert save(fragments, client, threads=5) == [True] * 5
    found = retrieve("words/7", client, threads=5, owner=OWNER)
    assert len(found) == 3
    assert bytes(recompute(found)) == state
    at = {p.name.index: p.node.host for p in survey(client, OWNER, "words/7").pieces}
    assert [text.partition(" ")[2] for text in found[0].label.holders] == [at[i] for i in range(5)]
    find = ["ring", "find", "words/7", "--ring", str(ring.file)]
    shown = CliRunner().invoke(main, [*find, "--query", "calls", "--owner", OWNER])
    assert "5 of 5 fragments are there, 3 are needed: enough" in shown.output
    lost = CliRunner().invoke(main, find)
    assert lost.exit_code == 1
    assert "has a fragment of words/7 that belongs to words: give the name as it is" in lost.output
    ring.kill([at[found[0].label.index], at[found[1].label.index]])
    assert bytes(recompute(retrieve("words/7", client, owner=OWNER))) == state


def test_corrupt_fragments_are_missing_ones(ring: LocalRing) -> None:
    store, data = ring.store(2, 2, "corrupt"), os.urandom(1_000_000)
    store.put(named(), data)
    at = holders(store, named())
    for index, position in ((0, 100_000), (1, -100)):
        (path,) = (ring.folder / at[index] / "backups" / "corrupt").rglob(f"*~{index}-2-4")
        damaged = bytearray(path.read_bytes())
        damaged[position] ^= 1
        path.write_bytes(damaged)
    assert ring.store(2, 2, "corrupt").get(named()).to_pybytes() == data
    found = retrieve(named(), ring.ring("corrupt"))
    assert {fragment.label.index for fragment in found} == {2, 3}


def test_transfers_with_the_holders_are_measured_and_not_those_with_the_store(
    ring: LocalRing,
) -> None:
    data = os.urandom(1_000_000)
    saved, read = Meter(), Meter()
    store = ring.store(2, 2, "measured")
    store.coded(4, 1, 4096).metered(saved).put(named(), data)
    (coded,) = saved.cost.encoded
    assert (coded.data, coded.parity, coded.bytes) == (4, 1, len(data))
    assert 5 / 4 * len(data) < saved.cost.sent.bytes < 1.4 * len(data)
    assert saved.cost.standing is not None
    found = saved.cost.standing
    assert (found.data, found.parity, found.nodes, found.near) == (4, 1, 7, 7)
    assert found.repair == 13 * PERIOD
    assert store.metered(read).get(named()).to_pybytes() == data
    (computed,) = read.cost.recomputed
    assert (computed.data, computed.parity, computed.bytes) == (4, 1, len(data))
    assert len(data) <= read.cost.received.bytes < 1.4 * len(data)
    store.put(named(2), data)
    assert len(holders(store, named(2))) == 4, "others are coded as before"


def test_what_a_query_needs_is_checked_before_it_starts(ring: LocalRing, tmp_path: Path) -> None:
    check(where(str(ring.file), 4, 2))
    with pytest.raises(PlanError, match="cannot read"):
        check(where(str(tmp_path / "none"), 4, 2))
    with pytest.raises(PlanError, match="32 fragments do not fit in a leaf set of 32"):
        check(where(str(ring.file), 30, 2))
    copy = tmp_path / "copy.json"
    copy.write_bytes(ring.file.read_bytes())
    copy.chmod(0o644)
    with pytest.raises(PlanError, match="other users can read"):
        check(where(str(copy), 4, 2))
    with LocalRing(tmp_path / "one", hosts(1, start=80), period=PERIOD) as one:
        with pytest.raises(PlanError, match="1 nodes beside"):
            check(where(str(one.file), 1, 1))
        one.kill(one.alive)
        with pytest.raises(PlanError, match="no node of the ring answers"):
            check(where(str(one.file), 1, 1))


def test_one_process_in_a_folder_and_one_at_a_port(
    ring: LocalRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)  # a node has its own
    host, file = HOSTS[0], RingFile.read(ring.file)
    port = int(ring.address(host).rpartition(":")[2])
    taken = Standing(file, host, ring.folder / host, port=0)
    with pytest.raises(PlanError, match="another process uses"):
        serve(taken, threading.Event(), pytest.fail)
    with pytest.raises(PlanError, match="cannot listen"):
        serve(replace(taken, folder=tmp_path, port=port), threading.Event(), pytest.fail)


def test_a_node_that_ends_by_an_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who watches over the process starts it again, and not one that was asked to end."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    settings = Standing(
        RingFile.create(tmp_path / "ring.json", Settings(period=PERIOD)), "127.0.0.80", tmp_path, 0
    )
    done = threading.Event()
    serve(settings, done, lambda address: done.set())
    monkeypatch.setattr(Peer, "tick", lambda self: [][0])
    with pytest.raises(AnabranchError, match="has ended by an error"):
        serve(settings, threading.Event(), lambda address: None)


def test_ask_without_a_deadline_left(ring: LocalRing) -> None:
    with ring.ring("") as whole, pytest.raises(DidNotHappen):
        whole.node(ring.address(HOSTS[0])).ask(Ping(), Deadline(0))
