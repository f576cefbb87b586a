"""The server of a node: keeps backups, hands them out, and does work, for those with the secret.

One loop accepts connections and reads requests. Nobody gets more than a few bytes of memory, and
nobody a thread, before the head of a request was verified; see :mod:`anabranch.nodes.wire`. What a
request asks for is then done in a thread. Those that move bytes of backups have threads of their
own: actions of other nodes wait for them, while nodes wait for those actions.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from anabranch.errors import DidNotHappen
from anabranch.nodes import chunks, fields
from anabranch.nodes.connection import Connection, CutOff, Gone, Halfway
from anabranch.nodes.failures import to_json
from anabranch.nodes.log import FailureLog
from anabranch.nodes.tickets import Refused, Verifier
from anabranch.nodes.vault import Incoming, Vault
from anabranch.nodes.wire import HEAD_BYTES, Kind, frame

Handler = Callable[[dict[str, Any]], dict[str, Any]]
T = TypeVar("T")

MOST_STRANGERS = 512
MOST_FRIENDS = 1024
THREADS = 64
_FIRST_SECONDS = 10.0
_KEPT_SECONDS = 120.0
_WORKING_SECONDS = 1.0
_SUMMARY_SECONDS = 2.0
_PAUSE = 0.05
_ACCEPTED_AT_ONCE = 64
_BACKLOG = 4096


class Agent:
    """Serves a vault and some actions; it listens as soon as it is made.

    An action takes the request and returns what JSON can hold; several can run at once. ``tls``
    has the node's certificate. Bytes of a backup must go on within ``timeout`` seconds each time.
    ``failures`` counts the requests that failed. ``stopping`` is set when a client says stop;
    whoever made the agent then shuts it down.
    """

    def __init__(
        self,
        host: str,
        port: int,
        vault: Vault,
        verifier: Verifier,
        actions: Mapping[str, Handler] | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        timeout: float = chunks.TIMEOUT,
        stopping: threading.Event | None = None,
    ) -> None:
        self.failures = FailureLog()
        self.stopping = stopping or threading.Event()
        self._vault = vault
        self._verifier = verifier
        self._tls = tls
        self._timeout = timeout
        self._lookups: dict[str, Handler] = {
            "list": lambda request: {"names": list(vault.list(fields.text(request, "prefix")))},
            "size": lambda request: {"bytes": vault.size(fields.name(request))},
            "delete": self._delete,
        }
        self._at_once: dict[str, Handler] = {"ping": self._ping, "stop": self._stop}
        built_in = {"put", "get", *self._lookups, *self._at_once}
        self._actions = {op: do for op, do in (actions or {}).items() if op not in built_in}
        self._known = built_in | set(self._actions)
        self._working = ThreadPoolExecutor(THREADS, "action")
        self._moving = ThreadPoolExecutor(THREADS, "backup")
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        self._strangers = _Crowd(min(MOST_STRANGERS, descriptors))
        self._friends = _Crowd(min(MOST_FRIENDS, descriptors))
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = _listening(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        """Serve nobody any more. Actions that are under way go on."""
        with suppress(RuntimeError):  # it was shut down before
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main)
        finally:
            self._listener.close()
            self._loop.close()
            self.failures.summarize(everything=True)
            for pool in (self._working, self._moving):
                pool.shutdown(wait=False, cancel_futures=True)

    async def _accept(self) -> None:
        summaries = asyncio.create_task(self._summaries())
        accepted = 0
        try:
            while True:
                try:
                    sock, peer = await self._loop.sock_accept(self._listener)
                except OSError as error:  # no descriptors are left
                    self.failures.note("accept", "nobody", error)
                    self._strangers.drop_oldest()
                    await asyncio.sleep(_PAUSE)
                    continue
                connection = Connection(sock, str(peer[0]))
                connection.task = asyncio.create_task(self._talk(connection))
                self._tasks.add(connection.task)
                connection.task.add_done_callback(self._tasks.discard)
                dropped = self._strangers.add(connection)
                if dropped is not None:
                    why = "it was silent, and was closed for a newer connection"
                    self.failures.note("connection", dropped.peer, Refused(why))
                accepted += 1
                if accepted % _ACCEPTED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # those who are there come first
        finally:
            tasks = [summaries, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _summaries(self) -> None:
        while True:
            await asyncio.sleep(_SUMMARY_SECONDS)
            self.failures.summarize()

    async def _talk(self, connection: Connection) -> None:
        """All requests of one connection."""
        try:
            if self._tls is not None:
                async with asyncio.timeout(_FIRST_SECONDS):
                    await connection.encrypt(self._tls)
            while await self._one_request(connection):
                self._friends.add(connection)  # it is the one that was used last
        except (Gone, TimeoutError) as error:
            if not connection.known:
                self.failures.note("connection", connection.peer, Refused(str(error) or "silent"))
        finally:
            self._strangers.discard(connection)
            self._friends.discard(connection)
            connection.close()

    async def _one_request(self, connection: Connection) -> bool:
        """Take a request and answer it; whether there may be another one."""
        doing = "request"
        try:
            request = await self._request(connection)
            if request is None:
                return False
            op = fields.text(request, "op")
            if op not in self._known:
                can = sorted(self._known)
                raise Refused(f"this node cannot do {fields.cut(op)}; it can {can}")
            doing = op
            answer = await self._done(connection, op, request)
            if answer:
                await connection.send(answer, self._timeout)
            return True
        except Gone:
            raise
        except Exception as error:
            self.failures.note(doing, connection.peer, error)
            if connection.halfway is Halfway.OUT:
                return False
            ends = not connection.verified or connection.halfway is not None
            answer = frame(Kind.FAILED, {**to_json(error, doing), "closing": ends})
            await connection.send(answer, self._timeout)
            if ends:
                await connection.linger()
            return not ends

    async def _request(self, connection: Connection) -> dict[str, Any] | None:
        """The next request, once its signature was found right; None if no more come."""
        seconds = _KEPT_SECONDS if connection.known else _FIRST_SECONDS
        connection.verified = False
        try:
            async with asyncio.timeout(seconds):
                data = await connection.receive(HEAD_BYTES)
        except TimeoutError:
            if connection.known:
                return None
            raise Refused(f"no request came within {seconds:g} s") from None
        except CutOff as error:
            raise Refused(f"the request was cut off: {error}") from error
        if not data:
            return None
        head = self._verifier.admit(data)
        self._befriend(connection)
        try:
            async with asyncio.timeout(self._timeout):
                body = await connection.receive(head.size)
        except (TimeoutError, CutOff) as error:
            connection.halfway = Halfway.IN
            raise Refused(f"the body of the request did not come: {error}") from error
        return self._verifier.open(head, body)

    def _befriend(self, connection: Connection) -> None:
        connection.known = connection.verified = True
        self._strangers.discard(connection)
        # It is of use: neither is it idle, nor may it be closed for another one.
        self._friends.discard(connection)
        if len(self._tasks) - len(self._strangers) - len(self._friends) > self._friends.most:
            connection.halfway = Halfway.IN
            raise DidNotHappen(f"this node is doing {self._friends.most} things already; ask later")

    async def _done(self, connection: Connection, op: str, request: dict[str, Any]) -> bytes | None:
        """Do what a request asks for; the frame to answer with."""
        if op in self._at_once:
            return frame(Kind.DONE, self._at_once[op](request))
        if op == "get":
            name = fields.name(request)
            return await self._in_thread(connection, partial(self._send, connection, name))
        if op == "put":
            size, checksum = fields.number(request, "bytes"), fields.checksum(request)
            receive = partial(self._receive, connection, fields.name(request), size, checksum)
            incoming = await self._in_thread(connection, receive)
            await self._waited_for(connection, self._moving, incoming.keep)
            return frame(Kind.DONE, {})
        if op in self._lookups:
            pool, work = self._moving, self._lookups[op]
        else:
            pool, work = self._working, self._actions[op]
        return await self._waited_for(connection, pool, lambda: frame(Kind.DONE, work(request)))

    async def _waited_for(self, connection: Connection, pool: Executor, work: Callable[[], T]) -> T:
        """Have a thread do something; the other side is told every second that it goes on."""
        future = self._loop.run_in_executor(pool, work)
        while True:
            done, _ = await asyncio.wait([future], timeout=_WORKING_SECONDS)
            if done:
                return future.result()
            try:
                await connection.send(frame(Kind.WORKING), self._timeout)
            except Gone:
                future.add_done_callback(partial(self._ended_alone, connection))
                raise

    def _ended_alone(self, connection: Connection, future: asyncio.Future[Any]) -> None:
        """Nobody waits any more for what a thread did."""
        if not future.cancelled() and isinstance(error := future.exception(), Exception):
            self.failures.note("nobody waited", connection.peer, error)

    async def _in_thread(self, connection: Connection, work: Callable[[], T]) -> T:
        """Let a thread use the connection."""
        future = self._loop.run_in_executor(self._moving, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            connection.break_off()
            await asyncio.wait([future])
            raise

    def _receive(self, connection: Connection, name: str, size: int, checksum: str) -> Incoming:
        incoming = self._vault.receiving(name, size)
        with incoming.dropped_on_error(), connection.blocking(self._timeout) as sock:
            connection.halfway = Halfway.IN
            what = f"put {name}"
            try:
                chunks.send(sock, frame(Kind.READY))
            except OSError as error:
                raise DidNotHappen(f"{what}: {error}") from error
            found = chunks.receive(sock, size, incoming.write, what)
            connection.halfway = None
            if found != checksum:
                raise DidNotHappen(
                    f"{what}: the checksum of the bytes that came is {found}, not {checksum}"
                )
        return incoming

    def _send(self, connection: Connection, name: str) -> None:
        with (
            self._vault.opened(name) as (descriptor, size),
            connection.blocking(self._timeout) as sock,
        ):
            connection.halfway = Halfway.OUT
            try:
                chunks.send(sock, frame(Kind.DONE, {"bytes": size}))
                chunks.send_file(sock, descriptor, size)
            except OSError as error:
                raise DidNotHappen(f"get {name}: {error}") from error
            connection.halfway = None

    def _delete(self, request: dict[str, Any]) -> dict[str, Any]:
        self._vault.delete(fields.name(request))
        return {}

    def _ping(self, request: dict[str, Any]) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "used": self._vault.used,
            "limit": self._vault.limit,
            "failures": self.failures.counts(),
        }

    def _stop(self, request: dict[str, Any]) -> dict[str, Any]:
        # The answer has to be sent before the loop ends.
        self._loop.call_later(_PAUSE, self.stopping.set)
        return {}


class _Crowd:
    """Connections that nothing is being done for. The one that came first goes if there are more.

    Like everything about connections it is of the loop's thread alone.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._members: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def add(self, connection: Connection) -> Connection | None:
        """Take one in, as the newest; the one that was closed for it, if any."""
        self._members.pop(connection, None)
        dropped = self.drop_oldest() if len(self._members) >= self.most else None
        self._members[connection] = None
        return dropped

    def discard(self, connection: Connection) -> None:
        """It is of use now, or gone."""
        self._members.pop(connection, None)

    def drop_oldest(self) -> Connection | None:
        """Close the connection that came first, if there is any."""
        oldest = next(iter(self._members), None)
        if oldest is not None:
            del self._members[oldest]
            assert oldest.task is not None
            oldest.task.cancel()
        return oldest


def _listening(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
