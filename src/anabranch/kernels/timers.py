"""Rows by time: a wheel of lists in three scales.

A row with a timer is in one doubly linked list. Times up to the ``clock`` are in the first list;
those after it are in the list of their quarter second (18 minutes ahead), their minute (12 days) or
their 19 hours (35 years), whichever is the finest that reaches so far, or else in the last list.
When the clock moves, the lists it passes are dealt out again.

The links of a row are the rows after and before it, + 1; at the ends of a list they are
``-1 - list``. ``lists`` has the first row + 1 of each list (0 if it is empty), then the last
row + 1 of each. The clock is two words: the time, and whether it was ever set.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]

NEVER = np.iinfo(np.int64).max
"""The timer of a row that has none."""

_FINE, _FINE_LISTS = 18, 1 << 12
_MIDDLE, _MIDDLE_LISTS = 26, 1 << 14
_COARSE, _COARSE_LISTS = 36, 1 << 14
_AT_MIDDLE = 1 + _FINE_LISTS
_AT_COARSE = _AT_MIDDLE + _MIDDLE_LISTS
_LAST = _AT_COARSE + _COARSE_LISTS
LISTS = _LAST + 1


@kernel
def _list_of(time: int, now: int) -> int:
    if time <= now:
        return 0
    if (time >> _FINE) - (now >> _FINE) < _FINE_LISTS:
        return 1 + ((time >> _FINE) & (_FINE_LISTS - 1))
    if (time >> _MIDDLE) - (now >> _MIDDLE) < _MIDDLE_LISTS:
        return _AT_MIDDLE + ((time >> _MIDDLE) & (_MIDDLE_LISTS - 1))
    if (time >> _COARSE) - (now >> _COARSE) < _COARSE_LISTS:
        return _AT_COARSE + ((time >> _COARSE) & (_COARSE_LISTS - 1))
    return _LAST


@kernel
def _link(lists: Array, links: Array, row: int, to: int) -> None:
    first = lists[to]
    links[2 * row + 1] = -1 - to
    if first > 0:
        links[2 * row] = first
        links[2 * first - 1] = row + 1
    else:
        links[2 * row] = -1 - to
        lists[LISTS + to] = row + 1
    lists[to] = row + 1


@kernel
def _join(lists: Array, links: Array, after: int, before: int) -> None:
    """Make two links, as found in a row, neighbours: rows + 1, or ends of a list."""
    if before > 0:
        links[2 * before - 2] = after
    else:
        lists[-1 - before] = max(after, 0)
    if after > 0:
        links[2 * after - 1] = before
    else:
        lists[LISTS - 1 - after] = max(before, 0)


@kernel
def put(times: Array, lists: Array, links: Array, clock: Array, rows: Array, given: Array) -> None:
    """Give rows timers, or take them with :data:`NEVER`; the last counts for a row named twice."""
    if clock[1] == 0 and rows.shape[0] > 0 and given.min() != NEVER:
        clock[0] = given.min() - 1
        clock[1] = 1
    for i in range(rows.shape[0]):
        row = rows[i]
        if times[row] != NEVER:
            _join(lists, links, links[2 * row], links[2 * row + 1])
        times[row] = given[i]
        if given[i] != NEVER:
            _link(lists, links, row, _list_of(given[i], clock[0]))


@kernel
def _deal(times: Array, lists: Array, links: Array, now: int, which: int) -> None:
    """Take a list apart and put its rows where they belong at this time."""
    at = lists[which]
    lists[which] = 0
    lists[LISTS + which] = 0
    while at > 0:
        row = at - 1
        at = links[2 * row]
        _link(lists, links, row, _list_of(times[row], now))


@kernel
def _pass(lists: Array, links: Array, which: int) -> None:
    """Put a list, all of which is due, in front of the first one, whole."""
    first, last = lists[which], lists[LISTS + which]
    if first > 0:
        lists[which] = 0
        lists[LISTS + which] = 0
        links[2 * first - 1] = -1
        old = lists[0]
        if old > 0:
            links[2 * last - 2] = old
            links[2 * old - 1] = last
        else:
            links[2 * last - 2] = -1
            lists[LISTS] = last
        lists[0] = first


@kernel
def _turn(
    times: Array, lists: Array, links: Array, then: int, now: int, scale: int, at: int, size: int
) -> None:
    """Move one scale on: lists that lie behind are due, the one at the time is dealt out."""
    here = now >> scale
    for i in range(1, min(here - (then >> scale) + 1, size)):
        _pass(lists, links, at + ((here - i) & (size - 1)))
    _deal(times, lists, links, now, at + (here & (size - 1)))


@kernel
def advance(times: Array, lists: Array, links: Array, clock: Array, now: int) -> None:
    """Move the clock on to a later time; all timers up to it are then in the first list."""
    then = clock[0]
    clock[0] = now
    if (now >> _COARSE) != (then >> _COARSE):
        _deal(times, lists, links, now, _LAST)
        _turn(times, lists, links, then, now, _COARSE, _AT_COARSE, _COARSE_LISTS)
    if (now >> _MIDDLE) != (then >> _MIDDLE):
        _turn(times, lists, links, then, now, _MIDDLE, _AT_MIDDLE, _MIDDLE_LISTS)
    _turn(times, lists, links, then, now, _FINE, 1, _FINE_LISTS)


@kernel
def due(times: Array, links: Array, upto: int, at: int, out: Array) -> tuple[int, int, int]:
    """List the rows that are due, from this link of the first list on, until ``out`` is full.

    Returns how many they are, the link to go on from (none if not above 0), and how many of the
    rows passed are not due.
    """
    count = 0
    early = 0
    while at > 0 and count < out.shape[0]:
        row = at - 1
        if times[row] <= upto:
            out[count] = row
            count += 1
        else:
            early += 1
        at = links[2 * row]
    return count, at, early


@kernel
def rebuild(
    times: Array, lists: Array, links: Array, head: Array, width: int, rows: int, now: int
) -> None:
    """Make all lists anew from the times of live rows."""
    lists[:] = 0
    for row in range(rows):
        if head[row * width + 1] & np.uint64(3) == np.uint64(1) and times[row] != NEVER:
            _link(lists, links, row, _list_of(times[row], now))


@kernel
def replace(times: Array, lists: Array, links: Array, source: Array, target: Array) -> None:
    """Let target rows take the places of source rows; the times are copied already."""
    for i in range(source.shape[0]):
        row = source[i]
        if times[row] != NEVER:
            new = target[i]
            after, before = links[2 * row], links[2 * row + 1]
            links[2 * new] = after
            links[2 * new + 1] = before
            if before > 0:
                links[2 * before - 2] = new + 1
            else:
                lists[-1 - before] = new + 1
            if after > 0:
                links[2 * after - 1] = new + 1
            else:
                lists[LISTS - 1 - after] = new + 1
