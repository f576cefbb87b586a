"""Every error that Anabranch raises on purpose.

::

    AnabranchError
    ├── PlanError (also ValueError)      the query cannot run as written; nothing was started
    ├── StateError                       a state table cannot be used
    │   ├── StateMissing                 not there, or not at the version that is needed
    │   ├── StateLocked                  another task holds it
    │   ├── StateFull                    no room for it in its folder
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
    │   │   └── Refused                  a node does not take such a request
    │   └── MayHaveHappened              the outcome is unknown; look before trying again
    ├── SinkFailed                       a sink cannot take results, such as for want of room
    ├── QueryFailed                      a running query ended with an error
    └── ClusterFailed                    a local cluster does not do what it was asked
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MISSING_TABLES = re.compile(r"\[missing tables: ([^\]]*)\]")
"""In a message, as nothing else of an error in a task comes through Spark."""


class AnabranchError(Exception):
    """The base of every error in this module."""


class PlanError(AnabranchError, ValueError):
    """The query cannot run as written. Raised before anything is started or changed."""


class StateError(AnabranchError):
    """A state table cannot be used."""


class StateMissing(StateError):
    """The table is not there, or not at the version that the batch needs."""

    @classmethod
    def of(cls, message: str, tables: Iterable[str]) -> StateMissing:
        """The error that names the tables of a node that are missing."""
        return cls(f"{message} [missing tables: {', '.join(tables)}]")

    @property
    def tables(self) -> tuple[str, ...]:
        """The missing tables, where the message names them, as that of a task does."""
        found = _MISSING_TABLES.search(str(self))
        return tuple(found[1].split(", ")) if found else ()


class StateLocked(StateError):
    """Another task holds the table."""


class StateFull(StateError):
    """The state folder has no room left."""


class SchemaChanged(StateError):
    """The state was written with other columns than the ones asked for."""


class Fenced(StateError):
    """A newer attempt has a table now, or another driver the query; this one must give up."""


class Deposed(Fenced):
    """Another driver has taken the query over; this one must not change anything any more."""


class Misplaced(StateError):
    """A task ran on another node than the one that has its state; it is worth another try."""


class Reshaped(StateError):
    """The partitions of an operator were merged or shifted before they were computed.

    A task then cannot know by its number which instance it runs. The batch is worth another try
    with the operator's results computed before they are handed on.
    """


class CutOff(StateError):
    """The rows that came to a task ended before their end mark; it is worth another try."""


class CheckpointError(AnabranchError):
    """A checkpoint cannot be used."""


class CheckpointCorrupt(CheckpointError):
    """The bytes of a checkpoint are not the ones that were written."""


class CheckpointNotFound(CheckpointError):
    """There is no checkpoint for that version."""


class StoreError(AnabranchError):
    """A backup store failed."""


class DidNotHappen(StoreError):
    """The operation changed nothing; it can be tried again."""


class Refused(DidNotHappen):
    """A node did not do what it was asked for: the request is not one that it takes."""


class MayHaveHappened(StoreError):
    """The outcome of the operation is unknown."""


class SinkFailed(AnabranchError):
    """A sink could not take the results of a batch, for example a disk without room."""


class QueryFailed(AnabranchError):
    """A running query ended with an error."""


class ClusterFailed(AnabranchError):
    """A process of a local cluster did not start, is gone, or does not do what it was asked."""
