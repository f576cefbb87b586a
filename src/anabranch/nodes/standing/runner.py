"""Runs a peer of the ring: one thread owns it, others send the messages that it returns.

No message is waited for by that thread. A node that does not answer holds up the messages to
itself, and nothing else: each address has a short queue and at most one sender. What does not fit
is dropped, as the ring expects that messages are lost.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from anabranch.errors import AnabranchError, DidNotHappen
from anabranch.nodes.node import Deadline
from anabranch.nodes.remote import RemoteNode
from anabranch.nodes.server import THREADS
from anabranch.nodes.standing.requests import Neighbour, Place, Tell
from anabranch.nodes.tickets import Signer
from anabranch.ring import (
    Came,
    Contact,
    Found,
    Message,
    NotFound,
    Output,
    Peer,
    Send,
    Settings,
    Status,
    Went,
)

_log = logging.getLogger(__name__)

_MOST_WAITING = 4096
"""Messages that were received and not looked at yet; more are dropped."""
_MOST_UNSENT = 16
"""Messages that wait for one address; the oldest are dropped."""
_MOST_NODES = 4096
"""Addresses to which connections are kept."""
MOST_SEARCHES = THREADS // 2
"""Searches that are waited for; more are refused."""
_MOST_UNANSWERED = 256
LONGEST_SEARCH = 10.0
_SHORTEST = 0.5
_LONGEST = 5.0
"""Seconds that a message may take at most."""


@dataclass(frozen=True)
class _Search:
    key: int
    found: Future[Place]


@dataclass(frozen=True)
class _Seeds:
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class _Undelivered:
    send: Send


_Item = Message | _Search | _Seeds | _Undelivered


@dataclass(frozen=True)
class Known:
    """What a peer knows at a time."""

    me: Contact
    status: Status
    leaves: tuple[Neighbour, ...]


class Runner:
    """A peer that runs in this process, until :meth:`close`.

    ``trusted`` is the certificate that other nodes are verified with, if they encrypt. ``load``
    gives how full this node is. ``news`` is called, from the thread of the peer, with each node
    that comes to the leaf set or leaves it. ``ended`` is called if the peer cannot go on, as
    when a later process has the id of this node, and with True if that is by an error: the process
    must end.
    """

    def __init__(
        self,
        me: Contact,
        settings: Settings,
        signer: Signer,
        seeds: Sequence[str],
        *,
        trusted: bytes | None = None,
        load: Callable[[], int],
        news: Callable[[Came | Went], None],
        ended: Callable[[bool], None],
    ) -> None:
        self._peer = Peer(me, settings, seeds)
        self._settings = settings
        self._load = load
        self._news = news
        self._ended = ended
        self._waiting: queue.Queue[_Item | None] = queue.Queue(_MOST_WAITING)
        self._searches: dict[int, list[Future[Place]]] = {}
        self._searching = threading.BoundedSemaphore(MOST_SEARCHES)
        self._known = self._look()
        self._sender = _Sender(signer, settings, trusted, self._refused)
        self._thread = threading.Thread(target=self._run, name="ring", daemon=True)

    @property
    def known(self) -> Known:
        """What the peer knows now."""
        return self._known

    def begin(self) -> None:
        """Join the ring."""
        self._thread.start()

    def receive(self, message: Message) -> None:
        """Take a message. It is dropped if too many wait already."""
        self._put(message)

    def know(self, addresses: Sequence[str]) -> None:
        """Join by these addresses, too, if the ring has parts that do not know each other."""
        self._put(_Seeds(tuple(addresses)))

    def find(self, key: int, deadline: Deadline) -> Place:
        """Find the node that is closest to a key. DidNotHappen if nobody has answered in time."""
        # A search waits in a thread that the messages of the ring need too: were all of them
        # waiting, this node would seem to have failed.
        if not self._searching.acquire(blocking=False):
            raise DidNotHappen(f"this node has {MOST_SEARCHES} searches to wait for; try again")
        try:
            search = _Search(key, Future())
            if not self._put(search):
                raise DidNotHappen("this node has too many messages of the ring; try again")
            return search.found.result(min(LONGEST_SEARCH, deadline.left()))
        except TimeoutError as error:
            raise DidNotHappen(
                f"no node of the ring has answered a search within {deadline.seconds:g} s, or "
                f"{LONGEST_SEARCH:g} s; the ring may be in repair: try again"
            ) from error
        finally:
            self._searching.release()

    def close(self) -> None:
        """Leave the ring, and tell the neighbours."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()
        self._sender.close()

    def _put(self, item: _Item) -> bool:
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            return False
        return True

    def _refused(self, send: Send) -> None:
        self._put(_Undelivered(send))

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _log.exception("The ring's thread has failed. Ending this node.")
            self._ended(True)

    def _serve(self) -> None:
        peer = self._peer
        self._carry_out(peer.start())
        at = time.monotonic() + self._settings.period
        while peer.status is not Status.REPLACED:
            left = at - time.monotonic()
            if left <= 0:
                at += self._settings.period * (1 + int(-left / self._settings.period))
                peer.load = self._load()
                self._carry_out(peer.tick())
                continue
            try:
                item = self._waiting.get(timeout=left)
            except queue.Empty:
                continue
            if item is None:
                self._carry_out(peer.leave())
                self._sender.drain(_LONGEST)
                return
            self._carry_out(self._step(item))
        _log.warning("A later process has the id of this node. Ending this one.")
        self._ended(False)

    def _step(self, item: _Item) -> list[Output]:
        match item:
            case _Search(key, found):
                # Each that is not answered is sent again in each period, for some periods.
                if sum(map(len, self._searches.values())) >= _MOST_UNANSWERED:
                    found.set_exception(DidNotHappen("too many searches are unanswered; try again"))
                    return []
                self._searches.setdefault(key, []).append(found)
                return self._peer.find(key)
            case _Seeds(addresses):
                return self._peer.know(addresses)
            case _Undelivered(send):
                return self._peer.undelivered(send)
            case _:
                return self._peer.receive(item)

    def _carry_out(self, outputs: list[Output]) -> None:
        self._known = self._look()
        for output in outputs:
            match output:
                case Send():
                    self._sender.send(output)
                case Found(key, root, leaves, hops):
                    for found in self._searches.pop(key, ()):
                        found.set_result(Place(root, leaves, hops))
                case NotFound(key):
                    for found in self._searches.pop(key, ()):
                        found.set_exception(
                            DidNotHappen("no node of the ring has answered a search; try again")
                        )
                case Came() | Went():
                    self._news(output)

    def _look(self) -> Known:
        near = self._peer.neighbours
        leaves = tuple(Neighbour(near.contact(id), near.load(id)) for id in near.leaves)
        return Known(self._peer.me, self._peer.status, leaves)


