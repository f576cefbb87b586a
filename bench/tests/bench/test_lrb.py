"""How a run of Linear Road is judged."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from anabranch_bench.cli import bench
from anabranch_bench.lrb.account import Found, account, grids
from anabranch_bench.lrb.measure import LrbResult, Order, _conclude, _search
from anabranch_bench.lrb.run import Outcome, Window
from anabranch_linearroad import Answer, Verdict, answer_table
from anabranch_linearroad.accounts import ANSWERED
from anabranch_linearroad.answers import Answers
from anabranch_linearroad.clock import Clock

CLOCK = Clock(started=1000.0, second=60, pace=1.0)


def part(folder: Path, version: int, rows: list[dict[str, int]]) -> None:
    blank = dict.fromkeys(ANSWERED.names)
    table = pa.Table.from_pylist([blank | row for row in rows], ANSWERED)
    pq.write_table(table, folder / f"part-abc-{version:010d}-00000.parquet")


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    """Two slices at 1000.0 and 1000.1, committed at 1000.5 and 1006, and one before the clock."""
    part(tmp_path, 0, [{"Type": 0, "VID": 1, "Time": 59, "Slice": 599}])
    part(tmp_path, 1, [{"Type": 0, "VID": v, "Time": 60, "Slice": 600} for v in range(3)])
    late = [{"Type": 0, "VID": 9, "Time": 60, "Slice": 601}, {"Type": 3, "QID": 1, "Time": 60}]
    part(tmp_path, 2, [late[0], late[1] | {"Slice": 601}])
    return Answers(tmp_path, {0: 999.0, 1: 1000.5, 2: 1006.0}, CLOCK)


def test_delays_are_from_arrival_to_commit(answers: Answers) -> None:
    delays = answers.delays()
    assert delays.total == 5
    assert delays.percentile(50) == pytest.approx(0.5)
    assert delays.percentile(100) == pytest.approx(5.9)
    assert delays.of(Answer.EXPENDITURE).total == 1
    assert np.isnan(delays.of(Answer.ALERT).percentile(50))


def test_late_is_after_the_limit_of_the_type(answers: Answers) -> None:
    assert answers.delays().late == 1  # the expenditure has ten seconds


def test_answers_are_written_with_the_second_they_were_given_in(
    answers: Answers, tmp_path: Path
) -> None:
    assert answers.write(tmp_path / "out") == 6
    written = pq.read_table(tmp_path / "out")
    assert written.schema.equals(answer_table().schema)
    assert written["Emit"].to_pylist() == [None, 60.5, 60.5, 60.5, 66.0, 66.0]


def found(answers: Answers, *, complete: bool = True, verdict: Verdict | None = None) -> Found:
    outcome = Outcome(3, Window(0, 60, 120), CLOCK, [], {}, [], answers, complete, 1.0)
    return Found(outcome, answers.delays(), verdict)


def test_a_run_is_told_in_numbers_and_in_tables(answers: Answers) -> None:
    said = account(found(answers, verdict=Verdict(6, 6)))
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert said["all_delays"] == {"answers": 5, "p50": 0.5, "p95": 5.9, "p99": 5.9, "max": 5.9}
    facts, delays, times = grids(said)
    assert dict(facts.rows)["limits"] == "1 answers late"
    assert dict(facts.rows)["verdict"] == "passed: 6 answers expected, 6 received"
    assert delays.rows[0] == ("toll notifications", "4", "0.500", "5.900", "5.900", "5.900")
    assert delays.rows[-1][:2] == ("all", "5")
    assert times.rows == [("batch", "0.000")]


def test_a_run_without_a_clock_has_no_delays(answers: Answers) -> None:
    said = account(found(replace(answers, clock=Clock(1000.0, 120, 1.0))))
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert [grid.title for grid in grids(said)] == [
        "L = 3",
        "L = 3: where the time of a batch goes",
    ]


def test_a_run_that_was_given_up_does_not_hold(answers: Answers) -> None:
    given_up = found(answers, complete=False)
    assert not given_up.holds
    assert "given up" in str(grids(account(given_up))[0].rows)


LATE, AT_PACE = "answers after their limit", "99th percentile, s"


@pytest.mark.parametrize(
    ("pace", "nodes", "bars", "note"),
    [(1.0, None, {LATE, AT_PACE}, ""), (1.0, 4, {LATE}, "4 nodes"), (4.0, None, set(), "4 times")],
)
def test_a_run_is_held_to_limits_at_true_pace_only(
    answers: Answers, pace: float, nodes: int | None, bars: set[str], note: str
) -> None:
    result = LrbResult("lrb", 1, False)
    _conclude(result, Order(3, Window(0, 60, 120, pace), nodes=nodes), found(answers))
    assert {bar.name for bar in result.bars} & {LATE, AT_PACE} == bars
    assert note in " ".join(result.notes)


@dataclass(frozen=True)
class Held:
    xways: int
    holds: bool


@pytest.mark.parametrize(("most", "start"), [(350, 100), (350, 400), (410, 350), (0, 50)])
def test_the_search_ends_near_the_greatest_that_holds(most: int, start: int) -> None:
    tried: list[int] = []

    def one(xways: int) -> Any:
        tried.append(xways)
        return Held(xways, xways <= most)

    best: Any = _search(one, Order(start, Window(0, 0, 60)))
    assert len(tried) == len(set(tried)) < 12
    if most:
        assert best.holds
        assert most - best.xways < 25
    else:
        assert not best.holds


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--faults"], "--nodes"), (["--faults", "--nodes", "4", "--pace", "0"], "--pace")],
)
def test_faults_need_nodes_and_a_clock(options: list[str], named: str) -> None:
    result = CliRunner().invoke(bench, ["lrb", *options])
    assert result.exit_code == 2
    assert named in result.output
