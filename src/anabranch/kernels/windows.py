"""Which windows rows belong to, and which sessions become one."""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]

VACANT, OPEN, EMITTED = 0, 1, 2
"""The status of a state row of a window: not in use, taking rows, sent out and kept for late rows.

A row that comes late to an emitted window opens it again.
"""


@kernel
def assign(
    times: Array, valid: Array, size: int, slide: int, offset: int, closed: int
) -> tuple[Array, Array, Array]:
    """The sliding windows of each time that end after ``closed``.

    Returns the position of the time and the start of the window for every pair, those of one time
    next to each other and earliest first, and how many windows each time has.
    """
    n = times.shape[0]
    counts = np.zeros(n, np.int64)
    total = 0
    for i in range(n):
        if valid[i]:
            start = times[i] - (times[i] - offset) % slide
            while start + size > times[i] and start + size > closed:
                counts[i] += 1
                start -= slide
            total += counts[i]
    index = np.empty(total, np.int64)
    starts = np.empty(total, np.int64)
    at = 0
    for i in range(n):
        if counts[i]:
            start = times[i] - (times[i] - offset) % slide - (counts[i] - 1) * slide
            for _ in range(counts[i]):
                index[at] = i
                starts[at] = start
                start += slide
                at += 1
    return index, starts, counts


@kernel
def opened(status: Array, at: Array) -> Array:
    """Open the rows that are not open; the first position in ``at`` of each of them."""
    found = np.empty(at.shape[0], np.int64)
    count = 0
    for i in range(at.shape[0]):
        if status[at[i]] != OPEN:
            status[at[i]] = OPEN
            found[count] = i
            count += 1
    return found[:count].copy()


@kernel
def ordinals(counts: Array, at: Array) -> Array:
    """Number the rows of each key on from ``counts``, which moves along."""
    out = np.empty(at.shape[0], np.int64)
    for i in range(at.shape[0]):
        out[i] = counts[at[i]]
        counts[at[i]] += 1
    return out


@kernel
def assign_counted(numbers: Array, size: int, slide: int) -> tuple[Array, Array, Array]:
    """The count windows of each numbered row: window w has rows w * slide to w * slide + size - 1.

    Returns the position of the row, the window, and whether the row is the window's last.
    """
    total = 0
    for i in range(numbers.shape[0]):
        window = numbers[i] // slide
        while window >= 0 and window * slide + size > numbers[i]:
            total += 1
            window -= 1
    index = np.empty(total, np.int64)
    windows = np.empty(total, np.int64)
    full = np.empty(total, np.bool_)
    at = 0
    for i in range(numbers.shape[0]):
        window = numbers[i] // slide
        while window >= 0 and window * slide + size > numbers[i]:
            index[at] = i
            windows[at] = window
            full[at] = window * slide + size - 1 == numbers[i]
            window -= 1
            at += 1
    return index, windows, full


@kernel
def extend_first(
    starts: Array,
    ends: Array,
    untils: Array,
    slots: Array,
    status: Array,
    at: Array,
    times: Array,
    gap: int,
) -> tuple[Array, Array]:
    """Take rows into the only session of their key, if it has one session and they fit.

    Returns the positions of the rows that need another look, once all have been through this, and
    of those that opened a session.
    """
    others = np.empty(at.shape[0], np.int64)
    found = np.empty(at.shape[0], np.int64)
    left = new = 0
    for i in range(at.shape[0]):
        row, start, end = at[i], times[i], times[i] + gap
        if slots[row] <= 1 and status[row] == VACANT:
            slots[row] = 1
            starts[row] = start
            ends[row] = end
        elif slots[row] == 1 and start <= ends[row] and starts[row] <= end:
            starts[row] = min(starts[row], start)
            ends[row] = max(ends[row], end)
        else:
            others[left] = i
            left += 1
            continue
        untils[row] = max(untils[row], ends[row])
        if status[row] != OPEN:
            status[row] = OPEN
            found[new] = i
            new += 1
    return others[:left].copy(), found[:new].copy()


@kernel
def sweep(
    order: Array, owners: Array, starts: Array, ends: Array, slots: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Join intervals of one owner that overlap or touch.

    ``order`` sorts by owner and start. The first ``len(slots)`` intervals are sessions that exist,
    with their slot numbers; the others are rows. Returns the number of the joint interval of each
    interval and, for each joint interval, its start, its end, the existing session in the lowest
    slot (-1 for none), and whether it has any rows.
    """
    n = order.shape[0]
    joint = np.empty(n, np.int64)
    joint_starts = np.empty(n, np.int64)
    joint_ends = np.empty(n, np.int64)
    sessions = np.full(n, -1, np.int64)
    changed = np.zeros(n, np.bool_)
    count = 0
    for i in range(n):
        item = order[i]
        new = i == 0 or owners[item] != owners[order[i - 1]]
        if new or starts[item] > joint_ends[count - 1]:
            joint_starts[count] = starts[item]
            joint_ends[count] = ends[item]
            count += 1
        now = count - 1
        joint[item] = now
        joint_ends[now] = max(joint_ends[now], ends[item])
        if item >= slots.shape[0]:
            changed[now] = True
        elif sessions[now] < 0 or slots[item] < slots[sessions[now]]:
            sessions[now] = item
    return joint, joint_starts[:count], joint_ends[:count], sessions[:count], changed[:count]


@kernel
def free_slots(owners: Array, bounds: Array, used_owners: Array, used_slots: Array) -> Array:
    """The lowest slots not in use, one for each entry of ``owners``.

    No slot of owner o at or above ``bounds[o]`` is in use.
    """
    first = np.empty(bounds.shape[0] + 1, np.int64)
    first[0] = 0
    for o in range(bounds.shape[0]):
        first[o + 1] = first[o] + bounds[o]
    used = np.zeros(first[-1], np.bool_)
    for i in range(used_owners.shape[0]):
        used[first[used_owners[i]] + used_slots[i]] = True
    following = np.zeros(bounds.shape[0], np.int64)
    out = np.empty(owners.shape[0], np.int64)
    for i in range(owners.shape[0]):
        o = owners[i]
        slot = following[o]
        while slot < bounds[o] and used[first[o] + slot]:
            slot += 1
        out[i] = slot
        following[o] = slot + 1
    return out


@kernel
def settle(
    bounds: Array, untils: Array, keys: Array, owners: Array, slots: Array, ends: Array
) -> None:
    """Tell the first row of each key the slots now in use, and the latest end of a session."""
    for o in range(keys.shape[0]):
        bounds[keys[o]] = 0
    for i in range(owners.shape[0]):
        row = keys[owners[i]]
        bounds[row] = max(bounds[row], slots[i] + 1)
        untils[row] = max(untils[row], ends[i])
