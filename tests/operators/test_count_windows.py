from collections import defaultdict

import pyarrow as pa
from harness import every_way, run, same
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Row, arrow, batches_of
from test_windowed import AGGREGATES, results

from anabranch.operators import aggregates as ab
from anabranch.operators.count_windows import CountWindowAggregate
from anabranch.operators.windows import CountWindow, count_window

SCHEMA = pa.schema([("k", pa.string()), ("x", pa.float64()), ("s", pa.string())])
rows = st.fixed_dictionaries(
    {
        "k": st.sampled_from(["a", "a", "b", None]),
        "x": st.none() | st.integers(-40, 40).map(lambda n: n / 4),
        "s": st.none() | st.text("ab", max_size=2),
    }
)


@settings(max_examples=30, deadline=None)
@given(
    batches=batches_of(rows),
    chunk=st.integers(1, 9),
    size=st.integers(1, 6),
    slide=st.integers(1, 6),
)
def test_a_window_comes_out_when_it_is_full(
    batches: list[list[Row]], chunk: int, size: int, slide: int
) -> None:
    slide = min(size, slide)
    operator = CountWindowAggregate(CountWindow(size, slide), AGGREGATES)
    result = every_way(operator, ["k"], arrow(batches, SCHEMA), chunk)
    seen: dict[str | None, list[Row]] = defaultdict(list)
    for batch, came_out in zip(batches, result.batches, strict=True):
        expected = []
        for row in batch:
            members = seen[row["k"]]
            members.append(row)
            window, rest = divmod(len(members) - size, slide)
            if window >= 0 and rest == 0:
                expected.append({"k": row["k"], "window": window} | results(members[-size:]))
        assert same(came_out, expected, places=9)
    started = {
        (key, window)
        for key, members in seen.items()
        for window in range(len(members) // slide + 1)
        if window * slide < len(members) < window * slide + size
    }
    windows = {(row["k"], row["window"]) for row in result.state if row["window"] >= 0}
    assert windows == started
    assert {row["k"]: row["window_rows"] for row in result.state if row["window"] < 0} == {
        key: len(members) for key, members in seen.items()
    }


def test_windows_that_fill_within_one_batch_come_out_in_order(tmp_path) -> None:
    batch = pa.record_batch({"k": ["a"] * 10, "x": list(range(10))})
    operator = CountWindowAggregate(count_window(3), {"sum": ab.sum("x")})
    result = run(operator, ["k"], [batch], tmp_path)
    assert [(row["window"], row["sum"]) for row in result.rows] == [(0, 3), (1, 12), (2, 21)]
    assert operator.bind(batch.schema, ["k"]).ordered is True
