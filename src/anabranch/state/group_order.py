"""Rows in the order of their key groups, put in order some at a time to save memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Array = npt.NDArray[Any]

_AT_ONCE = 1 << 24
"""About how many bytes of rows are put in order at a time, so that memory does not grow with them.
"""
_LISTED = 1 << 23
"""It is noted of about so many rows at a time where they are. Others are passed over once for each
time."""
_TEXTS = (
    pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary,
)  # fmt: skip


def in_order(
    table: pa.Table, column: int, key_groups: int, segment: int
) -> Iterator[pa.RecordBatch]:
    """The rows in the order of their groups, in batches of whole groups where these are small."""
    batches = [batch for batch in table.to_batches() if batch.num_rows]
    counts = np.zeros(key_groups, np.int64)
    sizes = np.zeros(key_groups)
    for batch in batches:
        groups = batch.column(column).to_numpy()
        counts += np.bincount(groups, minlength=len(counts))
        sizes += np.bincount(groups, _row_bytes(batch), len(counts))
    width = max(1.0, table.nbytes / max(1, table.num_rows))
    for rows in _gathered(batches, column, counts, sizes):
        groups = rows.column(column).to_numpy()
        found = rows.take(pa.array(np.argsort(groups, kind="stable")))
        there = np.bincount(groups, minlength=len(counts))
        at = 0
        for low, high in _spans(there, segment / width):
            until = at + int(there[low : high + 1].sum())
            most = max(1, int(segment / width)) if low == high else until - at
            for start in range(at, until, most):
                yield found.slice(start, min(most, until - start))
            at = until


def _row_bytes(batch: pa.RecordBatch) -> Array:
    """About how many bytes each row has: a few texts may be as large as all other rows."""
    texts = np.zeros(batch.num_rows)
    for values in batch.columns:
        if any(each(values.type) for each in _TEXTS):
            lengths = pc.binary_length(values).fill_null(0)
            texts += lengths.to_numpy(zero_copy_only=False)
    found: Array = texts + max(1.0, (batch.nbytes - texts.sum()) / batch.num_rows)
    return found


def _spans(counts: Array, most: float) -> Iterator[tuple[int, int]]:
    """Consecutive groups with about so many in all: the first and the last of them."""
    first, last, rows = -1, -1, 0
    for group in np.flatnonzero(counts).tolist():
        if first >= 0 and rows + counts[group] > most:
            yield first, last
            first, rows = -1, 0
        first, last = (group if first < 0 else first), group
        rows += counts[group]
    if first >= 0:
        yield first, last


def _gathered(
    batches: Sequence[pa.RecordBatch], column: int, counts: Array, sizes: Array
) -> Iterator[pa.RecordBatch]:
    """The rows of some groups after those of others, some at a time.

    ``counts`` and ``sizes`` are the rows of each group and their bytes. The rows of a group are in
    the order in which they are, in pieces if they are very many.
    """
    for first, last in _spans(counts, _LISTED):
        listed = (_listed(batch, column, first, last) for batch in batches)
        if first == last:
            yield from _taken(listed, first, last)
            continue
        found = list(listed)
        for low, high in _spans(sizes[first : last + 1], _AT_ONCE):
            yield from _taken(found, first + low, first + high)


@dataclass(frozen=True, slots=True)
class _Listed:
    """Which rows of a batch are of some groups, in the order of these, and the group of each."""

    batch: pa.RecordBatch
    rows: Array
    groups: Array

    def take(self, first: int, last: int) -> pa.RecordBatch | None:
        """Those of some of the groups, in the order in which they are in the batch."""
        start, end = np.searchsorted(self.groups, [first, last + 1])
        if end - start == self.batch.num_rows:
            return self.batch
        if start == end:
            return None
        # In the order in which they are: memory is then read from one end to the other.
        return self.batch.take(pa.array(np.sort(self.rows[start:end])))


def _listed(batch: pa.RecordBatch, column: int, first: int, last: int) -> _Listed:
    groups = batch.column(column).to_numpy()
    of = np.flatnonzero((groups >= first) & (groups <= last)).astype(np.uint32)
    of = of[np.argsort(groups[of], kind="stable")]
    return _Listed(batch, of, groups[of])


def _taken(listed: Iterable[_Listed], first: int, last: int) -> Iterator[pa.RecordBatch]:
    """The rows of some groups; in pieces, if it is one group with very many."""
    found: list[pa.RecordBatch] = []
    size = 0
    for each in listed:
        some = each.take(first, last)
        if some is not None:
            found.append(some)
            size += some.nbytes
        if first == last and size > _AT_ONCE:
            yield _joined(found)
            found, size = [], 0
    if found:
        yield _joined(found)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
