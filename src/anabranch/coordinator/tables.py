"""The state tables of a query on this machine: whether they can be used, and making them so."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from anabranch.errors import StateError
from anabranch.plan.bind import Bound
from anabranch.state.capture import Capture, capture
from anabranch.state.groups import Routing
from anabranch.state.partition import partition
from anabranch.state.restore import restore
from anabranch.state.table import StateTable
from anabranch.units import Version

_LOCK_SECONDS = 60.0


class Tables:
    """One table per operator and instance, below one folder."""

    def __init__(self, root: Path, bounds: Iterable[Bound]) -> None:
        self._root = root
        self._bounds = {bound.name: bound for bound in bounds}

    def folder(self, operator: str, routing: Routing) -> Path:
        """Where the tables of an operator are, one folder each, named by instance.

        Tables divided in another way are in another folder, so they are never taken for these.
        """
        return self._root / "tables" / f"{operator}@{routing.epoch}"

    def usable(self, routing: Mapping[str, Routing], version: Version) -> bool:
        """Whether every table is there and is, or can be rolled back to, a committed version."""
        return all(
            self._is_at(self.folder(name, routing[name]) / str(instance), bound, version)
            for name, bound in self._bounds.items()
            for instance in range(routing[name].instances)
        )

    def _is_at(self, folder: Path, bound: Bound, version: Version) -> bool:
        try:
            table = StateTable.open(folder, bound.layout)
        except StateError:
            return False
        try:
            with table.lock(_LOCK_SECONDS):
                if table.unfinished is not None or table.version == version + 1:
                    table.rollback()
                return table.version == version
        except StateError:
            return False
        finally:
            table.close()

    def capture(self, operator: str, routing: Routing) -> list[Capture]:
        """All rows of an operator's tables, as they are between two batches."""
        bound = self._bounds[operator]
        captures = []
        for instance, groups in enumerate(routing.owners):
            folder = self.folder(operator, routing) / str(instance)
            table = StateTable.open(folder, bound.layout)
            try:
                with table.lock(_LOCK_SECONDS):
                    captures.append(capture(table, operator, instance, groups=groups, base=None))
            finally:
                table.close()
        return captures

    def rescale(self, operator: str, before: Routing, after: Routing) -> None:
        """Divide an operator's tables anew; the old ones stay until :meth:`keep_only`."""
        parts = partition(self.capture(operator, before), dict(enumerate(after.owners)))
        self.restore(operator, after, parts)

    def restore(
        self, operator: str, routing: Routing, parts: Mapping[int, Sequence[Capture]]
    ) -> None:
        """Make an operator's tables from the captures of each instance."""
        bound = self._bounds[operator]
        fresh = self._root / "restoring"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        for instance in range(routing.instances):
            restore(fresh / str(instance), bound.layout, parts[instance])
        self._install(fresh, self.folder(operator, routing))

    def create(self, operator: str, routing: Routing) -> None:
        """Make an operator's tables without any state, as they are before the first batch."""
        fresh = self._root / "restoring"
        shutil.rmtree(fresh, ignore_errors=True)
        for instance in range(routing.instances):
            StateTable.create(fresh / str(instance), self._bounds[operator].layout).close()
        self._install(fresh, self.folder(operator, routing))

    def _install(self, fresh: Path, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh.rename(folder)

    def keep_only(self, routing: Mapping[str, Routing]) -> None:
        """Remove tables that were divided in other ways."""
        wanted = {self.folder(name, of) for name, of in routing.items()}
        for folder in (self._root / "tables").iterdir():
            if folder not in wanted:
                shutil.rmtree(folder)

    def destroy(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self._root / "tables", ignore_errors=True)
