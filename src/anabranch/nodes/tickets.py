"""Signed requests: who asks must know the query's secret, and may ask only once and one node.

A signed request is JSON in canonical form, ``{"mac": ..., "nonce": ..., "request": ...,
"time": ..., "to": ...}``. The code in ``mac`` covers every byte after it, and is checked before
any of them is parsed.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.errors import DidNotHappen, PlanError

LARGEST_REQUEST = 1 << 20
WINDOW = 60.0
MOST_REMEMBERED = 1 << 20
_SECRET_BYTES = 32
_NONCE_BYTES = 16
_HEAD = b'{"mac":"'
_BODY = len(_HEAD) + 2 * hashlib.sha256().digest_size


class Refused(DidNotHappen):
    """A node did not do what it was asked for: the request is not one that it takes."""


@dataclass(frozen=True)
class Secret:
    """What the nodes of one query know and nobody else does; it never shows in a repr."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != _SECRET_BYTES:
            raise PlanError(f"a secret has {_SECRET_BYTES} bytes, not {len(self.key)}")

    @classmethod
    def new(cls) -> Secret:
        """A random one."""
        return cls(os.urandom(_SECRET_BYTES))

    def to_hex(self) -> str:
        """The secret as text, to carry it to another process: never log it."""
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
    """Signs requests.

    >>> secret = Secret.new()
    >>> Verifier(secret).verify(Signer(secret).sign({"op": "ping"}))
    {'op': 'ping'}
    """

    def __init__(self, secret: Secret, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._clock = clock

    def sign(self, request: Mapping[str, Any], to: str = "") -> bytes:
        """The request, ready to be sent once to the node at an address.

        :class:`Refused` if JSON cannot hold it.
        """
        envelope = {
            "nonce": os.urandom(_NONCE_BYTES).hex(),
            "request": request,
            "time": self._clock(),
            "to": to,
        }
        try:
            text = json.dumps(envelope, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise Refused(f"the request cannot be sent as JSON: {error}") from error
        rest = b'",' + text.encode("ascii")[1:]
        signed = _HEAD + _mac(self._secret, rest) + rest
        _check_size(len(signed))
        return signed


class Verifier:
    """Takes each request signed with the same secret once, within ``window`` seconds of its time.

    The clocks of the nodes may differ by the window at most. May be used from several threads.
    """

    def __init__(
        self, secret: Secret, window: float = WINDOW, clock: Callable[[], float] = time.time
    ) -> None:
        self.address = ""
        """The address that requests must be meant for."""
        self._secret = secret
        self._window = window
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._by_time: list[tuple[float, str]] = []
        self._forgotten = float("-inf")

    def verify(self, data: bytes) -> dict[str, Any]:
        """The request in ``data``; :class:`Refused` if it is not to be trusted."""
        _check_size(len(data))
        mac, rest = data[len(_HEAD) : _BODY], data[_BODY:]
        if not data.startswith(_HEAD) or not rest.startswith(b'",'):
            raise Refused("this is not a signed request")
        if not hmac.compare_digest(mac, _mac(self._secret, rest)):
            raise Refused("the request is not signed with the secret of this node's query")
        nonce, signed_at, request, to = _parse(b"{" + rest[2:])
        if to != self.address:
            raise Refused(f"the request is meant for the node at {to or 'no address'}")
        self._take(nonce, signed_at)
        return request

    def _take(self, nonce: str, signed_at: float) -> None:
        with self._lock:
            now = self._clock()
            self._forget(now - self._window)
            # A clock that was set back must not make a forgotten request good again.
            if signed_at < now - self._window or signed_at <= self._forgotten:
                raise Refused(
                    f"the request is {now - signed_at:.0f} s old, more than {self._window:g} s; "
                    "send it anew, and see that the clocks of the nodes agree"
                )
            if signed_at > now + self._window:
                raise Refused(
                    f"the request is from {signed_at - now:.0f} s in the future, more than "
                    f"{self._window:g} s; see that the clocks of the nodes agree"
                )
            if nonce in self._seen:
                raise Refused("the request was sent before; every request is good for one time")
            if len(self._seen) >= MOST_REMEMBERED:
                raise Refused(f"more than {MOST_REMEMBERED} requests in {self._window:g} s")
            self._seen.add(nonce)
            heapq.heappush(self._by_time, (signed_at, nonce))

    def _forget(self, before: float) -> None:
        while self._by_time and self._by_time[0][0] < before:
            self._forgotten, nonce = heapq.heappop(self._by_time)
            self._seen.discard(nonce)


def _mac(secret: Secret, rest: bytes) -> bytes:
    return hmac.new(secret.key, rest, hashlib.sha256).hexdigest().encode("ascii")


def _check_size(size: int) -> None:
    if size > LARGEST_REQUEST:
        raise Refused(f"the request has {size} bytes; at most {LARGEST_REQUEST} are taken")


def _parse(body: bytes) -> tuple[str, float, dict[str, Any], str]:
    try:
        envelope = json.loads(body)
        nonce, signed_at, request = envelope["nonce"], envelope["time"], envelope["request"]
        to = envelope["to"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"the signed request is malformed: {type(error).__name__}") from error
    if not (
        isinstance(nonce, str)
        and isinstance(to, str)
        and isinstance(signed_at, int | float)
        and isinstance(request, dict)
        and abs(signed_at) < float("inf")
    ):
        raise Refused("the signed request is malformed: a part of it is of a wrong type")
    return nonce, signed_at, request, to
