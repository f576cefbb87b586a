"""Adaptation: m, k and the stripes of fragments follow what was measured, checkpoint by checkpoint.

The answers to orders say what these took at the nodes. When a checkpoint is about to be captured,
the backup policy is asked what suits best for all of that. It is used from this checkpoint on, for
all of its parts. Older parts keep their m and k.

So that the choice does not go to and fro, the policy leaves one that is as good within a tenth, and
another one must be wanted by three checkpoints in a row. It is taken at once if the present one
needs more nodes than there are, or is less reliable than the user wants.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from anabranch.backup.policy import Backup, Coding
from anabranch.fragments.adapt import Adapt, Choice, Measured, expect
from anabranch.fragments.cost import Coded, Cost, Transferred, covered
from anabranch.fragments.models import Rates, Sample, failures_per_hour, lost_rows
from anabranch.protocols.model import Host, serving
from anabranch.protocols.orders import SECOND
from anabranch.protocols.query import Query
from anabranch.protocols.turn import Turn

_REMEMBERED = 64
"""So many transfers, and codings of one m and k, are remembered."""
_LARGE = 4
"""Of these the ones count that are at least a fourth of the largest: small ones measure latency."""
_ROUNDS = 8
"""The intervals of so many checkpoints are remembered."""
_IN_A_ROW = 3
"""So many checkpoints in a row must want another choice."""
_ASSUMED_LINK = 125e6
"""The bytes per second of a link over which nothing has been sent yet: 1 Gbit."""
_ASSUMED_HOURS = 50.0
"""For so long one node is taken to have run without a failure before the query began. One failure
in the first minutes would otherwise count as many in an hour."""
_HOUR = 3600 * SECOND


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that a node sent or received, until a time."""

    host: Host
    until: int
    what: Transferred


@dataclass(frozen=True, slots=True)
class Observed:
    """What was measured since this driver has taken the query over."""

    sent: tuple[Transfer, ...] = ()
    received: tuple[Transfer, ...] = ()
    encoded: Mapping[tuple[int, int], tuple[Coded, ...]] = field(default_factory=dict)
    """By m and k."""
    recomputed: Mapping[tuple[int, int], tuple[Coded, ...]] = field(default_factory=dict)
    rounds: tuple[int, ...] = ()
    """When the last checkpoints were captured."""
    decided: tuple[int, ...] = ()
    """When the last of these was captured that the last choice took into account."""
    node_time: int = 0
    """For how long nodes were alive, all together, until they were counted last."""
    nodes: int = 0
    """How many they were then."""
    counted_at: int = 0
    losses: int = 0
    lost_at: int = 0
    """When a node was lost last."""
    repair: int = 0
    """How long it took from then until its fragments were made again."""
    wanted: int = 0
    """How many checkpoints in a row have wanted another choice."""
    files: bool = False
    """Whether the user was told that files would be better; once is enough."""


def adapt(turn: Turn) -> None:
    """Choose m, k and stripes for the checkpoint that is about to be captured."""
    backup, mine = turn.query.policies.backup, _mine(turn.query)
    coding = backup.coding
    if coding is None or coding.adapt is None or not mine.sent:
        return
    if mine.decided == mine.rounds[-1:]:
        return  # this is another attempt of the same batch
    _change(turn, decided=mine.rounds[-1:])
    measured = measurements(turn.query, coding.adapt)
    found = coding.adapted(measured)
    if found is None:
        return
    best, choice = found
    if choice.files and not mine.files:
        _change(turn, files=True)
        turn.tell("files are better", reason=choice.reason)
    if best == backup:
        _change(turn, wanted=0)
        return
    if mine.wanted + 1 < _IN_A_ROW and not _is_urgent(coding, coding.adapt, measured):
        _change(turn, wanted=mine.wanted + 1)
        return
    _change(turn, wanted=0)
    _use(turn, coding, best, choice)


def captured(turn: Turn) -> None:
    """A checkpoint was captured."""
    if _adapts(turn.query):
        _change(turn, rounds=(*_mine(turn.query).rounds, turn.query.now)[-_ROUNDS:])


def took(turn: Turn, host: Host | None, cost: Cost | None) -> None:
    """An order was executed by a node, and took so much."""
    query, mine = turn.query, _mine(turn.query)
    if cost is None or host is None or not _adapts(query):
        return
    _change(
        turn,
        sent=_with(mine.sent, Transfer(host, query.now, cost.sent)),
        received=_with(mine.received, Transfer(host, query.now, cost.received)),
        encoded=_by_shape(mine.encoded, cost.encoded),
        recomputed=_by_shape(mine.recomputed, cost.recomputed),
    )


def nodes_changed(turn: Turn, *, lost: bool) -> None:
    """A node has come, or was lost."""
    query = turn.query
    if _adapts(query) and _at_nodes(query):
        mine = _counted(query)
        if lost:
            mine = replace(mine, losses=mine.losses + 1, lost_at=query.now, repair=0)
        turn.change(observed=mine)


def standing_changed(turn: Turn, lost: int) -> None:
    """Others hold fragments now than at the last save, as so many standing nodes were lost."""
    if _adapts(turn.query):
        mine = _counted(turn.query)
        turn.change(observed=replace(mine, losses=mine.losses + lost))


