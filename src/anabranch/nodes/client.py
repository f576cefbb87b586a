"""One node as seen from elsewhere: a backup store, and calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyarrow import flight

from anabranch.backup.store import check_name
from anabranch.errors import DidNotHappen, MayHaveHappened, StoreError
from anabranch.nodes import chunks
from anabranch.nodes.failures import from_flight
from anabranch.nodes.server import CALL, READY, STORED
from anabranch.nodes.tickets import Signer

TIMEOUT = 30.0

_READS = frozenset({"list", "size", "ping"})
_OPTIONS = [
    # A new client must try at once, and not wait because an old one could not connect.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Nodes are reached directly: a proxy from the environment would only see the bytes.
    ("grpc.enable_http_proxy", 0),
]


class NodeStore:
    """The backups that one node keeps; ``address`` is ``host:port``.

    ``timeout`` is the longest that any one call may take, in seconds, the transfer of its bytes
    included. ``tls_root`` is the certificate (PEM) to trust; without it nothing is encrypted, and
    requests are signed all the same. May be used from several threads, but not in a process that
    was forked after its first call.

    What the node refuses raises :class:`~anabranch.nodes.tickets.Refused`; an error of its own is
    raised here as the same class. A node that cannot be reached: DidNotHappen. A connection lost
    during a change: MayHaveHappened.
    """

    def __init__(
        self,
        address: str,
        signer: Signer,
        *,
        timeout: float = TIMEOUT,
        tls_root: bytes | None = None,
    ) -> None:
        self.address = address
        self._signer = signer
        self._timeout = timeout
        self._tls_root = tls_root
        self._lock = threading.Lock()
        self._client: flight.FlightClient | None = None

    def __repr__(self) -> str:
        return f"NodeStore({self.address!r})"

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`anabranch.backup.BackupStore.put`."""
        buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
        request = {
            "op": "put",
            "name": check_name(name),
            "bytes": buffer.size,
            "checksum": chunks.checksum_of(buffer),
        }
        sending = _Sending()
        with self._connected(f"put {name}", lambda: sending.lost) as client:
            descriptor = flight.FlightDescriptor.for_command(
                self._signer.sign(request, self.address)
            )
            writer, answers = client.do_put(descriptor, chunks.SCHEMA, self._options())
            sending.send(writer, answers, buffer)

    def get(self, name: str) -> pa.Buffer:
        """See :meth:`anabranch.backup.BackupStore.get`."""
        request = {"op": "get", "name": check_name(name)}
        with self._connected(f"get {name}", lambda: DidNotHappen) as client:
            reader = client.do_get(
                flight.Ticket(self._signer.sign(request, self.address)), self._options()
            )
            what = f"get {name} from node {self.address}"
            gathering = chunks.Gathering(chunks.size_in(reader.schema, what), what)
            for chunk in reader:
                gathering.add(chunk.data)
            return gathering.finish()

    def list(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`anabranch.backup.BackupStore.list`."""
        names: Sequence[str] = self.call("list", prefix=prefix)["names"]
        return names

    def delete(self, name: str) -> None:
        """See :meth:`anabranch.backup.BackupStore.delete`."""
        self.call("delete", name=check_name(name))

    def size(self, name: str) -> int:
        """See :meth:`anabranch.backup.BackupStore.size`."""
        return int(self.call("size", name=check_name(name))["bytes"])

    def call(self, op: str, /, **fields: Any) -> dict[str, Any]:
        """Let the node do something, with these fields in the request; its answer."""
        lost = DidNotHappen if op in _READS else MayHaveHappened
        with self._connected(op, lambda: lost) as client:
            action = flight.Action(CALL, self._signer.sign({**fields, "op": op}, self.address))
            (result,) = client.do_action(action, self._options())
            answer: dict[str, Any] = json.loads(result.body.to_pybytes())
            return answer

    def close(self) -> None:
        """Let go of the connection; the next call makes another."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def __enter__(self) -> NodeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _options(self) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=self._timeout)

    @contextmanager
    def _connected(
        self, doing: str, lost: Callable[[], type[StoreError]]
    ) -> Iterator[flight.FlightClient]:
        """The client; ``lost`` says what it means if the connection fails at that moment."""
        try:
            client = self._open()
        except (pa.ArrowException, OSError) as error:
            raise DidNotHappen(f"{doing}: {self.address!r} is no address: {error}") from error
        try:
            yield client
        except (flight.FlightError, pa.ArrowException, OSError, ValueError) as error:
            told = from_flight(error)
            if told is not None:
                raise told from None
            self._drop(client)
            kind = DidNotHappen if _never_connected(error) else lost()
            raise kind(f"{doing}: node {self.address}: {_short(error)}") from error

    def _open(self) -> flight.FlightClient:
        with self._lock:
            if self._client is None:
                scheme = "grpc+tcp" if self._tls_root is None else "grpc+tls"
                self._client = flight.FlightClient(
                    f"{scheme}://{self.address}",
                    tls_root_certs=self._tls_root,
                    generic_options=_OPTIONS,
                )
            return self._client

    def _drop(self, client: flight.FlightClient) -> None:
        """Have the next call connect anew. Calls of other threads may still use this client."""
        with self._lock:
            if self._client is client:
                self._client = None


class _Sending:
    """The sending of one backup, which knows what it means if it breaks off."""

    def __init__(self) -> None:
        self.lost: type[StoreError] = DidNotHappen

    def send(
        self,
        writer: flight.FlightStreamWriter,
        answers: flight.FlightMetadataReader,
        data: pa.Buffer,
    ) -> None:
        # The node's answer to a request that it refuses is the error of close().
        if _answer(answers) == READY:
            last = -(-data.size // chunks.CHUNK) - 1
            for number, chunk in enumerate(chunks.split(data)):
                # Only a node that has every byte stores anything.
                if number == last:
                    self.lost = MayHaveHappened
                writer.write_batch(chunk)
            self.lost = MayHaveHappened
            writer.done_writing()
            if _answer(answers) == STORED:
                # It is there: what becomes of the connection now is of no matter.
                self._end(writer)
                return
        writer.close()
        raise flight.FlightInternalError("it ended the transfer without an answer")

    def _end(self, writer: flight.FlightStreamWriter) -> None:
        try:
            writer.close()
        except (pa.ArrowException, OSError):
            return


def _answer(answers: flight.FlightMetadataReader) -> bytes | None:
    answer = answers.read()
    return None if answer is None else answer.to_pybytes()


def _never_connected(error: Exception) -> bool:
    return isinstance(error, flight.FlightUnavailableError) and (
        "failed to connect" in str(error) or "errors resolving" in str(error)
    )


def _short(error: Exception) -> str:
    """The error without what gRPC repeats in it."""
    return str(error).partition(". gRPC client debug context")[0] or type(error).__name__
