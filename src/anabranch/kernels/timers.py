"""Rows by time: a wheel of lists in three scales.

A row with a timer is in one doubly linked list. Times up to the ``clock`` are in the first list;
those after it are in the list of their quarter second (18 minutes ahead), their minute (12 days) or
their 19 hours (35 years), whichever is the finest that reaches so far, or else in the last list.
When the clock moves, the lists it passes are dealt out again.

Lists are linked by ``row + 1``, 0 at the end. ``before`` of the first row is ``-1 - list``. The
clock is two words: the time, and whether it was ever set.
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
def _link(heads: Array, links: Array, row: int, to: int) -> None:
    first = heads[to]
    links[2 * row] = first
    links[2 * row + 1] = -1 - to
    if first > 0:
        links[2 * first - 1] = row + 1
    heads[to] = row + 1


@kernel
def _unlink(heads: Array, links: Array, row: int) -> None:
    after, before = links[2 * row], links[2 * row + 1]
    if before > 0:
        links[2 * before - 2] = after
    else:
        heads[-1 - before] = after
    if after > 0:
        links[2 * after - 1] = before


@kernel
def put(times: Array, heads: Array, links: Array, clock: Array, rows: Array, given: Array) -> None:
    """Give rows timers, or take them with :data:`NEVER`; the last counts for a row named twice."""
    if clock[1] == 0 and rows.shape[0] > 0 and given.min() != NEVER:
        clock[0] = given.min() - 1
        clock[1] = 1
    for i in range(rows.shape[0]):
        row = rows[i]
        if times[row] != NEVER:
            _unlink(heads, links, row)
        times[row] = given[i]
        if given[i] != NEVER:
            _link(heads, links, row, _list_of(given[i], clock[0]))


@kernel
def _deal(times: Array, heads: Array, links: Array, now: int, which: int) -> None:
    """Take a list apart and put its rows where they belong at this time."""
    row = heads[which] - 1
    heads[which] = 0
    while row >= 0:
        after = links[2 * row] - 1
        _link(heads, links, row, _list_of(times[row], now))
        row = after


@kernel
def advance(times: Array, heads: Array, links: Array, clock: Array, now: int) -> None:
    """Move the clock on to a later time; all timers up to it are then in the first list."""
    then = clock[0]
    clock[0] = now
    if (now >> _COARSE) != (then >> _COARSE):
        _deal(times, heads, links, now, _LAST)
    steps = min((now >> _COARSE) - (then >> _COARSE), _COARSE_LISTS)
    for i in range(steps):
        place = ((now >> _COARSE) - i) & (_COARSE_LISTS - 1)
        _deal(times, heads, links, now, _AT_COARSE + place)
    steps = min((now >> _MIDDLE) - (then >> _MIDDLE), _MIDDLE_LISTS)
    for i in range(steps):
        place = ((now >> _MIDDLE) - i) & (_MIDDLE_LISTS - 1)
        _deal(times, heads, links, now, _AT_MIDDLE + place)
    steps = min((now >> _FINE) - (then >> _FINE) + 1, _FINE_LISTS)
    for i in range(steps):
        place = ((now >> _FINE) - i) & (_FINE_LISTS - 1)
        _deal(times, heads, links, now, 1 + place)


@kernel
def due(times: Array, heads: Array, links: Array, upto: int, out: Array) -> tuple[int, int]:
    """List rows of the first list that are due, up to the size of ``out``.

    Returns how many are due and how many are not.
    """
    count = 0
    early = 0
    row = heads[0] - 1
    while row >= 0:
        if times[row] <= upto:
            if count < out.shape[0]:
                out[count] = row
            count += 1
        else:
            early += 1
        row = links[2 * row] - 1
    return count, early


@kernel
def rebuild(
    times: Array, heads: Array, links: Array, head: Array, width: int, rows: int, now: int
) -> None:
    """Make all lists anew from the times of live rows."""
    heads[:] = 0
    for row in range(rows):
        if head[row * width + 1] & np.uint64(3) == np.uint64(1) and times[row] != NEVER:
            _link(heads, links, row, _list_of(times[row], now))


@kernel
def replace(times: Array, heads: Array, links: Array, source: Array, target: Array) -> None:
    """Let target rows take the places of source rows; the times are copied already."""
    for i in range(source.shape[0]):
        row = source[i]
        if times[row] != NEVER:
            after, before = links[2 * row], links[2 * row + 1]
            new = target[i]
            links[2 * new] = after
            links[2 * new + 1] = before
            if before > 0:
                links[2 * before - 2] = new + 1
            else:
                heads[-1 - before] = new + 1
            if after > 0:
                links[2 * after - 1] = new + 1