class _Sender:
    """Sends messages in threads, to each address one after the other."""

    def __init__(
        self,
        signer: Signer,
        settings: Settings,
        trusted: bytes | None,
        refused: Callable[[Send], None],
    ) -> None:
        self._signer = signer
        self._trusted = trusted
        self._seconds = min(_LONGEST, max(_SHORTEST, settings.period))
        self._refused = refused
        # A whole leaf set may be silent, and a search must still go out.
        self._pool = ThreadPoolExecutor(settings.leaves + 8, "ring-send")
        self._lock = threading.Condition()
        self._unsent: dict[str, deque[Send]] = {}
        """By address; those that are here have a thread."""
        self._nodes: dict[str, RemoteNode] = {}

    def send(self, send: Send) -> None:
        """Send a message at some time soon, or drop it."""
        with self._lock:
            waiting = self._unsent.get(send.to)
            if waiting is not None:
                waiting.append(send)
                return
            self._unsent[send.to] = deque([send], _MOST_UNSENT)
        try:
            self._pool.submit(self._send_all, send.to)
        except RuntimeError:  # it is closed
            with self._lock:
                del self._unsent[send.to]

    def drain(self, seconds: float) -> None:
        """Wait until everything was sent, but no longer than that."""
        with self._lock:
            self._lock.wait_for(lambda: not self._unsent, seconds)

    def close(self) -> None:
        """Send nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def _send_all(self, address: str) -> None:
        while True:
            with self._lock:
                waiting = self._unsent[address]
                if not waiting:
                    del self._unsent[address]
                    self._lock.notify_all()
                    return
                send = waiting.popleft()
                node = self._node(address)
            try:
                node.ask(Tell(message=send.message), Deadline(self._seconds))
            except Exception as error:
                if not isinstance(error, AnabranchError):
                    _log.exception("A message to %s was not delivered.", address)
                _log.debug("A message to %s was not delivered: %s", address, error)
                if isinstance(error.__cause__, ConnectionRefusedError):
                    self._refused(send)
                with self._lock:
                    waiting.clear()  # what waited as long is old

    def _node(self, address: str) -> RemoteNode:
        if address not in self._nodes:
            if len(self._nodes) >= _MOST_NODES:
                for idle in self._nodes.keys() - self._unsent.keys():
                    self._nodes.pop(idle).close()
            self._nodes[address] = RemoteNode(
                address, self._signer, silence=self._seconds, tls_root=self._trusted
            )
        return self._nodes[address]
