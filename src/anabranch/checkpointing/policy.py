"""The checkpointing axis: a policy says when, and whether full or only what changed."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from anabranch.errors import PlanError
from anabranch.units import Duration, microseconds

Kind = Literal["full", "delta"]


@dataclass(frozen=True)
class Situation:
    """What a policy may decide on, at the start of a batch."""

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
    """When to checkpoint. A policy suggests; the coordinator may put it off while busy."""

    def decide(self, situation: Situation) -> Kind | None:
        """The checkpoint to take with this batch, if any."""
        ...

    @property
    def tracks_changes(self) -> bool:
        """Whether tables must remember what changed since the last checkpoint."""
        ...

    @property
    def retain(self) -> int:
        """How many checkpoints to keep."""
        ...

    @property
    def backs_up(self) -> bool:
        """Whether state is to outlive its node: what lost its backup is checkpointed again."""
        ...

    @property
    def tolerate(self) -> int:
        """How many checkpoints in a row may fail before the query stops."""
        ...

    @property
    def hold(self) -> bool:
        """Whether the stream waits for a checkpoint when Spark's log of offsets would soon not
        reach back to the newest one. If not, the query stops when a checkpoint fails then."""
        ...


@dataclass(frozen=True)
class Periodic:
    """A checkpoint every ``interval``: of everything, or of what changed since the last one.

    Keep the interval well below the time you can wait for a restart: what came after the last
    checkpoint is computed again. ``at_most`` bounds that in batches too, so that everything to be
    computed again is still in Spark's own log of offsets. The newest ``retain`` checkpoints are
    kept and can be read as tables.

    A checkpoint that fails is tried again, and an event tells of it. After more than ``tolerate``
    failures in a row the query stops. Should checkpoints fail or take so long that Spark's log
    would no longer reach back to the newest one, the stream waits for the next one; with
    ``hold=False`` the query stops instead.

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
        """Only incremental checkpoints need it."""
        return self.incremental

    @property
    def backs_up(self) -> bool:
        """That is what it is for."""
        return True


@dataclass(frozen=True)
class Never:
    """No checkpoints: state lives as long as the machine's memory.

    Meant as a baseline. A query whose state is lost starts from the first batch again, if Spark's
    log of offsets still goes back that far, and fails with a clear error if not. On a cluster
    :class:`~anabranch.FromInput` computes lost state again from the newest input alone.
    """

    def decide(self, situation: Situation) -> Kind | None:
        """Never."""
        return None

    @property
    def tracks_changes(self) -> bool:
        """Nothing would ever ask."""
        return False

    @property
    def retain(self) -> int:
        """What an earlier run with another policy left is kept."""
        return 1

    @property
    def backs_up(self) -> bool:
        """There are no backups."""
        return False

    @property
    def tolerate(self) -> int:
        """What a user asks for by hand may fail as often as it likes."""
        return 2**31

    @property
    def hold(self) -> bool:
        """There is nothing to wait for."""
        return False
