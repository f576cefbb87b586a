"""Addresses of stores, which can be sent to agents, other processes and the next driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.errors import DidNotHappen
from anabranch.named import named
from anabranch.stores.store import BackupStore

_FILES = "anabranch.stores.files:open_files"

NodeStores = Callable[[], Mapping[str, BackupStore]]
"""What the nodes that are alive keep of a query's parts, by host."""


@dataclass(frozen=True)
class StoreAddress:
    """The function that opens a store, and its arguments.

    >>> StoreAddress.of_files("/backups/words").to_json()
    '/backups/words'
    """

    opener: str
    """As ``module:function``; every process of the query must be able to import it."""
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Whatever JSON has. It is not shown, as there may be a password in it."""
    at_nodes: bool = False
    """Whether the nodes of the query keep the bytes. The function is then given the stores of the
    nodes as its first argument, as :data:`NodeStores`."""

    @classmethod
    def of_files(cls, uri: str) -> StoreAddress:
        """The address of files in a folder, or at a URI."""
        return cls(_FILES, {"uri": uri})

    @classmethod
    def from_json(cls, value: Any) -> StoreAddress:
        """Read :meth:`to_json`."""
        if isinstance(value, str):
            return cls.of_files(value)
        at_nodes = bool(value.get("at_nodes", False))
        return cls(str(value["opener"]), dict(value["arguments"]), at_nodes)

    def to_json(self) -> Any:
        """JSON for another process or the checkpoint folder. A store of files is its URI."""
        if self.opener == _FILES:
            return self.arguments["uri"]
        value = {"opener": self.opener, "arguments": dict(self.arguments)}
        return {**value, "at_nodes": True} if self.at_nodes else value

    def open(self, nodes: NodeStores | None = None) -> BackupStore:
        """The store, ready to use in this process.

        ``nodes`` are needed where the parts are at the nodes, as they are while the query runs.
        """
        opener = named("opener", self.opener)
        if self.at_nodes and nodes is None:
            raise DidNotHappen(
                f"the parts are at the nodes of a query ({self.opener}): they can be read only "
                "while it runs, through the query"
            )
        store: BackupStore = opener(*((nodes,) if self.at_nodes else ()), **self.arguments)
        return store
