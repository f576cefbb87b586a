"""The protocol of backup stores: blocks of bytes under names, which normally never change.

A store has five methods. Checksums, names, chains and retention are built on them. A wrapper of a
store is a store.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

_NAME = re.compile(r"[A-Za-z0-9_%=+~-][A-Za-z0-9_%=+~.-]*(/[A-Za-z0-9_%=+~-][A-Za-z0-9_%=+~.-]*)*")


class BackupStore(Protocol):
    """Bytes under names.

    Names are one or more segments separated by ``/``. A segment has letters, digits and
    ``_ % = + ~ - .`` and does not start with a dot. Anything else is a ValueError. An operation
    that fails raises :class:`~anabranch.errors.DidNotHappen` or
    :class:`~anabranch.errors.MayHaveHappened`; reads raise only the former. Stores may be used from
    several threads and processes.
    """

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """Store bytes durably. A reader sees all of them, or the bytes that were there before."""

    def get(self, name: str) -> pa.Buffer:
        """The bytes under a name; :class:`~anabranch.errors.CheckpointNotFound` if none are."""

    def list(self, prefix: str = "") -> Sequence[str]:
        """The names that start with a prefix, sorted."""

    def delete(self, name: str) -> None:
        """Delete a name. Nothing happens if it does not exist."""

    def size(self, name: str) -> int:
        """The number of bytes under a name. CheckpointNotFound if there are none."""


def check_name(name: str) -> str:
    """The name, if it is a valid name in a store. Otherwise ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be the name of a backup: use letters, digits and _%=+~-. in segments "
            "separated by '/'; no segment may start with a dot"
        )
    return name
