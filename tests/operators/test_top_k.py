import math
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import TIME, Row, arrow, bag, batches_of, moment, run_every_way

from anabranch.errors import PlanError
from anabranch.operators import ranking
from anabranch.operators.top_k import TopK

SCHEMA = pa.schema(
    [
        ("score", pa.float64()),
        ("k", pa.string()),
        pa.field("j", pa.int32(), nullable=False),
        ("text", pa.string()),
        ("price", pa.decimal128(38, 2)),
        ("at", TIME),
        ("tags", pa.list_(pa.string())),
        ("_count", pa.bool_()),
    ]
)
FLOATS = [None, 1.0, 2.0, 3.0, 0.0, -0.0, -1.0, math.inf, -math.inf, math.nan]

rows = st.fixed_dictionaries(
    {
        "score": st.sampled_from(FLOATS),
        "k": st.sampled_from(["a", "b", None]),
        "j": st.integers(0, 1),
        "text": st.sampled_from([None, "", "x", "yy"]),
        "price": st.sampled_from([None, Decimal("1.50"), Decimal("-1000000000000000000000000.00")]),
        "at": st.sampled_from([None, moment(3)]),
        "tags": st.sampled_from([None, [], ["x", None]]),
        "_count": st.sampled_from([None, True, False]),
    }
)


def order(value: float) -> tuple[bool, float]:
    """Spark's order: NaN is above infinity."""
    return (True, 0.0) if math.isnan(value) else (False, value)


@settings(max_examples=40, deadline=None)
@given(
    batches=batches_of(rows), chunk=st.integers(1, 5), k=st.integers(1, 4), largest=st.booleans()
)
def test_agrees_with_sorting(batches: list[list[Row]], chunk: int, k: int, largest: bool) -> None:
    operator = TopK(k, "score", largest=largest)
    result = run_every_way(operator, ["k", "j"], arrow(batches, SCHEMA), chunk)
    tops: dict[tuple[Any, ...], list[Row]] = {}
    for batch, came_out in zip(batches, result.batches, strict=True):
        before = {key: list(map(id, top)) for key, top in tops.items()}
        for row in batch:
            if row["score"] is not None:
                tops.setdefault((row["k"], row["j"]), []).append(row)
        for top in tops.values():
            # sort() is stable, also when reversed: what came first stays first
            top.sort(key=lambda row: order(row["score"]), reverse=largest)
            del top[k:]
        expected = [
            {"k": key[0], "j": key[1]}
            | {name: value for name, value in row.items() if name not in ("k", "j")}
            | {"rank": rank}
            for key, top in tops.items()
            if list(map(id, top)) != before.get(key)
            for rank, row in enumerate(top, start=1)
        ]
        assert bag(came_out) == bag(expected)
        ranks = [row["rank"] for row in came_out]
        assert all(b in (1, a + 1) for a, b in pairwise(ranks))
    assert len(result.state) == sum(map(len, tops.values()))


@pytest.mark.parametrize(
    "kind",
    [pa.int8(), pa.int64(), pa.uint8(), pa.uint64(), pa.float32(), pa.float64(), pa.bool_(),
     pa.date32(), TIME, pa.decimal128(18, 4), pa.duration("us")],
)  # fmt: skip
def test_codes_are_in_the_order_of_the_values(kind: pa.DataType) -> None:
    if pa.types.is_boolean(kind):
        values = pa.array([False, True])
    elif pa.types.is_floating(kind):
        values = pa.array([-math.inf, -2.5, -1e-30, 0.0, 1e-30, 2.5, math.inf, math.nan], kind)
    elif pa.types.is_unsigned_integer(kind):
        values = pa.array([0, 1, 2 ** (kind.bit_width - 1), 2**kind.bit_width - 1], kind)
    elif pa.types.is_decimal(kind):
        values = pa.array([Decimal(-(10**13)), Decimal("-0.0001"), Decimal(0), Decimal(7)], kind)
    else:
        limit = 2 ** (min(kind.bit_width, 32) - 1)
        values = pa.array([-limit, -1, 0, 1, limit - 1], pa.int64())
        values = values.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
    ranking.check("v", kind)
    found = ranking.codes(values)
    assert np.all(found[1:] > found[:-1]), found


def test_the_two_zeros_rank_alike() -> None:
    found = ranking.codes(pa.array([0.0, -0.0]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        (lambda: TopK(0, "score"), "at least 1"),
        (lambda: TopK(2, "nowhere"), "no column by='nowhere'"),
        (lambda: TopK(2, "k"), "one of the keys"),
        (lambda: TopK(2, "text"), "cannot be ranked"),
        (lambda: TopK(2, "price"), "18 digits"),
    ],
)
def test_what_cannot_be_ranked_is_refused(operator: Any, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        operator().bind(SCHEMA, ["k"])


def test_a_column_named_rank_is_refused() -> None:
    with pytest.raises(PlanError, match="rename"):
        TopK(2, "score").bind(SCHEMA.append(pa.field("rank", pa.int32())), ["k"])
