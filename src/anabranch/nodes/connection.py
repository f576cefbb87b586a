"""A connection to an agent. The agent's loop reads it until its first request is verified."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import TypeVar

from anabranch.nodes.wire import LARGEST_REQUEST

_LINGER_SECONDS = 2.0
_LINGER_STRANGER, _LINGER_VERIFIED = LARGEST_REQUEST, 1 << 25
_SOME = 1 << 18
_DROPPED = bytearray(1 << 16)

T = TypeVar("T")


class Gone(Exception):
    """The connection cannot be used any more."""


class CutOff(Exception):
    """The other side closed the connection within a request."""


class Halfway(Enum):
    """The direction of the transfer that failed."""

    IN = "in"
    OUT = "out"


class Connection:
    """One connection. Only its task uses it, or one thread at a time that the task waits for.

    A read never takes more bytes from the system than were requested, so that the buffers of the
    system fill and the other side waits.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        with suppress(OSError):  # it may have ended already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.known = False
        """Whether a request that came over it was signed with the secret."""
        self.verified = False
        """Whether the request that is being answered was."""
        self.by: str | None = None
        """Who signed it, empty for the node's own key. None: no request is being answered."""
        self.halfway: Halfway | None = None
        self.task: asyncio.Task[None] | None = None
        self._sock = sock

    async def peek(self, size: int) -> bytes:
        """Up to so many bytes that have come. They stay there to be received."""
        try:
            return await self._when_ready(partial(self._sock.recv, size, socket.MSG_PEEK))
        except (OSError, ValueError) as error:
            raise Gone(str(error)) from error

    async def encrypt(self, context: ssl.SSLContext) -> None:
        """Go on with TLS."""
        try:
            wrapped = context.wrap_socket(
                self._sock, server_side=True, do_handshake_on_connect=False
            )
            self._sock = wrapped
            await self._when_ready(wrapped.do_handshake)
        except (OSError, ValueError) as error:
            raise Gone(f"the TLS handshake failed: {error}") from error

    async def receive(self, size: int) -> bytes:
        """Read a number of bytes. None if the other side closed the connection before the first.

        CutOff if it ends before the last.
        """
        data = bytearray(size)
        count = 0
        try:
            with memoryview(data) as view:
                while count < size:
                    came = await self._when_ready(partial(self._sock.recv_into, view[count:]))
                    if not came:
                        break
                    count += came
        except (OSError, ValueError) as error:
            if count == 0:
                raise Gone(str(error)) from error
        if 0 < count < size:
            raise CutOff(f"it ended after {count} of {size} bytes")
        return bytes(data[:count])

    async def send(self, data: bytes, timeout: float) -> None:
        """Send all of these bytes, as long as some go within each ``timeout`` seconds."""
        try:
            with memoryview(data) as view:
                sent = 0
                while sent < len(view):
                    some = partial(self._sock.send, view[sent : sent + _SOME])
                    async with asyncio.timeout(timeout):
                        sent += await self._when_ready(some, writing=True)
        except (OSError, ValueError) as error:  # a timeout is an OSError
            raise Gone(str(error)) from error

    async def linger(self) -> None:
        """Let what was sent reach the other side before the connection is closed.

        To close with bytes unread would reset it, and the other side might lose the answer.
        """
        left = _LINGER_VERIFIED if self.verified else _LINGER_STRANGER
        with suppress(OSError, ValueError):
            self._sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_LINGER_SECONDS):
                while left > 0:
                    came = await self._when_ready(partial(self._sock.recv_into, _DROPPED))
                    if not came:
                        return
                    left -= came
                    await asyncio.sleep(0)  # others come first

    @contextmanager
    def blocking(self, timeout: float) -> Iterator[socket.socket]:
        """The socket for a thread to use, which waits up to ``timeout`` seconds for each byte."""
        self._sock.settimeout(timeout)
        try:
            yield self._sock
        finally:
            with suppress(OSError):
                self._sock.setblocking(False)

    def break_off(self) -> None:
        """Make a thread that uses the socket fail."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; nothing happens if it is closed."""
        self._sock.close()

    async def _when_ready(self, operation: Callable[[], T], *, writing: bool = False) -> T:
        """The result of an operation, which is tried again when the socket is ready for it."""
        while True:
            try:
                return operation()
            except ssl.SSLWantWriteError:
                await self._ready(writing=True)
            except ssl.SSLWantReadError:
                await self._ready(writing=False)
            except BlockingIOError:
                await self._ready(writing=writing)

    async def _ready(self, *, writing: bool) -> None:
        loop, descriptor = asyncio.get_running_loop(), self._sock.fileno()
        ready = loop.create_future()

        def tell() -> None:
            if not ready.done():
                ready.set_result(None)

        (loop.add_writer if writing else loop.add_reader)(descriptor, tell)
        try:
            await ready
        finally:
            (loop.remove_writer if writing else loop.remove_reader)(descriptor)
