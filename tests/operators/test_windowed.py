"""Tumbling and sliding windows against a model that keeps all rows."""

from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from harness import every_way, run, same
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import aggregate
from streams import Row, arrow, batches_of, moment

from anabranch.operators import aggregates as ab
from anabranch.operators.windowed import WindowAggregate
from anabranch.operators.windows import TimeWindow

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("x", pa.float64()),
        ("s", pa.string()),
    ]
)
# Times on both sides of 1970, a few windows apart.
rows = st.fixed_dictionaries(
    {
        "k": st.sampled_from(["a", "b", None]),
        "t": st.none() | st.integers(-30, 30),
        "x": st.none() | st.integers(-40, 40).map(lambda n: n / 4),
        "s": st.none() | st.text("ab", max_size=2),
    }
)
WANTED = {
    "n": ("rows", "x"),
    "sum_x": ("sum", "x"),
    "mean_x": ("mean", "x"),
    "var_x": ("variance", "x"),
    "min_s": ("min", "s"),
    "max_x": ("max", "x"),
    "first_s": ("first", "s"),
    "first_x": ("first", "x"),
    "last_s": ("last", "s"),
    "last_x": ("last", "x"),
}
AGGREGATES = {
    name: ab.count() if kind == "rows" else getattr(ab, kind)(column)
    for name, (kind, column) in WANTED.items()
}


def results(members: list[Row]) -> Row:
    return {name: aggregate(kind, [r[c] for r in members]) for name, (kind, c) in WANTED.items()}


def timed(batches: list[list[Row]]) -> list[list[Row]]:
    return [[{**row, "at": moment(row["t"])} for row in batch] for batch in batches]


class Model:
    def __init__(self, window: TimeWindow, lateness: int, delay: int, mode: str) -> None:
        self.window, self.lateness, self.delay, self.mode = window, lateness, delay, mode
        self.members: dict[tuple[Any, int], list[Row]] = defaultdict(list)
        self.sent: set[tuple[Any, int]] = set()
        self.latest: int | None = None

    def batch(self, batch: list[Row]) -> tuple[list[Row], list[Row]]:
        size = self.window.size
        mark = None if self.latest is None else self.latest - self.delay
        late, changed = [], []
        for row in batch:
            taken = False
            for start in range(-200, 200):
                aligned = (start - self.window.offset) % self.window.slide == 0
                around = row["t"] is not None and start <= row["t"] < start + size
                if aligned and around and (mark is None or start + size + self.lateness > mark):
                    self.members[row["k"], start].append(row)
                    self.sent.discard((row["k"], start))
                    changed.append((row["k"], start))
                    taken = True
            if not taken:
                late.append({name: row[name] for name in SCHEMA.names})
        out = list(dict.fromkeys(changed))
        if self.mode == "append":
            ended = [w for w in self.members if mark is not None and w[1] + size <= mark]
            out = [w for w in ended if w not in self.sent]
            self.sent |= set(out)
        rows = [
            {"k": k, "window_start": moment(start), "window_end": moment(start + size)}
            | results(self.members[k, start])
            for k, start in out
        ]
        for k, start in list(self.members):
            if mark is not None and start + size + self.lateness <= mark:
                del self.members[k, start]
        times = [row["t"] for row in batch if row["t"] is not None]
        if times:
            self.latest = max(times) if self.latest is None else max(*times, self.latest)
        return rows, late


@settings(max_examples=40, deadline=None)
@given(
    batches=batches_of(rows),
    chunk=st.integers(1, 5),
    size=st.integers(1, 12),
    slide=st.integers(1, 12),
    offset=st.integers(-3, 3),
    delay=st.integers(0, 8),
    lateness=st.sampled_from([0, 0, 5, 12]),
    mode=st.sampled_from(["append", "update"]),
)
def test_windows_are_those_of_the_model(
    batches: list[list[Row]],
    chunk: int,
    size: int,
    slide: int,
    offset: int,
    delay: int,
    lateness: int,
    mode: str,
) -> None:
    window = TimeWindow(size, min(size, slide), "at", offset)
    batches = timed(batches)
    operator = WindowAggregate(
        window, AGGREGATES, watermark_delay=delay, allowed_lateness=lateness, mode=mode
    )
    result = every_way(operator, ["k"], arrow(batches, SCHEMA), chunk)
    model = Model(window, lateness, delay, mode)
    for batch, came_out, late in zip(batches, result.batches, result.late_batches, strict=True):
        expected, expected_late = model.batch(batch)
        assert same(came_out, expected, places=9)
        assert same(late, expected_late)
    assert {(row["k"], row["window_start"]) for row in result.state} == set(model.members)


def test_a_late_window_comes_out_again_within_the_lateness(tmp_path) -> None:
    batches = timed(
        [
            [{"k": "a", "t": 1, "x": 1.0, "s": None}],
            [{"k": "b", "t": 12, "x": 1.0, "s": None}],
            [],
            [{"k": "a", "t": 2, "x": 1.0, "s": None}, {"k": "c", "t": 3, "x": 1.0, "s": None}],
            [{"k": "b", "t": 16, "x": 1.0, "s": None}],
            [{"k": "a", "t": 2, "x": 1.0, "s": None}],
        ]
    )
    operator = WindowAggregate(
        TimeWindow(10, 10, "at"), {"n": ab.count()}, allowed_lateness=5, mode="append"
    )
    result = run(operator, ["k"], arrow(batches, SCHEMA), tmp_path)
    counts = [sorted((row["k"], row["n"]) for row in batch) for batch in result.batches]
    assert counts == [[], [], [("a", 1)], [("a", 2), ("c", 1)], [], []]
    assert [row["k"] for row in result.late] == ["a"]
    assert [(row["k"], row["window_start"]) for row in result.state] == [("b", 10)]


@pytest.mark.parametrize("mode", ["append", "update"])
def test_without_any_time_nothing_is_kept(mode: str, tmp_path) -> None:
    batches = timed([[{"k": "a", "t": None, "x": 1.0, "s": None}], []])
    operator = WindowAggregate(TimeWindow(10, 5, "at"), {"n": ab.count()}, mode=mode)
    result = run(operator, ["k"], arrow(batches, SCHEMA), tmp_path)
    assert (result.rows, result.state, len(result.late)) == ([], [], 1)
