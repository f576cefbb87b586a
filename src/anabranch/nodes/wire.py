"""The frames between a node and its clients, without any I/O.

A request is a head of ``HEAD_BYTES`` bytes and then its body, which is JSON::

    4 bytes    mark and number of the format
    4          length of the body
    16         nonce
    8          time of signing, in seconds
    8          the start of the SHA-256 of the address that it is meant for
    32         who signs: the id of a query, or nothing for the node's own key; then zeros
    32         SHA-256 of the body
    32         HMAC-SHA-256, under the signer's key, of everything before

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
import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

LARGEST_REQUEST = 1 << 23
LARGEST_ANSWER = 1 << 26

_REQUEST, _ANSWER = b"anb2", b"anb1"
"""The form of requests has changed since the first one, that of answers has not. A client of the
first form therefore can read why it is refused."""
MARK_BYTES = 4
_FAMILY = b"anb"
_SIGNED = struct.Struct(">4sI16sd8s32s32s")
_SIGNER_BYTES = 32
_SIGNER = re.compile(r"(?:[A-Za-z0-9_=+~-][A-Za-z0-9_=+~.-]{0,31})?", re.ASCII)
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
    by: str
    """The query that signs. Empty: whoever has the node's own key."""
    digest: bytes

    @classmethod
    def of(cls, body: bytes, nonce: bytes, time: float, address: str, by: str = "") -> Head:
        """The head for a body, meant for the node at an address."""
        digest = hashlib.sha256(body).digest()
        return cls(len(body), nonce, time, destination(address), check_signer(by), digest)

    def pack(self) -> bytes:
        """The bytes that the authentication code covers. The code follows them."""
        by = self.by.encode("ascii")
        return _SIGNED.pack(_REQUEST, self.size, self.nonce, self.time, self.to, by, self.digest)

    @classmethod
    def unpack(cls, data: bytes) -> tuple[Head, bytes, bytes]:
        """The head in these bytes, the ones that its code covers, and the code."""
        if len(data) != HEAD_BYTES:
            raise Malformed(f"the head of a request has {HEAD_BYTES} bytes, not {len(data)}")
        signed, code = data[: _SIGNED.size], data[_SIGNED.size :]
        mark, size, nonce, time, to, by, digest = _SIGNED.unpack(signed)
        check_mark(mark)
        name = by.rstrip(b"\0").decode("latin-1")
        if not _SIGNER.fullmatch(name):
            raise Malformed(f"{by!r} is no id of a query")
        return cls(size, nonce, time, to, name, digest), signed, code


def check_mark(mark: bytes) -> None:
    """Malformed if these are not the first bytes of a request in the form of this version."""
    if mark[:MARK_BYTES] == _REQUEST:
        return
    if mark.startswith(_FAMILY):
        raise Malformed(
            f"a request starts with {_REQUEST!r}, not with {mark[:MARK_BYTES]!r}: client and node "
            "have different versions of anabranch; install the same one on all nodes and the driver"
        )
    raise Malformed(f"a request starts with {_REQUEST!r}, not with {mark!r}")


def begins_request(data: bytes) -> bool:
    """Whether these are the first bytes of a request in clear, of whatever version."""
    return data.startswith(_FAMILY)


def check_signer(by: str) -> str:
    """The id of a query, if it can stand in a head. Otherwise ValueError."""
    if not _SIGNER.fullmatch(by):
        raise ValueError(
            f"{by!r} cannot be the id of a query: use up to {_SIGNER_BYTES} letters, digits and "
            "_=+~-. that do not start with a dot"
        )
    return by


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
    return _FRAME.pack(_ANSWER, kind, len(body)) + body


def frame_head(data: bytes) -> tuple[Kind, int]:
    """The kind of the frame that starts with these bytes, and the length of its value."""
    if len(data) != FRAME_BYTES:
        raise Malformed(f"the answer ended after {len(data)} bytes")
    mark, kind, size = _FRAME.unpack(data)
    if mark != _ANSWER or kind not in Kind.__members__.values():
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
