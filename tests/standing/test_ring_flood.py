"""A flood of messages and requests that standing nodes must refuse, beside which they serve.

``FLOOD=1000000`` in the environment has so many sent; without it a few thousand are. None of them
crashes a node, changes the ring, or reads, changes or deletes a byte of another query.
"""

import json
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from anabranch.nodes import Secret, Signer, codec
from anabranch.nodes.requests import (
    BackupName,
    Block,
    Checksum,
    Delete,
    Epoch,
    Get,
    List,
    Put,
    Size,
    Stop,
)
from anabranch.nodes.standing.names import owner_of
from anabranch.nodes.standing.requests import Tell, View
from anabranch.nodes.standing.survey import survey
from anabranch.nodes.wire import FRAME_BYTES, HEAD_BYTES, frame_head
from anabranch.ring import (
    Contact,
    Found,
    Join,
    KeepAlive,
    Leaving,
    Lookup,
    Message,
    NodeId,
    Welcome,
)
from anabranch.testing import LocalRing
from anabranch.testing.rings import hosts

REQUESTS = int(os.environ.get("FLOOD", "3000"))
HOSTS = hosts(4, start=110)
AT_ONCE = 20
MINE, OTHERS = "mine", "others"

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(36_000 if REQUESTS > 10_000 else 300)]


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRing]:
    with LocalRing(tmp_path_factory.mktemp("flooded"), HOSTS, period=1.0) as ring:
        yield ring


class Kinds:
    """What is sent: foreign keys, replays, malformed messages; every answer is a refusal."""

    def __init__(self, ring: LocalRing, address: str, names: list[str], seed: int) -> None:
        self._random = random.Random(seed)
        self._address = address
        self._names = names
        whole = ring.ring("")
        secret = whole.access.key
        self._views = list(whole.everyone())
        self._ring = Signer(secret)
        self._query = Signer(secret.of_query(OTHERS), by=OTHERS)
        self._liar = Signer(secret.of_query(OTHERS), by=MINE)
        self._stranger = Signer(Secret.new())
        self._old = Signer(secret, lambda: time.time() - 100)
        self._used = self._signed(self._query, Get(name=BackupName("none")))
        self.all: dict[str, Callable[[], bytes]] = {
            "a message with the key of a query": lambda: self._signed(self._query, self._tell()),
            "a message with another key": lambda: self._signed(self._stranger, self._tell()),
            "a message of a minute ago": lambda: self._signed(self._old, self._tell()),
            "a message for another node": lambda: self._ring.sign(
                codec.encode(self._tell(), 5.0), "10.0.0.1:1"
            ),
            "a malformed message": self._malformed,
            "a request as another query": lambda: self._signed(self._liar, self._change()),
            "a change with the ring's key": lambda: self._signed(self._ring, self._change()),
            "an end": lambda: self._signed(self._query, Stop(epoch=Epoch(1 << 40))),
            "a changed byte": self._changed,
            "a replay": lambda: self._used,
            "what another query has": lambda: self._signed(self._query, self._read()),
            "the form before": lambda: b"anb1" + self._random.randbytes(HEAD_BYTES),
            "noise": lambda: self._random.randbytes(self._random.randint(1, 400)),
            "oversized": lambda: b"anb2" + struct.pack(">I", (1 << 32) - 1) + bytes(10_000),
        }

    def one(self, number: int) -> tuple[str, bytes]:
        name = sorted(self.all)[number % len(self.all)]
        return name, self.all[name]()

    def _signed(self, signer: Signer, request: object) -> bytes:
        return signer.sign(codec.encode(request, 5.0), self._address)  # type: ignore[arg-type]

    def _tell(self) -> Tell:
        view = self._random.choice(self._views)
        beat = 1 << 60
        later = replace(view.me, incarnation=view.me.incarnation + 1)
        nobody = Contact(NodeId(self._random.getrandbits(128)), "nobody", "127.0.0.1:1", 1)
        many = (nobody,) * self._random.randint(0, 40)
        messages: list[Message] = [
            Leaving(view.me, beat, many),
            Leaving(later, beat, ()),
            KeepAlive(later, beat, many, load=1000),
            Join(nobody, others=many),
            Welcome(later, beat, many, many),
            Found(int(view.me.id), nobody, many, 0),
            Lookup(int(view.me.id), "127.0.0.1:1"),
        ]
        return Tell(message=self._random.choice(messages))

    def _malformed(self) -> bytes:
        value = codec.encode(self._tell(), 5.0)
        message = value["message"]
        field = self._random.choice(sorted(message))
        wrong = [None, [], {}, "x", -1, 1 << 80, 1.5, [[]], [["x", "y", "z", 1]], "9" * 5000]
        change = self._random.choice(
            [
                lambda: message.update({field: self._random.choice(wrong[3:]), "type": "x"}),
                lambda: message.pop(field),
                lambda: message.update({"more": 1}),
                lambda: value.update({"message": self._random.choice(wrong)}),
                lambda: message.update({"sender": [1, 2, 3]}),
            ]
        )
        change()
        return self._ring.sign(value, self._address)

    def _change(self) -> object:
        name = BackupName(self._random.choice(self._names))
        checksum = Checksum("ef46db3751d8e999")  # of no bytes
        return self._random.choice(
            [
                Delete(epoch=Epoch(1 << 40), names=(name,)),
                Put(epoch=Epoch(1 << 40), blocks=(Block(name=name, bytes=0, checksum=checksum),)),
            ]
        )

    def _read(self) -> object:
        name = BackupName(self._random.choice(self._names))
        return self._random.choice([Get(name=name), Size(name=name)])

    def _changed(self) -> bytes:
        data = self._signed(self._query, List(prefix=""))
        at = self._random.randrange(4, HEAD_BYTES)
        return data[:at] + bytes([data[at] ^ self._random.randint(1, 255)]) + data[at + 1 :]


