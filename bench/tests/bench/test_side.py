"""The real sides, over very little input."""

from dataclasses import replace

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from anabranch.errors import QueryFailed
from anabranch_bench import inputs
from anabranch_bench.plan import Engine, Phase, Run, Side, Totals, Workload
from anabranch_bench.process import run_side, timings

pytestmark = pytest.mark.spark

KEYED = (Phase("fill", 1, 50, 50, fill_from=0), Phase("timed", 2, 100, 50, measured=True))
WORDS = (Phase("timed", 9, 20, 30, measured=True),)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    folder = tmp_path_factory.mktemp("inputs")
    keyed = inputs.write(folder / "keyed", Workload.KEYED, KEYED, 7)
    words = inputs.write(folder / "words", Workload.WORDS, WORDS, 7)
    return (
        Run("keyed", Workload.KEYED, str(keyed), KEYED, verify=True),
        Run("words", Workload.WORDS, str(words), WORDS),
    )


@pytest.mark.parametrize("engine", [Engine.ANABRANCH, Engine.ROCKSDB])
def test_a_side_times_every_batch_and_ends_with_the_right_state(
    runs: tuple[Run, Run], engine: Engine
) -> None:
    ticks: list[int] = []
    outcomes = run_side(Side(engine, runs), ticks.append)
    for run in runs:
        timed = timings(run, outcomes[run.name])
        assert list(timed) == ["timed"]
        assert len(timed["timed"].seconds) == run.phases[-1].batches
        assert all(0 < seconds < 300 for seconds in outcomes[run.name].seconds)
    read = pq.read_table(runs[0].input)
    assert outcomes["keyed"].totals == Totals(50, 250, pc.sum(read["x"]).as_py())
    assert ticks == sorted(ticks)
    assert ticks[-1] == sum(run.batches for run in runs)


def test_a_side_that_fails_says_why_in_one_line(runs: tuple[Run, Run]) -> None:
    missing = replace(runs[0], input="/nowhere/to/be/found")
    with pytest.raises(QueryFailed, match=r"spark, hdfs-backed side .*nowhere") as failed:
        run_side(Side(Engine.HDFS, (missing,)))
    assert "\n" not in str(failed.value)
