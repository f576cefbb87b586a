"""The ways in which instances come to the state of groups that they did not have."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.errors import PlanError


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
