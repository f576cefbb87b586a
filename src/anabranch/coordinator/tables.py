"""The state tables of a query, wherever they are: whether they can be used, and making them so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from anabranch.backup.manifests import OperatorManifest, Part
from anabranch.backup.peers import peer_name
from anabranch.nodes.workbench import Bench, Workbench
from anabranch.plan.bind import Bound
from anabranch.state.groups import Routing
from anabranch.state.partition import partition
from anabranch.state.restore import restore
from anabranch.units import NO_VERSION, Version

T = TypeVar("T")

HERE = ""
"""The host of everything where the driver runs the tasks itself."""


class Tables:
    """One table per operator and instance, each on the host where the instance is placed.

    ``query`` is the id under which checkpoint files are stored. ``benches`` gives the workbench of
    a host. ``holder`` says which host keeps the backups of an instance, or None if they all go to
    the same store.
    """

    def __init__(
        self,
        query: str,
        bounds: Iterable[Bound],
        benches: Callable[[str], Bench],
        placement: Mapping[str, Sequence[str]],
        holder: Callable[[str, int], str] | None = None,
    ) -> None:
        self._query = query
        self._bounds = {bound.name: bound for bound in bounds}
        self._benches = benches
        self._holder = holder
        self.placement = {name: tuple(hosts) for name, hosts in placement.items()}

    def placed(self, placement: Mapping[str, Sequence[str]]) -> Tables:
        """The same operators' tables, with instances on other hosts."""
        return Tables(self._query, self._bounds.values(), self._benches, placement, self._holder)

    def folder(self, operator: str, routing: Routing) -> str:
        """Where a node has the tables of an operator, one folder each, named by instance.

        Tables divided in another way are in another folder, so they are never taken for these.
        """
        return f"{operator}@{routing.epoch}"

    def name(self, operator: str, routing: Routing, instance: int) -> str:
        """The name of a table on its node."""
        return f"{self.folder(operator, routing)}/{instance}"

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
        layout = self._bounds[operator].layout

        def fits(instance: int) -> bool:
            table = self.name(operator, routing, instance)
            return self._bench(operator, instance).usable(table, layout, version)

        return [i for i, good in zip(instances, _each(fits, instances), strict=True) if not good]

    def capture(
        self, operator: str, routing: Routing, version: Version, base: Version | None = None
    ) -> dict[int, str]:
        """Write all rows of an operator's tables at a version to files where they are.

        With ``base``, the version of the last checkpoint, only the rows that changed since.
        """
        layout = self._bounds[operator].layout

        def taken(instance: int) -> str:
            return self._bench(operator, instance).capture(
                self.name(operator, routing, instance),
                layout,
                operator,
                instance,
                routing.owners[instance],
                version,
                base,
            )

        instances = list(range(routing.instances))
        return dict(zip(instances, _each(taken, instances), strict=True))

    def capture_all(
        self, routing: Mapping[str, Routing], version: Version
    ) -> dict[str, dict[int, str]]:
        """:meth:`capture` for every operator."""
        return {name: self.capture(name, of, version) for name, of in routing.items()}

    def fetch(self, operator: str, files: Mapping[int, str]) -> list[pa.Buffer]:
        """The bytes of capture files, which are removed."""
        return _each(lambda i: self._bench(operator, i).fetch(files[i]), list(files))

    def store(self, operator: str, instance: int, file: str) -> Part:
        """Put a capture file into the backup store."""
        return self._bench(operator, instance).store(file, self._under(operator, instance))

    def store_all(self, operator: str, files: Mapping[int, str]) -> list[Part]:
        """Put the capture files of several instances into the backup store, at the same time."""
        return _each(lambda i: self.store(operator, i, files[i]), list(files))

    def shorten(
        self, operator: str, instance: int, saved: OperatorManifest, stopped: threading.Event
    ) -> Part:
        """Merge a chain of stored files of an instance into one, where the instance is."""
        under = self._under(operator, instance)
        return self._bench(operator, instance).shorten(saved, under, stopped)

    def rescale(self, operator: str, before: Routing, after: Routing, version: Version) -> None:
        """Divide an operator's tables on this machine anew; the old ones stay for now."""
        bound, bench = self._bounds[operator], self._bench(operator, 0)
        assert isinstance(bench, Workbench), "tables are rescaled in place on one machine only"
        files = self.capture(operator, before, version)
        captures = [bench.read(file) for file in files.values()]
        for instance, parts in partition(captures, dict(enumerate(after.owners))).items():
            path = bench.cleared(self.name(operator, after, instance))
            restore(path, bound.layout, parts)
        for file in files.values():
            Path(file).unlink()

    def restore(
        self,
        operator: str,
        routing: Routing,
        saved: OperatorManifest,
        instances: Sequence[int] | None = None,
    ) -> int:
        """Make an operator's tables, or some, from a checkpoint; returns the bytes read."""
        layout = self._bounds[operator].layout
        chosen = list(range(routing.instances)) if instances is None else list(instances)

        def made(instance: int) -> int:
            table, groups = self.name(operator, routing, instance), routing.owners[instance]
            return self._bench(operator, instance).restore(table, layout, saved, groups)

        return sum(_each(made, chosen))

    def advance(
        self,
        operator: str,
        routing: Routing,
        changes: OperatorManifest,
        since: Version,
        fence: int,
    ) -> None:
        """Bring an operator's tables from a version to a later one, by the changes in between."""
        layout = self._bounds[operator].layout

        def advanced(instance: int) -> None:
            table, groups = self.name(operator, routing, instance), routing.owners[instance]
            bench = self._bench(operator, instance)
            bench.advance(table, layout, changes, groups, since, fence)

        _each(advanced, list(range(routing.instances)))

    def create(
        self,
        operator: str,
        routing: Routing,
        instances: Sequence[int] | None = None,
        version: Version = NO_VERSION,
    ) -> None:
        """Make an operator's tables, or some, without any state, as if after a version."""
        layout = self._bounds[operator].layout
        chosen = list(range(routing.instances)) if instances is None else list(instances)

        def made(instance: int) -> None:
            table = self.name(operator, routing, instance)
            self._bench(operator, instance).create(table, layout, version)

        _each(made, chosen)

    def rename(
        self, operator: str, before: Routing, after: Routing, instances: Iterable[int]
    ) -> None:
        """Let instances that keep their groups keep their tables under another routing."""
        _each(
            lambda i: self._bench(operator, i).rename(
                self.name(operator, before, i), self.name(operator, after, i)
            ),
            list(instances),
        )

    def keep_only(self, routing: Mapping[str, Routing], hosts: Iterable[str] = ()) -> None:
        """Remove tables that were divided in other ways, or are elsewhere now."""
        wanted: dict[str, list[str]] = {host: [] for host in hosts}
        for name, of in routing.items():
            for instance in range(of.instances):
                host = self.placement[name][instance]
                wanted.setdefault(host, []).append(self.name(name, of, instance))
        _each(lambda host: self._benches(host).keep_only(wanted[host]), list(wanted))

    def destroy(self, hosts: Iterable[str] = ()) -> None:
        """Give the memory back."""
        everywhere = {host for placed in self.placement.values() for host in placed}
        _each(lambda host: self._benches(host).keep_only(()), sorted(everywhere | set(hosts)))

    def _bench(self, operator: str, instance: int) -> Bench:
        return self._benches(self.placement[operator][instance])

    def _under(self, operator: str, instance: int) -> str:
        own = f"{self._query}/"
        return own if self._holder is None else peer_name(self._holder(operator, instance), own)


def _each(work: Callable[[int], T] | Callable[[str], T], over: Sequence[object]) -> list[T]:
    """Do something for all of these, at the same time."""
    if len(over) <= 1:
        return [work(item) for item in over]  # type: ignore[arg-type]
    with ThreadPoolExecutor(len(over)) as pool:
        return list(pool.map(work, over))
