"""Reductions of batch values into state columns, where a row may occur many times.

``column`` and its companions are live state columns, ``at`` the state row of each value. ``seen``
is True in the rows that have had a value.
"""

from typing import Any

import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]


@kernel
def count(column: Array, at: Array) -> None:
    """column[at] += 1, once per occurrence."""
    for i in range(at.shape[0]):
        column[at[i]] += 1


@kernel
def add(column: Array, at: Array, values: Array) -> None:
    """column[at] += values, once per occurrence."""
    for i in range(at.shape[0]):
        column[at[i]] += values[i]


@kernel
def minimum(column: Array, at: Array, values: Array) -> None:
    """column[at] = min(column[at], values), once per occurrence."""
    for i in range(at.shape[0]):
        if values[i] < column[at[i]]:
            column[at[i]] = values[i]


@kernel
def maximum(column: Array, at: Array, values: Array) -> None:
    """column[at] = max(column[at], values), once per occurrence."""
    for i in range(at.shape[0]):
        if values[i] > column[at[i]]:
            column[at[i]] = values[i]


@kernel
def add_seen(column: Array, seen: Array, at: Array, values: Array) -> None:
    """Add, and remember that there was something to add."""
    for i in range(at.shape[0]):
        row = at[i]
        column[row] += values[i]
        seen[row] = True


@kernel
def add_counted(column: Array, counts: Array, at: Array, values: Array) -> None:
    """Add, and count the values that were added."""
    for i in range(at.shape[0]):
        row = at[i]
        column[row] += values[i]
        counts[row] += 1


@kernel
def least(column: Array, seen: Array, at: Array, values: Array) -> None:
    """Keep the smallest value; not-a-number is greater than every number."""
    for i in range(at.shape[0]):
        row, value = at[i], values[i]
        old = column[row]
        if not seen[row] or value < old or (old != old and value == value):
            column[row] = value
            seen[row] = True


@kernel
def greatest(column: Array, seen: Array, at: Array, values: Array) -> None:
    """Keep the greatest value; not-a-number is greater than every number."""
    for i in range(at.shape[0]):
        row, value = at[i], values[i]
        old = column[row]
        if not seen[row] or value > old or (value != value and old == old):
            column[row] = value
            seen[row] = True


@kernel
def first(column: Array, seen: Array, at: Array, values: Array) -> None:
    """Keep the first value that each row ever gets."""
    for i in range(at.shape[0]):
        row = at[i]
        if not seen[row]:
            column[row] = values[i]
            seen[row] = True


@kernel
def last(column: Array, seen: Array, at: Array, values: Array) -> None:
    """Keep the newest value."""
    for i in range(at.shape[0]):
        row = at[i]
        column[row] = values[i]
        seen[row] = True


@kernel
def earliest(
    column: Array, seen: Array, times: Array, at: Array, values: Array, given: Array
) -> None:
    """Keep the value of the earliest time, the first that came of those with equal times."""
    for i in range(at.shape[0]):
        row = at[i]
        if not seen[row] or given[i] < times[row]:
            column[row] = values[i]
            times[row] = given[i]
            seen[row] = True


@kernel
def latest(
    column: Array, seen: Array, times: Array, at: Array, values: Array, given: Array
) -> None:
    """Keep the value of the latest time, the last that came of those with equal times."""
    for i in range(at.shape[0]):
        row = at[i]
        if not seen[row] or given[i] >= times[row]:
            column[row] = values[i]
            times[row] = given[i]
            seen[row] = True


@kernel
def moments(counts: Array, means: Array, squares: Array, at: Array, values: Array) -> None:
    """Take values into count, mean and sum of squared deviations (Welford's method)."""
    for i in range(at.shape[0]):
        row = at[i]
        counts[row] += 1
        delta = values[i] - means[row]
        step = delta / counts[row]
        means[row] += step
        squares[row] += delta * (delta - step)


@kernel
def merge_moments(counts: Array, means: Array, squares: Array, into: Array, source: Array) -> None:
    """Take the moments of source rows into other rows (Chan's method)."""
    for i in range(into.shape[0]):
        a, b = into[i], source[i]
        if counts[b] == 0:
            continue
        if counts[a] == 0:
            counts[a], means[a], squares[a] = counts[b], means[b], squares[b]
            continue
        n, m = float(counts[a]), float(counts[b])
        delta = means[b] - means[a]
        step = delta / (n + m)
        means[a] += step * m
        squares[a] += squares[b] + delta * step * n * m
        counts[a] += counts[b]
