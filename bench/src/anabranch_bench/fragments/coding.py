"""The rates of coding, on one core, without a network: figure 11.

Checksums are included. A state is coded from memory, and its rows are dropped: what a node does
that sends them. It is computed again from rows in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from anabranch.fragments import Encoder, Fragment, Reader, encode
from anabranch_bench.fragments.nodes import MB
from anabranch_bench.fragments.result import Bench, Panel

NAME = "coding"
BY_ROW, BY_SHAPE, BY_LOSS = "coding by row", "encode by shape", "recompute by loss"
PANELS = {
    BY_SHAPE: Panel("Encode by m and by k (11a, 11b)", "fragments", "seconds"),
    BY_LOSS: Panel("Recompute by lost data, 16 + 16 (11c)", "lost fragments of data", "seconds"),
    BY_ROW: Panel("Coding by the length of rows, 10 + 10", "KiB of a row", "GB/s"),
}
SIZE = 128 * MB
ENCODE_BAR, RECOMPUTE_BAR = 0.1, 2.0
_SHAPES = range(11, 21)
_LOSSES = range(17)
_ROWS = [1 << power for power in range(13, 21)]


class Took(NamedTuple):
    """Seconds of each round, by the clock and of the processor."""

    wall: list[float]
    cpu: list[float]


def run(bench: Bench, size: int = SIZE) -> None:
    """Measure all of it."""
    rounds = 3 if bench.quick else 9
    step = 3 if bench.quick else 1
    state = np.random.default_rng(bench.result.seed).integers(0, 256, size, np.uint8)
    with _one_core():
        bench.say(f"coding: {size / MB:.0f} MB, 10 + 10")
        encoded = timed(_coding(state, 10, 10), rounds)
        name = f"encode {size / MB:.0f} MB, 10 + 10, seconds"
        bench.at_most(name, median(encoded.wall), ENCODE_BAR)
        again = timed(_reading(encode(10, 10, state)[10:]), rounds)
        name = "recompute with all ten fragments of data lost, GB/s"
        bench.at_least(name, size / median(again.wall) / 1e9, RECOMPUTE_BAR)
        bench.note(
            f"coding: the bars are of the median time of {rounds} rounds; of CPU time it is "
            f"{median(encoded.cpu):.3f} s and {size / median(again.cpu) / 1e9:.2f} GB/s"
        )
        for shape in _SHAPES[::step]:
            for curve, m, k in (("m, k = 10", shape, 10), ("k, m = 10", 10, shape)):
                took = timed(_coding(state, m, k), rounds)
                bench.timed(BY_SHAPE, curve, shape, took.wall, size)
                bench.timed(BY_SHAPE, f"{curve}, CPU", shape, took.cpu, size)
        fragments = encode(16, 16, state)
        for loss in _LOSSES[:: step + 1]:
            took = timed(_reading(fragments[loss:]), rounds)
            bench.timed(BY_LOSS, "recompute", loss, took.wall, size)
            bench.timed(BY_LOSS, "recompute, CPU", loss, took.cpu, size)
        for row in _ROWS[::step]:
            coded = timed(_coding(state, 10, 10, row), rounds)
            again = timed(_reading(encode(10, 10, state, row=row)[10:]), rounds)
            for curve, took in (("encode", coded), ("recompute, all data lost", again)):
                bench.point(BY_ROW, curve, row >> 10, size / median(took.wall) / 1e9)
                bench.point(BY_ROW, f"{curve}, CPU", row >> 10, size / median(took.cpu) / 1e9)


def timed(run: Callable[[], object], rounds: int) -> Took:
    """The times of each round, after one that does not count."""
    wall, cpu = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter(), time.thread_time()
        run()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.thread_time() - start[1])
    return Took(wall[1:], cpu[1:])


def _coding(state: Any, data: int, parity: int, row: int | None = None) -> Callable[[], None]:
    def run() -> None:
        for _ in Encoder(data, parity, row=row).stripes([state]):
            pass

    return run


def _reading(fragments: list[Fragment]) -> Callable[[], None]:
    def run() -> None:
        for _ in Reader(fragments).read():
            pass

    return run


@contextmanager
def _one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
