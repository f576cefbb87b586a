"""What an agent refuses; after each refusal it serves as before."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node_tools import wait_until
from pyarrow import flight

from anabranch.errors import DidNotHappen
from anabranch.nodes import AgentAddress, NodeStore, Refused, Secret, Signer
from anabranch.nodes.chunks import CHUNK, SCHEMA, split
from anabranch.nodes.failures import from_flight
from anabranch.nodes.server import LARGEST_BACKUP


class Asking(Signer):
    """Signs requests to the agent of the test."""

    address = ""

    def sign(self, request: Mapping[str, Any], to: str = "") -> bytes:
        return super().sign(request, to or self.address)


@pytest.fixture(autouse=True)
def _serves_afterwards(node: NodeStore, home: Path, secret: Secret) -> Iterator[None]:
    node.put("kept", b"kept")
    before = node.call("ping")
    yield
    assert list(node.list()) == ["kept"]
    assert node.get("kept").to_pybytes() == b"kept"
    after = node.call("ping")
    assert after["pid"] == before["pid"]
    assert sum(after["failures"].values()) > sum(before["failures"].values()), "it is counted"
    log = (home / "agent.log").read_text()
    assert "Refused" in log or "DidNotHappen" in log
    assert secret.to_hex() not in log


@pytest.fixture
def client(agent: AgentAddress) -> Iterator[flight.FlightClient]:
    Asking.address = str(agent)
    with flight.connect(f"grpc+tcp://{agent}") as connection:
        yield connection


def get(client: flight.FlightClient, ticket: bytes) -> bytes:
    chunks = client.do_get(flight.Ticket(ticket)).read_all().column(0)
    return b"".join(chunks.to_pylist())


def call(client: flight.FlightClient, body: bytes, kind: str = "call") -> object:
    (result,) = client.do_action(flight.Action(kind, body))
    return json.loads(result.body.to_pybytes())


def put(
    client: flight.FlightClient,
    command: bytes,
    batches: list[pa.RecordBatch],
    schema: pa.Schema = SCHEMA,
) -> None:
    descriptor = flight.FlightDescriptor.for_command(command)
    writer, _ = client.do_put(descriptor, schema, flight.FlightCallOptions(timeout=20))
    try:
        for batch in batches:
            writer.write_batch(batch)
        writer.done_writing()
    finally:
        writer.close()


def declared(data: bytes, **changes: object) -> dict[str, object]:
    checksum = xxhash.xxh3_64_hexdigest(data)
    return {"op": "put", "name": "a", "bytes": len(data), "checksum": checksum, **changes}


def batches(data: bytes) -> list[pa.RecordBatch]:
    return list(split(pa.py_buffer(data)))


def reason(raised: pytest.ExceptionInfo[Exception]) -> str:
    told = from_flight(raised.value)
    assert isinstance(told, DidNotHappen)
    assert "Traceback" not in str(raised.value)
    if isinstance(told, Refused):
        assert isinstance(raised.value, flight.FlightUnauthenticatedError)
    return str(told)


UNSIGNED = [
    b"", b"x", b"{}", b'{"op":"get","name":"kept"}', b"\xff" * 99, b"x" * (2 << 20),
    b'{"mac":"' + b"0" * 64 + b'",}',
]  # fmt: skip


@pytest.mark.parametrize("ticket", UNSIGNED)
def test_no_signature(client: flight.FlightClient, ticket: bytes) -> None:
    for ask in (lambda: get(client, ticket), lambda: call(client, ticket),
                lambda: put(client, ticket, batches(b"x"))):  # fmt: skip
        with pytest.raises(flight.FlightUnauthenticatedError) as raised:
            ask()
        assert "request" in reason(raised)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=200))
def test_garbage(client: flight.FlightClient, garbage: bytes) -> None:
    for ask in (lambda: get(client, garbage), lambda: call(client, garbage),
                lambda: put(client, garbage, batches(b"x"))):  # fmt: skip
        with pytest.raises(flight.FlightUnauthenticatedError):
            ask()


def test_bytes_that_are_not_even_flight(agent: AgentAddress, client: flight.FlightClient) -> None:
    for garbage in (b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10_000):
        with socket.create_connection((agent.host, agent.port), timeout=10) as connection:
            connection.sendall(garbage)
    with pytest.raises(flight.FlightUnauthenticatedError):
        get(client, b"")


def test_another_secret(agent: AgentAddress) -> None:
    with NodeStore(str(agent), Signer(Secret.new())) as stranger:
        for ask in (lambda: stranger.get("kept"), lambda: stranger.put("a", b"x"), stranger.list,
                    lambda: stranger.delete("kept"), lambda: stranger.size("kept"),
                    lambda: stranger.call("stop"), lambda: stranger.call("ping")):  # fmt: skip
            with pytest.raises(Refused, match="not signed with the secret"):
                ask()


def test_a_request_to_another_node(client: flight.FlightClient, secret: Secret) -> None:
    for address in ("", "127.0.0.1:1"):
        with pytest.raises(flight.FlightUnauthenticatedError) as raised:
            call(client, Signer(secret).sign({"op": "ping"}, address))
        assert "meant for" in reason(raised)


def test_a_request_sent_twice(client: flight.FlightClient, secret: Secret) -> None:
    read = Asking(secret).sign({"op": "get", "name": "kept"})
    assert get(client, read) == b"kept"
    asked = Asking(secret).sign({"op": "ping"})
    call(client, asked)
    stored = Asking(secret).sign(declared(b"kept", name="kept"))
    put(client, stored, batches(b"kept"))
    for again in (lambda: get(client, read), lambda: call(client, asked),
                  lambda: put(client, stored, batches(b"kept"))):  # fmt: skip
        with pytest.raises(flight.FlightUnauthenticatedError) as raised:
            again()
        assert "sent before" in reason(raised)


@pytest.mark.parametrize(("age", "why"), [(120, "old"), (-120, "future")])
def test_a_request_of_another_time(
    client: flight.FlightClient, secret: Secret, age: float, why: str
) -> None:
    signed = Asking(secret, lambda: time.time() - age).sign({"op": "get", "name": "kept"})
    with pytest.raises(flight.FlightUnauthenticatedError) as raised:
        get(client, signed)
    assert why in reason(raised)


def test_a_request_for_another_call(client: flight.FlightClient, secret: Secret) -> None:
    size, read = (Asking(secret).sign({"op": op, "name": "kept"}) for op in ("size", "get"))
    for ask in (lambda: get(client, size), lambda: put(client, read, batches(b"x"))):
        with pytest.raises(flight.FlightUnauthenticatedError) as raised:
            ask()
        assert "signed for" in reason(raised)


@pytest.mark.parametrize("size", [LARGEST_BACKUP + 1, -1, 1.5, "1", None, True, 10**30])
def test_an_impossible_declaration(
    client: flight.FlightClient, secret: Secret, size: object
) -> None:
    command = Asking(secret).sign(declared(b"x", bytes=size))
    with pytest.raises(flight.FlightUnauthenticatedError) as raised:
        put(client, command, batches(b"x"))
    assert str(LARGEST_BACKUP) in reason(raised)


@pytest.mark.parametrize("size", [1, 100, CHUNK])
def test_more_bytes_than_declared(client: flight.FlightClient, secret: Secret, size: int) -> None:
    command = Asking(secret).sign(declared(b"x" * size))
    with pytest.raises(flight.FlightServerError) as raised:
        put(client, command, batches(b"x" * (size + 1)))
    assert f"more bytes than the {size}" in reason(raised)
    endless = batches(b"x" * CHUNK) * 200
    with pytest.raises(flight.FlightServerError):
        put(client, Asking(secret).sign(declared(b"x" * size)), endless)


def test_fewer_bytes_than_declared(client: flight.FlightClient, secret: Secret) -> None:
    with pytest.raises(flight.FlightServerError) as raised:
        put(client, Asking(secret).sign(declared(b"xyz")), batches(b"xy"))
    assert "only 2 of 3" in reason(raised)


def test_a_wrong_checksum(client: flight.FlightClient, secret: Secret) -> None:
    with pytest.raises(flight.FlightServerError) as raised:
        put(client, Asking(secret).sign(declared(b"xyz")), batches(b"xyZ"))
    assert "checksum" in reason(raised)


def test_streams_of_something_else(client: flight.FlightClient, secret: Secret) -> None:
    numbers = pa.record_batch([pa.array([1, 2, 3])], names=["chunk"])
    two = pa.record_batch([pa.array([b"x", b"y"])], schema=SCHEMA)
    null = pa.record_batch([pa.array([None], pa.binary())], schema=SCHEMA)
    for batch in (numbers, two, null):
        with pytest.raises(flight.FlightServerError) as raised:
            put(client, Asking(secret).sign(declared(b"xy")), [batch], batch.schema)
        assert reason(raised)


def test_a_chunk_that_points_beyond_its_bytes(client: flight.FlightClient, secret: Secret) -> None:
    offsets = np.array([0, 64], np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"x" * 64)]
    column = pa.Array.from_buffers(pa.binary(), 1, buffers)
    batch = pa.RecordBatch.from_arrays([column], schema=SCHEMA)
    offsets[1] = 1 << 30
    command = Asking(secret).sign(declared(b"x", bytes=1 << 20))
    with pytest.raises(flight.FlightServerError) as raised:
        put(client, command, [batch])
    assert "malformed" in reason(raised)


@pytest.mark.parametrize("name", ["", "../x", "/etc/passwd", ".partial/x", None, 1])
def test_bad_names(client: flight.FlightClient, secret: Secret, name: object) -> None:
    signer = Asking(secret)
    for ask in (lambda: get(client, signer.sign({"op": "get", "name": name})),
                lambda: put(client, signer.sign(declared(b"x", name=name)), batches(b"x")),
                lambda: call(client, signer.sign({"op": "delete", "name": name})),
                lambda: call(client, signer.sign({"op": "size", "name": name}))):  # fmt: skip
        with pytest.raises(flight.FlightUnauthenticatedError) as raised:
            ask()
        assert "name" in reason(raised)


def test_unknown_calls(client: flight.FlightClient, node: NodeStore, secret: Secret) -> None:
    with pytest.raises(Refused, match=r"cannot do 'dance'; it can \['delete', 'echo'"):
        node.call("dance")
    for ask in (lambda: call(client, Asking(secret).sign({"op": "ping"}), "dance"),
                lambda: call(client, Asking(secret).sign({})),
                lambda: list(client.list_flights()), lambda: list(client.list_actions()),
                lambda: client.get_flight_info(flight.FlightDescriptor.for_path("a"))):  # fmt: skip
        with pytest.raises(flight.FlightUnauthenticatedError) as raised:
            ask()
        assert reason(raised)


def test_a_client_that_goes_away_half_way(
    agent: AgentAddress, node: NodeStore, secret: Secret
) -> None:
    program = """
import os, signal, sys
import pyarrow as pa
from pyarrow import flight
from anabranch.nodes.chunks import SCHEMA, split
client = flight.connect(sys.argv[1])
command = flight.FlightDescriptor.for_command(sys.stdin.buffer.read())
writer, answers = client.do_put(command, SCHEMA)
assert answers.read().to_pybytes() == b"ready"
for batch in list(split(pa.py_buffer(bytes(8 << 20))))[:5]:
    writer.write_batch(batch)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = Asking(secret).sign(declared(bytes(8 << 20)))
    before = node.call("ping")["failures"].get("DidNotHappen", 0)
    killed = subprocess.run(
        [sys.executable, "-c", program, f"grpc+tcp://{agent}"],
        input=command, timeout=60, check=False,
    )  # fmt: skip
    assert killed.returncode == -9
    wait_until(lambda: node.call("ping")["failures"].get("DidNotHappen", 0) > before)
