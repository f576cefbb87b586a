"""Benchmark 4: the cost of checkpoints in throughput and latency."""

from dataclasses import replace
from statistics import median

from anabranch_bench.harness import Result, in_order
from anabranch_bench.plan import Checkpoints, Engine, Phase, Workload
from anabranch_bench.runner import Runner

NAME = "overhead"

_KEYS = 1_000_000
_TIMED = "timed"


def case(number: int) -> str:
    """The name of a round."""
    return f"round {number}"


def run(runner: Runner) -> None:
    """The three policies take turns for several rounds; each round is compared with itself.

    Keys are drawn evenly, so that nearly all of the state has changed by the next checkpoint: the
    hardest case for incremental checkpoints.
    """
    phases = (
        Phase("fill", 1, _KEYS, _KEYS, fill_from=0),
        Phase("warm up", 1, 1_000_000, _KEYS),
        Phase(_TIMED, 8 if runner.quick else 30, 1_000_000, _KEYS, measured=True),
    )
    plan = runner.prepare(NAME, Workload.KEYED, phases)
    rounds = range(1, (2 if runner.quick else 5) + 1)
    turns = [(number, policy) for number in rounds for policy in _order(number)]
    runs = [replace(plan, name=f"{n} {policy}", checkpoints=policy) for n, policy in turns]
    warm = replace(plan, name=NAME, checkpoints=Checkpoints.NEVER)  # for the JVM; not counted
    timed = runner.run(Engine.ANABRANCH, warm, *runs)
    for number, policy in turns:
        runner.record(NAME, case(number), policy, timed[f"{number} {policy}"][_TIMED])
    lost = cost(runner.result, Checkpoints.INCREMENTAL)
    runner.at_most("incremental checkpoints: share of throughput lost", lost, 0.05)


def cost(result: Result, policy: Checkpoints) -> float:
    """The share of the throughput that a policy takes: the median of the rounds."""
    shares = []
    for number in in_order(measure.case for measure in result.pick(NAME)):
        never = result.timing(NAME, number, Checkpoints.NEVER).rows_per_second
        shares.append(1 - result.timing(NAME, number, policy).rows_per_second / never)
    return median(shares)


def _order(number: int) -> list[Checkpoints]:
    # A different one goes first in each round, so that none always runs on the coolest machine.
    policies = list(Checkpoints)
    first = number % len(policies)
    return policies[first:] + policies[:first]
