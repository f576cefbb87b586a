"""Benchmark 1: count and sum per key over a million keys, on four engines."""

from dataclasses import replace

from anabranch_bench.plan import Engine, Phase, Workload
from anabranch_bench.runner import Runner

NAME = "keyed"
LARGE, SMALL, FEW = "1,000,000 rows", "100,000 rows", "100 rows"
"""The cases: how many rows a batch has."""

_KEYS = 1_000_000


def run(runner: Runner) -> None:
    """Every engine fills its state with all keys, then is timed at three sizes of batch."""
    quick = runner.quick
    phases = (
        Phase("fill", 1, _KEYS, _KEYS, fill_from=0),
        Phase("warm up", 1 if quick else 3, 1_000_000, _KEYS),
        Phase(LARGE, 3 if quick else 15, 1_000_000, _KEYS, measured=True),
        Phase("warm up", 1 if quick else 2, 100_000, _KEYS),
        Phase(SMALL, 4 if quick else 20, 100_000, _KEYS, measured=True),
        Phase("warm up", 3, 100, _KEYS),
        Phase(FEW, 6 if quick else 30, 100, _KEYS, measured=True),
    )
    plan = replace(runner.prepare(NAME, Workload.KEYED, phases), verify=True)
    for engine in (Engine.ANABRANCH, Engine.ROCKSDB, Engine.HDFS):
        for case, timing in runner.run(engine, plan)[plan.name].items():
            runner.record(NAME, case, engine, timing)
    _run_pandas(runner)
    _bars(runner)


def _run_pandas(runner: Runner) -> None:
    # Few rows, or it would take an hour: it calls Python once for every key of the batch.
    rows = 10_000 if runner.quick else 20_000
    phases = (
        Phase("warm up", 1, 2_000, _KEYS),
        Phase(LARGE, 1 if runner.quick else 3, rows, _KEYS, measured=True),
    )
    plan = runner.prepare(f"{NAME} in pandas", Workload.KEYED, phases)
    timing = runner.run(Engine.PANDAS, plan)[plan.name][LARGE]
    runner.record(NAME, LARGE, Engine.PANDAS, timing)
    runner.result.notes.append(
        f"{Engine.PANDAS} is timed over batches of {rows:,} rows and a state that holds only the "
        "keys it has seen"
    )


def _bars(runner: Runner) -> None:
    def speed(engine: Engine) -> float:
        return runner.result.timing(NAME, LARGE, engine).rows_per_second

    ours = speed(Engine.ANABRANCH)
    runner.at_least("keyed, 1 M rows a batch: times RocksDB", ours / speed(Engine.ROCKSDB), 5)
    runner.at_least("keyed, 1 M rows a batch: times HDFS-backed", ours / speed(Engine.HDFS), 3)
    runner.at_least(
        f"keyed, 1 M rows a batch: times {Engine.PANDAS}", ours / speed(Engine.PANDAS), 300
    )
    few = runner.result.timing(NAME, FEW, Engine.ANABRANCH)
    runner.at_most("micro-batch of 100 rows: median milliseconds", few.median * 1000, 300)
