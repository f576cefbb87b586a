"""Nanoseconds of CPU per row of the state table, step by step, in a steady state.

Run: python bench/table_micro.py [--folder /dev/shm] [--quick]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.kernels import reduce
from anabranch.state import schema
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version


class Clock:
    """CPU time per named step; the best of all rounds counts, as others use the machine too."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = defaultdict(list)
        self.last = time.process_time()

    def start(self) -> None:
        self.last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.taken[name].append(now - self.last)
        self.last = now


def hashes_of(numbers: np.ndarray) -> np.ndarray:
    mixed = numbers.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    return mixed * np.uint64(0x94D049BB133111EB)


def key_column(kind: str, numbers: np.ndarray) -> pa.Array:
    if kind == "int64":
        return pa.array(numbers)
    texts = pc.binary_join_element_wise("user-name", pa.array(numbers).cast(pa.string()), "-")
    return texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts


def run(folder: Path, kind: str, keys: int, batch: int, rounds: int) -> None:
    random = np.random.default_rng(1)
    field = pa.field("key", pa.int64() if kind == "int64" else pa.string())
    layout = TableLayout(KeyLayout([field]), schema.schema(n=schema.int64, total=schema.float64))
    table = StateTable.create(folder / f"{kind}-{keys}-{batch}", layout)
    clock = Clock()
    load = Clock()
    version = 0
    step = min(keys, 1_000_000)
    for start in range(0, keys, step):
        numbers = np.arange(start, start + step)
        encoded = layout.key.encode([key_column(kind, numbers)], hashes_of(numbers))
        table.begin(Version(version), 1)
        load.start()
        table.rows(encoded)
        load.lap("insert")
        table.mark_clean()
        table.finish()
        version += 1
    for _ in range(rounds):
        numbers = random.integers(0, keys, batch)
        column, hashes = key_column(kind, numbers), hashes_of(numbers)
        ones = np.ones(batch, np.int64)
        clock.start()
        encoded = layout.key.encode([column], hashes)
        clock.lap("encode")
        table.begin(Version(version), 1)
        clock.lap("begin")
        at = table.rows(encoded)
        clock.lap("rows")
        table.touch(at)
        clock.lap("touch (journal, dirty)")
        table.touch(at)
        clock.lap("touch again")
        reduce.add(table.column("n"), at, ones)
        clock.lap("add")
        table.mark_clean()
        table.finish()
        clock.lap("finish")
        version += 1
    best = {name: min(taken[1:]) / batch * 1e9 for name, taken in clock.taken.items()}
    counted = ("begin", "rows", "touch (journal, dirty)", "add", "finish")
    total = sum(best[name] for name in counted)
    print(f"\n{kind} keys: {batch:,} rows over {keys:,} keys, {table.bytes / 1e6:.0f} MB")
    for name, value in best.items():
        print(
            f"  {name:<24}{value:8.1f} ns/row" + ("" if name in counted else "  (not in the sum)")
        )
    print(f"  {'sum':<24}{total:8.1f} ns/row")
    inserts = [taken / step * 1e9 for taken in load.taken["insert"]]
    print(f"  insert of new keys: median {np.median(inserts):.1f}, last {inserts[-1]:.1f} ns/row")
    table.destroy()


def run_churn(folder: Path, keys: int, batch: int, rounds: int) -> None:
    """Every batch is of new keys, and as many old ones end: what windows do."""
    layout = TableLayout(
        KeyLayout([pa.field("key", pa.string())], sub=["window"]),
        schema.schema(n=schema.int64, total=schema.float64),
        timers=True,
    )
    table = StateTable.create(folder / f"churn-{keys}-{batch}", layout)
    clock = Clock()
    window = keys // batch
    for version in range(2 * window + rounds):
        numbers = np.arange(batch)
        column, hashes = key_column("string", numbers), hashes_of(numbers)
        windows = np.full(batch, version)
        encoded = layout.key.encode([column], hashes, [windows])
        clock.start()
        table.begin(Version(version), 1)
        clock.lap("begin")
        at = table.rows(encoded)
        clock.lap("rows")
        table.touch(at)
        clock.lap("touch")
        reduce.add(table.column("n"), at, np.ones(batch, np.int64))
        clock.lap("add")
        table.set_timer(at, np.full(batch, version + window) * 30_000_000)
        clock.lap("set_timer")
        due = table.due(version * 30_000_000)
        clock.lap("due")
        table.delete(due)
        clock.lap("delete")
        table.dirty()
        table.mark_clean()
        table.finish()
        clock.lap("finish")
    assert table.count == keys
    print(f"\nchurn of {batch:,} string keys with timers over {keys:,}, {table.bytes / 1e6:.0f} MB")
    for name, taken in clock.taken.items():
        print(f"  {name:<24}{np.median(taken[2 * window :]) / batch * 1e9:8.1f} ns/row")
    total = sum(np.median(taken[2 * window :]) for taken in clock.taken.values())
    print(f"  {'sum':<24}{total / batch * 1e9:8.1f} ns/row")
    table.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--quick", action="store_true", help="smaller tables, fewer rounds")
    options = parser.parse_args()
    rounds = 4 if options.quick else 8
    large = 2_000_000 if options.quick else 10_000_000
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run_churn(Path(folder), 1_000_000, 100_000, rounds)
        run(Path(folder), "int64", 1_000_000, 1_000_000, rounds)
        run(Path(folder), "int64", 1_000_000, 100_000, rounds)
        run(Path(folder), "int64", large, 100_000, 4 * rounds)
        run(Path(folder), "string", 1_000_000, 1_000_000, rounds)
        run(Path(folder), "string", large, 100_000, 4 * rounds)


if __name__ == "__main__":
    main()
