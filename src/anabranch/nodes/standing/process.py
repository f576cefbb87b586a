"""A standing node: a process that keeps fragments for many queries, and is part of a ring."""

from __future__ import annotations

import logging
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from anabranch.errors import AnabranchError, PlanError, Refused, StateLocked, StoreError
from anabranch.nodes.agent import emptied
from anabranch.nodes.fence import EPOCH, Fence
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import Delete, Epoch, Get, List, Ping, Put, Request, Size
from anabranch.nodes.server import Agent
from anabranch.nodes.standing.client import ASKED, Access, Ring
from anabranch.nodes.standing.file import RingFile
from anabranch.nodes.standing.repair import Repair
from anabranch.nodes.standing.requests import Describe, Find, Reigning, Tell, View
from anabranch.nodes.standing.runner import Runner
from anabranch.nodes.starting import join
from anabranch.nodes.tenants import Shelf, Tenant
from anabranch.nodes.tickets import Signer, Verifier
from anabranch.nodes.tls import server_context
from anabranch.nodes.vault import Vault
from anabranch.private import private_folder
from anabranch.ring import Contact, NodeId, Status
from anabranch.state.lock import locked
from anabranch.state.part import OWN

A = TypeVar("A")

_log = logging.getLogger(__name__)

PORT = 7070
_BACKUPS, _SCRATCH, _EPOCHS = "backups", "scratch", "epochs"
_GRACE = 1.0
_LOOK = 0.5
_OF_RING: frozenset[type[Request[Any]]] = frozenset(
    {Ping, Tell, Find, Describe, Reigning, List, Size, Get}
)
_OF_QUERY: frozenset[type[Request[Any]]] = frozenset(
    {Ping, Find, Describe, List, Size, Get, Put, Delete}
)


