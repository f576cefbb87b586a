"""The input of the benchmarks: Parquet files from a seed, a fixed number of them per batch.

Both sides read the same files. Nothing is compressed or dictionary-encoded, so that reading costs
little next to the state, which is what is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch_bench.plan import FILES_PER_BATCH, Phase, Workload

Array = npt.NDArray[Any]

SCHEMAS = {Workload.KEYED: "key BIGINT, x BIGINT", Workload.WORDS: "at TIMESTAMP, text STRING"}
"""The columns of the files, in Spark's notation."""

SENTENCE = 140
"""Bytes in a sentence: one word of seven letters and nineteen of six, with spaces between."""

_EVENT_STEP = 5_000_000  # microseconds of event time in a batch: six batches fill a window of 30 s
_EVENT_START = 1_700_000_000_000_000
_FIRST_MTIME = 1_700_000_000


def write(
    folder: Path,
    workload: Workload,
    phases: Sequence[Phase],
    seed: int,
    tick: Callable[[int], None] = lambda done: None,
) -> Path:
    """Write the files of all batches of these phases; ``tick`` is told how many are done."""
    folder.mkdir(parents=True)
    make = _keyed if workload is Workload.KEYED else _words
    file = 0
    for number, (phase, index) in enumerate(_batches(phases)):
        table = make(phase, index, number, np.random.default_rng([seed, number]))
        step = -(-len(table) // FILES_PER_BATCH)
        for part in range(FILES_PER_BATCH):
            path = folder / f"{file:06}.parquet"
            pq.write_table(
                table.slice(part * step, step), path, compression="none", use_dictionary=False
            )
            # Spark's file source takes files in the order of their modification times.
            os.utime(path, (_FIRST_MTIME + file, _FIRST_MTIME + file))
            file += 1
        tick(number + 1)
    return folder


def _batches(phases: Sequence[Phase]) -> Iterator[tuple[Phase, int]]:
    for phase in phases:
        for index in range(phase.batches):
            yield phase, index


def draw_keys(phase: Phase, index: int, rng: np.random.Generator) -> Array:
    """The keys of one batch: numbers spread over all of int64, so that no side gains by order."""
    if phase.fill_from is None:
        picked = rng.integers(0, phase.keys, phase.rows)
    else:
        start = phase.fill_from + index * phase.rows
        picked = np.arange(start, min(start + phase.rows, phase.keys))
    return (picked.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def _keyed(phase: Phase, index: int, number: int, rng: np.random.Generator) -> pa.Table:
    keys = draw_keys(phase, index, rng)
    return pa.table({"key": keys, "x": rng.integers(0, 100, len(keys))})


def _words(phase: Phase, index: int, number: int, rng: np.random.Generator) -> pa.Table:
    start = _EVENT_START + number * _EVENT_STEP
    at = np.sort(rng.integers(start, start + _EVENT_STEP, phase.rows))
    return pa.table(
        {"at": pa.array(at, pa.timestamp("us", tz="UTC")), "text": sentences(phase, rng)}
    )


def sentences(phase: Phase, rng: np.random.Generator) -> pa.Array:
    """Sentences of 140 bytes; the frequency of words falls with their rank (Zipf)."""
    words = 20
    ranks = np.exp(rng.random((phase.rows, words)) * np.log(phase.keys)).astype(np.int64) - 1
    text = np.full((phase.rows, SENTENCE), ord(" "), np.uint8)
    text[:, :7] = _letters(phase.keys, 7)[ranks[:, 0]]
    six = _letters(phase.keys, 6)
    for word in range(1, words):
        at = 8 + 7 * (word - 1)
        text[:, at : at + 6] = six[ranks[:, word]]
    offsets = np.arange(phase.rows + 1, dtype=np.int32) * SENTENCE
    return pa.StringArray.from_buffers(
        phase.rows, pa.py_buffer(offsets), pa.py_buffer(text.reshape(-1))
    )


def _letters(words: int, length: int) -> Array:
    # A different word for each number: a bijection on the words of that length, then base 26.
    numbers = (np.arange(words, dtype=np.int64) * 150_000_001) % 26**length
    powers = 26 ** np.arange(length, dtype=np.int64)
    letters: Array = (ord("a") + (numbers[:, None] // powers) % 26).astype(np.uint8)
    return letters
