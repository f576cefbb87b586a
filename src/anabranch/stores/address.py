"""Addresses of stores, which can be sent to agents, other processes and the next driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.named import named
from anabranch.stores.store import BackupStore

_FILES = "anabranch.stores.files:open_files"


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

    @classmethod
    def of_files(cls, uri: str) -> StoreAddress:
        """The address of files in a folder, or at a URI."""
        return cls(_FILES, {"uri": uri})

    @classmethod
    def from_json(cls, value: Any) -> StoreAddress:
        """Read :meth:`to_json`."""
        if isinstance(value, str):
            return cls.of_files(value)
        return cls(str(value["opener"]), dict(value["arguments"]))

    def to_json(self) -> Any:
        """JSON for another process or the checkpoint folder. A store of files is its URI."""
        if self.opener == _FILES:
            return self.arguments["uri"]
        return {"opener": self.opener, "arguments": dict(self.arguments)}

    def open(self) -> BackupStore:
        """Open the store in this process."""
        store: BackupStore = named("opener", self.opener)(**self.arguments)
        return store
