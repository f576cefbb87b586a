"""Groups of equal values inside one batch, numbered without sorting."""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]


@kernel
def number(values: Array) -> tuple[Array, Array]:
    """Number the different int64 values 0, 1, ... in the order in which they first occur.

    Returns the number of each value, and for each number the position where it first occurs.
    """
    size = 16
    while size < 2 * values.shape[0]:
        size *= 2
    mask = size - 1
    slots = np.full(size, -1, np.int64)
    numbers = np.empty(values.shape[0], np.int64)
    firsts = np.empty(values.shape[0], np.int64)
    found = 0
    for i in range(values.shape[0]):
        value = values[i]
        mixed = np.uint64(value) * np.uint64(0x9E3779B97F4A7C15)
        slot = np.int64(mixed >> np.uint64(32)) & mask
        while slots[slot] >= 0 and values[firsts[slots[slot]]] != value:
            slot = (slot + 1) & mask
        if slots[slot] < 0:
            slots[slot] = found
            firsts[found] = i
            found += 1
        numbers[i] = slots[slot]
    return numbers, firsts[:found].copy()


@kernel
def spread(counts: Array) -> tuple[Array, Array]:
    """Lay out ``counts[i]`` members for each i: the i of each member, and its number in i."""
    total = 0
    for i in range(counts.shape[0]):
        total += counts[i]
    owners = np.empty(total, np.int64)
    members = np.empty(total, np.int64)
    at = 0
    for i in range(counts.shape[0]):
        for member in range(counts[i]):
            owners[at] = i
            members[at] = member
            at += 1
    return owners, members
