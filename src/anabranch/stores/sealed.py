"""Small JSON files with a checksum, which detects every changed, missing or added byte."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from anabranch.errors import CheckpointCorrupt


def seal(kind: str, body: Any) -> bytes:
    """The bytes of a value's file: JSON with the kind of the value and a checksum.

    >>> print(seal("commit", {"version": 3}).decode())
    {
     "commit": {
      "version": 3
     },
     "checksum": "91d3c44e31161724"
    }
    """
    return json.dumps({kind: body, "checksum": _digest(body)}, indent=1).encode()


def unseal(kind: str, data: bytes, *, name: str) -> Any:
    """The value that :func:`seal` wrote. CheckpointCorrupt if any byte was changed."""
    try:
        read = json.loads(data)
        if "checksum" not in read:
            raise ValueError("it has no checksum; an earlier version wrote it, or it is damaged")
        body, checksum = read[kind], read["checksum"]
        if checksum != _digest(body):
            raise ValueError(f"its checksum is {_digest(body)}, not {checksum}")
        if seal(kind, body) != data:
            raise ValueError("it has extra bytes")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{name}: not a {kind} as written: {error}") from error
    return body


def _digest(body: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body).encode())
