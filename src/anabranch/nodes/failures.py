"""Errors across the network: as a class name and a message, never as an object."""

from __future__ import annotations

import json
from typing import Any

from pyarrow import flight

from anabranch import errors
from anabranch.errors import AnabranchError, QueryFailed
from anabranch.nodes.tickets import Refused

LONGEST_MESSAGE = 1000  # bytes; it travels in a header, and those are small

_KNOWN = {
    cls.__name__: cls
    for cls in (*vars(errors).values(), Refused)
    if isinstance(cls, type) and issubclass(cls, AnabranchError)
}


def to_flight(error: Exception, doing: str) -> flight.FlightError:
    """What a server raises so that the client can raise the same.

    An error that is none of ours becomes QueryFailed, and says what was being done.
    """
    if isinstance(error, AnabranchError):
        name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _KNOWN)
        message = str(error)
    else:
        name = QueryFailed.__name__
        message = f"{doing} failed: {type(error).__name__}: {error}; see the log of the node"
    short = message.encode(errors="replace")[:LONGEST_MESSAGE].decode(errors="ignore")
    detail = json.dumps({"error": name, "message": short}, ensure_ascii=False).encode()
    kind = (
        flight.FlightUnauthenticatedError if name == Refused.__name__ else flight.FlightServerError
    )
    return kind(name, extra_info=detail)


def from_flight(error: Exception) -> AnabranchError | None:
    """The error that the server raised; None if it is the connection that failed."""
    try:
        detail: Any = json.loads(getattr(error, "extra_info", b"") or b"null")
        return _KNOWN[detail["error"]](detail["message"])
    except (ValueError, KeyError, TypeError):
        return None
