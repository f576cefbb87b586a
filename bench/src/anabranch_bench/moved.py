"""The bytes and memory of a move: ``anabranch bench scaling --only moved``.

An operator with all keys in its state grows from 8 to 9 instances while its query runs. Bytes that
are stored and read for it, and the memory that it takes, are set against those of the groups that
move: their share of a full checkpoint, and of the state before the move.
"""

from __future__ import annotations

from statistics import median

from anabranch.state.groups import Routing
from anabranch_bench.faults import Act, Outcome, Scenario, Scheme, run
from anabranch_bench.harness import Bar, Result

_INSTANCES = 8
_KEY_GROUPS = 128
_ROOM = 1.3
"""So many times the bytes of the groups that move may be stored, read, and taken as memory."""
_INCREMENTAL = 0.1
"""A checkpoint with less than this share of the bytes of a full one is an incremental one."""
_CALM = 20.0


def scenario(*, quick: bool, seed: int) -> Scenario:
    """Few rows come while the operator grows: what was there before is what moves."""
    return Scenario(
        Scheme.CHECKPOINT,
        rate=1_000,
        keys=1_000_000 if quick else 10_000_000,
        fill=True,
        window=None,
        instances=_INSTANCES,
        grow_to=_INSTANCES + 1,
        nodes=3,
        warm=60.0,
        after=20.0,
        act=Act.SCALE,
        seed=seed,
    )


def measure(result: Result) -> None:
    """Run it, and keep the figures with their bars."""
    wanted = scenario(quick=result.quick, seed=result.seed)
    note(result, wanted, run(wanted))


def note(result: Result, scenario: Scenario, outcome: Outcome) -> None:
    """Set what a move took against the groups that it moved."""
    share = moved_share(scenario.instances, scenario.grow_to)
    moves = [event for event in outcome.events if event["kind"] == "scale"]
    checkpoints = [event for event in outcome.events if event["kind"] == "checkpoint"]
    stored = {event["version"]: event["bytes"] for event in checkpoints}
    full = max(stored.values())
    after = _first_after(outcome, stored)
    groups = share * full
    before = [size for at, size in outcome.memory if 0 < outcome.happened - at < _CALM]
    during = [size for at, size in outcome.memory if outcome.happened <= at <= outcome.over]
    grown = max(during) - median(before)
    case = f"{scenario.keys:,} keys, {scenario.instances} to {scenario.grow_to} instances"
    for what, value in {
        "stored, times the bytes of the groups that moved": sum(m["bytes"] for m in moves) / groups,
        "read, times the bytes of the groups that moved": sum(m["read"] for m in moves) / groups,
        "memory, times that of the groups that moved": grown / (share * median(before)),
    }.items():
        result.bars.append(Bar(f"{case}: {what}", value, _ROOM, at_least=False))
    result.bars.append(
        Bar(f"{case}: the next checkpoint, share of a full one", after / full, _INCREMENTAL, False)
    )
    result.notes.append(
        f"{case}: a full checkpoint is {full / 2**20:,.0f} MiB, {share:.1%} of the groups moved, "
        f"the state took {median(before) / 2**20:,.0f} MiB before, at most "
        f"{max(during) / 2**20:,.0f} MiB during the move; the stream was held for "
        f"{max(m['pause'] for m in moves):.2f} s"
    )


def moved_share(instances: int, grow_to: int) -> float:
    """The share of the key groups that change their instance.

    >>> round(moved_share(8, 9), 3)
    0.109
    """
    before = Routing.even(_KEY_GROUPS, instances)
    after = before.scaled(grow_to)
    moved = sum(
        len(groups - before.owners[number]) if number < instances else len(groups)
        for number, groups in enumerate(after.owners)
    )
    return moved / _KEY_GROUPS


def _first_after(outcome: Outcome, stored: dict[int, int]) -> int:
    """The bytes of the first checkpoint that was begun after the move."""
    reached = max(number for at, number in outcome.commits if at <= outcome.over)
    return stored[min(version for version in stored if version > reached)]
