"""Loops over keys: hash mixing, and the bytes of nested values.

``at`` arrays hold the position of each value in the bytes, -1 for a value that is not there
because it stands under a null.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]


@kernel
def mix(hashes: Array, sub: Array, out: Array) -> None:
    """Combine 64-bit hashes with int64 values (splitmix64's finaliser, twice).

    For a known value this can be undone, and :mod:`anabranch.kernels.unmix` does.
    """
    for i in range(hashes.shape[0]):
        z = np.uint64(sub[i]) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = hashes[i] ^ z ^ (z >> np.uint64(31))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out[i] = z ^ (z >> np.uint64(31))


@kernel
def gather_bytes(starts: Array, lens: Array, data: Array, offsets: Array, out: Array) -> None:
    """Copy byte ranges one after the other, each to its offset; nulls have length -1."""
    for i in range(starts.shape[0]):
        start, offset = starts[i], offsets[i]
        for j in range(lens[i]):
            out[offset + j] = data[start + j]


@kernel
def write_words(valid: Array, words: Array, at: Array, out: Array) -> None:
    """Write a null flag and the bytes of fixed-width values."""
    for i in range(at.shape[0]):
        p = at[i]
        if p >= 0:
            out[p] = valid[i]
            for w in range(words.shape[1]):
                word = words[i, w]
                for b in range(8):
                    out[p + 1 + 8 * w + b] = (word >> (8 * b)) & 0xFF


@kernel
def read_words(data: Array, at: Array, valid: Array, words: Array) -> None:
    """Read what :func:`write_words` wrote."""
    for i in range(at.shape[0]):
        p = at[i]
        valid[i] = p >= 0 and data[p] == 1
        for w in range(words.shape[1]):
            word = np.int64(0)
            if valid[i]:
                for b in range(8):
                    word |= np.int64(data[p + 1 + 8 * w + b]) << (8 * b)
            words[i, w] = word


@kernel
def write_u32(value: int, p: int, out: Array) -> None:
    """Write a count or length of four bytes."""
    for b in range(4):
        out[p + b] = (value >> (8 * b)) & 0xFF


@kernel
def read_u32(data: Array, p: int) -> int:
    """Read a count or length of four bytes."""
    value = np.int64(0)
    for b in range(4):
        value |= np.int64(data[p + b]) << (8 * b)
    return int(value)


@kernel
def write_strings(starts: Array, lens: Array, data: Array, at: Array, out: Array) -> None:
    """Write a null flag, the length and the bytes of strings."""
    for i in range(at.shape[0]):
        p = at[i]
        if p >= 0 and lens[i] >= 0:
            out[p] = 1
            write_u32(lens[i], p + 1, out)
            for j in range(lens[i]):
                out[p + 5 + j] = data[starts[i] + j]


@kernel
def read_strings(data: Array, at: Array, starts: Array, lens: Array, ends: Array) -> None:
    """Find strings that :func:`write_strings` wrote; length -1 where null."""
    for i in range(at.shape[0]):
        p = at[i]
        starts[i], lens[i], ends[i] = 0, -1, p + 1
        if p >= 0 and data[p] == 1:
            lens[i] = read_u32(data, p + 1)
            starts[i] = p + 5
            ends[i] = p + 5 + lens[i]


@kernel
def list_sizes(valid: Array, offsets: Array, sizes: Array, table: bool, out: Array) -> None:
    """Encoded size of each list, from the encoded sizes of all elements."""
    for i in range(out.shape[0]):
        size = 1
        if valid[i]:
            size += 4
            for j in range(offsets[i], offsets[i + 1]):
                size += sizes[j]
            if table:
                size += 4 * (offsets[i + 1] - offsets[i])
        out[i] = size


@kernel
def write_lists(
    valid: Array,
    offsets: Array,
    sizes: Array,
    table: bool,
    at: Array,
    out: Array,
    element_at: Array,
) -> None:
    """Write null flags, counts and size tables of lists; say where the elements go."""
    for i in range(at.shape[0]):
        p = at[i]
        first, last = offsets[i], offsets[i + 1]
        if p < 0 or not valid[i]:
            for j in range(first, last):
                element_at[j] = -1
            continue
        out[p] = 1
        write_u32(last - first, p + 1, out)
        p += 5
        if table:
            for j in range(first, last):
                write_u32(sizes[j], p, out)
                p += 4
        for j in range(first, last):
            element_at[j] = p
            p += sizes[j]


@kernel
def read_counts(data: Array, at: Array, valid: Array, offsets: Array) -> None:
    """Read null flags and counts of lists; counts add up in ``offsets``."""
    offsets[0] = 0
    for i in range(at.shape[0]):
        p = at[i]
        valid[i] = p >= 0 and data[p] == 1
        offsets[i + 1] = offsets[i] + (read_u32(data, p + 1) if valid[i] else 0)


@kernel
def read_elements(
    data: Array,
    at: Array,
    valid: Array,
    offsets: Array,
    size: int,
    element_at: Array,
    ends: Array,
) -> None:
    """Say where the elements of lists are; a ``size`` of -1 means that a size table tells."""
    for i in range(at.shape[0]):
        p = at[i]
        if not valid[i]:
            ends[i] = p + 1
            continue
        first, last = offsets[i], offsets[i + 1]
        table = p + 5
        p = table if size >= 0 else table + 4 * (last - first)
        for j in range(first, last):
            element_at[j] = p
            p += size if size >= 0 else read_u32(data, table + 4 * (j - first))
        ends[i] = p
