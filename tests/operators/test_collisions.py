"""Keys whose 64-bit hashes are all the same stay apart in every operator."""

import random
from typing import Any

import pyarrow as pa
import pytest
from harness import run
from streams import TIME, Marked, Row, arrow, bag, folder, moment

from anabranch.operators.dedup import Deduplicate
from anabranch.operators.join import Join
from anabranch.operators.operator import Operator
from anabranch.operators.top_k import TopK

SCHEMA = pa.schema(
    [("k", pa.string()), ("__side", pa.int8()), ("lt", TIME), ("a", pa.int64()), ("rt", TIME)]
)
MARKS = [None, 20, 40, 60, 80, 1000]


def row(chance: random.Random, at: int) -> Row:
    time = moment(at + chance.randrange(30))
    side = chance.randrange(2)
    mine: dict[str, Any] = {"lt": time, "a": chance.randrange(9)} if side == 0 else {"rt": time}
    return {"k": chance.choice("abcdef"), "__side": side, **mine}


@pytest.mark.parametrize(
    "operator",
    [
        Marked(Join(on=("lt", "rt"), before=9, after=9, how="left").of(["lt", "a"], ["rt"]), MARKS),
        TopK(3, "a"),
        Deduplicate(ttl=10, on="lt"),
    ],
)
def test_equal_hashes_make_no_difference(operator: Operator) -> None:
    chance = random.Random(5)
    batches = [[row(chance, 20 * number) for _ in range(40)] for number in range(5)] + [[]]
    if isinstance(operator, TopK):
        batches = [[{n: v for n, v in r.items() if n != "__side"} for r in b] for b in batches]
    schema = SCHEMA.remove(1) if isinstance(operator, TopK) else SCHEMA
    with folder() as place:
        apart = run(operator, ["k"], arrow(batches, schema), place / "apart")
        same = run(operator, ["k"], arrow(batches, schema), place / "same", hasher=lambda key: 7)
    assert list(map(bag, same.batches)) == list(map(bag, apart.batches))
    assert bag(same.state) == bag(apart.state)
    assert len(apart.rows) > 20
