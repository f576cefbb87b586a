"""A remote node, reached through its agent, and the store of the backups that it keeps."""

from __future__ import annotations

import mmap
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import pyarrow as pa

from anabranch.errors import AnabranchError, DidNotHappen, MayHaveHappened, StoreError
from anabranch.nodes import chunks, codec, wire
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import (
    MOST_BLOCKS,
    BackupName,
    Block,
    Change,
    Checksum,
    Delete,
    Epoch,
    Get,
    List,
    Put,
    Request,
    Size,
)
from anabranch.nodes.tickets import Signer
from anabranch.nodes.tls import client_context
from anabranch.nodes.together import SMALL, Blocks, Together
from anabranch.nodes.wire import Kind
from anabranch.stores.store import batched, check_name

A = TypeVar("A")

_IN_MEMORY = 1 << 25
"""Backups that are larger come into a file, which is mapped."""
_KEPT = 8
_KEPT_SECONDS = 30.0
"""A node keeps connections open for longer than this."""
_MOST_NAMES = 10_000
"""Names of more backups than this are deleted by more than one request."""
_MARGIN, _MARGIN_SECONDS = 0.2, 5.0
_LOOK_SECONDS = 0.5
"""The interval in which a wait looks whether its deadline was brought forward."""
_SOON = 0.001
"""A socket that is told to wait for no time at all would not wait for anything ever after."""


