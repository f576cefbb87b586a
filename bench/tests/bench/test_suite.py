"""The whole suite, with the sides replaced by ones that take a known time."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from anabranch.errors import QueryFailed
from anabranch_bench import inputs, plot, runner, state, tables
from anabranch_bench.harness import Bar, Result
from anabranch_bench.plan import Checkpoints, Engine, Outcome, Phase, Run, Side, Totals

Seconds = Callable[[Engine, Run, Phase], float]
Install = Callable[..., None]


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make every batch take what a function says, and every side end with a sum of its own."""

    def install(seconds: Seconds, total: Callable[[Engine], int] = lambda engine: 1) -> None:
        def run_side(side: Side, tick: Callable[[int], None]) -> dict[str, Outcome]:
            return {
                run.name: Outcome(
                    tuple(
                        seconds(side.engine, run, phase)
                        for phase, _ in run.slices()
                        for _ in range(phase.batches)
                    ),
                    Totals(1, 1, total(side.engine)) if run.verify else None,
                )
                for run in side.runs
            }

        monkeypatch.setattr(runner, "run_side", run_side)
        monkeypatch.setattr(inputs, "write", lambda folder, *rest: folder)

    return install


def quiet() -> Console:
    return Console(file=io.StringIO(), width=140)


def by_name(result: Result) -> dict[str, Bar]:
    return {bar.name: bar for bar in result.bars}


def constant(engine: Engine, run: Run, phase: Phase) -> float:
    return {Engine.ANABRANCH: 0.25, Engine.ROCKSDB: 2.0, Engine.HDFS: 0.5, Engine.PANDAS: 10.0}[
        engine
    ]


def test_bars_compare_throughput_whatever_the_size_of_the_batches(sides: Install) -> None:
    sides(constant)
    bars = by_name(state.run(quick=True, console=quiet()))
    assert bars["keyed, 1 M rows a batch: times RocksDB"].value == pytest.approx(8)
    assert bars["keyed, 1 M rows a batch: times RocksDB"].holds
    assert bars["keyed, 1 M rows a batch: times HDFS-backed"].value == pytest.approx(2)
    assert not bars["keyed, 1 M rows a batch: times HDFS-backed"].holds
    pandas = bars["keyed, 1 M rows a batch: times applyInPandasWithState"]
    assert pandas.value == pytest.approx((1_000_000 / 0.25) / (10_000 / 10))
    few = bars["micro-batch of 100 rows: median milliseconds"]
    assert few.value == pytest.approx(250)
    assert few.holds


def test_growth_is_the_large_state_over_the_small_one(sides: Install) -> None:
    sides(lambda engine, run, phase: 0.4 if phase.keys == 10_000_000 else 0.25)
    result = state.run(quick=False, only=["growth"], console=quiet())
    (bar,) = result.bars
    assert bar.value == pytest.approx(1.6)
    assert not bar.holds
    assert {measure.side for measure in result.measures} == {Engine.ANABRANCH, Engine.ROCKSDB}


def test_overhead_compares_each_round_with_itself(sides: Install) -> None:
    def slower_every_round(engine: Engine, run: Run, phase: Phase) -> float:
        drift = 1 + int(run.name[0]) if run.name[0].isdigit() else 1
        return drift * (1.25 if run.checkpoints is Checkpoints.INCREMENTAL else 1.0)

    sides(slower_every_round)
    result = state.run(quick=False, only=["overhead"], console=quiet())
    (bar,) = result.bars
    assert bar.value == pytest.approx(0.2)
    assert not bar.holds
    rounds = {measure.case for measure in result.measures}
    assert len(rounds) == 5
    firsts = [result.pick("overhead", case)[0].side for case in rounds]
    assert len(set(firsts)) == 3, "none always goes first"


def test_a_side_that_is_quick_and_wrong_does_not_win(sides: Install) -> None:
    sides(constant, lambda engine: 2 if engine is Engine.ROCKSDB else 1)
    with pytest.raises(QueryFailed, match=r"keyed: spark, rocksdb ended with .*total=2.*total=1"):
        state.run(quick=True, only=["keyed"], console=quiet())


@pytest.mark.parametrize("only", [(), ("growth",), ("keyed", "overhead")])
def test_tables_and_picture_show_what_was_run(
    sides: Install, tmp_path: Path, only: tuple[str, ...]
) -> None:
    sides(constant)
    result = state.run(quick=True, only=only, console=quiet())
    console = quiet()
    tables.show(result, console)
    text = console.file.getvalue()
    assert ("Count and sum per key" in text) == (not only or "keyed" in only)
    assert ("Checkpoints every 5 s" in text) == (not only or "overhead" in only)
    assert "has to be" in text
    for bar in result.bars:
        assert bar.name in text
    plot.write(result, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
