"""Errors across the network: as a class name and a message, never as an object."""

from __future__ import annotations

from typing import Any

from anabranch import errors
from anabranch.errors import AnabranchError, QueryFailed
from anabranch.nodes.tickets import Refused

LONGEST_MESSAGE = 1000  # bytes

_KNOWN = {
    cls.__name__: cls
    for cls in (*vars(errors).values(), Refused)
    if isinstance(cls, type) and issubclass(cls, AnabranchError)
}


def to_json(error: Exception, doing: str) -> dict[str, Any]:
    """What a server answers so that the client can raise the same.

    An error that is none of ours becomes QueryFailed, and says what was being done.
    """
    if isinstance(error, AnabranchError):
        name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _KNOWN)
        message = str(error)
    else:
        name = QueryFailed.__name__
        message = f"{doing} failed: {type(error).__name__}: {error}; see the log of the node"
    short = message.encode(errors="replace")[:LONGEST_MESSAGE].decode(errors="ignore")
    return {"error": name, "message": short}


def from_json(value: dict[str, Any]) -> AnabranchError | None:
    """The error that the server answered with; None if it is none that is known here."""
    kind, message = _KNOWN.get(str(value.get("error"))), value.get("message")
    return kind(message) if kind is not None and isinstance(message, str) else None
