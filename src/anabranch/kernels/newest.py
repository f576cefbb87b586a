"""Of the rows of several captures, the newest of every key."""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]


@kernel
def _same(a: int, b: int, words: Array, starts: Array, lens: Array, data: Array) -> bool:
    for w in range(words.shape[1]):
        if words[a, w] != words[b, w]:
            return False
    for p in range(lens.shape[1]):
        if lens[a, p] != lens[b, p]:
            return False
        for i in range(lens[a, p]):
            if data[starts[a, p] + i] != data[starts[b, p] + i]:
                return False
    return True


@kernel
def first_of_each(hashes: Array, words: Array, starts: Array, lens: Array, data: Array) -> Array:
    """Which rows have a key that no row before them has.

    A hash table of row numbers, by the upper bits of the hash: the lower ones are the key group,
    and there may be few groups. Keys of equal hash are compared as a whole.
    """
    bits = 1
    while (1 << bits) < 2 * len(hashes):
        bits += 1
    seen = np.full(1 << bits, -1, np.int32)
    keep = np.ones(len(hashes), np.bool_)
    for row in range(len(hashes)):
        slot = np.int64(hashes[row] >> np.uint64(64 - bits))
        while seen[slot] >= 0:
            other = seen[slot]
            if hashes[row] == hashes[other] and _same(row, other, words, starts, lens, data):
                keep[row] = False
                break
            slot = (slot + 1) & (len(seen) - 1)
        if keep[row]:
            seen[slot] = row
    return keep
