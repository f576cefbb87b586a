"""One node as seen from elsewhere: a backup store, and calls."""

from __future__ import annotations

import mmap
import select
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from anabranch.backup.store import check_name
from anabranch.errors import AnabranchError, DidNotHappen, MayHaveHappened, StoreError
from anabranch.nodes import chunks, wire
from anabranch.nodes.failures import from_json
from anabranch.nodes.tickets import Signer
from anabranch.nodes.tls import client_context
from anabranch.nodes.wire import Kind

_READS = frozenset({"list", "size", "ping"})
_IN_MEMORY = 1 << 25
"""Backups that are larger come into a file, which is mapped."""
_KEPT = 8
_KEPT_SECONDS = 30.0
"""A node keeps connections open for longer than this."""


class NodeStore:
    """The backups that one node keeps; ``address`` is ``host:port``.

    ``timeout`` is the longest, in seconds, that a node may be silent, or that a transfer may
    stand still: there is no limit to how long it takes in all. ``tls_root`` is the certificate
    (PEM) to trust; without it nothing is encrypted, and requests are signed all the same. May be
    used from several threads, but not in a process that was forked after its first call.

    What the node refuses raises :class:`~anabranch.nodes.tickets.Refused`; an error of its own is
    raised here as the same class. A node that cannot be reached: DidNotHappen. A connection lost
    during a change: MayHaveHappened.
    """

    def __init__(
        self,
        address: str,
        signer: Signer,
        *,
        timeout: float = chunks.TIMEOUT,
        tls_root: bytes | None = None,
    ) -> None:
        self.address = address
        self._signer = signer
        self._timeout = timeout
        self._tls = None if tls_root is None else client_context(tls_root)
        self._lock = threading.Lock()
        self._idle: list[tuple[float, socket.socket]] = []
        self._generation = 0

    def __repr__(self) -> str:
        return f"NodeStore({self.address!r})"

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`anabranch.backup.BackupStore.put`."""
        check_name(name)
        view = chunks.flat(data)
        checksum = chunks.checksum_of(view)
        request = {"op": "put", "name": name, "bytes": len(view), "checksum": checksum}
        with self._asking(f"put {name}", request) as exchange:
            exchange.answer(Kind.READY)
            exchange.upload(view)
            exchange.answer(Kind.DONE)

    def get(self, name: str) -> pa.Buffer:
        """See :meth:`anabranch.backup.BackupStore.get`. A large one is a map of a file."""
        doing = f"get {name}"
        with self._asking(doing, {"op": "get", "name": check_name(name)}) as exchange:
            size = exchange.answer(Kind.DONE).get("bytes")
            if type(size) is not int or size < 0:
                raise wire.Malformed(f"a backup of {size!r} bytes")
            return exchange.download(size, f"{doing} from node {self.address}")

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
        with self._asking(op, {**fields, "op": op}) as exchange:
            if op not in _READS:
                exchange.lost = MayHaveHappened
            return exchange.answer(Kind.DONE)

    def close(self) -> None:
        """Let go of the connections; the next call makes another."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._generation += 1
        for _, sock in idle:
            sock.close()

    def __enter__(self) -> NodeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _asking(self, doing: str, request: dict[str, Any]) -> Iterator[_Exchange]:
        """Send a request; the exchange says what it means if the connection then fails."""
        generation = self._generation
        try:
            sock = self._kept() or self._connected()
        except (OSError, ValueError) as error:
            raise DidNotHappen(f"{doing}: node {self.address}: {_short(error)}") from error
        exchange = _Exchange(sock)
        try:
            exchange.ask(self._signer.sign(request, self.address))
            yield exchange
        except (OSError, wire.Malformed) as error:
            kind = exchange.lost
            raise kind(f"{doing}: node {self.address}: {_short(error)}") from error
        finally:
            if not exchange.whole or not self._keep(sock, generation):
                sock.close()

    def _connected(self) -> socket.socket:
        host, colon, port = self.address.rpartition(":")
        if not colon or not port.isdecimal():
            raise ValueError(f"{self.address!r} is no address, which is host:port")
        host = host.removeprefix("[").removesuffix("]")
        sock = socket.create_connection((host, int(port)), self._timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock if self._tls is None else self._tls.wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise

    def _kept(self) -> socket.socket | None:
        """A connection that was used before, and that the node has not closed."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                since, sock = self._idle.pop()
            if time.monotonic() - since < _KEPT_SECONDS and not _readable(sock):
                return sock
            sock.close()

    def _keep(self, sock: socket.socket, generation: int) -> bool:
        with self._lock:
            if generation != self._generation or len(self._idle) >= _KEPT:
                return False
            self._idle.append((time.monotonic(), sock))
            return True


class _Exchange:
    """One request and its answer, over a connection.

    ``lost`` is what it means if the connection fails now; ``whole`` says whether the connection
    can be used again.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.lost: type[StoreError] = DidNotHappen
        self.whole = False
        self._sock = sock

    def ask(self, signed: bytes) -> None:
        """Send a signed request."""
        chunks.send(self._sock, signed)

    def answer(self, wanted: Kind) -> dict[str, Any]:
        """The value of the next frame of a kind; what the node failed with is raised."""
        self.whole = False
        while True:
            kind, size = wire.frame_head(chunks.exactly(self._sock, wire.FRAME_BYTES))
            data = chunks.exactly(self._sock, size)
            if len(data) < size:
                raise wire.Malformed(f"the answer ended after {len(data)} of {size} bytes")
            value = wire.frame_value(data)
            if kind is Kind.WORKING:
                continue
            if kind is Kind.FAILED:
                self.whole = value.get("closing") is False
                raise _told(value)
            if kind is not wanted:
                raise wire.Malformed(f"it answered {kind.name}, not {wanted.name}")
            self.whole = kind is Kind.DONE
            return value

    def upload(self, data: memoryview) -> None:
        """Send the bytes of a backup, until the node says that it does not want them."""
        for start in range(0, len(data), chunks.CHUNK):
            if _readable(self._sock):
                return
            # Only a node that has every byte stores anything.
            if start + chunks.CHUNK >= len(data):
                self.lost = MayHaveHappened
            chunks.send(self._sock, data[start : start + chunks.CHUNK])
        self.lost = MayHaveHappened

    def download(self, size: int, what: str) -> pa.Buffer:
        """The bytes of a backup."""
        self.whole = False
        data, checksum = _received(self._sock, size, what)
        told = chunks.exactly(self._sock, chunks.CHECKSUM_BYTES).hex()
        if told != checksum:
            raise DidNotHappen(
                f"{what}: the checksum of the bytes that came is {checksum}, not {told}"
            )
        self.whole = True
        return data


def _received(sock: socket.socket, size: int, what: str) -> tuple[pa.Buffer, str]:
    """So many bytes, in memory or in a file that has no name, and their checksum."""
    if size <= _IN_MEMORY:
        buffer = pa.allocate_buffer(size)
        return buffer, chunks.receive_into(sock, chunks.flat(buffer), what)
    try:
        with tempfile.TemporaryFile(buffering=0) as file:

            def write(chunk: memoryview) -> None:
                written = 0
                while written < len(chunk):
                    written += file.write(chunk[written:])

            checksum = chunks.receive(sock, size, write, what)
            return pa.py_buffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)), checksum
    except OSError as error:
        folder = tempfile.gettempdir()
        raise DidNotHappen(f"{what}: cannot keep the bytes in {folder}: {error}") from error


def _told(value: dict[str, Any]) -> AnabranchError | wire.Malformed:
    return from_json(value) or wire.Malformed("it failed with an error that is not known here")


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _short(error: Exception) -> str:
    return str(error) or type(error).__name__
