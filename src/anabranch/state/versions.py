"""Beginning, finishing and rolling back a version of a table."""

from __future__ import annotations

from anabranch.errors import Fenced, Reshaped, StateFull, StateMissing
from anabranch.state import maintenance
from anabranch.state.header import NONE, Counters
from anabranch.state.maintenance import NO_UPKEEP, Upkeep
from anabranch.state.storage import Storage

NO_TASK = -1
"""The task attempt of what begins a version outside of a Spark task."""


def begin(
    storage: Storage, version: int, base: int, fence: int, attempt: int
) -> tuple[Counters, Upkeep]:
    """Start a version on top of another one, ``base``; returns the counters to work with.

    An unfinished version is rolled back first, and so is the last finished one, if that leads to
    ``base``.
    """
    header = storage.header
    counters = header.load()
    if (fence, attempt) < (counters.fence, counters.attempt):
        raise Fenced(
            f"the state table in {storage.folder} was taken over by "
            f"{_attempt(counters.fence, counters.attempt)}; {_attempt(fence, attempt)} at version "
            f"{version} must give up"
        )
    if attempt != NO_TASK and (fence, attempt) == (counters.fence, counters.attempt):
        _refuse_again(storage, counters, version)
    counters.fence, counters.attempt = fence, attempt
    header.flip(counters)
    counters = recover(storage)
    if counters.version != base and counters.previous == base:
        counters = roll_back(storage)
    if counters.version != base:
        raise StateMissing(
            f"version {version} needs the state of version {base}; the table in "
            f"{storage.folder} has {describe(counters)}"
        )
    forget(storage, counters)
    counters, upkeep = _maintain(storage, counters)
    counters.unfinished = version
    counters.tick += 1
    changed, counters.appended, counters.changed = counters.changed, 0, 0
    header.save_begun(counters)
    header.flip(counters)
    maintenance.give_back(storage, counters, changed)
    return counters, upkeep


def forget(storage: Storage, counters: Counters) -> None:
    """Drop the journal, so that the last finished version cannot be rolled back."""
    counters.previous = NONE
    storage.header.flip(counters)
    storage.journal.clear()


def finish(storage: Storage, counters: Counters) -> None:
    """Finish the version of these counters."""
    stored = storage.header.load()
    if _writer(stored) != _writer(counters):
        raise Fenced(
            f"the state table in {storage.folder} was taken over by "
            f"{_attempt(stored.fence, stored.attempt)} while "
            f"{_attempt(counters.fence, counters.attempt)} was at version {counters.unfinished}"
        )
    counters.previous = counters.version
    counters.version = counters.unfinished
    counters.unfinished = NONE
    storage.header.flip(counters)


def recover(storage: Storage) -> Counters:
    """Roll back the unfinished work of a process that died."""
    counters = storage.header.load()
    if counters.maintaining:
        return _undo_maintenance(storage)
    if counters.unfinished != NONE:
        return roll_back(storage)
    return counters


def roll_back(storage: Storage) -> Counters:
    """Roll back to the version before the journal. Repeatable if the process is killed."""
    header = storage.header
    now = header.load()
    if now.previous == NONE and now.unfinished == NONE:
        raise StateMissing(
            f"the state table in {storage.folder} has {describe(now)}, and no journal to roll back"
        )
    counters = header.begun()
    counters.fence, counters.attempt = now.fence, now.attempt
    header.flip(counters)
    storage.journal.restore()
    storage.settle(counters)
    counters.unfinished = NONE
    header.flip(counters)
    return counters


def describe(counters: Counters) -> str:
    """The versions of a table, for messages."""
    text = f"version {counters.version}"
    if counters.previous != NONE:
        text += f" and can go back to {counters.previous}"
    if counters.unfinished != NONE:
        text += f", with version {counters.unfinished} begun and not finished"
    return text


def _refuse_again(storage: Storage, counters: Counters, version: int) -> None:
    """Refuse a task that runs a version a second time, as it has the rows of two instances."""
    if version in (counters.version, counters.unfinished):
        raise Reshaped(
            f"one Spark task ran version {version} of the state table in {storage.folder} twice: "
            "the partitions of the operator were merged before they were computed, as by "
            "coalesce(). Use repartition() instead, or keep the operator's result with persist()"
        )


def _writer(counters: Counters) -> tuple[int, int, int]:
    return counters.fence, counters.attempt, counters.unfinished


def _attempt(fence: int, attempt: int) -> str:
    return f"attempt {fence}" + ("" if attempt == NO_TASK else f" (task {attempt})")


def _maintain(storage: Storage, counters: Counters) -> tuple[Counters, Upkeep]:
    maintenance.move_lists_down(storage, counters)
    if not maintenance.needed(storage, counters):
        return counters, NO_UPKEEP
    storage.undo.clear()
    counters.maintaining = 1
    storage.header.flip(counters)
    try:
        upkeep = maintenance.run(storage, counters)
    except StateFull:
        # There is no room to make room. Let the version itself find out whether it needs any.
        counters, upkeep = _undo_maintenance(storage), NO_UPKEEP
    counters.maintaining = 0
    return counters, upkeep


def _undo_maintenance(storage: Storage) -> Counters:
    counters = storage.header.load()
    storage.undo.apply()
    storage.settle(counters, from_states=True)
    counters.maintaining = 0
    storage.header.flip(counters)
    return counters
