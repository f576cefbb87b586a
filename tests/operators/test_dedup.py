import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import TIME, Row, arrow, bag, batches_of, moment, run_every_way

from anabranch.errors import PlanError
from anabranch.operators.dedup import Deduplicate

SCHEMA = pa.schema([("k", pa.string()), ("at", TIME), ("x", pa.int64())])

rows = st.fixed_dictionaries(
    {
        "k": st.sampled_from(["a", "b", "c", None]),
        "at": st.one_of(st.none(), st.integers(0, 40)).map(moment),
        "x": st.integers(0, 9),
    }
)


@settings(max_examples=25, deadline=None)
@given(batches=batches_of(rows), chunk=st.integers(1, 5))
def test_the_first_row_of_each_key_passes(batches: list[list[Row]], chunk: int) -> None:
    result = run_every_way(Deduplicate(), ["k"], arrow(batches, SCHEMA), chunk)
    seen: set[str | None] = set()
    for batch, came_out in zip(batches, result.batches, strict=True):
        expected = []
        for row in batch:
            if row["k"] not in seen:
                seen.add(row["k"])
                expected.append(row)
        assert bag(came_out) == bag(expected)
    assert {row["k"] for row in result.state} == seen


@settings(max_examples=40, deadline=None)
@given(
    batches=batches_of(rows),
    chunk=st.integers(1, 5),
    ttl=st.integers(0, 12),
    delay=st.integers(0, 8),
)
def test_with_a_ttl_a_key_passes_again_later(
    batches: list[list[Row]], chunk: int, ttl: int, delay: int
) -> None:
    batches = [*batches, [{"k": "end", "at": moment(1000), "x": 0}], []]
    operator = Deduplicate(ttl=ttl, on="at", watermark=delay)
    result = run_every_way(operator, ["k"], arrow(batches, SCHEMA), chunk)
    last_passed: dict[str | None, int] = {}
    latest = None
    for batch, came_out, late in zip(batches, result.batches, result.late_batches, strict=True):
        expected, expected_late = [], []
        watermark = None if latest is None else latest - delay
        for row in batch:
            at = None if row["at"] is None else row["at"].microsecond
            if at is None or (watermark is not None and at < watermark):
                expected_late.append(row)
                continue
            latest = at if latest is None else max(latest, at)
            before = last_passed.get(row["k"])
            if before is None or at > before + ttl:
                last_passed[row["k"]] = at
                expected.append(row)
        assert bag(came_out) == bag(expected)
        assert bag(late) == bag(expected_late)
    assert {row["k"] for row in result.state} <= {"end"}, "forgotten once the watermark is past"


@pytest.mark.parametrize("together", [True, False])
def test_the_end_of_the_interval_belongs_to_it(together: bool) -> None:
    rows = [{"k": "a", "at": moment(at), "x": at} for at in (5, 8, 9, 13)]
    batches = [rows] if together else [[row] for row in rows]
    result = run_every_way(Deduplicate(ttl=3, on="at"), ["k"], arrow(batches, SCHEMA), 10)
    assert [row["x"] for row in result.rows] == [5, 9, 13]


@pytest.mark.parametrize(
    ("ttl", "on"), [(5, None), (None, "at"), (5, "x"), (5, "nowhere"), (-1, "at")]
)
def test_a_ttl_needs_a_time(ttl: int | None, on: str | None) -> None:
    with pytest.raises(PlanError, match="deduplicate"):
        Deduplicate(ttl=ttl, on=on).bind(SCHEMA, ["k"])
