"""Queries on a real cluster whose nodes are killed: the result is that of an undisturbed run."""

from pathlib import Path

import pytest

from cluster import runs

pytestmark = [pytest.mark.spark, pytest.mark.chaos]
FILES = 14


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_input(tmp_path_factory.mktemp("cluster") / "input", 3, FILES)


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> dict[bool, Path]:
    """With operators for which the order of rows counts, and without."""
    works = {}
    for ordered in (True, False):
        works[ordered] = source.parent / f"undisturbed-{ordered}"
        runs.run(source, works[ordered], nodes=0, ordered=ordered)
    return works


def test_a_node_is_killed(source: Path, undisturbed: dict[bool, Path], tmp_path: Path) -> None:
    acts = {"5": ["kill 0"], "9": ["~kill 0", "add"]}
    events = runs.run(source, tmp_path / "work", nodes=3, ordered=True, acts=acts)
    runs.same(tmp_path / "work", undisturbed[True])
    recoveries = [event for event in events if event["kind"] == "recovery"]
    assert len(recoveries) >= 2
    assert recoveries[0]["replayed"] >= 0


def test_an_operator_is_scaled(source: Path, undisturbed: dict[bool, Path], tmp_path: Path) -> None:
    acts = {"3": ["~scale users 4"], "8": ["~scale users 1", "~scale cities 3"]}
    events = runs.run(source, tmp_path / "work", nodes=3, acts=acts, backup="upstream")
    runs.same(tmp_path / "work", undisturbed[False])
    assert len([event for event in events if event["kind"] == "scale"]) == 3
