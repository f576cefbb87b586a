"""Where checkpoints are kept: named, immutable-by-habit blocks of bytes.

A store is five methods. Anything more (checksums, names, chains, retention) is built on them, and
a wrapper over a store is a store.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

_NAME = re.compile(r"[A-Za-z0-9_%=+~-][A-Za-z0-9_%=+~.-]*(/[A-Za-z0-9_%=+~-][A-Za-z0-9_%=+~.-]*)*")


class BackupStore(Protocol):
    """Bytes under names.

    Names are one or more parts joined by ``/``; a part has letters, digits and ``_ % = + ~ - .``
    and does not start with a dot. Anything else is a ValueError. An operation that fails raises
    :class:`~anabranch.errors.DidNotHappen` or :class:`~anabranch.errors.MayHaveHappened`;
    reads only ever raise the former. Stores may be used from several threads and processes.
    """

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """Store bytes that outlive this process. A reader sees all of them or what was before."""

    def get(self, name: str) -> pa.Buffer:
        """The bytes under a name; :class:`~anabranch.errors.CheckpointNotFound` if none are."""

    def list(self, prefix: str = "") -> Sequence[str]:
        """The names that start with this text, sorted."""

    def delete(self, name: str) -> None:
        """Forget a name; nothing happens if there is none."""

    def size(self, name: str) -> int:
        """How many bytes are under a name; CheckpointNotFound if none are."""


def check_name(name: str) -> str:
    """The name, if a store takes it; otherwise ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be the name of a backup: use letters, digits and _%=+~-. in segments "
            "separated by '/'; no segment may start with a dot"
        )
    return name
