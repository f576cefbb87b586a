"""A connection to an agent on which a test sends whatever it likes."""

import socket
from collections.abc import Mapping
from typing import Any

import xxhash
from node_tools import EPOCH

from anabranch.nodes import AgentAddress, Signer, wire
from anabranch.nodes.chunks import exactly
from anabranch.nodes.wire import Kind


class Asking(Signer):
    """Signs requests to the agent of the test."""

    address = ""

    def sign(self, request: Mapping[str, Any], to: str = "") -> bytes:
        return super().sign(request, to or self.address)


class Raw:
    """One connection."""

    def __init__(self, agent: AgentAddress, timeout: float = 20) -> None:
        self.socket = socket.create_connection((agent.host, agent.port), timeout)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes; the agent may have closed the connection already."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return

    def answer(self) -> tuple[Kind, dict[str, Any]] | None:
        """The next frame that says something; None if the agent closed the connection."""
        while True:
            try:
                head = exactly(self.socket, wire.FRAME_BYTES)
            except ConnectionResetError:
                return None
            if not head:
                return None
            kind, size = wire.frame_head(head)
            value = wire.frame_value(exactly(self.socket, size))
            if kind is not Kind.WORKING:
                return kind, value

    def ask(self, data: bytes, body: bytes = b"") -> tuple[Kind, dict[str, Any]] | None:
        """Send a request, and bytes behind it if they are wanted; the last frame."""
        self.send(data)
        answer = self.answer()
        if answer == (Kind.READY, {}):
            self.send(body)
            answer = self.answer()
        return answer


def asked(verb: object, **fields: object) -> dict[str, object]:
    """Any request."""
    return {"verb": verb, "within": 20, **fields}


def declared(data: bytes, **changes: object) -> dict[str, object]:
    """The request to store bytes. The changes are those of its block, but for the epoch's."""
    epoch = changes.pop("epoch", EPOCH)
    checksum = xxhash.xxh3_64_hexdigest(data)
    block = {"name": "a", "bytes": len(data), "checksum": checksum}
    return asked("put", epoch=epoch, blocks=[block | changes])
