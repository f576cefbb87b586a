"""Spark's ``xxhash64``, value for value: XXH64 whose seed is the hash of the columns before.

Nulls leave the hash as it is. ``valid`` is empty when there are none.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]

_uint: Any = np.uint64

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_FOUR, _EIGHT = np.uint64(4), np.uint64(8)


@kernel
def _rotated(value: Any, by: int) -> Any:
    return (value << _uint(by)) | (value >> _uint(64 - by))


@kernel
def _finished(value: Any) -> Any:
    value = (value ^ (value >> _uint(33))) * _P2
    value = (value ^ (value >> _uint(29))) * _P3
    return value ^ (value >> _uint(32))


@kernel
def _round(lane: Any, word: Any) -> Any:
    return _rotated(lane + word * _P2, 31) * _P1


@kernel
def _with_word(value: Any, word: Any) -> Any:
    return _rotated(value ^ _round(_uint(0), word), 27) * _P1 + _P4


@kernel
def _with_half(value: Any, half: Any) -> Any:
    return _rotated(value ^ (half * _P1), 23) * _P2 + _P3


@kernel
def _little(data: Array, at: Any, count: int) -> Any:
    word = _uint(0)
    for b in range(count):
        word |= _uint(data[at + b]) << _uint(8 * b)
    return word


@kernel
def longs(values: Array, valid: Array, hashes: Array) -> None:
    """Go on with a column of 64-bit values."""
    nulls = valid.shape[0] > 0
    for i in range(values.shape[0]):
        if not nulls or valid[i]:
            hashes[i] = _finished(_with_word(hashes[i] + _P5 + _EIGHT, _uint(values[i])))


@kernel
def ints(values: Array, valid: Array, hashes: Array) -> None:
    """Go on with a column of 32-bit values, given as unsigned ones."""
    nulls = valid.shape[0] > 0
    for i in range(values.shape[0]):
        if not nulls or valid[i]:
            hashes[i] = _finished(_with_half(hashes[i] + _P5 + _FOUR, _uint(values[i])))


@kernel
def strings(starts: Array, lens: Array, data: Array, hashes: Array) -> None:
    """Go on with a column of byte strings; a length of -1 is a null."""
    for i in range(starts.shape[0]):
        if lens[i] < 0:
            continue
        at, seed = starts[i], hashes[i]
        end = at + lens[i]
        if lens[i] >= 32:
            a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
            while at + 32 <= end:
                a = _round(a, _little(data, at, 8))
                b = _round(b, _little(data, at + 8, 8))
                c = _round(c, _little(data, at + 16, 8))
                d = _round(d, _little(data, at + 24, 8))
                at += 32
            value = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
            for lane in (a, b, c, d):
                value = (value ^ _round(_uint(0), lane)) * _P1 + _P4
        else:
            value = seed + _P5
        value += _uint(lens[i])
        while at + 8 <= end:
            value = _with_word(value, _little(data, at, 8))
            at += 8
        if at + 4 <= end:
            value = _with_half(value, _little(data, at, 4))
            at += 4
        while at < end:
            value = _rotated(value ^ (_uint(data[at]) * _P5), 11) * _P1
            at += 1
        hashes[i] = _finished(value)
