"""The state tables of a query, wherever they are: what their nodes are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pyarrow as pa

from anabranch.backup.manifests import OperatorManifest, Part
from anabranch.backup.peers import peer_name
from anabranch.nodes.local import LocalNode
from anabranch.nodes.node import Deadline, Node
from anabranch.nodes.requests import (
    Address,
    Advance,
    Capture,
    CaptureFile,
    Drop,
    Epoch,
    Fetch,
    Inspect,
    Instance,
    Make,
    Merge,
    OperatorName,
    Prefix,
    Rename,
    Request,
    Store,
    TableName,
)
from anabranch.plan.bind import Bound
from anabranch.state.checkpoint import read
from anabranch.state.groups import KeyGroups, Routing
from anabranch.state.partition import partition
from anabranch.state.restore import restore
from anabranch.units import Version

A = TypeVar("A")
I = TypeVar("I")  # noqa: E741
T = TypeVar("T")

HERE = ""
"""The host of everything where the driver runs the tasks itself."""
SHORT_SECONDS = 90.0
"""For what takes no time but that of waiting for a task to let go of its table."""
LONG_SECONDS = 3600.0
"""For what moves as many bytes as there are. An agent that is gone is noticed by its silence."""


class Tables:
    """One table per operator and instance, each on the host where the instance is placed.

    ``query`` is the id under which checkpoint files are stored, and ``epoch`` the number of this
    run of it. ``nodes`` gives the node of a host, ``peers`` the agents by host. ``holder`` says
    which host keeps the backups of an instance, or None if they all go to the same store.
    """

    def __init__(
        self,
        query: str,
        epoch: int,
        bounds: Iterable[Bound],
        nodes: Callable[[str], Node],
        placement: Mapping[str, Sequence[str]],
        holder: Callable[[str, int], str] | None = None,
        peers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._query = query
        self._epoch = Epoch(epoch)
        self._bounds = {bound.name: bound for bound in bounds}
        self._nodes = nodes
        self._holder = holder
        self._peers = peers
        self.placement = {name: tuple(hosts) for name, hosts in placement.items()}

    def placed(self, placement: Mapping[str, Sequence[str]]) -> Tables:
        """The same operators' tables, with instances on other hosts."""
        return Tables(
            self._query,
            self._epoch,
            self._bounds.values(),
            self._nodes,
            placement,
            self._holder,
            self._peers,
        )

    def folder(self, operator: str, routing: Routing) -> str:
        """Where a node has the tables of an operator, one folder each, named by instance.

        Tables divided in another way are in another folder, so they are never taken for these.
        """
        return f"{operator}@{routing.epoch}"

    def name(self, operator: str, routing: Routing, instance: int) -> TableName:
        """The name of a table on its node."""
        return TableName(f"{self.folder(operator, routing)}/{instance}")

    def usable(self, routing: Mapping[str, Routing], version: Version) -> bool:
        """Whether every table is there and is, or can be rolled back to, a committed version."""
        return all(
            self.unusable(name, routing[name], version, range(routing[name].instances)) == []
            for name in self._bounds
        )

    def unusable(
        self, operator: str, routing: Routing, version: Version, instances: Sequence[int]
    ) -> list[int]:
        """Those of the instances whose tables cannot be used at a version."""
        layout, placed = self._bounds[operator].layout, self.placement[operator]
        names = {instance: self.name(operator, routing, instance) for instance in instances}

        def usable(host: str) -> set[TableName]:
            here = {name: layout for i, name in names.items() if placed[i] == host}
            found = self._ask(host, Inspect(layouts=here), SHORT_SECONDS)
            return {name for name in here if version in found.get(name, ())}

        good = set[TableName]().union(*_each(usable, sorted({placed[i] for i in instances})))
        return [instance for instance, name in names.items() if name not in good]

    def capture(
        self,
        operator: str,
        routing: Routing,
        version: Version,
        fence: int,
        base: Version | None = None,
    ) -> dict[int, str]:
        """Write all rows of an operator's tables at a version to files where they are.

        With ``base``, the version of the last checkpoint, only the rows that changed since.
        ``fence`` is above that of the last batch.
        """
        layout = self._bounds[operator].layout

        def capture(instance: int) -> str:
            request = Capture(
                epoch=self._epoch,
                table=self.name(operator, routing, instance),
                layout=layout,
                operator=OperatorName(operator),
                instance=Instance(instance),
                groups=routing.owners[instance],
                version=version,
                base=base,
                fence=fence,
            )
            return self._ask_instance(operator, instance, request)

        instances = range(routing.instances)
        return dict(zip(instances, _each(capture, instances), strict=True))

    def capture_all(
        self, routing: Mapping[str, Routing], version: Version, fence: int
    ) -> dict[str, dict[int, str]]:
        """:meth:`capture` for every operator."""
        return {name: self.capture(name, of, version, fence) for name, of in routing.items()}

    def fetch(self, operator: str, files: Mapping[int, str]) -> list[pa.Buffer]:
        """The bytes of capture files, which are removed."""

        def fetch(instance: int) -> pa.Buffer:
            request = Fetch(file=CaptureFile(files[instance]))
            data = self._ask_instance(operator, instance, request)
            self.discard(operator, instance, files[instance])
            return data

        return _each(fetch, list(files))

    def store(self, operator: str, instance: int, file: str) -> Part:
        """Put a capture file into the backup store."""
        request = Store(
            epoch=self._epoch,
            peers=self._addresses(),
            file=CaptureFile(file),
            under=self._under(operator, instance),
        )
        return self._ask_instance(operator, instance, request)

    def store_all(self, operator: str, files: Mapping[int, str]) -> list[Part]:
        """Put the capture files of several instances into the backup store, at the same time."""
        return _each(lambda i: self.store(operator, i, files[i]), list(files))

    def discard(self, operator: str, instance: int, file: str) -> None:
        """Remove a capture file that is not to be stored."""
        request = Drop(epoch=self._epoch, captures=(CaptureFile(file),))
        self._ask(self.placement[operator][instance], request, SHORT_SECONDS)

    def merge(
        self, operator: str, instance: int, saved: OperatorManifest, stopped: threading.Event
    ) -> Part:
        """Merge the parts of an instance into one, where the instance is.

        Nobody wants it any more once ``stopped`` is set.
        """
        request = Merge(
            epoch=self._epoch,
            peers=self._addresses(),
            schema=saved.schema,
            parts=saved.parts,
            groups=KeyGroups(tuple(r for part in saved.parts for r in part.groups.ranges)),
            version=max(part.version for part in saved.parts),
            under=self._under(operator, instance),
        )
        node = self._nodes(self.placement[operator][instance])
        return node.ask(request, Deadline(LONG_SECONDS, stopped))

    def rescale(
        self, operator: str, before: Routing, after: Routing, version: Version, fence: int
    ) -> None:
        """Divide an operator's tables on this machine anew; the old ones stay for now."""
        bound, node = self._bounds[operator], self._nodes(HERE)
        assert isinstance(node, LocalNode), "tables are rescaled in place on one machine only"
        data = self.fetch(operator, self.capture(operator, before, version, fence))
        captures = [read(each, name=operator) for each in data]
        for instance, parts in partition(captures, dict(enumerate(after.owners))).items():
            restore(node.clear(self.name(operator, after, instance)), bound.layout, parts)

    def make(
        self,
        operator: str,
        routing: Routing,
        version: Version,
        parts: tuple[Part, ...] = (),
        instances: Sequence[int] | None = None,
    ) -> int:
        """Make an operator's tables, or some, from parts, or without any state: the bytes read."""
        layout, peers = self._bounds[operator].layout, self._addresses()

        def make(instance: int) -> int:
            request = Make(
                epoch=self._epoch,
                peers=peers,
                table=self.name(operator, routing, instance),
                layout=layout,
                version=version,
                groups=routing.owners[instance],
                parts=parts,
            )
            return self._ask_instance(operator, instance, request)

        return sum(_each(make, range(routing.instances) if instances is None else instances))

    def advance(
        self,
        operator: str,
        routing: Routing,
        parts: tuple[Part, ...],
        since: Version,
        upto: Version,
        fence: int,
    ) -> None:
        """Bring an operator's tables from a version to a later one, by the changes in between."""
        layout, peers = self._bounds[operator].layout, self._addresses()

        def advance(instance: int) -> None:
            request = Advance(
                epoch=self._epoch,
                peers=peers,
                table=self.name(operator, routing, instance),
                layout=layout,
                since=since,
                upto=upto,
                groups=routing.owners[instance],
                parts=parts,
                fence=fence,
            )
            self._ask_instance(operator, instance, request)

        _each(advance, range(routing.instances))

    def rename(
        self, operator: str, before: Routing, after: Routing, instances: Iterable[int]
    ) -> None:
        """Let instances that keep their groups keep their tables under another routing."""

        def rename(instance: int) -> None:
            table, to = (self.name(operator, of, instance) for of in (before, after))
            request = Rename(epoch=self._epoch, table=table, to=to)
            self._ask(self.placement[operator][instance], request, SHORT_SECONDS)

        _each(rename, list(instances))

    def drop(self, operator: str, routing: Routing, hosts: Collection[str]) -> None:
        """Remove the tables of an operator as it is, or was, divided from some hosts."""
        names = [self.name(operator, routing, instance) for instance in range(routing.instances)]
        _each(lambda host: self._drop(host, names), sorted(hosts))

    def drop_others(self, routing: Mapping[str, Routing], hosts: Iterable[str] = ()) -> None:
        """Remove tables that were divided in other ways, or are elsewhere now.

        For the start of a query, when nobody is making any.
        """
        wanted: dict[str, set[TableName]] = {host: set() for host in hosts}
        for name, of in routing.items():
            for instance in range(of.instances):
                host = self.placement[name][instance]
                wanted.setdefault(host, set()).add(self.name(name, of, instance))

        def drop(host: str) -> None:
            found = self._ask(host, Inspect(layouts={}), SHORT_SECONDS)
            self._drop(host, [table for table in found if table not in wanted[host]])

        _each(drop, list(wanted))

    def destroy(self) -> None:
        """Give the memory back."""
        self.drop_others({}, {host for placed in self.placement.values() for host in placed})

    def _drop(self, host: str, tables: Sequence[TableName]) -> None:
        if tables:
            request = Drop(epoch=self._epoch, tables=tuple(tables))
            self._ask(host, request, SHORT_SECONDS)

    def _ask_instance(self, operator: str, instance: int, request: Request[A]) -> A:
        return self._ask(self.placement[operator][instance], request, LONG_SECONDS)

    def _ask(self, host: str, request: Request[A], seconds: float) -> A:
        return self._nodes(host).ask(request, Deadline(seconds))

    def _addresses(self) -> dict[str, Address]:
        return {host: Address(address) for host, address in self._peers().items()}

    def _under(self, operator: str, instance: int) -> Prefix:
        own = f"{self._query}/"
        name = own if self._holder is None else peer_name(self._holder(operator, instance), own)
        return Prefix(name)


def _each(work: Callable[[I], T], over: Sequence[I]) -> list[T]:
    """Do something for all of these, at the same time."""
    if len(over) <= 1:
        return [work(item) for item in over]
    with ThreadPoolExecutor(len(over)) as pool:
        return list(pool.map(work, over))
