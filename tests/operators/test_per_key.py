from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from harness import run
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import TIME, Marked, Row, arrow, bag, batches_of, folder, moment, run_every_way

from anabranch.errors import PlanError
from anabranch.operators.key_state import KeyState
from anabranch.operators.per_key import PerKey
from anabranch.operators.rows import Rows
from anabranch.state import schema as ab

SCHEMA = pa.schema([("k", pa.string()), ("j", pa.int64()), ("at", TIME), ("x", pa.int64())])
STATE = ab.schema(
    n=ab.int64, total=ab.float64, last=ab.string, recent=ab.vector(ab.int64, 2), ever=ab.bool_
)
OUTPUT = pa.schema([("k", pa.string()), ("n", pa.int64()), ("total", pa.float64()),
                    ("last", pa.string()), ("why", pa.string())])  # fmt: skip

rows = st.fixed_dictionaries(
    {
        "k": st.sampled_from(["a", "b", None]),
        "j": st.integers(0, 1),
        "at": st.integers(0, 40).map(moment),
        "x": st.integers(-3, 9),
    }
)


def each_row(key: tuple[Any, ...], rows: Rows, state: KeyState) -> Iterator[Row]:
    for x in rows["x"].tolist():
        state.n += 1
        state.total += x / 2
        state.last = None if x < 0 else f"{key[0]}{x}"
        state.recent[0], state.recent[1] = state.recent[1], x
        state.ever = True
        yield {"k": key[0], "n": state.n, "total": state.total, "last": state.last}
        if state.n >= 4 and x == 9:
            yield {"k": key[0], "why": "full"}


@settings(max_examples=25, deadline=None)
@given(batches=batches_of(rows), chunk=st.integers(1, 5))
def test_state_of_a_key_is_kept_between_calls(batches: list[list[Row]], chunk: int) -> None:
    operator = PerKey(each_row, state=STATE, output=OUTPUT)
    # In portions the keys of a batch come in turns, so only the rows of each key are compared.
    whole = _run(operator, batches)
    other = _run(operator, batches, chunk=chunk, repeat=True)
    expected: dict[tuple[Any, int], list[Any]] = {}
    for batch in batches:
        for row in batch:
            seen = expected.setdefault((row["k"], row["j"]), [])
            seen.append(row["x"])
    for result in (whole, other):
        for (k, j), xs in expected.items():
            (kept,) = [row for row in result.state if (row["k"], row["j"]) == (k, j)]
            assert kept["n"] == len(xs)
            assert kept["total"] == sum(xs) / 2
            assert kept["last"] == (None if xs[-1] < 0 else f"{k}{xs[-1]}")
            assert kept["recent"] == [0, *xs][-2:]
            assert kept["ever"]
        assert len(result.state) == len(expected)
        for batch, came_out in zip(batches, result.batches, strict=True):
            assert sum(1 for row in came_out if row["why"] is None) == len(batch)
    assert bag(whole.rows) == bag(other.rows)


def count_down(key: tuple[Any, ...], rows: Rows, state: KeyState) -> None:
    state.n += len(rows)
    state.set_timer(int(rows.times("at").max()) + 5)


def give_up(key: tuple[Any, ...], state: KeyState) -> Rows:
    state.delete()
    return Rows(pa.record_batch({"n": [state.n], "k": pa.array([key[0]], pa.string())}))


@settings(max_examples=25, deadline=None)
@given(batches=batches_of(rows))
def test_timers_fire_when_the_watermark_reaches_them(batches: list[list[Row]]) -> None:
    batches = [*batches, []]
    marks = [10 * number for number in range(len(batches) - 1)] + [1000]
    operator = PerKey(
        count_down,
        state=ab.schema(n=ab.int64),
        output=ab.schema(k=ab.string, n=ab.int64),
        on_timer=give_up,
        event_time="at",
    )
    result = run_every_way(Marked(operator, marks), ["k"], arrow(batches, SCHEMA), 100)
    counts: dict[Any, int] = {}
    timers: dict[Any, int] = {}
    for batch, mark, came_out in zip(batches, marks, result.batches, strict=True):
        for key in {row["k"] for row in batch}:
            mine = [row for row in batch if row["k"] == key]
            counts[key] = counts.get(key, 0) + len(mine)
            timers[key] = max(row["at"].microsecond for row in mine) + 5
        fired = [key for key, at in timers.items() if at <= mark]
        expected = [{"k": key, "n": counts.pop(key)} for key in fired]
        timers = {key: at for key, at in timers.items() if at > mark}
        assert bag(came_out) == bag(expected)
    assert result.state == []


