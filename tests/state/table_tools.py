"""Small tables for tests: keys whose hashes collide at will, and housekeeping that starts early."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from anabranch.state import heap, index, maintenance, schema, storage
from anabranch.state.keys import KeyBatch, KeyLayout
from anabranch.state.table import StateTable, TableLayout

Key = tuple[str | None, int]
GOLDEN = 0x9E3779B97F4A7C15
INVERSE = pow(GOLDEN, -1, 1 << 64)


def scattered(key: Key) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def same(key: Key) -> int:
    return 42


def same_tag(key: Key) -> int:
    """Different hashes whose upper 32 bits are the same after the index has mixed them."""
    return ((7 << 32) | (scattered(key) & 0xFFFFFFFF)) * INVERSE % (1 << 64)


Hash = Callable[[Key], int]

LAYOUT = TableLayout(
    KeyLayout([pa.field("name", pa.string())], sub=["window"]),
    schema.schema(
        n=schema.int64,
        text=schema.string,
        small=schema.Column("small", schema.int8, default=7),
        numbers=schema.vector(schema.float32, 3),
        raw=schema.binary,
    ),
    timers=True,
)


def encode(
    keys: Sequence[Key], hashing: Hash = scattered, layout: TableLayout = LAYOUT
) -> KeyBatch:
    names = pa.array([name for name, _ in keys], pa.string())
    windows = np.array([window for _, window in keys], np.int64)
    batch = layout.key.encode([names], np.zeros(len(keys), np.int64), [windows])
    hashes = np.array([hashing(key) for key in keys], np.uint64)
    return KeyBatch(
        hashes,
        (hashes % np.uint64(128)).astype(np.uint16),
        batch.words,
        batch.starts,
        batch.lens,
        batch.data,
    )


def decoded(table: StateTable, rows: np.ndarray) -> list[Key]:
    names, windows = table.keys(rows)
    return list(zip(names.to_pylist(), windows.to_pylist(), strict=True))


def content(table: StateTable) -> dict[Key, tuple[Any, ...]]:
    """Everything in a table of :data:`LAYOUT`."""
    rows = table.live()
    columns = [
        table.get("n", rows).tolist(),
        table.get("text", rows).to_pylist(),
        table.get("small", rows).tolist(),
        list(map(tuple, table.get("numbers", rows).tolist())),
        table.get("raw", rows).to_pylist(),
        table.timers(rows).to_pylist(),
    ]
    found = dict(zip(decoded(table, rows), zip(*columns, strict=True), strict=True))
    assert len(found) == len(rows) == table.count, "a key has two rows"
    return found


@contextmanager
def eager_housekeeping(ring: int = 1 << 15) -> Iterator[None]:
    """Thresholds so low, and rings so small, that a handful of rows makes everything happen."""
    with (
        mock.patch.multiple(
            maintenance,
            _RELEASE_ROWS=3,
            _COMPACT_FROM=4,
            _COMPACT_ROWS=3,
            _CLEAN_BYTES=256,
            _LAST_TICK=20,
        ),
        mock.patch.object(heap, "_CLEAN_FROM", 64),
        mock.patch.object(storage, "RING_BYTES", ring),
        mock.patch.multiple(index, _SPARSE_SLOTS=8),
    ):
        yield


def table_of(folder: Path, layout: TableLayout = LAYOUT) -> StateTable:
    return StateTable.create(folder / "table", layout)
