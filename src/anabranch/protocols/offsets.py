"""Spark's log of offsets: a checkpoint is published before the log forgets what follows on it.

A restart runs the batches after the newest published version again, so it needs their offsets. At
half of the log a checkpoint is urgent. At its end the stream is held until one is published, or the
query stops, as the user chose.
"""

from __future__ import annotations

from anabranch.protocols import pending
from anabranch.protocols.query import Query
from anabranch.protocols.turn import Turn
from anabranch.units import Version

ATTEMPTS = 3
"""The checkpoints that may fail while the stream waits for one, if the query is to stop then."""


def urgent(query: Query) -> bool:
    """Whether a checkpoint must not be postponed: half of Spark's offset log is used up."""
    return 2 * _behind(query) >= query.policies.retained_offsets


def exhausted(query: Query) -> bool:
    """Whether Spark's log would lose offsets that a restart needs, if another batch ran."""
    return _behind(query) >= query.policies.retained_offsets


def look(turn: Turn) -> None:
    """Hold the stream before Spark's log loses offsets, resume it, or stop the query."""
    query = turn.query
    published, committed, mine = _restartable(query), query.committed, pending.of(query)
    full = exhausted(query)
    if full != (mine.held_since is not None):
        turn.tell("stream held" if full else "stream goes on", published=published,
                  committed=committed)  # fmt: skip
        pending.change(turn, held_since=query.now if full else None, held_failures=0)
    elif full and mine.held_failures >= ATTEMPTS and not query.policies.hold:
        turn.stop(
            f"checkpoints fail; the newest one is of version {published}, and Spark's log of "
            f"offsets will not reach back to it after batch {committed}. Check the backup store, "
            "then start the query again"
        )


def _behind(query: Query) -> int:
    """The number of batches that a restart would run again."""
    if not query.policies.checkpointing.backs_up:
        return 0
    return query.committed - _restartable(query)


def _restartable(query: Query) -> Version:
    return query.published[-1].version if query.published else Version(query.oldest_offsets - 1)
