"""Pending checkpoints: those that are wanted, and the one in progress.

One is wanted because the policy of an operator says so, because a command asks for it, or because
state is not protected. What is wanted is captured with the next batch. One is in progress at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from anabranch.protocols.model import Change
from anabranch.protocols.orders import SECOND, CommandId, Wake
from anabranch.protocols.query import Query
from anabranch.protocols.turn import Turn
from anabranch.units import Version

PATIENCE = 5 * SECOND
"""How long a wanted checkpoint waits for a batch."""
SHORT = SECOND // 5
"""The same where a user waits for the checkpoint, and Spark has no batch to run."""


@dataclass(frozen=True, slots=True)
class Current:
    """A checkpoint in progress."""

    version: Version
    commands: tuple[CommandId, ...] = ()
    since: int = 0
    operators: frozenset[str] = frozenset()
    at_rest: bool = False
    """Whether captures are being taken between two batches; the stream waits for them."""
    failure: str | None = None
    publishing: bool = False
    bytes: int = 0
    """Of the parts that are stored."""
    late: bool = False
    """Whether the next one is due by the number of batches, and waits for this one."""

    @property
    def change(self) -> Change:
        """The present step, the reason, and the start."""
        what = ", ".join(sorted(self.operators))
        why = "a command" if self.commands else f"due with batch {self.version}"
        step = "storing what was captured"
        if self.at_rest:
            step = "capturing between two batches"
        elif self.publishing:
            step = f"publishing version {self.version}"
        return Change("checkpoint", what, why, step, self.since)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Which checkpoints are due, and the one in progress."""

    last: Mapping[str, int] = field(default_factory=dict)
    """When the policy's last checkpoint of each operator was begun."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """Batches committed since."""
    changed: Mapping[str, float] = field(default_factory=dict)
    """The share of each operator's rows that have changed, as the last batch reported it."""
    loads: Mapping[str, float] = field(default_factory=dict)
    """How much of a core each operator's busiest instance used, as the last batch reported it."""
    wanted: frozenset[str] = frozenset()
    """Operators to capture with the next batch, whatever the policy says."""
    wanted_since: int = 0
    commands: tuple[CommandId, ...] = ()
    """Commands that wait for a checkpoint of all operators."""
    tries: Mapping[CommandId, int] = field(default_factory=dict)
    """How many checkpoints have failed for each command."""
    ordered: frozenset[str] = frozenset()
    """Operators that the batch which runs was told to capture because they are due."""
    failures: int = 0
    """Checkpoints that failed in a row."""
    not_before: int = 0
    """After one that failed there is a pause."""
    current: Current | None = None
    held_since: int | None = None
    """Since when the stream waits because a restart would not find its offsets otherwise."""
    held_failures: int = 0
    """Checkpoints that were begun since then, and failed."""

    def holding(self, newest: Version) -> Change | None:
        """That the stream is held for a checkpoint, if it is."""
        if self.held_since is None:
            return None
        why = f"Spark's log of offsets would soon not reach back to checkpoint {newest}"
        return Change(
            "hold", "stream", why, "waiting until a checkpoint is published", self.held_since
        )

    @property
    def open(self) -> tuple[CommandId, ...]:
        """The commands that have not ended."""
        return self.commands if self.current is None else (*self.current.commands, *self.commands)


def want(turn: Turn, *operators: str, command: CommandId | None = None) -> None:
    """Capture operators with the next batch, or between two batches if none comes for a while."""
    mine = of(turn.query)
    since = mine.wanted_since if mine.wanted else turn.query.now
    commands = mine.commands if command is None else (*mine.commands, command)
    change(turn, wanted=mine.wanted | set(operators), wanted_since=since, commands=commands)
    turn.send(Wake(since + PATIENCE))
    if command is not None:
        turn.send(Wake(since + SHORT))


def of(query: Query) -> Checkpoints:
    """The checkpoints of a query."""
    return query.checkpoints or Checkpoints()


def change(turn: Turn, **fields: object) -> None:
    """Change what is pending."""
    turn.change(checkpoints=replace(of(turn.query), **fields))  # type: ignore[arg-type]
