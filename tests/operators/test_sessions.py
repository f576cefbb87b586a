"""Session windows against a model that keeps all rows."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from harness import every_way, run, same
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Row, arrow, batches_of, moment
from test_windowed import AGGREGATES, SCHEMA, results, rows, timed

from anabranch.kernels.windows import VACANT
from anabranch.operators import aggregates as ab
from anabranch.operators.sessions import SessionAggregate
from anabranch.operators.windows import SessionWindow


@dataclass
class Session:
    key: Any
    start: int
    end: int
    members: list[Row]
    sent: bool = False


class Model:
    def __init__(self, gap: int, lateness: int, delay: int) -> None:
        self.gap, self.lateness, self.delay = gap, lateness, delay
        self.sessions: list[Session] = []
        self.latest: int | None = None

    def batch(self, batch: list[Row]) -> tuple[list[Row], list[Row]]:
        mark = None if self.latest is None else self.latest - self.delay
        late = []
        for row in batch:
            if row["t"] is None or (
                mark is not None and row["t"] + self.gap + self.lateness <= mark
            ):
                late.append({name: row[name] for name in SCHEMA.names})
                continue
            new = Session(row["k"], row["t"], row["t"] + self.gap, [row])
            for old in list(self.sessions):
                if old.key == new.key and old.start <= new.end and new.start <= old.end:
                    new.start, new.end = min(old.start, new.start), max(old.end, new.end)
                    new.members = old.members + new.members
                    self.sessions.remove(old)
            self.sessions.append(new)
        out = [s for s in self.sessions if mark is not None and s.end <= mark and not s.sent]
        for s in out:
            s.sent = True
            # Of equal times the one that came first is first: members are in order of arrival.
            s.members.sort(key=lambda row: row["t"])
        came_out = [
            {"k": s.key, "window_start": moment(s.start), "window_end": moment(s.end)}
            | results(s.members)
            for s in out
        ]
        if mark is not None:
            self.sessions = [s for s in self.sessions if s.end + self.lateness > mark]
        times = [row["t"] for row in batch if row["t"] is not None]
        if times:
            self.latest = max(times) if self.latest is None else max(*times, self.latest)
        return came_out, late


def check_state(state: list[Row], model: Model) -> None:
    """Exactly the open sessions are kept, and slot 0 of a key as long as it has another."""
    kept = [row for row in state if row["window_status"] != VACANT]
    assert sorted((repr(row["k"]), row["window_start"], row["window_end"]) for row in kept) == (
        sorted((repr(s.key), s.start, s.end) for s in model.sessions)
    )
    for row in state:
        if row["window_status"] == VACANT:
            assert row["window_slot"] == 0
            assert any(other["k"] == row["k"] for other in kept)
    assert {row["k"] for row in kept} <= {row["k"] for row in state if row["window_slot"] == 0}


@settings(max_examples=40, deadline=None)
@given(
    batches=batches_of(rows),
    chunk=st.integers(1, 5),
    gap=st.integers(1, 8),
    delay=st.integers(0, 20),
    lateness=st.sampled_from([0, 0, 5, 12]),
)
def test_sessions_are_those_of_the_model(
    batches: list[list[Row]], chunk: int, gap: int, delay: int, lateness: int
) -> None:
    batches = timed(batches)
    operator = SessionAggregate(
        SessionWindow(gap, "at"), AGGREGATES, watermark_delay=delay, allowed_lateness=lateness
    )
    result = every_way(operator, ["k"], arrow(batches, SCHEMA), chunk)
    model = Model(gap, lateness, delay)
    for batch, came_out, late in zip(batches, result.batches, result.late_batches, strict=True):
        expected, expected_late = model.batch(batch)
        assert same(came_out, expected, places=9)
        assert same(late, expected_late)
    check_state(result.state, model)


float_rows = st.fixed_dictionaries(
    {"k": st.sampled_from("ab"), "t": st.integers(0, 60), "x": st.floats(-1e6, 1e6)}
)
FLOATS = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("x", pa.float64())])


@settings(max_examples=20, deadline=None)
@given(batches=batches_of(float_rows), chunk=st.integers(1, 5), gap=st.integers(1, 6))
def test_floats_are_the_same_to_the_bit_however_a_batch_is_divided(
    batches: list[list[Row]], chunk: int, gap: int
) -> None:
    aggregates = {"sum": ab.sum("x"), "mean": ab.mean("x"), "var": ab.variance("x")}
    operator = SessionAggregate(SessionWindow(gap, "at"), aggregates, watermark_delay=30)
    every_way(operator, ["k"], arrow(timed(batches), FLOATS), chunk)


KINDS = {
    "n": ab.count("i"),
    "many": ab.approx_count_distinct("i"),
    "first": ab.first("i"),
    "last": ab.last("i"),
    "first_s": ab.first("s"),
    "last_s": ab.last("s"),
    "least": ab.min("i"),
    "most": ab.max("s"),
    "sum": ab.sum("i"),
    "mean": ab.mean("i"),
    "var": ab.variance("i"),
}


def test_a_row_that_bridges_two_sessions_merges_every_aggregate(tmp_path) -> None:
    values = [(10, 3), (12, None), (30, 5), (31, 1), (50, 7), (40, 2), (20, 4), (90, 0)]
    schema = pa.schema(
        [
            ("k", pa.int32()),
            ("at", pa.timestamp("us", tz="UTC")),
            ("i", pa.int32()),
            ("s", pa.string()),
        ]
    )
    batches = [
        [{"k": 1, "at": moment(t), "i": i, "s": None if i is None else str(i)}] for t, i in values
    ]
    operator = SessionAggregate(SessionWindow(10, "at"), KINDS, watermark_delay=30)
    result = run(operator, ["k"], arrow([*batches, []], schema), tmp_path, repeat=True)
    window = {"k": 1, "window_start": moment(10), "window_end": moment(60)}
    expected = {"n": 6, "many": 6, "first": 3, "last": 7, "first_s": "3", "last_s": "7"}
    expected |= {"least": 1, "most": "7", "sum": 22, "mean": 22 / 6, "var": 4.666666667}
    assert same(result.rows, [window | expected], places=9)
    kept = [row["window_start"] for row in result.state if row["window_status"] != VACANT]
    assert kept == [90]


def test_rows_exactly_the_gap_apart_are_one_session_as_in_spark(tmp_path) -> None:
    batches = timed([[{"k": "a", "t": t, "x": None, "s": None}] for t in (0, 10, 21, 99)] + [[]])
    operator = SessionAggregate(SessionWindow(10, "at"), {"n": ab.count()})
    result = run(operator, ["k"], arrow(batches, SCHEMA), tmp_path)
    assert [(row["window_start"], row["n"]) for row in result.rows] == [
        (moment(0), 2),
        (moment(21), 1),
    ]


def test_of_equal_times_the_first_that_came_is_first_and_the_last_is_last(tmp_path) -> None:
    def row(x: float, t: int = 5) -> Row:
        return {"k": "a", "t": t, "x": x, "s": str(x)}

    batches = timed([[row(1.0), row(2.0)], [row(3.0), row(4.0)], [row(0.0, t=99)], []])
    wanted = {f"{kind}_{c}": getattr(ab, kind)(c) for kind in ("first", "last") for c in "xs"}
    operator = SessionAggregate(SessionWindow(10, "at"), wanted)
    (out,) = run(operator, ["k"], arrow(batches, SCHEMA), tmp_path).rows
    assert {name: out[name] for name in wanted} == {
        "first_x": 1.0,
        "first_s": "1.0",
        "last_x": 4.0,
        "last_s": "4.0",
    }


def test_a_vacant_slot_starts_from_nothing(tmp_path) -> None:
    """The session of slot 0 ends before a later one, and then an earlier one takes its place."""
    times: list[list[int]] = [[0, 1], [20], [], [13], [60], []]
    batches = timed([[{"k": "a", "t": t, "x": 1.0, "s": str(t)} for t in ts] for ts in times])
    operator = SessionAggregate(SessionWindow(5, "at"), AGGREGATES, watermark_delay=10)
    result = run(operator, ["k"], arrow(batches, SCHEMA), tmp_path, repeat=True)
    came_out = [(row["window_start"], row["n"], row["first_s"]) for row in result.rows]
    assert came_out == [(moment(0), 2, "0"), (moment(13), 1, "13"), (moment(20), 1, "20")]


@pytest.mark.parametrize("lateness", [0, 10])
def test_many_sessions_of_one_key_leave_nothing_behind(lateness: int, tmp_path) -> None:
    times = [(t * 37) % 400 * 5 for t in range(400)]
    first = [{"k": "a", "t": t, "x": 1.0, "s": str(t)} for t in times]
    last = [{"k": "b", "t": 5000, "x": 1.0, "s": ""}]
    for gap, sessions in ((3, 400), (5, 1)):
        operator = SessionAggregate(
            SessionWindow(gap, "at"),
            AGGREGATES,
            watermark_delay=3000,
            allowed_lateness=lateness,
        )
        end = [{"k": "c", "t": 9000, "x": 1.0, "s": ""}]
        stream = timed([first[:150], first[150:160], first[160:], last, end, []])
        result = run(operator, ["k"], arrow(stream, SCHEMA), tmp_path / str(gap))
        ours = [row for row in result.rows if row["k"] == "a"]
        assert len(ours) == sessions
        assert sum(row["n"] for row in ours) == 400
        assert [(row["k"], row["window_start"]) for row in result.state] == [("c", 9000)]