def test_a_timer_fires_once_and_can_be_set_again_or_taken_back() -> None:
    def start(key: tuple[Any, ...], rows: Rows, state: KeyState) -> None:
        state.set_timer(datetime(1970, 1, 1, 0, 0, 0, 5))
        if key == ("b",):
            state.clear_timer()

    def again(key: tuple[Any, ...], state: KeyState) -> Row:
        state.n += 1
        if state.n < 3:
            state.set_timer(np.datetime64(10 * state.n, "us"))
        return {"k": key[0], "n": state.n, "mark": state.watermark}

    operator = PerKey(
        start,
        state=ab.schema(n=ab.int64),
        output=ab.schema(k=ab.string, n=ab.int64, mark=ab.int64),
        on_timer=again,
        event_time="at",
    )
    batches = [[{"k": k, "j": 0, "at": moment(0), "x": 0} for k in "ab"], [], [], [], []]
    marked = Marked(operator, [4, 5, 19, 20, 100])
    result = run_every_way(marked, ["k"], arrow(batches, SCHEMA), 100)
    assert [[(row["n"], row["mark"]) for row in batch] for batch in result.batches] == [
        [], [(1, 5)], [(2, 19)], [(3, 20)], []
    ]  # fmt: skip


def test_a_deleted_key_starts_anew() -> None:
    def toggle(key: tuple[Any, ...], rows: Rows, state: KeyState) -> Row:
        state.n += len(rows)
        if state.n > 2:
            state.delete()
        return {"k": key[0], "n": state.n}

    operator = PerKey(
        toggle, state=ab.schema(n=ab.int64), output=ab.schema(k=ab.string, n=ab.int64)
    )
    row = {"k": "a", "j": 0, "at": moment(0), "x": 0}
    result = run_every_way(operator, ["k"], arrow([[row] * 2, [row], [row]], SCHEMA), 100)
    assert [row["n"] for row in result.rows] == [2, 3, 1]


def _one(key: tuple[Any, ...], rows: Rows, state: KeyState) -> Any:
    return {"k": key[0], "nn": 1}


def _misspelled(key: tuple[Any, ...], rows: Rows, state: KeyState) -> Any:
    state.m = 1


def _untimely(key: tuple[Any, ...], rows: Rows, state: KeyState) -> Any:
    state.set_timer(1)


def _narrow(key: tuple[Any, ...], rows: Rows, state: KeyState) -> Any:
    return rows.select("k")


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (_one, "nn"),
        (_misspelled, "no state column 'm'"),
        (_untimely, "on_timer"),
        (_narrow, "lack"),
    ],
)
def test_mistakes_in_the_function_are_named(fn: Any, reason: str, tmp_path: Path) -> None:
    operator = PerKey(fn, state=ab.schema(n=ab.int64), output=ab.schema(k=ab.string, n=ab.int64))
    row = {"k": "a", "j": 0, "at": moment(0), "x": 0}
    with pytest.raises((ValueError, AttributeError), match=reason):
        run(operator, ["k"], arrow([[row]], SCHEMA), tmp_path)


def test_names_that_the_state_object_has_itself_are_refused() -> None:
    with pytest.raises(PlanError, match="'delete'"):
        PerKey(_one, state=ab.schema(delete=ab.int64), output=ab.schema(n=ab.int64))


def _run(operator: PerKey, batches: list[list[Row]], **way: Any) -> Any:
    with folder() as place:
        return run(operator, ["k", "j"], arrow(batches, SCHEMA), place, **way)
