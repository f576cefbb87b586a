"""The log of a query: one sentence for each event, and for each operation that begins.

:func:`sentence` words an event. :func:`beginnings` compares the query before and after a step of
the coordinator, and words the operations that the step has begun. Readers know Spark and not this
library: a sentence has what happened, the reason, what is done about it, and the figures.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anabranch.protocols import ends
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
    Mend,
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
_ROUTINE = {
    "checkpoint", "checkpoint late", "merge", "slices merged", "scale", "pool short",
    "fragments adapted", "files are better",
}  # fmt: skip


def level(kind: str, details: Mapping[str, Any]) -> int:
    """The log level of an event. Losses, failures and recoveries are warnings."""
    if kind == "restarted" and details.get("start") == details.get("target"):
        return logging.INFO
    if kind == "query stopped" and not details.get("failed"):
        return logging.INFO
    return logging.INFO if kind in _ROUTINE else logging.WARNING


def sentence(kind: str, seconds: float, details: Mapping[str, Any]) -> str:
    """An event as a sentence; see ``query.events`` for the kinds.

    >>> sentence("recovery", 1.24, {"lost": {"counter": [2]}, "slices": ["3-9"], "restored": 14,
    ...     "replayed": 4})
    'Recovered counter/2 in 1.2 s: restored 1 slice from checkpoint 14 and replayed 4 batches.'
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
                return _start(f"{_node(of['host'])} was lost. It served no slices.")
            lost = f"{_count(of['slices'], 'slice')} of {_instances(of['instances'])}"
            return _start(f"{_node(of['host'])} was lost with {lost}.")
        case "node does not answer":
            node = _node(of["host"])
            if "attempts" not in of:
                return _because(
                    f"The agent of {node} does not answer", of, "Replacing it unless it answers now"
                )
            tried = _many(of["attempts"], "attempt")
            return _because(
                f"The agent of {node} did not start in {tried}",
                of,
                f"Treating the node as lost; trying it again in {of['pause']:.0f} s",
            )
        case "batch failed":
            tried = f"attempt {of['attempt']} of {ATTEMPTS}"
            again = "" if of["attempt"] >= ATTEMPTS else "Running it again"
            return _because(f"Batch {of['version']} failed ({tried})", of, again)
        case "recovery":
            return (
                f"Recovered {_instances(of['lost'])} in {took}: restored "
                f"{_count(of['slices'], 'slice')} from {_checkpoint(of['restored'])} and replayed "
                f"{_many(of['replayed'], 'batch')}."
            )
        case "recovery failed":
            return _because(f"Recovery failed while {of['step']}", of, _starts_again(of))
        case "going back":
            back = f"Rolling the query back from batch {of['committed']} to a published checkpoint"
            return _because(back, of)
        case "restarted":
            start, target = of["start"], of["target"]
            if start == target == NO_VERSION:
                return "The query starts with empty state."
            if start == target:
                return f"The query resumes from {_checkpoint(start)}."
            return (
                f"The query resumes from {_checkpoint(start)} and runs "
                f"{_many(target - start, 'batch')} again, up to batch {target}."
            )
        case "restart failed":
            return _because(f"Restart failed while {of['step']}", of, _starts_again(of))
        case "power failure":
            return (
                f"The machine was rebooted since the query last ran. Results written after "
                f"{_checkpoint(of['restored'])} may be incomplete; removing them and running "
                f"{_many(of['again'], 'batch')} again."
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
                f"while {_many(of['batches'], 'batch')} ran; held the stream for "
                f"{of['pause']:.2f} s."
            )
        case "scale failed":
            return _move_failed(f"Moving key groups of {of['operator']}", of)
        case "checkpoint":
            return f"Published checkpoint {of['version']} in {took}: stored {_size(of['bytes'])}."
        case "checkpoint failed":
            row, then = "", ""
            if "failures" in of:
                row = f" ({of['failures']} in a row, {of['tolerate']} tolerated)"
                retry = of["failures"] <= of["tolerate"]
                then = "Trying again" if retry else "Stopping the query"
            return _because(f"Checkpoint {of['version']} failed{row}", of, then)
        case "checkpoint late":
            return (
                f"Checkpoint {of['version']} has been stored for {took}, and the next one is due "
                f"after {_many(of['batches'], 'batch')}: it waits, and a restart would run "
                f"{_many(of['committed'] - of['version'], 'batch')} again."
            )
        case "checkpoint damaged":
            damaged = f"Checkpoint {of['version']} is damaged"
            return _because(damaged, of, "Using an older checkpoint")
        case "part damaged":
            return (
                f"Checkpoint file {of['part']} is damaged or missing. The next checkpoint "
                "captures its rows again."
            )
        case "part mended":
            return (
                f"Made lost fragments of {of['part']} again; it is at {', '.join(of['holders'])}."
            )
        case "mending failed":
            return _because(
                f"Making lost fragments of {of['part']} again failed",
                of,
                f"Trying again in {of['pause']:g} s",
            )
        case "fragments adapted":
            before = "{} + {}".format(*of["before"])
            return (
                f"Checkpoints are in {of['data']} + {of['parity']} fragments from now on, coded in "
                f"stripes of {_size(of['stripe'])}; before, they were in {before}. {of['reason']}"
            )
        case "fragments lowered":
            (data, parity), now = of["wanted"], f"{of['data']} + {of['parity']}"
            return (
                f"The ring has {_many(of['nodes'], 'node')} for {data + parity} fragments: "
                f"checkpoints are in {now} fragments, and survive the loss of "
                f"{_many(of['parity'], 'node')}. Start more nodes to have {data} + {parity}."
            )
        case "files are better":
            return f"A shared store suits this query better than fragments. {of['reason']}"
        case "merge":
            return (
                f"Merged a chain of checkpoint files of {of['operator']} into one full file of "
                f"version {of['version']}: {_size(of['bytes'])}."
            )
        case "merge failed" if "slice" in of:
            return _because(
                f"Merging the checkpoint files of slice {of['slice']} failed",
                of,
                "The next checkpoint of the slice is a full one",
            )
        case "merge failed":
            return _move_failed(f"Merging small slices of {of['operator']}", of)
        case "slices merged":
            return f"Merged small slices of {of['operator']} into {', '.join(of['slices'])}."
        case "note failed":
            return _because(
                "The arrangement of slices was not written to the checkpoint folder",
                of,
                f"Trying again in {of['pause']:g} s; until then a restart uses the one before",
            )
        case "stream held":
            return (
                f"Holding the stream after batch {of['committed']} until a checkpoint is "
                f"published. A restart would begin from {_checkpoint(of['published'])}; Spark's "
                "offset log would soon not reach back to it."
            )
        case "stream goes on":
            return (
                f"Resuming the stream after batch {of['committed']}: checkpoint "
                f"{of['published']} is published."
            )
        case "pool short":
            total = of["nodes"] + of["missing"]
            return (
                f"The query has {_many(of['nodes'], 'node')} and wants {total}. Requesting "
                f"{of['missing']} more from the cluster manager."
            )
        case "release failed":
            return _end(_start(str(of["reason"])))
        case "order failed":
            return _because(f"{of['order']} failed", of)
        case "driver deposed":
            return _because(f"Driver {of['driver']} was deposed, so the query ends here", of)
        case "query stopped":
            ended = "failed" if of["failed"] else "stopped"
            return _because(f"The query {ended} after batch {of['version']}", of)
        case _:
            raise KeyError(kind)


