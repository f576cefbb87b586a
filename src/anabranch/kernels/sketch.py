"""HyperLogLog: counting different values approximately, from their hashes.

A row of 2**p registers; each hash picks one by its first p bits and raises it to the number of
leading zeros of the rest plus one. The estimate is Ertl's improved raw estimator
(arXiv:1702.01284), which needs neither bias tables nor a switch for small counts.
"""

from math import inf, log, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]

_A = np.uint64(0xBF58476D1CE4E5B9)
_B = np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(0x9E3779B97F4A7C15)


@kernel
def _mix(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * _A
    z = (z ^ (z >> np.uint64(27))) * _B
    return z ^ (z >> np.uint64(31))


@kernel
def hash_words(words: Array) -> Array:
    """64-bit hashes of int64 values."""
    out = np.empty(words.shape[0], np.uint64)
    for i in range(words.shape[0]):
        out[i] = _mix(np.uint64(words[i]) + _STEP)
    return out


@kernel
def hash_bytes(starts: Array, lens: Array, data: Array) -> Array:
    """64-bit hashes of byte strings, eight bytes at a time."""
    out = np.empty(starts.shape[0], np.uint64)
    for i in range(starts.shape[0]):
        h = _mix(np.uint64(lens[i]) + _STEP)
        at, end = starts[i], starts[i] + lens[i]
        while at < end:
            word = np.uint64(0)
            for b in range(min(8, end - at)):
                word |= np.uint64(data[at + b]) << np.uint64(8 * b)
            h = _mix(h ^ word) + _STEP
            at += 8
        out[i] = _mix(h)
    return out


@kernel
def observe(registers: Array, at: Array, hashes: Array, precision: int) -> None:
    """Take hashes into the registers of their rows."""
    shift, p = np.uint64(64 - precision), np.uint64(precision)
    top = np.uint64(1) << np.uint64(63)
    # A bit behind the last one that counts, so that the zeros end there.
    stop = np.uint64(1) << (p - np.uint64(1))
    for i in range(at.shape[0]):
        rest = (hashes[i] << p) | stop
        rank = np.uint8(1)
        while rest & top == 0:
            rest <<= np.uint64(1)
            rank += np.uint8(1)
        index = np.int64(hashes[i] >> shift)
        if rank > registers[at[i], index]:
            registers[at[i], index] = rank


@kernel
def merge(registers: Array, into: Array, source: Array) -> None:
    """Take the registers of source rows into other rows."""
    for i in range(into.shape[0]):
        for j in range(registers.shape[1]):
            if registers[source[i], j] > registers[into[i], j]:
                registers[into[i], j] = registers[source[i], j]


@kernel
def _sigma(x: float) -> float:
    if x == 1.0:
        return inf
    y, z, old = 1.0, x, -1.0
    while z != old:
        x *= x
        old = z
        z += x * y
        y += y
    return z


@kernel
def _tau(x: float) -> float:
    if x == 0.0 or x == 1.0:
        return 0.0
    y, z, old = 1.0, 1.0 - x, -1.0
    while z != old:
        x = sqrt(x)
        old = z
        y *= 0.5
        z -= (1.0 - x) ** 2 * y
    return z / 3.0


@kernel
def estimate(registers: Array, at: Array, precision: int) -> Array:
    """The number of different hashes that each row has seen, rounded."""
    out = np.empty(at.shape[0], np.int64)
    m, q = float(registers.shape[1]), 64 - precision
    counts = np.empty(q + 2, np.int64)
    for i in range(at.shape[0]):
        counts[:] = 0
        for j in range(registers.shape[1]):
            counts[registers[at[i], j]] += 1
        z = m * _tau(1.0 - counts[q + 1] / m)
        for k in range(q, 0, -1):
            z = 0.5 * (z + counts[k])
        z += m * _sigma(counts[0] / m)
        out[i] = np.int64(round(m * m / (2.0 * log(2.0) * z)))
    return out