def exchange(address: str, requests: list[tuple[str, bytes]], seed: int) -> list[bytes]:
    """Send each on a connection of its own, all at once; the answers."""
    host, _, port = address.rpartition(":")
    chance = random.Random(seed)
    socks = []
    for _, data in requests:
        sock = socket.socket()
        sock.settimeout(30)
        sock.bind((f"127.9.{chance.randint(0, 255)}.{chance.randint(1, 254)}", 0))
        sock.connect((host, int(port)))
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the node has refused it, and closed the connection
        socks.append(sock)
    return [answer(sock) for sock in socks]


def answer(sock: socket.socket) -> bytes:
    with sock:
        data = b""
        try:
            while more := sock.recv(4000):
                data += more
        except OSError:
            return data
        return data


def seen(ring: LocalRing) -> list[tuple[Contact, bool, set[NodeId], int]]:
    """The ring, as its nodes know it, and how many fragments each has."""
    views: list[View] = list(ring.ring("").everyone())
    return [(v.me, v.joined, {n.contact.id for n in v.leaves}, v.fragments) for v in views]


def test_nothing_is_taken_and_everybody_else_is_served(ring: LocalRing) -> None:
    store, data = ring.store(2, 1, MINE), os.urandom(50_000)
    store.put("mine/parts/1", data)
    pieces = survey(store.ring, owner_of("mine/parts/1", MINE), "mine/parts/1").pieces
    names = [str(piece.name) for piece in pieces]
    names += [f"{MINE}/{name}" for name in names] + ["mine/parts/1"]
    before, pids = seen(ring), [ring.pid(host) for host in HOSTS]
    kinds = {host: Kinds(ring, ring.address(host), names, at) for at, host in enumerate(HOSTS)}
    # It is used once, so that each further time is a replay.
    for host, of in kinds.items():
        exchange(ring.address(host), [("a replay", of._used)], 1)
    sent: Counter[str] = Counter()
    for start in range(0, REQUESTS, AT_ONCE):
        host = HOSTS[start // AT_ONCE % len(HOSTS)]
        many = [kinds[host].one(start + n) for n in range(AT_ONCE)]
        for (name, _), told in zip(many, exchange(ring.address(host), many, start), strict=True):
            sent[name] += 1
            if not told:
                continue  # closed without an answer, as the end of what was sent was not read
            kind, size = frame_head(told[:FRAME_BYTES])
            value = json.loads(told[FRAME_BYTES:][:size])
            assert kind.name == "FAILED", (name, value)
            assert value["error"] in ("Refused", "CheckpointNotFound"), (name, value)
        if start % (50 * AT_ONCE) == 0:
            began = time.monotonic()
            assert store.get("mine/parts/1").to_pybytes() == data
            assert time.monotonic() - began < 30
    assert set(sent) == set(kinds[HOSTS[0]].all)
    assert store.get("mine/parts/1").to_pybytes() == data
    assert ring.store(2, 1, OTHERS).list() == []
    assert store.list() == ["mine/parts/1"]
    ring.wait_closed()
    assert seen(ring) == before
    assert [ring.pid(host) for host in ring.alive] == pids
    assert "Traceback" not in "".join(map(ring.log, HOSTS)), "a refusal is no bug"