def beginnings(before: Query, after: Query) -> Iterator[tuple[int, str]]:
    """The operations that a step of the coordinator has begun: log levels and sentences."""
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
                f"{operator} to {_slices(moving.targets, 'new slice')}.",
            )


def _of_recovery(before: Query, after: Query) -> Iterator[tuple[int, str]]:
    was, now = before.recovery, after.recovery
    if now is None:
        return
    if was is None and not now.made:
        lost = instances_of(after.slices[each] for each in after.suspects if each in after.slices)
        if lost:
            names = _instances(lost)
            yield logging.WARNING, f"Starting recovery: the state of {names} may be lost."
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
        newest = after.published[-1].version if after.published else "none"
        had = "There is no batch to resume from."
        if now.target != NO_VERSION:
            had = f"Last batch: {now.target}; newest published checkpoint: {newest}."
        yield logging.INFO, f"Driver {after.epoch} takes the query over. {had}"
    if now is None or not now.made or now.start == NO_VERSION:
        return
    if was is None or was.made != now.made:
        for operator in after.operators:
            slices = [each for each in now.made if each.operator == operator]
            yield (
                logging.INFO,
                f"Restoring the state of {operator} from {_checkpoint(now.start)}: "
                f"{_slices(slices)}, {_rows_to_read(after, slices, Owner.RESTART)}.",
            )


