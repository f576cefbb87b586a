import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import PlanError
from anabranch.operators import aggregates as ab
from anabranch.operators.windowed import windowed
from anabranch.operators.windows import (
    NEVER,
    TimeWindow,
    count_window,
    session_window,
    sliding,
    tumbling,
)

SECOND = 1_000_000
HOUR = 3600 * SECOND


@given(
    times=st.lists(st.integers(-(10**4), 10**4), max_size=20),
    size=st.integers(1, 40),
    slide=st.integers(1, 40),
    offset=st.integers(-50, 50),
    closed=st.just(NEVER) | st.integers(-(10**4), 10**4),
    data=st.data(),
)
def test_a_time_is_in_every_open_window_around_it(
    times: list[int], size: int, slide: int, offset: int, closed: int, data: st.DataObject
) -> None:
    slide = min(slide, size)
    valid = np.array([data.draw(st.booleans()) for _ in times], dtype=bool)
    window = TimeWindow(size, slide, "at", offset)
    index, starts, late = window.assign(np.array(times, np.int64), valid, closed)
    if index is None:
        index = np.arange(len(times))
    expected = []
    for i, at in enumerate(times):
        first = at - size + 1
        first += -(first - offset) % slide
        for start in range(first, at + 1, slide):
            if valid[i] and start + size > closed:
                expected.append((i, start))
    assert list(zip(index.tolist(), starts.tolist(), strict=True)) == expected
    assert late.tolist() == [i for i in range(len(times)) if i not in set(index.tolist())]


def test_lengths_are_read() -> None:
    assert tumbling("1 hour", on="at") == TimeWindow(HOUR, HOUR, "at")
    assert tumbling("1 day", on="at", offset="-3 hours".replace("-", "")).offset == 3 * HOUR
    assert tumbling(60, on="at", offset=-1).offset == -SECOND
    assert sliding("1 minute", "10 seconds", on="at").slide == 10 * SECOND
    assert session_window("5 minutes", on="at").gap == 300 * SECOND
    assert count_window(7).slide == 7


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tumbling(0, on="at"), "longer than 0"),
        (lambda: tumbling("soon", on="at"), "soon"),
        (lambda: sliding("1 minute", "2 minutes", on="at"), "must not be longer"),
        (lambda: sliding("1 minute", 0, on="at"), "slide"),
        (lambda: session_window(-1, on="at"), "gap"),
        (lambda: count_window(0), "size must be at least 1"),
        (lambda: count_window(5, slide=6), "from 1 to the size"),
    ],
)
def test_windows_that_cannot_be_are_refused(make, said) -> None:
    with pytest.raises(PlanError, match=said):
        make()


SCHEMA = pa.schema(
    [("k", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("x", pa.int64())]
    + [(name, pa.int64()) for name in ("window_end", "window")]
)
MINUTE = tumbling("1 minute", on="at")


@pytest.mark.parametrize(
    ("window", "keys", "options", "said"),
    [
        ("1 minute", ["k"], {}, "not a window"),
        (tumbling("1 minute", on="when"), ["k"], {}, "no column 'when'"),
        (tumbling("1 minute", on="x"), ["k"], {}, "needs a timestamp"),
        (session_window("1 minute", on="x"), ["k"], {}, "needs a timestamp"),
        (MINUTE, ["k", "window_end"], {}, "rename"),
        (session_window("1 minute", on="at"), ["k", "window_end"], {}, "rename"),
        (count_window(3), ["k", "window"], {}, "rename"),
        (MINUTE, ["k"], {"mode": "complete"}, "'append' or 'update'"),
        (MINUTE, ["k"], {"lateness": -1}, "negative"),
        (session_window("1 minute", on="at"), ["k"], {"mode": "update"}, "mode='append'"),
        (session_window("1 minute", on="at"), ["k"], {"delay": -1}, "negative"),
        (count_window(3), ["k"], {"mode": "update"}, "append"),
        (count_window(3), ["k"], {"delay": 1}, "has no event time"),
    ],
)
def test_operators_that_cannot_be_are_refused(window, keys, options, said) -> None:
    given_options = {"mode": "append", "delay": 0, "lateness": 0} | options
    with pytest.raises(PlanError, match=said):
        windowed(window, {"n": ab.count()}, **given_options).bind(SCHEMA, keys)


@pytest.mark.parametrize("window", [MINUTE, session_window("1 minute", on="at")])
def test_an_aggregate_cannot_take_the_name_of_a_window_column(window) -> None:
    operator = windowed(window, {"window_start": ab.count()}, mode="append", delay=0, lateness=0)
    with pytest.raises(PlanError, match="choose another name"):
        operator.bind(SCHEMA, ["k"])


@pytest.mark.parametrize("tz", [None, "UTC"])
@pytest.mark.parametrize("window", [MINUTE, session_window("1 minute", on="at")])
def test_window_columns_have_a_time_zone_if_the_input_has_one(window, tz) -> None:
    schema = pa.schema([("k", pa.int32()), ("at", pa.timestamp("us", tz=tz))])
    operator = windowed(window, {"n": ab.count()}, mode="append", delay=0, lateness=0)
    out = operator.bind(schema, ["k"]).output(schema, ["k"])
    assert out.names == ["k", "window_start", "window_end", "n"]
    assert out.field("window_end").type == pa.timestamp("us", tz=tz)
    assert operator.bind(schema, ["k"]).ordered is False
