"""Every error that Anabranch raises on purpose.

::

    AnabranchError
    ├── PlanError (also ValueError)      the query cannot run as written; nothing was started
    ├── StateError                       a state table cannot be used
    │   ├── StateMissing                 it does not exist, or is not at the version that is needed
    │   ├── StateLocked                  another task holds its lock
    │   ├── StateFull                    its folder has no room
    │   ├── SchemaChanged                it was written with other columns
    │   ├── Fenced                       a newer attempt has taken over
    │   │   └── Deposed                  another driver has taken the query over
    │   ├── Misplaced                    a task ran on another node than its state
    │   ├── Reshaped                     partitions were merged or shifted before they were computed
    │   └── CutOff                       the rows of a task ended before their end mark
    ├── CheckpointError                  a checkpoint cannot be used
    │   ├── CheckpointCorrupt            its bytes are not what was written
    │   └── CheckpointNotFound           there is none for that version
    ├── StoreError                       a backup store failed
    │   ├── DidNotHappen                 nothing was changed; it can be tried again
    │   │   └── Refused                  a node does not accept such a request
    │   └── MayHaveHappened              the outcome is unknown; look before trying again
    ├── SinkFailed                       a sink cannot be written, for example to a full disk
    ├── QueryFailed                      a running query ended with an error
    └── ClusterFailed                    a local cluster did not do what it was asked
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MISSING_TABLES = re.compile(r"\[missing tables: ([^\]]*)\]")
"""Stands in the message, because Spark passes on nothing else of an error in a task."""


class AnabranchError(Exception):
    """The base of every error in this module."""


class PlanError(AnabranchError, ValueError):
    """The query cannot run as written. Raised before anything is started or changed."""


class StateError(AnabranchError):
    """A state table cannot be used."""


class StateMissing(StateError):
    """The table does not exist, or is not at the version that the batch needs."""

    @classmethod
    def of(cls, message: str, tables: Iterable[str]) -> StateMissing:
        """The error that names the tables of a node that are missing."""
        return cls(f"{message} [missing tables: {', '.join(tables)}]")

    @property
    def tables(self) -> tuple[str, ...]:
        """The missing tables, if the message names them, as the message of a task does."""
        found = _MISSING_TABLES.search(str(self))
        return tuple(found[1].split(", ")) if found else ()


class StateLocked(StateError):
    """Another task holds the lock of the table."""


class StateFull(StateError):
    """The state folder has no room left."""


class SchemaChanged(StateError):
    """The state was written with other columns than the ones asked for."""


class Fenced(StateError):
    """A newer attempt has taken a table over, or a newer driver the query; this one must stop."""


class Deposed(Fenced):
    """Another driver has taken the query over; this one must not change anything."""


class Misplaced(StateError):
    """A task ran on another node than the one that has its state. Another attempt may succeed."""


class Reshaped(StateError):
    """The partitions of an operator were merged or shifted before they were computed.

    The partition number of a task then no longer tells which instance it runs. Another attempt may
    succeed if the operator's results are computed before anything reads them.
    """


class CutOff(StateError):
    """The input of a task ended without its end-of-stream mark. Another attempt may succeed."""


class CheckpointError(AnabranchError):
    """A checkpoint cannot be used."""

    def __init__(self, message: str = "", *, part: str | None = None) -> None:
        super().__init__(message)
        self.part = part
        """The name of the part that none of its holders has in a readable form, if known."""


class CheckpointCorrupt(CheckpointError):
    """The bytes of a checkpoint are not the ones that were written."""


class CheckpointNotFound(CheckpointError):
    """There is no checkpoint for that version."""


class StoreError(AnabranchError):
    """A backup store failed."""

    def __init__(
        self,
        message: str = "",
        *,
        host: str | None = None,
        part: str | None = None,
        without: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.host = host
        """The node that did not answer, if that is the cause."""
        self.part = part
        """The name of the part that was requested, if some of its holders do not have it."""
        self.without = tuple(without)
        """The holders that answered and do not have the part in a readable form."""


class DidNotHappen(StoreError):
    """The operation changed nothing; it can be tried again."""


class Refused(DidNotHappen):
    """A node refused a request and changed nothing."""


class MayHaveHappened(StoreError):
    """The outcome of the operation is unknown."""


class SinkFailed(AnabranchError):
    """A sink could not write the results of a batch, for example because a disk is full."""


class QueryFailed(AnabranchError):
    """A running query ended with an error."""


class ClusterFailed(AnabranchError):
    """A process of a local cluster did not start, has ended, or did not do what it was asked."""