def name_of(order: Order) -> str:
    """The operation of an order, as the subject of a sentence."""
    match order:
        case Make(each):
            return f"Making {_slice(each)}"
        case Advance(each, upto=version):
            return f"Advancing {_slice(each)} to version {version}"
        case Capture(_, each):
            return f"Capturing {_slice(each)}"
        case Mend(part):
            return f"Mending checkpoint file {part.name}"
        case Merge(each):
            return f"Merging the checkpoint files of {_slice(each)}"
        case Store(captured):
            return f"Storing the capture of slice {captured.slice} of {captured.operator}"
        case Replay(slices, version):
            return f"Replaying batches up to {version} on {_count(slices, 'slice')}"
        case Publish(published):
            return f"Publishing checkpoint {published.version}"
        case Prepare(host):
            return f"Starting the agent of {_node(host)}"
        case Inspect(host):
            return f"Inspecting the tables of {_node(host)}"
        case Rewind(start):
            return f"Rewinding Spark's logs to batch {start}"
        case Drop(host):
            return f"Dropping tables and captured files of {_node(host)}"
        case Withdraw():
            return "Deleting obsolete checkpoints"
        case Note():
            return "Writing the arrangement of slices to the checkpoint folder"
        case Tell(kind):
            return f"Writing the event {kind!r} to the checkpoint folder"
        case AskNodes(total):
            return f"Requesting {_many(total, 'node')} from the cluster manager"
        case Trim(operator):
            return f"Trimming the output buffers of rows sent to {operator}"
        case _:
            return f"The order {type(order).__name__}"


def _slice(each: Slice) -> str:
    return f"slice {each.id} of {each.operator}/{each.instance}{_on(each.node)}"


def _node(host: str) -> str:
    """A node by its host. Without a cluster the only node has no host name."""
    return f"node {host}" if host else "this machine"


def _start(text: str) -> str:
    """The text with a capital letter in front."""
    return text[:1].upper() + text[1:]


def _on(host: str) -> str:
    return f" on {host}" if host else ""


def _nodes_of(query: Query) -> str:
    return _many(len(query.nodes), "node")


def _slices(slices: Iterable[Slice], noun: str = "slice") -> str:
    """The number of slices, and their nodes."""
    found = list(slices)
    hosts = sorted({each.node for each in found if each.node})
    return _count(found, noun) + (f" on {', '.join(hosts)}" if hosts else "")


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
    """A number of bytes with a unit.

    >>> _size(12_345_678), _size(999)
    ('12.3 MB', '999 bytes')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return _many(size, "byte")


def _starts_again(of: Mapping[str, Any]) -> str:
    """What follows a restart or a recovery that failed."""
    pause = of["pause"]
    return "Stopping the query" if pause is None else f"Starting it again in {pause:g} s"


def _move_failed(what: str, of: Mapping[str, Any]) -> str:
    """An attempt of a move that failed, and whether another one follows."""
    then = "Starting again" if of["attempt"] < ends.ATTEMPTS else "Giving up"
    attempt = f"attempt {of['attempt']} of {ends.ATTEMPTS}"
    return _because(f"{what} failed ({attempt})", of, f"{then}; nothing was changed")


def _because(text: str, of: Mapping[str, Any], then: str = "") -> str:
    """What happened, its reason on one line, and what is done then. The event has all lines."""
    lines = [line.strip() for line in str(of.get("reason") or "").splitlines() if line.strip()]
    if lines:
        # Of a traceback the last line says what went wrong.
        line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        text = f"{text}: {line if len(line) <= _LONGEST else f'{line[:_LONGEST]}...'}"
    return " ".join(_end(each) for each in (text, then) if each)


def _end(text: str) -> str:
    """The text with a full stop, unless it ends a sentence already."""
    return text if text.endswith((".", "?", "!")) else f"{text}."
