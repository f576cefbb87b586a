"""The protocol of backup stores: blocks of bytes under names, which normally never change.

A store has five methods, and two of them for many names at once. Checksums, names, chains and
retention are built on them. A wrapper of a store is a store.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import pyarrow as pa

T = TypeVar("T")

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

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """Store bytes under several names, with fewer requests and flushes than one by one.

        Each name is as after :meth:`put`. With DidNotHappen none of them has changed; with
        MayHaveHappened some may have.
        """

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """The bytes under a name, or a range of them; fewer if they end before.

        :class:`~anabranch.errors.CheckpointNotFound` if there are none.
        """

    def list(self, prefix: str = "") -> Sequence[str]:
        """The names that start with a prefix, sorted."""

    def delete(self, name: str) -> None:
        """Delete a name. Nothing happens if it does not exist."""

    def delete_all(self, names: Collection[str]) -> None:
        """Delete several names, with fewer requests than one by one.

        A name that cannot be deleted does not keep the others. With an error any may be left.
        """

    def size(self, name: str) -> int:
        """The number of bytes under a name. CheckpointNotFound if there are none."""


def batched(items: Iterable[T], most: int) -> Iterator[tuple[T, ...]]:
    """The items, so many at a time.

    >>> list(batched("abcde", 2))
    [('a', 'b'), ('c', 'd'), ('e',)]
    """
    rest = iter(items)
    while some := tuple(islice(rest, most)):
        yield some


def check_name(name: str) -> str:
    """The name, if it is a valid name in a store. Otherwise ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be the name of a backup: use letters, digits and _%=+~-. in segments "
            "separated by '/'; no segment may start with a dot"
        )
    return name
