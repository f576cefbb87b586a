"""Which of several strings a state row keeps: positions are chosen, bytes are not moved.

``groups`` numbers the state row of each value from 0 to ``count`` - 1.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]


@kernel
def last_of(groups: Array, count: int) -> Array:
    """The position of the last value of each group."""
    chosen = np.empty(count, np.int64)
    for i in range(groups.shape[0]):
        chosen[groups[i]] = i
    return chosen


@kernel
def earliest_of(groups: Array, count: int, times: Array) -> Array:
    """The position of the earliest value of each group, the first of equals."""
    chosen = np.full(count, -1, np.int64)
    for i in range(groups.shape[0]):
        old = chosen[groups[i]]
        if old < 0 or times[i] < times[old]:
            chosen[groups[i]] = i
    return chosen


@kernel
def latest_of(groups: Array, count: int, times: Array) -> Array:
    """The position of the latest value of each group, the last of equals."""
    chosen = np.full(count, -1, np.int64)
    for i in range(groups.shape[0]):
        old = chosen[groups[i]]
        if old < 0 or times[i] >= times[old]:
            chosen[groups[i]] = i
    return chosen


@kernel
def compare(starts: Array, lens: Array, data: Array, a: int, b: int) -> int:
    """Negative, zero or positive as string a is before, equal to or after b, by bytes."""
    for j in range(min(lens[a], lens[b])):
        x, y = data[starts[a] + j], data[starts[b] + j]
        if x != y:
            return -1 if x < y else 1
    return int(lens[a]) - int(lens[b])


@kernel
def extreme_of(
    groups: Array, count: int, starts: Array, lens: Array, data: Array, sign: int
) -> Array:
    """The position of the smallest (sign 1) or greatest (sign -1) string of each group.

    The first ``count`` strings are what the groups have now, with length -1 where that is nothing;
    the string of value i is number ``count + i``.
    """
    chosen = np.arange(count)
    for i in range(groups.shape[0]):
        old = chosen[groups[i]]
        if lens[old] < 0 or sign * compare(starts, lens, data, count + i, old) < 0:
            chosen[groups[i]] = count + i
    return chosen
