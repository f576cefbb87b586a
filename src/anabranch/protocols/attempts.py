"""Attempts: how long it is until what failed is begun again, and how often it is.

What fails as a node is lost or a store does not answer is begun again for as long as it takes. Any
other error may come back for ever, such as a disk that is full: there may be room again in a while,
but after some attempts the query stops with this error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anabranch.errors import QueryFailed, Refused, StoreError
from anabranch.protocols.events import Failed
from anabranch.protocols.orders import SECOND
from anabranch.protocols.turn import Turn

_FIRST_PAUSE, _LONGEST_PAUSE = SECOND // 2, 15 * SECOND
ATTEMPTS = 12
"""With the pauses between them these take about two minutes."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts that have failed in a row."""

    pauses: int = 0
    """Since a node was lost: whatever failed before may succeed without it."""
    errors: int = 0
    """Those that have failed with an error which may come back for ever."""
    error: Failed | None = None
    """The last one of these."""

    def after(self, failed: Failed | None) -> Attempts:
        """One more has failed, or has ended as a node was lost."""
        if failed is None:
            return replace(self, pauses=0)
        errors = self.errors + may_come_back_for_ever(failed)
        last = failed if errors > self.errors else self.error
        return Attempts(self.pauses + 1, errors, last)

    @property
    def pause(self) -> int:
        """How long to wait before the next one."""
        return min(_LONGEST_PAUSE, _FIRST_PAUSE << min(max(self.pauses - 1, 0), 10))

    @property
    def over(self) -> Failed | None:
        """The error with which the query stops, if there is to be no further attempt."""
        last = self.error
        return last if last is not None and (last.final or self.errors >= ATTEMPTS) else None

    def stop_if_over(self, turn: Turn, what: str) -> None:
        """Stop the query with the error, if there is to be no further attempt."""
        last = self.over
        if last is not None:
            tried = "attempt" if self.errors == 1 else "attempts"
            reason = f"{what} failed in {self.errors} {tried}: {last.reason}"
            turn.stop(reason, last.kind or QueryFailed)


NONE_YET = Attempts()


def may_come_back_for_ever(failed: Failed) -> bool:
    """Whether nothing that the query waits for, or does next, mends an error."""
    kind = failed.kind
    silent = kind is not None and issubclass(kind, StoreError) and not issubclass(kind, Refused)
    helped = failed.unreachable is not None or failed.damaged is not None
    return kind is not None and not silent and not helped
