"""The workbench of another node, used through its agent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyarrow as pa

from anabranch.backup.manifests import OperatorManifest, Part
from anabranch.nodes.actions import saved_to_json
from anabranch.nodes.client import NodeStore
from anabranch.state import layouts
from anabranch.state.groups import KeyGroups
from anabranch.state.table import TableLayout
from anabranch.units import Version


class RemoteBench:
    """See :class:`~anabranch.nodes.workbench.Bench`. ``peers`` gives all nodes' addresses."""

    def __init__(self, node: NodeStore, peers: Callable[[], Mapping[str, str]]) -> None:
        self._node = node
        self._peers = peers

    def usable(self, table: str, layout: TableLayout, version: Version) -> bool:
        """See :meth:`Bench.usable`."""
        return bool(self._call("usable", table=table, layout=layout, version=version)["usable"])

    def create(self, table: str, layout: TableLayout, version: Version) -> None:
        """See :meth:`Bench.create`."""
        self._call("create", table=table, layout=layout, version=version)

    def restore(
        self, table: str, layout: TableLayout, saved: OperatorManifest, groups: KeyGroups
    ) -> int:
        """See :meth:`Bench.restore`."""
        answer = self._call(
            "restore", table=table, layout=layout, saved=saved_to_json(saved), groups=str(groups)
        )
        return int(answer["bytes"])

    def advance(
        self,
        table: str,
        layout: TableLayout,
        changes: OperatorManifest,
        groups: KeyGroups,
        since: Version,
        fence: int,
    ) -> None:
        """See :meth:`Bench.advance`."""
        self._call(
            "advance",
            table=table,
            layout=layout,
            changes=saved_to_json(changes),
            groups=str(groups),
            since=since,
            fence=fence,
        )

    def capture(
        self,
        table: str,
        layout: TableLayout,
        operator: str,
        instance: int,
        groups: KeyGroups,
        version: Version,
        base: Version | None = None,
    ) -> str:
        """See :meth:`Bench.capture`."""
        answer = self._call(
            "capture",
            table=table,
            layout=layout,
            operator=operator,
            instance=instance,
            groups=str(groups),
            version=version,
            base=base,
        )
        return str(answer["file"])

    def fetch(self, file: str) -> pa.Buffer:
        """See :meth:`Bench.fetch`."""
        name = str(self._call("offer", file=file)["name"])
        data = self._node.get(name)
        self._node.delete(name)
        return data

    def store(self, file: str, under: str) -> Part:
        """See :meth:`Bench.store`."""
        return Part.from_json(self._call("store", file=file, under=under)["part"])

    def shorten(self, saved: OperatorManifest, under: str, stopped: threading.Event) -> Part:
        """See :meth:`Bench.shorten`."""
        answer = self._call("shorten", saved=saved_to_json(saved), under=under)
        return Part.from_json(answer["part"])

    def rename(self, table: str, to: str) -> None:
        """See :meth:`Bench.rename`."""
        self._call("rename", table=table, to=to)

    def keep_only(self, tables: Collection[str]) -> None:
        """See :meth:`Bench.keep_only`."""
        self._call("keep_only", tables=sorted(tables))

    def _call(self, op: str, **fields: Any) -> dict[str, Any]:
        layout = fields.get("layout")
        if layout is not None:
            fields["layout"] = layouts.to_json(layout)
        return self._node.call(op, **fields, peers=dict(self._peers()))
