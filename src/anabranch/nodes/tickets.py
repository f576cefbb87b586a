"""Signed requests: a client must know the query's secret. A request is valid once, at one node.

See :mod:`anabranch.nodes.wire` for the bytes. The head of a request is verified before its body is
read. The digest of the body, which is in the head, is verified before the body is parsed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.errors import PlanError, Refused
from anabranch.nodes import wire
from anabranch.nodes.wire import HEAD_BYTES, LARGEST_REQUEST, NONCE_BYTES, Head

WINDOW = 60.0
MOST_REMEMBERED = 1 << 18
_SECRET_BYTES = 32


@dataclass(frozen=True)
class Secret:
    """The shared secret of the nodes of one query, or of a ring. It never shows in a repr."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != _SECRET_BYTES:
            raise PlanError(f"a secret has {_SECRET_BYTES} bytes, not {len(self.key)}")

    @classmethod
    def new(cls) -> Secret:
        """A random one."""
        return cls(os.urandom(_SECRET_BYTES))

    def of_query(self, query: str) -> Secret:
        """The key of a query that nodes with this secret serve. It does not lead back to it.

        >>> Secret(bytes(32)).of_query("words") == Secret(bytes(32)).of_query("others")
        False
        """
        return Secret(hmac.digest(self.key, b"anabranch query " + query.encode("ascii"), "sha256"))

    def to_hex(self) -> str:
        """The secret as text, for another process. Never log it."""
        return self.key.hex()

    @classmethod
    def from_hex(cls, text: str) -> Secret:
        """The secret that :meth:`to_hex` wrote."""
        try:
            return cls(bytes.fromhex(text))
        except (ValueError, TypeError):
            # The text may be nearly right: it is kept out of the message and of its causes.
            raise PlanError(f"a secret is {2 * _SECRET_BYTES} hexadecimal digits") from None


class Signer:
    """Signs requests. ``by`` is the query whose key the secret is, at nodes that serve many.

    >>> secret = Secret.new()
    >>> Verifier(secret).verify(Signer(secret).sign({"op": "ping"}))
    {'op': 'ping'}
    """

    def __init__(
        self, secret: Secret, clock: Callable[[], float] = time.time, *, by: str = ""
    ) -> None:
        self._secret = secret
        self._clock = clock
        self._by = wire.check_signer(by)

    def sign(self, request: Mapping[str, Any], to: str = "") -> bytes:
        """The signed bytes of a request, to be sent once to the node at an address.

        :class:`Refused` if JSON cannot hold it.
        """
        try:
            text = json.dumps(request, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise Refused(f"the request cannot be sent as JSON: {error}") from error
        body = text.encode("ascii")
        _check_size(len(body))
        head = Head.of(body, os.urandom(NONCE_BYTES), self._clock(), to, self._by).pack()
        return head + _code(self._secret, head) + body


class Verifier:
    """Accepts each request signed with the same secret once, within ``window`` seconds of its time.

    The clocks of the nodes may differ by the window at most. May be used from several threads.
    Only requests with the right signature are remembered, and only for the window. With ``shared``
    the node serves many queries, each of which signs with the key that is derived for it; none of
    them can use up what is remembered of the others. What was signed before ``since`` is refused: a
    process that begins at the address of another one does not know what that one was sent.

    >>> secret = Secret.new()
    >>> signed = Signer(secret.of_query("words"), by="words").sign({"op": "ping"})
    >>> Verifier(secret, shared=True).verify(signed)
    {'op': 'ping'}
    """

    def __init__(
        self,
        secret: Secret,
        window: float = WINDOW,
        clock: Callable[[], float] = time.time,
        *,
        shared: bool = False,
        since: float = -math.inf,
    ) -> None:
        self.address = ""
        """The address that requests must be meant for."""
        self._secret = secret
        self._shared = shared
        self._window = window
        self._clock = clock
        self._lock = threading.Lock()
        # The nonces by the second in which they were signed: a whole second is forgotten at once.
        self._seen: dict[int, set[tuple[str, bytes]]] = {}
        self._count: Counter[str] = Counter()
        self._forgotten = since

    def begin(self, data: bytes) -> None:
        """:class:`Refused` if a request cannot begin with these bytes."""
        try:
            wire.check_mark(data)
        except wire.Malformed as error:
            raise Refused(f"this is not a signed request: {error}") from None

    def admit(self, data: bytes) -> Head:
        """Verify the head of a request. :class:`Refused` if it is not valid.

        No other request with this head is accepted afterwards.
        """
        try:
            head, signed, code = Head.unpack(data)
        except wire.Malformed as error:
            raise Refused(f"this is not a signed request: {error}") from None
        if not hmac.compare_digest(code, _code(self._key(head.by), signed)):
            whose = f"the key of query {head.by}" if head.by else "the secret of this node's query"
            raise Refused(f"the request is not signed with {whose}")
        if head.to != wire.destination(self.address):
            raise Refused(f"the request is meant for another node than the one at {self.address}")
        _check_size(head.size)
        self._take(head)
        return head

    def open(self, head: Head, body: bytes) -> dict[str, Any]:
        """Verify and parse the body of a request with this head."""
        if hashlib.sha256(body).digest() != head.digest:
            raise Refused("the body of the request is not the one that was signed")
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the signed request is malformed: {type(error).__name__}") from error
        if not isinstance(request, dict):
            raise Refused("the signed request is malformed: it is not an object")
        return request

    def verify(self, data: bytes) -> dict[str, Any]:
        """The request in ``data``. :class:`Refused` if it is not valid."""
        return self.open(self.admit(data[:HEAD_BYTES]), data[HEAD_BYTES:])

    def _key(self, by: str) -> Secret:
        if not by:
            return self._secret
        if not self._shared:
            raise Refused(
                "the request is not signed with the secret of this node's query: it is signed as "
                f"query {by}, and this node is not a standing node, which serves several"
            )
        return self._secret.of_query(by)

    def _take(self, head: Head) -> None:
        with self._lock:
            now = self._clock()
            self._forget(now - self._window)
            if not math.isfinite(head.time):
                raise Refused(f"the signed request is malformed: {head.time} is no time")
            # A clock that was set back must not make a forgotten request good again.
            if head.time < now - self._window or head.time < self._forgotten:
                raise Refused(
                    f"the request is {now - head.time:.0f} s old: more than {self._window:g} s, or "
                    "of a time that this node has forgotten or was not there; send it again, and "
                    "synchronize the clocks of the nodes"
                )
            if head.time > now + self._window:
                raise Refused(
                    f"the request is from {head.time - now:.0f} s in the future, more than "
                    f"{self._window:g} s; synchronize the clocks of the nodes"
                )
            seen = self._seen.setdefault(math.floor(head.time), set())
            if (head.by, head.nonce) in seen:
                raise Refused("the request was received before; a request can be used only once")
            if self._count[head.by] >= MOST_REMEMBERED:
                raise Refused(f"more than {MOST_REMEMBERED} requests in {self._window:g} s")
            seen.add((head.by, head.nonce))
            self._count[head.by] += 1

    def _forget(self, before: float) -> None:
        for second in [second for second in self._seen if second + 1 <= before]:
            self._count -= Counter(by for by, _ in self._seen.pop(second))
            self._forgotten = max(self._forgotten, second + 1)


def _code(secret: Secret, signed: bytes) -> bytes:
    return hmac.digest(secret.key, signed, "sha256")


def _check_size(size: int) -> None:
    if size > LARGEST_REQUEST:
        raise Refused(f"the request has {size} bytes; at most {LARGEST_REQUEST} are accepted")
