"""A block of bytes over a connected socket, a chunk at a time, with a checksum.

The timeout of the socket applies to one chunk. A transfer may take any time, but must not stall.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import xxhash

from anabranch.errors import DidNotHappen

TIMEOUT = 30.0
"""For how many seconds a transfer may stand still, unless another time is given."""
CHUNK = 1 << 20
CHECKSUM_BYTES = 8


class Pipe(Protocol):
    """The transport of a block: a socket, or a wrapper of one."""

    def send(self, data: memoryview, /) -> int:
        """Send some of these bytes. Returns their number."""

    def recv_into(self, view: memoryview, /) -> int:
        """Read available bytes into ``view``. Returns their number, 0 at the end."""


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum that is sent with a block."""
    return str(xxhash.xxh3_64_hexdigest(data))


def flat(data: Any) -> memoryview:
    """The bytes of a contiguous buffer."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def send(sock: Pipe, data: bytes | memoryview) -> None:
    """Send all of these bytes. Unlike ``sendall``, without a limit of the total time."""
    view = flat(data)
    sent = 0
    while sent < len(view):
        sent += sock.send(view[sent : sent + CHUNK])


def send_file(sock: Pipe, descriptor: int, offset: int, size: int) -> None:
    """Send some bytes of a file, and then their checksum."""
    hashed = xxhash.xxh3_64()
    chunk = memoryview(bytearray(min(CHUNK, size)))
    at = 0
    while at < size:
        count = os.preadv(descriptor, [chunk[: size - at]], offset + at)
        if count == 0:
            raise OSError(f"the file has {offset + at} bytes instead of {offset + size}")
        hashed.update(chunk[:count])
        send(sock, chunk[:count])
        at += count
    send(sock, hashed.digest())


def send_buffer(sock: Pipe, data: Any) -> None:
    """Send bytes, and then their checksum."""
    hashed = xxhash.xxh3_64()
    view = flat(data)
    for start in range(0, len(view), CHUNK):
        hashed.update(view[start : start + CHUNK])
        send(sock, view[start : start + CHUNK])
    send(sock, hashed.digest())


def receive(sock: Pipe, size: int, take: Callable[[memoryview], None], what: str) -> str:
    """Pass exactly this number of bytes to ``take`` as they arrive. Returns their checksum.

    DidNotHappen, with a message that starts with ``what``, if the transfer stalls or ends.
    """
    hashed = xxhash.xxh3_64()
    chunk = memoryview(bytearray(min(CHUNK, size)))
    count = 0
    while count < size:
        came = _some(sock, chunk[: size - count], count, size, what)
        hashed.update(chunk[:came])
        take(chunk[:came])
        count += came
    return hashed.hexdigest()


def receive_into(sock: Pipe, view: memoryview, what: str) -> str:
    """Fill ``view`` with the next bytes, in the same way. Returns their checksum."""
    hashed = xxhash.xxh3_64()
    count, size = 0, len(view)
    while count < size:
        came = _some(sock, view[count : count + CHUNK], count, size, what)
        hashed.update(view[count : count + came])
        count += came
    return hashed.hexdigest()


def _some(sock: Pipe, view: memoryview, count: int, size: int, what: str) -> int:
    try:
        came = sock.recv_into(view)
    except OSError as error:
        raise DidNotHappen(f"{what}: failed after {count} of {size} bytes: {error}") from error
    if came == 0:
        raise DidNotHappen(f"{what}: ended after {count} of {size} bytes")
    return came


def exactly(sock: Pipe, size: int) -> bytes:
    """The next bytes. Fewer if the other side closes the connection."""
    data = bytearray(size)
    view = memoryview(data)
    count = 0
    while count < size and (came := sock.recv_into(view[count:])):
        count += came
    return bytes(view[:count])
