"""The frames between a node and its clients, without any I/O.

A request is a head of ``HEAD_BYTES`` bytes and then its body, which is JSON::

    4 bytes    mark and number of the format
    4          length of the body
    16         nonce
    8          time of signing, in seconds
    8          the start of the SHA-256 of the address that it is meant for
    32         SHA-256 of the body
    32         HMAC-SHA-256, under the query's secret, of everything before

All of the head can be verified before a single byte of the body is taken. An answer is one or
more frames, of which the last is DONE or FAILED::

    4 bytes    mark and number of the format
    1          kind
    4          length of the value
    ...        the value, which is JSON

An upload follows on the frame READY; a download, with its checksum, on the frame DONE. Numbers are
big endian.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

LARGEST_REQUEST = 1 << 23
LARGEST_ANSWER = 1 << 26

_MARK = b"anb1"
_SIGNED = struct.Struct(">4sI16sd8s32s")
_MAC_BYTES = hashlib.sha256().digest_size
_FRAME = struct.Struct(">4sBI")

HEAD_BYTES = _SIGNED.size + _MAC_BYTES
FRAME_BYTES = _FRAME.size
NONCE_BYTES = 16


class Malformed(ValueError):
    """Bytes that are no frame."""


@dataclass(frozen=True)
class Head:
    """The head of a request."""

    size: int
    nonce: bytes
    time: float
    to: bytes
    digest: bytes

    @classmethod
    def of(cls, body: bytes, nonce: bytes, time: float, address: str) -> Head:
        """The head for a body, meant for the node at an address."""
        return cls(len(body), nonce, time, destination(address), hashlib.sha256(body).digest())

    def pack(self) -> bytes:
        """The bytes that the authentication code covers. The code follows them."""
        return _SIGNED.pack(_MARK, self.size, self.nonce, self.time, self.to, self.digest)

    @classmethod
    def unpack(cls, data: bytes) -> tuple[Head, bytes, bytes]:
        """The head in these bytes, the ones that its code covers, and the code."""
        if len(data) != HEAD_BYTES:
            raise Malformed(f"the head of a request has {HEAD_BYTES} bytes, not {len(data)}")
        signed, code = data[: _SIGNED.size], data[_SIGNED.size :]
        mark, *values = _SIGNED.unpack(signed)
        if mark != _MARK:
            raise Malformed(f"a request starts with {_MARK!r}, not with {mark!r}")
        return cls(*values), signed, code


def destination(address: str) -> bytes:
    """The form of the destination address in a head."""
    return hashlib.sha256(address.encode()).digest()[:8]


class Kind(IntEnum):
    """The kinds of frames."""

    WORKING = 1
    """It takes longer: the node is alive, and another frame will come."""
    READY = 2
    """The bytes of an upload may come."""
    DONE = 3
    """It was done; the value is the answer."""
    FAILED = 4
    """It was not done; the value is the error."""


def frame(kind: Kind, value: dict[str, Any] | None = None) -> bytes:
    """The bytes of a frame. ValueError or TypeError if JSON cannot hold the value."""
    body = b"" if value is None else json.dumps(value, allow_nan=False).encode("ascii")
    if len(body) > LARGEST_ANSWER:
        raise ValueError(f"an answer of {len(body)} bytes; at most {LARGEST_ANSWER} are sent")
    return _FRAME.pack(_MARK, kind, len(body)) + body


def frame_head(data: bytes) -> tuple[Kind, int]:
    """The kind of the frame that starts with these bytes, and the length of its value."""
    if len(data) != FRAME_BYTES:
        raise Malformed(f"the answer ended after {len(data)} bytes")
    mark, kind, size = _FRAME.unpack(data)
    if mark != _MARK or kind not in Kind.__members__.values():
        raise Malformed(f"{data!r} is no answer of a node")
    if size > LARGEST_ANSWER:
        raise Malformed(f"an answer of {size} bytes; at most {LARGEST_ANSWER} are accepted")
    return Kind(kind), size


def frame_value(data: bytes) -> dict[str, Any]:
    """The value of a frame."""
    if not data:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the answer is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise Malformed(f"the answer is {type(value).__name__}, not an object")
    return value
