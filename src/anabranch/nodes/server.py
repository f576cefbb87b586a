"""The server of an agent: keeps backups and executes requests, for clients with the secret.

One loop accepts connections and reads requests. A connection gets no thread and only a few bytes of
memory before the head of its request was verified; see :mod:`anabranch.nodes.wire`. A thread then
executes the request. Requests that transfer backups have threads of their own, because requests on
other nodes wait for them, and could otherwise block each other.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from anabranch.errors import DidNotHappen, Refused
from anabranch.nodes import chunks, codec
from anabranch.nodes.connection import Connection, CutOff, Gone, Halfway
from anabranch.nodes.fence import Fence, FencedStore
from anabranch.nodes.log import FailureLog
from anabranch.nodes.node import Deadline, Node
from anabranch.nodes.requests import (
    VERBS,
    Delete,
    Get,
    List,
    Ping,
    Pong,
    Put,
    Request,
    Size,
    Stop,
)
from anabranch.nodes.tenants import Tenant, Tenants, alone
from anabranch.nodes.tickets import Verifier
from anabranch.nodes.vault import Incoming, Vault, keep_all
from anabranch.nodes.wire import HEAD_BYTES, MARK_BYTES, Kind, begins_request, frame

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
_UNREAD = "request"
"""The verb of a request that was not read yet."""
_OWN = frozenset({Put, Get, List, Size, Delete, Ping, Stop})
"""What the agent does itself; its node is asked for everything else."""


class Agent:
    """Serves a vault and the node that it is on. It listens as soon as it is made.

    The node executes several requests at once, in threads. Without a node there are only backups.
    ``fence`` guards all changes. With ``tenants`` many queries have backups and a fence each, and
    may not ask for everything. ``tls`` has the node's certificate. A transfer must not stall for
    ``timeout`` seconds. ``failures`` counts the requests that failed. ``stopping`` is set by the
    request Stop; the owner of the agent then shuts it down.
    """

    def __init__(
        self,
        host: str,
        port: int,
        vault: Vault,
        fence: Fence,
        verifier: Verifier,
        node: Node | None = None,
        *,
        tenants: Tenants | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = chunks.TIMEOUT,
        stopping: threading.Event | None = None,
    ) -> None:
        self.failures = FailureLog()
        self.stopping = stopping or threading.Event()
        self._vault = vault
        self._tenants = alone(vault, fence) if tenants is None else tenants
        self._verifier = verifier
        self._node = node
        self._tls = tls
        self._timeout = timeout
        self._working = ThreadPoolExecutor(THREADS, "node")
        self._moving = ThreadPoolExecutor(THREADS, "backup")
        # One of many queries, whose transfers are slow, must not have all of the threads.
        share = THREADS if tenants is None else THREADS // 2
        self._shares: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(share)
        )
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        self._strangers = _Crowd(min(MOST_STRANGERS, descriptors))
        self._friends = _Crowd(min(MOST_FRIENDS, descriptors))
        self._most_of_one = self._friends.most if tenants is None else self._friends.most // 2
        self._under_way: Counter[str] = Counter()
        """Requests by who signed them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = _listening(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        """Stop to serve. Requests in progress continue."""
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
                    self.failures.note("Accepting a connection", "a stranger", error)
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
                    self.failures.note("A connection", dropped.peer, Refused(why))
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
                    if begins_request(await connection.peek(MARK_BYTES)):
                        await self._refuse_clear(connection)
                        return
                    await connection.encrypt(self._tls)
            while await self._one_request(connection):
                self._friends.add(connection)  # it is the one that was used last
        except (Gone, TimeoutError) as error:
            if not connection.known:
                why = str(error) or "it was silent"
                self.failures.note("A connection", connection.peer, Refused(why))
        finally:
            self._strangers.discard(connection)
            self._friends.discard(connection)
            connection.close()

    async def _refuse_clear(self, connection: Connection) -> None:
        """Tell a client that it has to encrypt. To fail the handshake would not say so."""
        refused = Refused("this node encrypts; the client has no certificate to trust it by (tls)")
        self.failures.note("A connection", connection.peer, refused)
        answer = frame(Kind.FAILED, {**codec.encode_error(refused, _UNREAD), "closing": True})
        await connection.send(answer, self._timeout)
        await connection.linger()

    async def _one_request(self, connection: Connection) -> bool:
        """Take a request and answer it; whether there may be another one."""
        doing = _UNREAD
        try:
            signed = await self._value(connection)
            if signed is None:
                return False
            by, value = signed
            doing = codec.verb_of(value)
            tenant = self._tenants(by)
            tenant.check(VERBS[doing], by)
            answer = await self._execute(connection, doing, value, tenant, by)
            if answer:
                await connection.send(answer, self._timeout)
            return True
        except Gone:
            raise
        except Exception as error:
            what = f"The request {doing!r}" if doing != _UNREAD else "A request"
            self.failures.note(what, connection.peer, error)
            if connection.halfway is Halfway.OUT:
                return False
            ends = not connection.verified or connection.halfway is not None
            answer = frame(Kind.FAILED, {**codec.encode_error(error, doing), "closing": ends})
            await connection.send(answer, self._timeout)
            if ends:
                await connection.linger()
            return not ends
        finally:
            if connection.by is not None:
                self._under_way[connection.by] -= 1
                self._under_way += Counter()  # only those that are left
                connection.by = None

    async def _value(self, connection: Connection) -> tuple[str, dict[str, Any]] | None:
        """Who signed the next request, and the request as JSON, once its signature was found right.

        None if no more come.
        """
        seconds = _KEPT_SECONDS if connection.known else _FIRST_SECONDS
        connection.verified = False
        try:
            async with asyncio.timeout(seconds):
                data = await connection.receive(MARK_BYTES)
                if data:
                    # Another version's head may be shorter: the rest of it is not waited for.
                    self._verifier.begin(data)
                    data += await connection.receive(HEAD_BYTES - MARK_BYTES)
        except TimeoutError:
            if connection.known:
                return None
            raise Refused(f"no request came within {seconds:g} s") from None
        except CutOff as error:
            raise Refused(f"the request was cut off: {error}") from error
        if not data:
            return None
        head = self._verifier.admit(data)
        self._befriend(connection, head.by)
        try:
            async with asyncio.timeout(self._timeout):
                body = await connection.receive(head.size)
        except (TimeoutError, CutOff) as error:
            connection.halfway = Halfway.IN
            raise Refused(f"the body of the request did not arrive: {error}") from error
        return head.by, self._verifier.open(head, body)

    def _befriend(self, connection: Connection, by: str) -> None:
        connection.known = connection.verified = True
        connection.by = by
        self._under_way[by] += 1
        self._strangers.discard(connection)
        # It is of use: neither is it idle, nor may it be closed for another one.
        self._friends.discard(connection)
        if len(self._tasks) - len(self._strangers) - len(self._friends) > self._friends.most:
            connection.halfway = Halfway.IN
            raise DidNotHappen(
                f"this node runs {self._friends.most} requests already; try again later"
            )
        if self._under_way[by] > self._most_of_one:
            connection.halfway = Halfway.IN
            raise DidNotHappen(
                f"this node runs {self._most_of_one} requests of this query already; try again "
                "later"
            )

    async def _execute(
        self, connection: Connection, verb: str, value: dict[str, Any], tenant: Tenant, by: str
    ) -> bytes | None:
        """Do what a request of a query asks for; the frame to answer with, if it was not sent."""
        if VERBS[verb] not in _OWN:
            # A thread reads it too: a request may have many parts.
            ask = partial(self._ask, verb, value)
            request, answer = await self._wait_for(connection, self._working, ask)
            if isinstance(answer, bytes):
                return answer
            await self._in_thread(connection, partial(self._send, connection, request, answer))
            return None
        request, seconds = codec.decode(value)
        match request:
            case Ping():
                return _done(request, self._pong())
            case Stop():
                tenant.fence.check(request.epoch)
                # The answer has to be sent before the loop ends.
                self._loop.call_later(_PAUSE, self.stopping.set)
                return _done(request, None)
        async with self._shares[by]:
            return await self._move(connection, request, tenant, seconds)

    async def _move(
        self, connection: Connection, request: Request[Any], tenant: Tenant, seconds: float
    ) -> bytes | None:
        """Do what a request for backups asks for."""
        match request:
            case Get():
                send = partial(self._send_backup, connection, request, tenant)
                await self._in_thread(connection, send)
                return None
            case Put():
                receive = partial(self._receive, connection, request, tenant)
                incoming = await self._in_thread(connection, receive)
                work = partial(self._keep, incoming, request, tenant, Deadline(seconds))
            case _:
                work = partial(self._look_up, request, tenant, Deadline(seconds))
        return await self._wait_for(connection, self._moving, work)

    async def _wait_for(self, connection: Connection, pool: Executor, work: Callable[[], T]) -> T:
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
        """Log the failure of a request whose client has left."""
        if not future.cancelled() and isinstance(error := future.exception(), Exception):
            self.failures.note("An abandoned request", connection.peer, error)

    async def _in_thread(self, connection: Connection, work: Callable[[], T]) -> T:
        """Let a thread use the connection."""
        future = self._loop.run_in_executor(self._moving, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            connection.break_off()
            await asyncio.wait([future])
            raise

    def _ask(self, verb: str, value: dict[str, Any]) -> tuple[Request[Any], bytes | pa.Buffer]:
        """Execute a request on the node. The frame to answer with, or a block of bytes."""
        if self._node is None:
            raise Refused(f"this node only keeps backups; it cannot {verb}")
        request, seconds = codec.decode(value)
        answer = self._node.ask(request, Deadline(seconds))
        in_bytes = codec.answers_with_bytes(request)
        return request, answer if in_bytes else _done(request, answer)

    def _look_up(self, request: Request[Any], tenant: Tenant, deadline: Deadline) -> bytes:
        backups = tenant.backups
        match request:
            case List():
                return _done(request, tuple(backups.list(request.prefix)))
            case Size():
                return _done(request, backups.size(request.name))
            case Delete():
                fenced = FencedStore(backups, tenant.fence, request.epoch, deadline)
                fenced.delete_all(request.names)
                return _done(request, None)
        raise AssertionError(f"no handler for the request {request}")

    def _receive(self, connection: Connection, request: Put, tenant: Tenant) -> list[Incoming]:
        tenant.fence.check(request.epoch)
        sizes = [(block.name, block.bytes) for block in request.blocks]
        with (
            tenant.backups.receiving_all(sizes) as coming,
            connection.blocking(self._timeout) as sock,
        ):
            connection.halfway = Halfway.IN
            try:
                chunks.send(sock, frame(Kind.READY))
            except OSError as error:
                raise DidNotHappen(f"{request}: {error}") from error
            found = [
                chunks.receive(sock, block.bytes, each.write, f"put {block.name}")
                for block, each in zip(request.blocks, coming, strict=True)
            ]
            connection.halfway = None
            for block, checksum in zip(request.blocks, found, strict=True):
                if checksum != block.checksum:
                    raise DidNotHappen(
                        f"put {block.name}: the received bytes have the checksum {checksum}, not "
                        f"{block.checksum}"
                    )
        return coming

    def _keep(
        self, coming: list[Incoming], request: Put, tenant: Tenant, deadline: Deadline
    ) -> bytes:
        with ExitStack() as admitted:
            with ExitStack() as dropped:
                for each in coming:
                    dropped.enter_context(each.dropped_on_error())
                admitted.enter_context(tenant.fence.admit(request.epoch, deadline))
            keep_all(coming)
        return _done(request, None)

    def _send_backup(self, connection: Connection, request: Get, tenant: Tenant) -> None:
        with tenant.backups.opened(request.name) as (descriptor, size):
            offset = min(request.offset, size)
            length = size - offset
            if request.length is not None:
                length = min(request.length, length)
            send = partial(chunks.send_file, descriptor=descriptor, offset=offset, size=length)
            self._transfer(connection, request, length, send)

    def _send(self, connection: Connection, request: Request[Any], data: pa.Buffer) -> None:
        self._transfer(connection, request, data.size, partial(chunks.send_buffer, data=data))

    def _transfer(
        self,
        connection: Connection,
        request: Request[Any],
        size: int,
        send: Callable[[socket.socket], None],
    ) -> None:
        """Answer with a number of bytes, which ``send`` sends."""
        with connection.blocking(self._timeout) as sock:
            connection.halfway = Halfway.OUT
            try:
                chunks.send(sock, frame(Kind.DONE, {"bytes": size}))
                send(sock)
            except OSError as error:
                raise DidNotHappen(f"{request}: {error}") from error
            connection.halfway = None

    def _pong(self) -> Pong:
        return Pong(os.getpid(), self._vault.used, self._vault.limit, self.failures.counts())


def _done(request: Request[Any], answer: object) -> bytes:
    return frame(Kind.DONE, codec.encode_answer(request, answer))


class _Crowd:
    """A bounded set of idle connections. The oldest one is closed if there are more.

    Only the thread of the loop uses it, as everything about connections.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._members: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def add(self, connection: Connection) -> Connection | None:
        """Add a connection as the newest. Returns the one that was closed for it, if any."""
        self._members.pop(connection, None)
        dropped = self.drop_oldest() if len(self._members) >= self.most else None
        self._members[connection] = None
        return dropped

    def discard(self, connection: Connection) -> None:
        """Remove a connection, which is in use now or closed."""
        self._members.pop(connection, None)

    def drop_oldest(self) -> Connection | None:
        """Close the oldest connection, if there is any."""
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
