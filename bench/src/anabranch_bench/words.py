"""Benchmark 2: word counts in windows of 30 seconds."""

from anabranch_bench.plan import Engine, Phase, Workload
from anabranch_bench.runner import Runner

NAME = "words"
CASE = "50,000 sentences"

_VOCABULARY = 100_000


def run(runner: Runner) -> None:
    """Sentences of 20 words; a batch is 5 seconds of event time, six batches are a window."""
    phases = (
        Phase("warm up", 2 if runner.quick else 6, 50_000, _VOCABULARY),
        Phase(CASE, 6 if runner.quick else 24, 50_000, _VOCABULARY, measured=True),
    )
    plan = runner.prepare(NAME, Workload.WORDS, phases)
    engines = [Engine.ANABRANCH, Engine.ROCKSDB]
    if not runner.quick:
        engines.append(Engine.HDFS)
    for engine in engines:
        runner.record(NAME, CASE, engine, runner.run(engine, plan)[plan.name][CASE])
