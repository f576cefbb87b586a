"""The ways in which instances come to the state of groups that they did not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from anabranch.errors import PlanError
from anabranch.units import Duration, microseconds


class Movement(Protocol):
    """How state that is lost, or is needed elsewhere, comes to its new instances."""

    @property
    def parallelism(self) -> int:
        """How many instances share what one lost instance had."""
        ...

    @property
    def window(self) -> int | None:
        """State comes from the rows of so much event time alone, in microseconds; None: from a
        checkpoint."""
        ...

    @property
    def from_source(self) -> bool:
        """Whether old rows are computed from the sources again, instead of being kept."""
        ...


@dataclass(frozen=True)
class FromCheckpoint:
    """Restore from the newest checkpoint, and run again what was sent since.

    ``parallelism`` is how many instances share what one lost instance had: recovery is then as
    many times shorter, and the operator has more instances afterwards.
    """

    parallelism: int = 1

    def __post_init__(self) -> None:
        if self.parallelism < 1:
            raise PlanError(f"FromCheckpoint(parallelism={self.parallelism}): give 1 or more")

    @property
    def window(self) -> int | None:
        """There are checkpoints."""
        return None

    @property
    def from_source(self) -> bool:
        """What was sent since the checkpoint is kept."""
        return False


@dataclass(frozen=True)
class FromInput:
    """Compute lost state again from the rows of the last so much event time.

    For operators whose state depends on no older rows, such as those over windows of that length,
    with ``checkpointing=Never()`` on a cluster. The rows are the ones that were sent to the lost
    instances then (upstream backup). With ``source=True`` they are computed from the sources again,
    through everything that is before the operator (source replay).
    """

    last: Duration
    source: bool = False

    def __post_init__(self) -> None:
        if microseconds(self.last, what="FromInput(last)") <= 0:
            raise PlanError(f"FromInput(last={self.last!r}): give a length of time")

    @property
    def parallelism(self) -> int:
        """A lost instance comes back as one."""
        return 1

    @property
    def window(self) -> int | None:
        """The rows of so much event time are enough, in microseconds."""
        return microseconds(self.last)

    @property
    def from_source(self) -> bool:
        """As the user has said."""
        return self.source
