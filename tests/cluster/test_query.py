"""Queries on a real cluster whose nodes are killed: the result is that of an undisturbed run."""

from pathlib import Path
from typing import Any

import pytest

from anabranch.cluster import LocalCluster
from cluster import runs

pytestmark = [
    pytest.mark.spark,
    pytest.mark.chaos,
    pytest.mark.cluster,
    pytest.mark.timeout(900),  # a machine that is busy with other things
]
FILES = 11


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


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in events]


def test_a_node_is_killed(source: Path, undisturbed: dict[bool, Path], tmp_path: Path) -> None:
    acts = {"3": ["kill 0"], "6": ["~kill 0", "add"]}
    events = runs.run(source, tmp_path / "work", nodes=3, ordered=True, acts=acts)
    runs.same(tmp_path / "work", undisturbed[True])
    assert kinds(events).count("recovery") >= 2
    recoveries = [e for e in events if e["kind"] == "recovery"]
    assert recoveries[0]["replayed"] >= 0


@pytest.mark.parametrize("incremental", [True, False])
def test_an_operator_is_scaled(
    source: Path, undisturbed: dict[bool, Path], tmp_path: Path, incremental: bool
) -> None:
    """New instances take over changes; or, of tables that do not know them, run batches again."""
    acts = {"2": ["~scale users 4"], "6": ["~scale users 1", "~scale cities 3"]}
    plan = {"nodes": 3, "acts": acts, "backup": "upstream", "incremental": incremental}
    plan["tls"] = runs.make_certificate(tmp_path / "tls")
    events = runs.run(source, tmp_path / "work", **plan)
    runs.same(tmp_path / "work", undisturbed[False])
    assert kinds(events).count("scale") == 3


def test_lost_groups_are_recovered_over_two_nodes(
    source: Path, undisturbed: dict[bool, Path], tmp_path: Path
) -> None:
    acts = {"4": ["kill 0"], "6": ["add", "rebalance"]}
    events = runs.run(
        source, tmp_path / "work", nodes=3, seconds=30, acts=acts, parallelism=2, backup="upstream"
    )
    runs.same(tmp_path / "work", undisturbed[False])
    assert "recovery" in kinds(events)
    assert "scale" in kinds(events), "nothing was moved to the new node"


def test_the_driver_is_killed(source: Path, undisturbed: dict[bool, Path], tmp_path: Path) -> None:
    with LocalCluster(nodes=2, memory="600m") as cluster:
        plan = {"nodes": 2, "master": cluster.master, "ordered": True, "backup": "upstream"}
        runs.kill_after(source, tmp_path / "work", "committed 6", **plan)
        runs.run(source, tmp_path / "work", **plan)
    runs.same(tmp_path / "work", undisturbed[True])


def test_agents_and_executors_are_killed(
    source: Path, undisturbed: dict[bool, Path], tmp_path: Path
) -> None:
    acts = {"3": ["agent 0"], "5": ["~agent 1"], "7": ["executor 1"]}
    plan = {"nodes": 3, "ordered": True, "acts": acts, "backup": "upstream"}
    events = runs.run(source, tmp_path / "work", **plan)
    runs.same(tmp_path / "work", undisturbed[True])
    # An agent that is gone alone is no loss of state.
    assert kinds(events).count("failure") <= 1


@pytest.mark.parametrize("killed", ["0 1", "all"])
def test_several_nodes_are_killed_at_once(
    source: Path, undisturbed: dict[bool, Path], tmp_path: Path, killed: str
) -> None:
    acts = {"5": [f"kill {killed}", "~add", "~add"]}
    plan = {"nodes": 3, "instances": 2, "ordered": True, "seconds": 3, "acts": acts}
    events = runs.run(source, tmp_path / "work", **plan)
    runs.same(tmp_path / "work", undisturbed[True])
    assert kinds(events).count("failure") >= 2


def test_nodes_die_while_an_operator_is_scaled_and_during_a_checkpoint(
    source: Path, undisturbed: dict[bool, Path], tmp_path: Path
) -> None:
    acts = {
        "3": ["~scale users 4", "~kill 1", "~add"],
        "7": ["~checkpoint", "~kill 0", "~add"],
    }
    events = runs.run(source, tmp_path / "work", nodes=3, acts=acts)
    runs.same(tmp_path / "work", undisturbed[False])
    assert "scale" in kinds(events)


def test_state_at_peers_outlives_one_node_after_another(
    source: Path, undisturbed: dict[bool, Path], tmp_path: Path
) -> None:
    """Idle nodes hold backups, too. When one dies, what it held is stored again elsewhere."""
    kills = {2: "kill-idle 0", 4: "kill 0", 5: "kill-idle 0", 7: "kill 0", 8: "kill-idle 0"}
    acts = {str(file): [kill, "add", "protected"] for file, kill in kills.items()}
    acts["1"] = ["protected"]
    plan = {"nodes": 3, "instances": 1, "pool": 1, "backup": "upstream", "acts": acts}
    events = runs.run(source, tmp_path / "work", **plan)
    runs.same(tmp_path / "work", undisturbed[False])
    assert kinds(events).count("failure") == len(kills)
    assert "going back" not in kinds(events)


def test_the_pool_is_refilled(source: Path, tmp_path: Path) -> None:
    plan = {"nodes": 3, "instances": 1, "pool": 2, "acts": {"2": ["retire"], "5": ["wait 3"]}}
    events = runs.run(source, tmp_path / "work", **plan)
    assert [event["missing"] for event in events if event["kind"] == "pool short"] == [1]