@dataclass(frozen=True)
class Standing:
    """The settings of a standing node."""

    ring: RingFile
    host: str
    """Its name on the ring, and the address that it listens at."""
    folder: Path
    """Of this process alone. It has the fragments, and the ring's other nodes find them again when
    the node is back."""
    port: int = PORT
    zone: str = ""
    rack: str = ""
    capacity: int | None = None
    """The most bytes of fragments; None: the free space of the disk, less a reserve."""
    join: str | None = None
    """A node to join the ring by, beside those in the ring's file."""
    certificate: str | None = None
    """The certificate of this node, a file in PEM form, if the ring's file has one to trust. It
    must name the host."""
    key: str | None = None
    """Its private key."""

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of this node. None if the ring does not encrypt.

        PlanError if the ring's file and the files of this node do not go together.
        """
        if (self.certificate is None) != (self.key is None):
            raise PlanError("a node needs both --tls-certificate and --tls-key, or neither")
        if self.certificate is None or self.key is None:
            if self.ring.root:
                raise PlanError(
                    f"the nodes of the ring of {self.ring.path} encrypt: give the certificate of "
                    "this one with --tls-certificate and --tls-key"
                )
            return None
        if not self.ring.root:
            raise PlanError(
                f"{self.ring.path} has no certificate to trust, so nobody could reach a node that "
                "encrypts: give one with --tls-root, at all nodes of the ring, and copy the file "
                "to the drivers again"
            )
        return server_context(self.certificate, self.key)


def serve(settings: Standing, done: threading.Event, ready: Callable[[str], None]) -> None:
    """Serve until ``done``. Calls ``ready`` with the address once the node listens.

    PlanError if another process uses the folder, or the address is taken.
    """
    folder = private_folder(settings.folder)
    try:
        with locked(folder, timeout=0):
            tempfile.tempdir = str(emptied(folder / _SCRATCH))
            _serve(settings, folder, done, ready)
    except StateLocked as error:
        raise PlanError(
            f"another process uses {folder}: each node needs a folder of its own ({error})"
        ) from error


def _serve(
    settings: Standing, folder: Path, done: threading.Event, ready: Callable[[str], None]
) -> None:
    ring, tls = settings.ring, settings.tls()
    vault = Vault(folder / _BACKUPS, settings.capacity)
    tenants = _Tenants(vault, folder)
    # The one before it may have had this address: what it took is not taken again.
    verifier = Verifier(ring.secret, shared=True, since=time.time())
    node = _Node(vault, tenants)
    try:
        agent = Agent(
            settings.host,
            settings.port,
            vault,
            tenants("").fence,
            verifier,
            node,
            tenants=tenants,
            tls=tls,
            stopping=done,
        )
    except OSError as error:
        raise PlanError(
            f"cannot listen at {settings.host} port {settings.port}: {error}; give an address of "
            "this machine with --host, and a port that is free with --port"
        ) from error
    address = join(settings.host, agent.port)
    verifier.address = address
    id = NodeId.of(settings.host, settings.zone, settings.rack)
    # One that returns, at whatever port, is a later process than the one before.
    me = Contact(id, settings.host, address, time.time_ns() // 1000)
    seeds = [settings.join] if settings.join is not None else []
    seeds += [known for known in ring.nodes if known != address]
    access = replace(Access.of(ring, ""), nodes=tuple(dict.fromkeys([address, *seeds])))
    own = Ring(access)
    repair = Repair(own, me, vault, ring.settings)
    failed = threading.Event()

    def ended(by_error: bool) -> None:
        if by_error:
            failed.set()
        done.set()

    runner = Runner(
        me,
        ring.settings,
        Signer(ring.secret),
        seeds,
        trusted=access.trusted,
        load=lambda: _load(vault),
        news=repair.news,
        ended=ended,
    )
    node.begin(runner, repair, agent)
    if tls is not None:
        _check_certificate(own, address)
    _log.info("Listening at %s as %s; fragments: %r", address, id, vault)
    _note(ring, [address])
    runner.begin()
    repair.begin()
    ready(address)
    _until(done, runner, ring, address, () if settings.join is None else (settings.join,))
    _log.info("Leaving the ring.")
    repair.close()
    runner.close()
    ending = threading.Thread(target=agent.shutdown, daemon=True)
    ending.start()
    ending.join(_GRACE)
    _log.info("The node has ended.")
    if failed.is_set():
        raise AnabranchError(
            f"the node at {address} has ended by an error, which its log shows; start it again"
        )


def _check_certificate(own: Ring, address: str) -> None:
    """PlanError if those who trust the ring's certificate do not trust this node.

    The others would not say why: to them it is a node that does not answer.
    """
    try:
        own.ask(address, Ping(), ASKED)
    except StoreError as error:
        raise PlanError(
            f"this node cannot be reached at {address} by those who have the file of the ring: "
            f"{error}; its certificate must be signed with the one that the file has, and name "
            "what --host says"
        ) from error


def _until(
    done: threading.Event, runner: Runner, ring: RingFile, address: str, join: tuple[str, ...]
) -> None:
    """Wait for the end. Whom the node has met is noted in the file of the ring, for its return.

    The node joins by whom others have noted there: all of a ring may begin at the same time.
    """
    noted: set[str] = set()
    seeds: tuple[str, ...] = ()
    while not done.wait(min(_LOOK, ring.settings.period)):
        there = ring.known()
        if there not in ((), seeds):
            seeds = there
            runner.know((*join, *seeds))
        met = {each.contact.address for each in runner.known.leaves}
        if met - noted and runner.known.status is Status.JOINED:
            noted = met
            _note(ring, [address, *sorted(met)])


def _note(ring: RingFile, nodes: Sequence[str]) -> None:
    try:
        ring.remember(nodes)
    except (OSError, PlanError) as error:
        # The file may be in a folder that is mounted to be read only.
        _log.warning(
            "The addresses %s were not noted in %s; after a restart this node may need --join: %s",
            ", ".join(nodes),
            ring.path,
            error,
        )


class _Tenants:
    """The queries that the node serves, each with its own backups and its own fence."""

    def __init__(self, vault: Vault, folder: Path) -> None:
        self._vault = vault
        self._folder = folder
        self._lock = threading.Lock()
        self._of: dict[str, Tenant] = {
            "": Tenant(vault, Fence(folder / EPOCH), _OF_RING),
        }

    def __call__(self, by: str) -> Tenant:
        # What the vault has under this name it deletes when it needs the room.
        if f"{by}/" == OWN:
            raise Refused(f"{by!r} cannot be the id of a query at a standing node")
        with self._lock:
            if by not in self._of:
                fence = Fence(self._folder / _EPOCHS / by)
                self._of[by] = Tenant(Shelf(self._vault, by), fence, _OF_QUERY)
            return self._of[by]

    def epoch(self, query: str) -> Epoch:
        """The greatest epoch of a query that this node has seen."""
        return self(query).fence.greatest()


class _Node:
    """What a standing node answers, beside its backups. See :class:`~anabranch.nodes.node.Node`."""

    def __init__(self, vault: Vault, tenants: _Tenants) -> None:
        self._vault = vault
        self._tenants = tenants
        self._began = threading.Event()

    def begin(self, runner: Runner, repair: Repair, agent: Agent) -> None:
        """Answer from now on."""
        self._runner, self._repair, self._agent = runner, repair, agent
        self._began.set()

    def ask(self, request: Request[A], deadline: Deadline) -> A:
        """See :meth:`~anabranch.nodes.node.Node.ask`."""
        self._began.wait(deadline.left())
        match request:
            case Tell(message=message):
                return cast(A, self._runner.receive(message))
            case Find(key=key):
                return cast(A, self._runner.find(key, deadline))
            case Describe():
                return cast(A, self._view())
            case Reigning(query=query):
                return cast(A, self._tenants.epoch(query))
        raise Refused(f"a standing node has no tables: it cannot {request.verb}")

    def _view(self) -> View:
        known, vault = self._runner.known, self._vault
        return View(
            known.me,
            known.status is Status.JOINED,
            known.leaves,
            _load(vault),
            len(vault.list()),
            vault.used,
            vault.limit,
            sum(self._agent.failures.counts().values()),
            self._repair.made,
        )


def _load(vault: Vault) -> int:
    return min(1000, 1000 * vault.used // max(1, vault.limit))
