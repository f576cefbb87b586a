import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch_bench.harness import Bar, Measure, Result, Timing

seconds = st.lists(st.floats(0.001, 100), min_size=1, max_size=30).map(tuple)


@given(rows=st.integers(1, 10**7), taken=seconds)
def test_throughput_lies_between_the_slowest_and_the_fastest_batch(
    rows: int, taken: tuple[float, ...]
) -> None:
    timing = Timing(rows, taken)
    assert rows / max(taken) <= timing.rows_per_second * (1 + 1e-9)
    assert timing.rows_per_second <= rows / min(taken) * (1 + 1e-9)
    assert min(taken) <= timing.median <= timing.percentile(100) == max(taken)


def test_a_slow_batch_lowers_throughput_and_not_the_median() -> None:
    steady, bumpy = Timing(100, (1.0,) * 9), Timing(100, (1.0,) * 8 + (10.0,))
    assert steady.median == bumpy.median
    assert bumpy.rows_per_second < steady.rows_per_second / 1.9


@pytest.mark.parametrize(
    ("value", "at_least", "holds"), [(5, True, True), (4.9, True, False), (5, False, True)]
)
def test_a_bar_that_is_just_met_holds(value: float, at_least: bool, holds: bool) -> None:
    assert Bar("x", value, 5, at_least=at_least).holds is holds


def test_the_json_says_where_and_with_what_it_was_measured(tmp_path: Path) -> None:
    result = Result("state", seed=3, quick=True)
    result.measures.append(Measure("keyed", "many", "anabranch", Timing(10, (0.5, 0.5))))
    result.bars.append(Bar("speed", 2, 5, at_least=True))
    path = tmp_path / "deep" / "result.json"
    result.write_json(path)
    read = json.loads(path.read_text())
    assert read["seed"] == 3
    assert read["machine"]["cores"] >= 1
    assert {"anabranch", "python", "java", "pyspark"} <= read["versions"].keys()
    assert read["measures"][0]["rows_per_second"] == 20
    assert read["measures"][0]["seconds"] == [0.5, 0.5]
    assert {"name": "speed", "value": 2, "bar": 5, "holds": False}.items() <= read["bars"][
        0
    ].items()
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_a_measure_that_was_not_taken_is_not_made_up() -> None:
    result = Result("state", seed=1, quick=True)
    with pytest.raises(KeyError, match="no measure of spark in keyed"):
        result.timing("keyed", "many", "spark")
