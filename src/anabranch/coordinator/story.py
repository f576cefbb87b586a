"""The story of a query in sentences, as its log tells it.

What has happened is told by events, in the words of :func:`sentence`; what begins is seen from the
query before and after a step of the coordinator, see :func:`beginnings`. Whoever reads the log
knows Spark, and is to see what was lost or changed, what is done about it, and the figures.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anabranch.protocols import move
from anabranch.protocols.batches import ATTEMPTS
from anabranch.protocols.events import Rebalance, Scale
from anabranch.protocols.model import Readiness, Slice, instances_of
from anabranch.protocols.orders import (
    Advance,
    AskNodes,
    Capture,
    Drop,
    Inspect,
    Make,
    Merge,
    Note,
    Order,
    Prepare,
    Publish,
    Replay,
    Rewind,
    Store,
    Tell,
    Trim,
    Withdraw,
)
from anabranch.protocols.query import Owner, Query
from anabranch.units import NO_VERSION

_LONGEST = 300
_ROUTINE = {"checkpoint", "merge", "slices merged", "scale", "pool short"}


def level(kind: str, details: Mapping[str, Any]) -> int:
    """How loudly an event is logged: what was lost, failed or is whole again is a warning."""
    if kind == "restarted" and details.get("start") == details.get("target"):
        return logging.INFO
    return logging.INFO if kind in _ROUTINE else logging.WARNING


def sentence(kind: str, seconds: float, details: Mapping[str, Any]) -> str:
    """What has happened, as a sentence; see ``query.events`` for the kinds.

    >>> sentence("recovery", 1.24, {"lost": {"counter": [2]}, "slices": ["3-9"], "restored": 14,
    ...     "replayed": 4})
    'Recovered counter/2 in 1.2 s: made 1 slice from checkpoint 14 and replayed 4 batches.'
    """
    try:
        return _sentence(kind, seconds, details)
    except (KeyError, TypeError, ValueError):  # an event of another release
        return f"{kind}: {dict(details)}"


def _sentence(kind: str, seconds: float, of: Mapping[str, Any]) -> str:
    took = f"{seconds:.1f} s"
    match kind:
        case "failure":
            if not of["slices"]:
                return _start(f"{_node(of['host'])} was lost; it served no slices.")
            lost = f"{_count(of['slices'], 'slice')} of {_instances(of['instances'])}"
            return _start(f"{_node(of['host'])} was lost with {lost}.")
        case "node does not answer":
            node = _node(of["host"])
            if "attempts" not in of:
                return _because(
                    f"The agent of {node} does not answer, so it is ended and replaced", of
                )
            tried = _many(of["attempts"], "attempt")
            return _because(
                f"The agent of {node} did not start in {tried}, so the node counts as lost and is "
                f"tried again in {of['pause']:.0f} s",
                of,
            )
        case "batch failed":
            again = "" if of["attempt"] >= ATTEMPTS else " and is run again"
            tried = f"attempt {of['attempt']} of {ATTEMPTS}"
            return _because(f"Batch {of['version']} failed ({tried}){again}", of)
        case "recovery":
            return (
                f"Recovered {_instances(of['lost'])} in {took}: made "
                f"{_count(of['slices'], 'slice')} from {_checkpoint(of['restored'])} and replayed "
                f"{_many(of['replayed'], 'batch')}."
            )
        case "recovery failed":
            return _because(f"A recovery failed while {of['step']} and begins again", of)
        case "going back":
            back = f"The query goes back from batch {of['committed']} to a published checkpoint"
            return _because(back, of)
        case "restarted":
            start, target = of["start"], of["target"]
            if start == target == NO_VERSION:
                return "The query begins with empty state."
            if start == target:
                return f"The query goes on from {_checkpoint(start)}."
            return (
                f"The query goes on from {_checkpoint(start)}, and runs "
                f"{_many(target - start, 'batch')} again, up to batch {target}."
            )
        case "restart failed":
            return _because(f"A restart failed while {of['step']} and begins again", of)
        case "power failure":
            return (
                f"The machine was rebooted since the query ran, so what was written since "
                f"{_checkpoint(of['restored'])} may be incomplete: it is removed, and "
                f"{_many(of['again'], 'batch')} will run again."
            )
        case _:
            return _of_changes(kind, took, of)


def _of_changes(kind: str, took: str, of: Mapping[str, Any]) -> str:
    match kind:
        case "scale":
            before, after = of["before"], of["after"]
            what = f"Scaled {of['operator']} from {before} to {_many(after, 'instance')}"
            if before == after:
                what = f"Rebalanced {of['operator']}"
            return (
                f"{what} in {took}: moved {_size(of['bytes'])} to {_count(of['slices'], 'slice')} "
                f"while {_many(of['batches'], 'batch')} ran, and held the stream for "
                f"{of['pause']:.2f} s."
            )
        case "scale failed":
            return _because(f"Moving key groups of {of['operator']} failed {_move_again(of)}", of)
        case "checkpoint":
            return f"Published checkpoint {of['version']} in {took}: stored {_size(of['bytes'])}."
        case "checkpoint failed":
            row = ""
            if "failures" in of:
                again = "is tried again" if of["failures"] <= of["tolerate"] else "the query stops"
                row = f" ({of['failures']} in a row, {of['tolerate']} are tolerated) and {again}"
            return _because(f"Checkpoint {of['version']} failed{row}", of)
        case "checkpoint damaged":
            return _because(f"Checkpoint {of['version']} is damaged, an older one is used", of)
        case "part damaged":
            return (
                f"Checkpoint file {of['part']} is damaged or gone; its rows are captured again "
                "with the next checkpoint."
            )
        case "merge":
            return (
                f"Merged a chain of checkpoint files of {of['operator']} into one of version "
                f"{of['version']} with {_size(of['bytes'])}."
            )
        case "merge failed" if "slice" in of:
            return _because(
                f"Merging the checkpoint files of slice {of['slice']} failed, so its next capture "
                "is a full one",
                of,
            )
        case "merge failed":
            what = f"Merging small slices of {of['operator']}"
            return _because(f"{what} failed {_move_again(of)}", of)
        case "slices merged":
            return f"Merged small slices of {of['operator']} into {', '.join(of['slices'])}."
        case "stream held":
            return (
                f"The stream is held after batch {of['committed']} until a checkpoint is published:"
                f" Spark's log of offsets would soon not reach back to the newest one, "
                f"{of['published']}."
            )
        case "stream goes on":
            return (
                f"The stream goes on after batch {of['committed']}: checkpoint {of['published']} "
                "is published."
            )
        case "pool short":
            total = of["nodes"] + of["missing"]
            return (
                f"The query has {_many(of['nodes'], 'node')} and wants {total}; asking the cluster "
                f"manager for {of['missing']} more."
            )
        case "release failed":
            return _start(str(of["reason"]))
        case _:
            raise KeyError(kind)


def beginnings(before: Query, after: Query) -> Iterator[tuple[int, str]]:
    """What has begun in a step of the coordinator: sentences, and how loudly each is logged."""
    yield from _of_nodes(before, after)
    yield from _of_moves(before, after)
    yield from _of_recovery(before, after)
    yield from _of_restart(before, after)


def _of_nodes(before: Query, after: Query) -> Iterator[tuple[int, str]]:
    if before.nodes is not after.nodes:
        for host, node in after.nodes.items():
            known = before.nodes.get(host)
            was_ready = known is not None and known.readiness is Readiness.READY
            if host and node.readiness is Readiness.READY and not was_ready:
                yield logging.INFO, f"Node {host} is ready: it has an executor and an agent."


def _of_moves(before: Query, after: Query) -> Iterator[tuple[int, str]]:
    for which, moving in after.moves.items():
        was, operator = before.moves.get(which), moving.operator
        now = after.routed[operator].routing.instances
        if was is None:
            match moving.event:
                case Scale(instances=wanted):
                    wish = f"from {now} to {_many(wanted, 'instance')}"
                    yield logging.INFO, f"Scaling {operator} {wish}."
                case Rebalance():
                    yield logging.INFO, f"Rebalancing {operator} over {_nodes_of(after)}."
        if moving.targets and (was is None or not was.targets):
            groups = sum(len(each.groups) for each in moving.targets)
            yield (
                logging.INFO,
                f"Moving {groups} of {after.operators[operator].key_groups} key groups of "
                f"{operator} to {_slices(moving.targets)}.",
            )


def _of_recovery(before: Query, after: Query) -> Iterator[tuple[int, str]]:
    was, now = before.recovery, after.recovery
    if now is None:
        return
    if was is None and not now.made:
        lost = instances_of(after.slices[each] for each in after.suspects if each in after.slices)
        if lost:
            names = _instances(lost)
            yield logging.WARNING, f"Recovery begins: the state of {names} is lost, or may be."
    if now.made and (was is None or was.made != now.made):
        for (operator, instance, node), slices in _at_nodes(now.made).items():
            version = min(each.version for each in slices)
            replayed = after.committed - version
            yield (
                logging.WARNING,
                f"Recovering {operator}/{instance}{_on(node)} from {_checkpoint(version)}: "
                f"{_count(slices, 'slice')}, {_rows_to_read(after, slices, Owner.RECOVERY)}, "
                f"{_many(replayed, 'batch')} to replay.",
            )


def _of_restart(before: Query, after: Query) -> Iterator[tuple[int, str]]:
    was, now = before.restart, after.restart
    if before.taken_over is None and after.taken_over is not None and now is not None:
        newest = after.published[-1].version if after.published else NO_VERSION
        had = "no batch has run yet"
        if now.target != NO_VERSION:
            had = f"the last batch is {now.target}, the newest version published {newest}"
        yield logging.INFO, f"Driver {after.epoch} takes the query over: {had}."
    if now is None or not now.made or now.start == NO_VERSION:
        return
    if was is None or was.made != now.made:
        for operator in after.operators:
            slices = [each for each in now.made if each.operator == operator]
            yield (
                logging.INFO,
                f"Making the state of {operator} from {_checkpoint(now.start)}: "
                f"{_slices(slices)}, {_rows_to_read(after, slices, Owner.RESTART)}.",
            )


def name_of(order: Order) -> str:
    """What an order is to do, as the subject of a sentence."""
    match order:
        case Make(each):
            return f"Making {_slice(each)}"
        case Advance(each, upto=version):
            return f"Bringing {_slice(each)} on to version {version}"
        case Capture(_, each):
            return f"Capturing {_slice(each)}"
        case Merge(each):
            return f"Merging the checkpoint files of {_slice(each)}"
        case Store(captured):
            return f"Storing the rows captured of slice {captured.slice} of {captured.operator}"
        case Replay(slices, version):
            return f"Replaying batches up to {version} on {_count(slices, 'slice')}"
        case Publish(published):
            return f"Publishing checkpoint {published.version}"
        case Prepare(host):
            return f"Starting the agent of {_node(host)}"
        case Inspect(host):
            return f"Inspecting the tables of {_node(host)}"
        case Rewind(start):
            return f"Taking Spark back to version {start}"
        case Drop(host):
            return f"Dropping tables and captured files of {_node(host)}"
        case Withdraw():
            return "Deleting checkpoints that are not needed any more"
        case Note():
            return "Noting the slices in the checkpoint folder"
        case Tell(kind):
            return f"Writing the event {kind!r} to the checkpoint folder"
        case AskNodes(total):
            return f"Asking the cluster manager for {_many(total, 'node')}"
        case Trim(operator):
            return f"Letting go of rows that were sent to {operator}"
        case _:
            return f"The order {type(order).__name__}"


def _slice(each: Slice) -> str:
    return f"slice {each.id} of {each.operator}/{each.instance}{_on(each.node)}"


def _node(host: str) -> str:
    """A node by its host; the only node of a query without a cluster has none."""
    return f"node {host}" if host else "this machine"


def _start(text: str) -> str:
    """The text as the start of a sentence."""
    return text[:1].upper() + text[1:]


def _on(host: str) -> str:
    return f" on {host}" if host else ""


def _nodes_of(query: Query) -> str:
    return _many(len(query.nodes), "node")


def _slices(slices: Iterable[Slice]) -> str:
    """How many slices, and where."""
    found = list(slices)
    hosts = sorted({each.node for each in found if each.node})
    return _count(found, "slice") + (f" on {', '.join(hosts)}" if hosts else "")


def _at_nodes(slices: Iterable[Slice]) -> dict[tuple[str, int, str], list[Slice]]:
    found: dict[tuple[str, int, str], list[Slice]] = {}
    for each in slices:
        found.setdefault((each.operator, each.instance, each.node), []).append(each)
    return found


def _instances(by_operator: Mapping[str, Iterable[int]]) -> str:
    return ", ".join(
        f"{name}/{instance}" for name in sorted(by_operator) for instance in by_operator[name]
    )


def _rows_to_read(query: Query, slices: Iterable[Slice], owner: Owner) -> str:
    ids = {each.id for each in slices}
    orders = [w.order for w in query.outstanding.values() if w.owner is owner]
    made = [order for order in orders if isinstance(order, Make) and order.slice.id in ids]
    parts = {part.name: part for order in made for part in order.parts}
    return f"{_many(sum(part.rows for part in parts.values()), 'row')} to read"


def _checkpoint(version: int) -> str:
    return "empty state" if version == NO_VERSION else f"checkpoint {version}"


def _count(found: Iterable[object], noun: str) -> str:
    return _many(len(list(found)), noun)


def _many(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _size(size: int) -> str:
    """A number of bytes for a reader.

    >>> _size(12_345_678), _size(999)
    ('12.3 MB', '999 bytes')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return _many(size, "byte")


def _move_again(of: Mapping[str, Any]) -> str:
    """What comes after an attempt of a move that failed."""
    again = "begins again" if of["attempt"] < move.ATTEMPTS else "is given up"
    return f"with nothing changed (attempt {of['attempt']} of {move.ATTEMPTS}) and {again}"


def _because(text: str, of: Mapping[str, Any]) -> str:
    """A sentence and the reason in one line; the event has all of it."""
    lines = [line.strip() for line in str(of.get("reason") or "").splitlines() if line.strip()]
    if not lines:
        return f"{text}."
    # Of a traceback the last line says what went wrong.
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return f"{text}: {line if len(line) <= _LONGEST else f'{line[:_LONGEST]}...'}"