class RemoteNode:
    """See :class:`~anabranch.nodes.node.Node`; ``address`` is ``host:port`` of its agent.

    ``host`` is the name of the node; errors have it if the node did not answer. ``silence`` is how
    long, in seconds, the agent may be silent, or a transfer stall, before the request fails,
    usually long before its deadline. ``tls_root`` is the certificate (PEM) to trust. Without it
    nothing is encrypted; requests are signed all the same. May be used from several threads, but
    not in a process that was forked after its first call.
    """

    def __init__(
        self,
        address: str,
        signer: Signer,
        *,
        host: str | None = None,
        silence: float = chunks.TIMEOUT,
        tls_root: bytes | None = None,
    ) -> None:
        self.address = address
        self.host = host
        self._signer = signer
        self._silence = silence
        self._tls = None if tls_root is None else client_context(tls_root)
        self._lock = threading.Lock()
        self._idle: list[tuple[float, socket.socket]] = []
        self._generation = 0
        self._together = Together(self._upload)

    def __repr__(self) -> str:
        return f"RemoteNode({self.address!r})"

    def ask(self, request: Request[A], deadline: Deadline) -> A:
        """See :meth:`~anabranch.nodes.node.Node.ask`."""
        with self._asking(request, deadline) as exchange:
            if isinstance(request, Change):
                exchange.lost = MayHaveHappened
            value = exchange.answer(Kind.DONE)
            if codec.answers_with_bytes(request):
                return cast(A, exchange.download(value.get("bytes")))
            try:
                return codec.decode_answer(request, value)
            except ValueError as error:
                raise wire.Malformed(str(error)) from error

    def put(self, blocks: Blocks, epoch: Epoch, deadline: Deadline) -> None:
        """Send up to ``MOST_BLOCKS`` blocks of bytes, of which the node keeps all, or none."""
        if sum(len(data) for _, data in blocks) > SMALL:
            self._upload(blocks, epoch, deadline)
        else:
            self._together.put(blocks, epoch, deadline)

    def _upload(self, blocks: Blocks, epoch: Epoch, deadline: Deadline) -> None:
        request = Put(epoch=epoch, blocks=tuple(block for block, _ in blocks))
        with self._asking(request, deadline) as exchange:
            exchange.answer(Kind.READY)
            exchange.upload([data for _, data in blocks])
            exchange.answer(Kind.DONE)

    def close(self) -> None:
        """Close the connections. The next call opens another."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._generation += 1
        for _, sock in idle:
            sock.close()

    def __enter__(self) -> RemoteNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _asking(self, request: Request[Any], deadline: Deadline) -> Iterator[_Exchange]:
        """Send a request. ``lost`` of the exchange is the error if the connection then fails."""
        doing = f"{request} at node {self.address}"
        deadline.check(doing)
        generation = self._generation
        try:
            sock = self._kept() or self._connected(deadline)
        except (OSError, ValueError) as error:
            raise DidNotHappen(f"{doing}: {_short(error)}", host=self.host) from error
        exchange = _Exchange(_Patient(sock, self._silence, deadline), doing)
        try:
            value = codec.encode(request, _earlier(deadline.left()))
            exchange.ask(self._signer.sign(value, self.address))
            yield exchange
        except (OSError, wire.Malformed) as error:
            why = _short(error)
            if deadline.left() == 0:
                why = deadline.why
            raise exchange.lost(f"{doing}: {why}", host=self.host) from error
        finally:
            if not exchange.whole or not self._keep(sock, generation):
                sock.close()

    def _connected(self, deadline: Deadline) -> socket.socket:
        host, colon, port = self.address.rpartition(":")
        if not colon or not port.isdecimal():
            raise ValueError(f"{self.address!r} is no address; write it as host:port")
        host = host.removeprefix("[").removesuffix("]")
        seconds = max(_SOON, min(self._silence, deadline.left()))
        sock = socket.create_connection((host, int(port)), seconds)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock if self._tls is None else self._tls.wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise

    def _kept(self) -> socket.socket | None:
        """An open connection that was used before."""
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


class NodeStore:
    """The backups that a node keeps, as a :class:`~anabranch.stores.BackupStore`.

    The driver of an epoch changes them. ``deadline`` makes the deadline of each call.
    """

    def __init__(self, node: RemoteNode, epoch: Epoch, deadline: Callable[[], Deadline]) -> None:
        self.node = node
        self._epoch = epoch
        self._deadline = deadline

    def __repr__(self) -> str:
        return f"NodeStore({self.node!r})"

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`anabranch.stores.BackupStore.put`."""
        self.put_all({name: data})

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """See :meth:`anabranch.stores.BackupStore.put_all`."""
        views = [(name, chunks.flat(data)) for name, data in blocks.items()]
        told = [
            (
                Block(
                    name=BackupName(check_name(name)),
                    bytes=len(view),
                    checksum=Checksum(chunks.checksum_of(view)),
                ),
                view,
            )
            for name, view in views
        ]
        for number, some in enumerate(batched(told, MOST_BLOCKS)):
            try:
                self.node.put(some, self._epoch, self._deadline())
            except DidNotHappen as error:
                if number == 0:
                    raise
                raise MayHaveHappened(
                    f"{number * MOST_BLOCKS} of {len(told)} blocks were stored: {error}",
                    host=error.host,
                ) from error

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """See :meth:`anabranch.stores.BackupStore.get`. A large backup is a mapped file."""
        request = Get(name=BackupName(check_name(name)), offset=offset, length=length)
        return self.node.ask(request, self._deadline())

    def list(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`anabranch.stores.BackupStore.list`."""
        return self.node.ask(List(prefix=prefix), self._deadline())

    def delete(self, name: str) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete`."""
        self.delete_all([name])

    def delete_all(self, names: Collection[str]) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete_all`."""
        checked = [BackupName(check_name(name)) for name in names]
        failed: StoreError | None = None
        for some in batched(checked, _MOST_NAMES):
            try:
                self.node.ask(Delete(epoch=self._epoch, names=some), self._deadline())
            except StoreError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def size(self, name: str) -> int:
        """See :meth:`anabranch.stores.BackupStore.size`."""
        return self.node.ask(Size(name=BackupName(check_name(name))), self._deadline())


class _Patient:
    """A socket that waits for each transfer until a deadline, and no longer than ``silence``."""

    def __init__(self, sock: socket.socket, silence: float, deadline: Deadline) -> None:
        self._sock = sock
        self._silence = silence
        self._deadline = deadline

    def send(self, data: memoryview) -> int:
        """See :meth:`socket.socket.send`."""
        return self._waited(lambda: self._sock.send(data))

    def recv_into(self, view: memoryview) -> int:
        """See :meth:`socket.socket.recv_into`."""
        return self._waited(lambda: self._sock.recv_into(view))

    def readable(self) -> bool:
        """Whether there are bytes to read."""
        return _readable(self._sock)

    def _waited(self, operation: Callable[[], int]) -> int:
        until = time.monotonic() + self._silence
        while True:
            left = min(until - time.monotonic(), self._deadline.left())
            if left <= 0:
                raise TimeoutError("timed out")
            self._sock.settimeout(max(_SOON, min(left, _LOOK_SECONDS)))
            try:
                return operation()
            except TimeoutError:
                continue


class _Exchange:
    """One request and its answer, over a connection.

    ``lost`` is the error to raise if the connection fails now. ``whole`` says whether the
    connection can be used again.
    """

    def __init__(self, sock: _Patient, doing: str) -> None:
        self.lost: type[StoreError] = DidNotHappen
        self.whole = False
        self._sock = sock
        self._doing = doing

    def ask(self, signed: bytes) -> None:
        """Send a signed request."""
        chunks.send(self._sock, signed)

    def answer(self, wanted: Kind) -> dict[str, Any]:
        """The value of the next frame of a kind. Raises the error that the node answers with."""
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

    def upload(self, blocks: Sequence[memoryview]) -> None:
        """Send the bytes of backups, unless the node refuses them."""
        left = sum(map(len, blocks))
        for data in blocks:
            for start in range(0, len(data), chunks.CHUNK):
                if self._sock.readable():
                    return
                some = data[start : start + chunks.CHUNK]
                left -= len(some)
                # Only a node that has every byte stores anything.
                if left == 0:
                    self.lost = MayHaveHappened
                chunks.send(self._sock, some)
        self.lost = MayHaveHappened

    def download(self, size: object) -> pa.Buffer:
        """The bytes in the answer of the node."""
        if type(size) is not int or size < 0:
            raise wire.Malformed(f"it announced a block of {size!r} bytes")
        self.whole = False
        data, checksum = _received(self._sock, size, self._doing)
        told = chunks.exactly(self._sock, chunks.CHECKSUM_BYTES).hex()
        if told != checksum:
            raise DidNotHappen(
                f"{self._doing}: the received bytes have the checksum {checksum}, not {told}"
            )
        self.whole = True
        return data


def _received(sock: _Patient, size: int, what: str) -> tuple[pa.Buffer, str]:
    """A number of bytes, in memory or in an unnamed file, and their checksum."""
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
        raise DidNotHappen(f"{what}: cannot write the bytes to {folder}: {error}") from error


def _told(value: dict[str, Any]) -> AnabranchError | wire.Malformed:
    return codec.decode_error(value) or wire.Malformed(
        "it failed with an error that is not known here"
    )


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _earlier(seconds: float) -> float:
    """The time that the node has, so that its answer is there before the deadline."""
    return seconds - min(_MARGIN_SECONDS, _MARGIN * seconds)


def _short(error: Exception) -> str:
    return str(error) or type(error).__name__
