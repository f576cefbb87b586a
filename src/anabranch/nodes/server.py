"""The server of a node: keeps backups, hands them out, and does work, for those with the secret.

Three calls, each with one signed request: ``do_get`` reads a backup, ``do_put`` stores one, and
the action ``call`` does everything else. A client that stores waits for ``READY`` before it sends
bytes, so that a request that is refused costs none, and for ``STORED`` after the last.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyarrow import flight

from anabranch.backup.store import check_name
from anabranch.errors import AnabranchError, CheckpointNotFound, DidNotHappen
from anabranch.nodes import chunks
from anabranch.nodes.failures import to_flight
from anabranch.nodes.tickets import LARGEST_REQUEST, Refused, Verifier
from anabranch.nodes.vault import Vault

Handler = Callable[[dict[str, Any]], dict[str, Any]]

CALL = "call"
READY = b"ready"
STORED = b"stored"
LARGEST_BACKUP = 1 << 31

_log = logging.getLogger(__name__)


class Agent(flight.FlightServerBase):  # type: ignore[misc]
    """Serves a vault and some actions; it listens as soon as it is made.

    An action takes the request and returns what JSON can hold. It runs in the thread of its call,
    so several can run at once. ``tls`` is a certificate chain and its key, both as PEM text.
    ``failures`` counts the calls that failed by the name of the error. ``stopping`` is set when a
    client says stop; whoever made the agent then shuts it down.
    """

    def __init__(
        self,
        location: str,
        vault: Vault,
        verifier: Verifier,
        actions: Mapping[str, Handler] | None = None,
        largest: int = LARGEST_BACKUP,
        *,
        tls: tuple[bytes, bytes] | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.stopping = stopping or threading.Event()
        self._vault = vault
        self._verifier = verifier
        self._largest = largest
        self._counting = threading.Lock()
        built_in: dict[str, Handler] = {
            "list": lambda request: {"names": list(vault.list(_text(request, "prefix")))},
            "size": lambda request: {"bytes": vault.size(_name(request))},
            "delete": self._delete,
            "ping": self._ping,
            "stop": self._stop,
        }
        self._actions = {**(actions or {}), **built_in}
        # Calls come in from here on, before the constructor returns.
        super().__init__(location, tls_certificates=[tls] if tls else None)

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> Any:
        """Stream the bytes of a backup."""
        with self._answering(context, "get"):
            data = self._vault.get(_name(self._verified(ticket.ticket, "get")))
            schema = chunks.schema_of(data.size)
            return flight.GeneratorStream(schema, chunks.split(data, schema))

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """Store the bytes that come, when all of them have come and are the right ones."""
        with self._answering(context, "put"):
            request = self._verified(descriptor.command or b"", "put")
            name, size, checksum = _name(request), request.get("bytes"), _text(request, "checksum")
            if type(size) is not int or not 0 <= size <= self._largest:
                raise Refused(
                    f"a backup of {_cut(size)} bytes; from 0 to {self._largest} are taken"
                )
            self._vault.check_room(name, size)
            writer.write(READY)
            data = _gather(reader, chunks.Gathering(size, f"put {name}"), checksum)
            self._vault.put(name, data)
            writer.write(STORED)

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> list[flight.Result]:
        """Do what a signed request asks for; the answer is JSON."""
        with self._answering(context, CALL):
            if action.type != CALL:
                raise Refused(f"there is no action {_cut(action.type)}, only {CALL!r}")
            request = self._verified(action.body)
            op = _text(request, "op")
            if op not in self._actions:
                raise Refused(f"this node cannot do {_cut(op)}; it can {sorted(self._actions)}")
        with self._answering(context, op):
            answer = json.dumps(self._actions[op](request), allow_nan=False)
            return [flight.Result(answer.encode("ascii"))]

    def _not_served(self, context: flight.ServerCallContext, *_: object) -> Any:
        with self._answering(context, "the call"):
            raise Refused("this node takes do_get, do_put and do_action only")

    do_exchange = list_flights = list_actions = get_flight_info = get_schema = _not_served

    def _verified(self, data: bytes | pa.Buffer, op: str | None = None) -> dict[str, Any]:
        if len(data) > LARGEST_REQUEST:
            raise Refused(f"the request has {len(data)} bytes; at most {LARGEST_REQUEST} are taken")
        request = self._verifier.verify(bytes(data))
        if op is not None and request.get("op") != op:
            raise Refused(f"the request was signed for {_cut(request.get('op'))}, not for {op!r}")
        return request

    def _delete(self, request: dict[str, Any]) -> dict[str, Any]:
        self._vault.delete(_name(request))
        return {}

    def _ping(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._counting:
            failures = dict(self.failures)
        return {
            "pid": os.getpid(),
            "used": self._vault.used,
            "limit": self._vault.limit,
            "failures": failures,
        }

    def _stop(self, request: dict[str, Any]) -> dict[str, Any]:
        # A shutdown waits for the calls under way, and this is one of them.
        self.stopping.set()
        return {}

    @contextmanager
    def _answering(self, context: flight.ServerCallContext, doing: str) -> Iterator[None]:
        """Turn every error into one for the client; count it and log it."""
        try:
            yield
        except Exception as error:
            with self._counting:
                self.failures[type(error).__name__] += 1
            if isinstance(error, CheckpointNotFound):
                _log.info("%s for %s: %s", doing, context.peer(), error)
            elif isinstance(error, AnabranchError):
                kind = type(error).__name__
                _log.warning("%s for %s: %s: %s", doing, context.peer(), kind, error)
            else:
                _log.exception("%s for %s failed", doing, context.peer())
            # Neither cause nor traceback goes to the client.
            raise to_flight(error, doing) from None


def _gather(
    reader: flight.MetadataRecordBatchReader, gathering: chunks.Gathering, checksum: str
) -> pa.Buffer:
    try:
        for chunk in reader:
            gathering.add(chunk.data)
    except (pa.ArrowException, flight.FlightError) as error:
        raise DidNotHappen(f"the bytes of a backup stopped coming: {error}") from error
    return gathering.finish(checksum)


def _text(request: dict[str, Any], field: str) -> str:
    value = request.get(field)
    if not isinstance(value, str):
        raise Refused(f"the request needs {field!r} as text")
    return value


def _name(request: dict[str, Any]) -> str:
    try:
        return check_name(_text(request, "name"))
    except ValueError as error:
        raise Refused(str(error)) from error


def _cut(value: object) -> str:
    """What someone else sent, short enough for a log."""
    return f"{value!r:.100}"