def mended(turn: Turn) -> None:
    """Lost fragments were made again."""
    mine = _mine(turn.query)
    if _adapts(turn.query) and mine.losses:
        _change(turn, repair=turn.query.now - mine.lost_at)


def measurements(query: Query, wish: Adapt) -> Measured:
    """What was measured, as far as it was; the rest is assumed.

    A state is all that one node serves: it is saved over the link of that node, and is what is to
    be recovered if the node is lost.
    """
    mine = _counted(query)
    sizes, pieces = Counter[Host](), Counter[Host]()
    for each in serving(query.slices.values()):
        sizes[each.node] += query.size(each)
        pieces[each.node] += 1
    largest = max(sizes, key=lambda host: (sizes[host], host), default="")
    standing = query.standing
    found = Measured(
        size=sizes[largest],
        nodes=len(query.ready) - 1 if standing is None else standing.nodes,
        up=_rate(mine.sent) or _ASSUMED_LINK,
        down=_rate(mine.received) or _ASSUMED_LINK,
        encode=Rates(tuple(_samples(mine.encoded, recomputed=False))),
        recompute=Rates(tuple(_samples(mine.recomputed, recomputed=True))),
        store=wish.store_rate,
        failures=failures_per_hour(mine.losses, _ASSUMED_HOURS + mine.node_time / _HOUR),
        repair=mine.repair / SECOND if standing is None else standing.repair,
        pieces=max(1, pieces[largest]),
    )
    if len(mine.rounds) < 2:
        return found
    between = (mine.rounds[-1] - mine.rounds[0]) / (len(mine.rounds) - 1)
    return replace(found, interval=between / SECOND)


def _use(turn: Turn, before: Coding, after: Backup, choice: Choice) -> None:
    turn.change(policies=replace(turn.query.policies, backup=after))
    if choice.parity > before.parity:
        # Changes are lost with what they follow on, which may survive less.
        turn.put(*(replace(each, base=None) for each in serving(turn.query.slices.values())))
    turn.tell(
        "fragments adapted",
        before=[before.data, before.parity],
        data=choice.data,
        parity=choice.parity,
        stripe=choice.stripe,
        reason=choice.reason,
    )


def _is_urgent(coding: Coding, wish: Adapt, measured: Measured) -> bool:
    """Whether the present m and k do not fit on the nodes, or are not reliable enough."""
    if coding.data + coding.parity > measured.nodes:
        return True
    now = expect(measured, coding.data, coding.parity)
    return now.unreliability > 1 - wish.reliability


def _adapts(query: Query) -> bool:
    coding = query.policies.backup.coding
    return coding is not None and coding.adapt is not None


def _at_nodes(query: Query) -> bool:
    """Whether the nodes of the query hold the fragments, and not standing nodes."""
    return query.policies.backup.where.at_nodes


def _mine(query: Query) -> Observed:
    return query.observed or Observed()


def _with(before: Sequence[Transfer], one: Transfer) -> tuple[Transfer, ...]:
    if one.what.bytes == 0 or one.what.seconds <= 0:
        return tuple(before)
    return (*before, one)[-_REMEMBERED:]


def _by_shape(
    before: Mapping[tuple[int, int], tuple[Coded, ...]], more: Iterable[Coded]
) -> Mapping[tuple[int, int], tuple[Coded, ...]]:
    found = dict(before)
    for one in more:
        if one.bytes and one.seconds > 0:
            shape = one.data, one.parity
            found[shape] = (*found.get(shape, ()), one)[-_REMEMBERED:]
    return found


def _rate(transfers: Sequence[Transfer]) -> float | None:
    """The bytes per second over the link of a node. What it does at once shares the link."""
    least = max((each.what.bytes for each in transfers), default=0) / _LARGE
    large = [each for each in transfers if each.what.bytes >= least]
    spans: dict[Host, list[tuple[float, float]]] = defaultdict(list)
    for each in large:
        spans[each.host].append((each.until - each.what.seconds * SECOND, each.until))
    busy = sum(map(covered, spans.values()))
    return sum(each.what.bytes for each in large) / (busy / SECOND) if busy > 0 else None


def _samples(
    coded: Mapping[tuple[int, int], tuple[Coded, ...]], *, recomputed: bool
) -> Iterable[Sample]:
    for (data, parity), each in coded.items():
        least = max(one.bytes for one in each) / _LARGE
        large = [one for one in each if one.bytes >= least]
        rate = sum(one.bytes for one in large) / sum(one.seconds for one in large)
        yield Sample(data, lost_rows(data, parity) if recomputed else parity, rate)


def _counted(query: Query) -> Observed:
    """With the time that the nodes have been alive until now."""
    mine = _mine(query)
    more = mine.nodes * (query.now - mine.counted_at)
    standing = 0 if query.standing is None else query.standing.near
    nodes = len(query.nodes) if _at_nodes(query) else standing
    return replace(mine, node_time=mine.node_time + more, nodes=nodes, counted_at=query.now)


def _change(turn: Turn, **fields: object) -> None:
    turn.change(observed=replace(_mine(turn.query), **fields))  # type: ignore[arg-type]
