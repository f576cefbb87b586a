"""What is read out of a run in which something happened, and how it is shown."""

from pathlib import Path

import pytest
from rich.console import Console

from anabranch.errors import QueryFailed
from anabranch_bench import moved, panels, recovery, scaling
from anabranch_bench.faults import Act, Outcome, Scenario, Scheme
from anabranch_bench.harness import Measure, Result, Timing


def test_a_scenario_travels_as_json() -> None:
    scenario = Scenario(Scheme.SPARK, 1000, act=Act.SCALE, window=None)
    assert Scenario.from_json(scenario.to_json()) == scenario


def test_the_gap_ends_with_the_first_batch_begun_after_what_happened() -> None:
    commits = [(1.0, 0), (2.0, 1), (3.5, 2), (9.0, 3), (10.0, 4)]
    # At 3.0 batch 2 was under way: that it was committed shows nothing.
    assert Outcome(3.0, 3.0, commits).gap == 6.0
    with pytest.raises(QueryFailed, match="no batch"):
        _ = Outcome(9.5, 9.5, commits).gap


def test_times_between_commits_around_a_moment() -> None:
    commits = [(1.0, 0), (2.0, 1), (5.0, 2), (6.0, 3)]
    # The gap that the moment falls into counts, however it is cut.
    assert Outcome(3.0, 4.0, commits).between(3.0, 4.0) == [3.0]
    assert Outcome(3.0, 4.0, commits).between(0.0, 9.0) == [1.0, 3.0, 1.0]


def test_every_case_has_a_title_and_a_scenario_of_its_own() -> None:
    for quick in (True, False):
        cases = recovery.cases(quick=quick, seed=1)
        assert {case.benchmark for case in cases} == set(recovery.CHOICES)
        assert set(recovery.CHOICES) <= set(recovery.TITLES)
        named = [(case.benchmark, case.name, case.side) for case in cases]
        assert len(set(named)) == len(named)
        assert scaling.scenarios(quick=quick, seed=1)


def test_results_are_shown_and_drawn(tmp_path: Path) -> None:
    result = Result("recovery", seed=1, quick=True)
    for side in ("ours", "theirs"):
        timing = Timing(10, (1.0, 1.0, 9.0))
        result.measures.append(Measure(recovery.RATES, "slow", side, timing))
        result.measures.append(Measure(recovery.LATENCY, "slow", side, timing))
    console = Console(record=True, width=120)
    panels.show(result, recovery.TITLES, console, (recovery.LATENCY,))
    text = console.export_text()
    assert "figure 11" in text
    assert "1.000" in text
    assert "8.200" in text, "the 95th percentile"
    panels.draw(result, recovery.TITLES, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_move_is_set_against_the_groups_that_it_moves() -> None:
    scenario = moved.scenario(quick=True, seed=1)
    events = [
        {"kind": "checkpoint", "version": 1, "bytes": 6400},
        {"kind": "checkpoint", "version": 2, "bytes": 64},
        {"kind": "scale", "bytes": 700, "read": 1400, "pause": 0.1},
        {"kind": "checkpoint", "version": 4, "bytes": 640},
        {"kind": "checkpoint", "version": 5, "bytes": 64},
    ]
    memory = [(10.0, 12800), (15.0, 12800), (20.5, 14200), (22.0, 99999)]
    commits = [(9.0, 2), (20.5, 3), (21.5, 4), (22.5, 5)]
    result = Result("scaling", seed=1, quick=True)
    moved.note(result, scenario, Outcome(20.0, 21.0, commits, 0, events, memory))
    # 14 of 128 groups move: 700 bytes of a full checkpoint, 1,400 of the state.
    stored, read, grown, after = (bar.value for bar in result.bars)
    assert stored == pytest.approx(1.0)
    assert read == pytest.approx(2.0)
    assert grown == pytest.approx(1.0)
    assert after == pytest.approx(0.1)
    assert [bar.holds for bar in result.bars] == [True, False, True, True]
