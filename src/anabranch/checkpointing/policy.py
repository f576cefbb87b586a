"""Checkpointing policies: when a checkpoint is taken, and whether it is full or incremental."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from anabranch.errors import PlanError
from anabranch.units import Duration, microseconds

Kind = Literal["full", "delta"]


@dataclass(frozen=True)
class Situation:
    """The input of a policy's decision, at the start of a batch."""

    now: int
    """Microseconds, of any clock that only goes forward."""
    last: int
    """When the last checkpoint was begun, or the query started, on the same clock."""
    batches: int
    """How many batches have been committed since the last checkpoint."""
    operator: str = ""
    """The operator to decide for."""
    changed: float = 1.0
    """The share of its rows that have changed since they were captured last, if that is known."""
    load: float = 0.0
    """The share of the time since the commit before for which its busiest instance used a core."""


class Checkpointing(Protocol):
    """When to take checkpoints. The coordinator may postpone one while another is in progress."""

    def decide(self, situation: Situation) -> Kind | None:
        """The kind of checkpoint to take with this batch, if any."""
        ...

    @property
    def tracks_changes(self) -> bool:
        """Whether tables must track the rows that changed since the last checkpoint."""
        ...

    @property
    def retain(self) -> int:
        """How many checkpoints to keep."""
        ...

    @property
    def backs_up(self) -> bool:
        """Whether state must survive the loss of its node. State without a backup is captured."""
        ...

    @property
    def tolerate(self) -> int:
        """How many checkpoints in a row may fail before the query stops."""
        ...

    @property
    def hold(self) -> bool:
        """Whether the stream waits for a checkpoint before Spark's offset log no longer reaches
        back to the newest one. If not, the query stops when a checkpoint fails then."""
        ...


@dataclass(frozen=True)
class Periodic:
    """A checkpoint every ``interval``: of all rows, or of those that changed since the last one.

    A restart runs the batches after the last checkpoint again, so keep the interval well below the
    time that a restart may take. ``at_most`` limits the number of these batches, so that Spark's
    own log still has their offsets. One checkpoint is stored at a time: one that is due meanwhile
    waits, and if it is due by the number of batches, an event (``checkpoint late``) tells of it.
    The newest ``retain`` checkpoints are kept and can be read as tables.

    A checkpoint that fails is tried again, and recorded as an event. After more than ``tolerate``
    failures in a row the query stops. The stream waits for a checkpoint before Spark's log no
    longer reaches back to the newest one; with ``hold=False`` the query stops if three
    checkpoints fail while it waits.

    >>> Periodic("5 seconds").tracks_changes
    True
    """

    interval: Duration = "5 seconds"
    incremental: bool = True
    at_most: int = 50
    retain: int = 3
    tolerate: int = 10
    hold: bool = True
    micros: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        micros = microseconds(self.interval, what="Periodic(interval)")
        if micros < 0 or self.at_most < 1 or self.retain < 1 or self.tolerate < 0:
            raise PlanError(
                f"{self!r}: interval and tolerate must not be negative, at_most and retain must be "
                "at least 1"
            )
        object.__setattr__(self, "micros", micros)

    def decide(self, situation: Situation) -> Kind | None:
        """A checkpoint once the interval is over or enough batches have gone by."""
        due = situation.now - situation.last >= self.micros or situation.batches >= self.at_most
        return ("delta" if self.incremental else "full") if due else None

    @property
    def tracks_changes(self) -> bool:
        """True for incremental checkpoints."""
        return self.incremental

    @property
    def backs_up(self) -> bool:
        """Always true."""
        return True


@dataclass(frozen=True)
class Never:
    """No checkpoints: state lasts as long as the machine's memory.

    Meant as a baseline. A query whose state is lost starts from the first batch again, if Spark's
    offset log still goes back that far. Otherwise it fails with an error that says so. On a
    cluster :class:`~anabranch.FromInput` computes lost state again from the newest input alone.
    """

    def decide(self, situation: Situation) -> Kind | None:
        """Never."""
        return None

    @property
    def tracks_changes(self) -> bool:
        """Always false."""
        return False

    @property
    def retain(self) -> int:
        """One: the newest checkpoint that a user commanded, or that an earlier run left."""
        return 1

    @property
    def backs_up(self) -> bool:
        """Always false."""
        return False

    @property
    def tolerate(self) -> int:
        """No limit: a checkpoint that a user commands may fail any number of times."""
        return 2**31

    @property
    def hold(self) -> bool:
        """Always false."""
        return False
