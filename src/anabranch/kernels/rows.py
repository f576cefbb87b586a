"""Passes over row records: marks, states and the free list.

``marks`` has one number per row: when it was last touched. ``head`` is described in
:mod:`anabranch.kernels.index`; its second word ends in two bits of state.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel
from anabranch.kernels._prefetch import prefetch

Array = npt.NDArray[Any]

_int: Any = np.int64  # as Any, so that its results count as int for the type checker

_FREE, _LIVE, _DEAD = np.uint64(0), np.uint64(1), np.uint64(2)
_STATE = np.uint64(3)
_AHEAD = 16


@kernel
def touch(
    marks: Array, rows: Array, begun: int, tick: int, clean: int, first: Array, dirty: Array
) -> tuple[int, int]:
    """Mark rows with ``tick``.

    Rows not marked since ``begun`` are listed in ``first``: their images are to be kept. Rows not
    marked since ``clean`` are listed in ``dirty``.
    """
    images = 0
    fresh = 0
    count = rows.shape[0]
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(marks, rows[i + _AHEAD])
        row = rows[i]
        mark = marks[row]
        if mark != tick:
            marks[row] = tick
            if mark < begun:
                first[images] = row
                images += 1
            if mark <= clean:
                dirty[fresh] = row
                fresh += 1
    return images, fresh


@kernel
def states(head: Array, width: int, rows: Array, out: Array) -> None:
    """The second word of each row's record: its group and its state."""
    count = rows.shape[0]
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(head, rows[i + _AHEAD] * width + 1)
        out[i] = head[rows[i] * width + 1]


@kernel
def marked(marks: Array, last: int, since: int, out: Array) -> int:
    """List the rows before ``last`` with a later mark than ``since``; ``out`` has one to spare."""
    count = 0
    for row in range(last):
        out[count] = row
        # Without a branch: which rows these are cannot be foreseen.
        count += _int(marks[row] > since)
    return count


@kernel
def by_state(head: Array, width: int, rows: Array, live: Array, dead: Array) -> tuple[int, int]:
    """List the live ones of some rows, and the dead ones, in their order."""
    count = rows.shape[0]
    living = 0
    gone = 0
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(head, rows[i + _AHEAD] * width + 1)
        state = head[rows[i] * width + 1] & _STATE
        if state == _LIVE:
            live[living] = rows[i]
            living += 1
        elif state == _DEAD:
            dead[gone] = rows[i]
            gone += 1
    return living, gone


@kernel
def records(
    head: Array, width: int, rows: Array, hashes: Array, groups: Array, rest: Array
) -> None:
    """What is in the records of rows: the hash, the group, and the words that are left."""
    count = rows.shape[0]
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(head, rows[i + _AHEAD] * width)
        at = rows[i] * width
        hashes[i] = head[at]
        groups[i] = head[at + 1] >> np.uint64(2)
        for word in range(rest.shape[1]):
            rest[i, word] = head[at + 2 + word]


@kernel
def change(head: Array, width: int, rows: Array, old: int, new: int, done: Array) -> int:
    """Bring rows from one state to another; lists each that was in the old one, once."""
    count = 0
    for i in range(rows.shape[0]):
        at = rows[i] * width + 1
        if _int(head[at] & _STATE) == old:
            head[at] = (head[at] & ~_STATE) | np.uint64(new)
            done[count] = rows[i]
            count += 1
    return count


@kernel
def in_state(head: Array, width: int, first: int, last: int, state: int, out: Array) -> int:
    """List the rows of a range that are in this state."""
    count = 0
    for row in range(first, last):
        if _int(head[row * width + 1] & _STATE) == state:
            out[count] = row
            count += 1
    return count


@kernel
def of_groups(head: Array, width: int, rows: Array, member: Array, out: Array) -> int:
    """List those of some rows whose group is one of the members; ``out`` has one to spare."""
    count = 0
    total = rows.shape[0]
    for i in range(total):
        if i + _AHEAD < total:
            prefetch(head, rows[i + _AHEAD] * width + 1)
        out[count] = rows[i]
        count += _int(member[_int(head[rows[i] * width + 1] >> np.uint64(2))])
    return count


@kernel
def last_of_groups(
    head: Array, width: int, first: int, last: int, member: Array, out: Array
) -> tuple[int, int]:
    """List the live rows of some groups from the end of a range on down, until ``out`` is full.

    Returns how many they are, and the row that was looked at last.
    """
    count = 0
    row = last
    while row > first and count < out.shape[0]:
        row -= 1
        info = head[row * width + 1]
        if info & _STATE == _LIVE and member[_int(info >> np.uint64(2))]:
            out[count] = row
            count += 1
    return count, row


@kernel
def restore(head: Array, width: int, rows: Array, images: Array) -> None:
    """Put the second words of records back."""
    for i in range(rows.shape[0]):
        head[rows[i] * width + 1] = images[i]


@kernel
def release(
    head: Array, width: int, marks: Array, clean: int, rows: int, queue: Array, out: Array
) -> int:
    """List the queued rows that are dead and whose end is in a checkpoint, or need be in none.

    The latter were shed, and are queued as ``-1 - row``. A row can be queued twice, come back to
    life, or die again after the checkpoint. The caller changes their state afterwards; a row listed
    twice is caught there.
    """
    count = 0
    for i in range(queue.shape[0]):
        row = _int(queue[i])
        shed = row < 0
        if shed:
            row = -1 - row
        dead = row < rows and head[row * width + 1] & _STATE == _DEAD
        if dead and (shed or marks[row] <= clean):
            out[count] = row
            count += 1
    return count


@kernel
def place(head: Array, width: int, rows: Array, first: int) -> None:
    """Tell rows their places on the free stack: a free row's first word is for that."""
    for i in range(rows.shape[0]):
        head[rows[i] * width] = np.uint64(first + i)


@kernel
def evict(free: Array, count: int, head: Array, width: int, first: int, last: int) -> int:
    """Take the free rows of a range off the stack, wherever they are. Returns what is left."""
    for row in range(first, last):
        if head[row * width + 1] & _STATE == _FREE:
            place = _int(head[row * width])
            count -= 1
            top = _int(free[count])
            free[place] = top
            head[top * width] = np.uint64(place)
    return count


@kernel
def copy(array: Array, width: int, source: Array, target: Array) -> None:
    """Copy whole records from source rows to target rows."""
    for i in range(source.shape[0]):
        for w in range(width):
            array[target[i] * width + w] = array[source[i] * width + w]


@kernel
def settle(
    head: Array,
    width: int,
    marks: Array,
    rows: int,
    free: Array,
    dirty: Array,
    clean: int,
) -> None:
    """Make states and marks agree with the free stack and the list of changed rows.

    What a version that did not finish left behind is of no account: rows it took from the stack
    are free again, and marks say no more than whether a row is in the list.
    """
    for row in range(rows):
        if marks[row] > clean:
            marks[row] = clean
    for i in range(dirty.shape[0]):
        marks[dirty[i]] = clean + 1
    for i in range(free.shape[0]):
        row = _int(free[i])
        head[row * width] = np.uint64(i)
        head[row * width + 1] = head[row * width + 1] & ~_STATE
