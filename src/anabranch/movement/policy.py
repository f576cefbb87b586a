"""Movement policies: how an instance gets the state of key groups that are new to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from anabranch.errors import PlanError
from anabranch.units import Duration, microseconds


class Movement(Protocol):
    """How the new instances of lost or moving key groups get their state."""

    @property
    def parallelism(self) -> int:
        """How many instances take over the key groups of one lost instance."""
        ...

    @property
    def window(self) -> int | None:
        """State is computed from the rows of this much event time, in microseconds. None: state is
        restored from a checkpoint."""
        ...

    @property
    def from_source(self) -> bool:
        """Whether old rows are computed from the sources again instead of being kept."""
        ...


@dataclass(frozen=True)
class FromCheckpoint:
    """Restore from the newest checkpoint, and replay the batches since then.

    ``parallelism`` is how many instances take over the key groups of one lost instance. They
    recover in parallel, and the operator has more instances afterwards.
    """

    parallelism: int = 1

    def __post_init__(self) -> None:
        if self.parallelism < 1:
            raise PlanError(f"FromCheckpoint(parallelism={self.parallelism}): give 1 or more")

    @property
    def window(self) -> int | None:
        """None: state is restored from a checkpoint."""
        return None

    @property
    def from_source(self) -> bool:
        """False: the rows sent since the checkpoint are kept."""
        return False


@dataclass(frozen=True)
class FromInput:
    """Compute lost state again from the input of the last period of event time.

    Use it with ``checkpointing=Never()`` on a cluster, for operators whose state depends on no
    older rows, such as windows of that length. The rows are those that were sent to the lost
    instances (upstream backup). With ``source=True`` they are computed from the sources again,
    by all steps before the operator (source replay).
    """

    last: Duration
    source: bool = False

    def __post_init__(self) -> None:
        if microseconds(self.last, what="FromInput(last)") <= 0:
            raise PlanError(f"FromInput(last={self.last!r}): give a length of time")

    @property
    def parallelism(self) -> int:
        """One: a lost instance is recovered as one instance."""
        return 1

    @property
    def window(self) -> int | None:
        """The length of the period, in microseconds."""
        return microseconds(self.last)

    @property
    def from_source(self) -> bool:
        """Whether ``source=True`` was given."""
        return self.source
