"""Queries on a real cluster whose nodes are killed: the result is that of an undisturbed run."""

import json
from pathlib import Path
from typing import Any

import pytest

from anabranch.cluster import LocalCluster
from anabranch.cluster.links import open_network, remove
from anabranch.testing import LocalRing
from anabranch.testing.rings import hosts
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


def test_three_of_five_nodes_are_killed_at_once(
    source: Path, undisturbed: dict[bool, Path], tmp_path: Path
) -> None:
    """The state of an instance is lost together with two of the four nodes that have fragments."""
    acts = {
        "2": ["protected"],
        "3": ["kill 0 1 2", "add", "add", "add", "protected"],
        "6": ["~scale users 4", "kill 0 1 2", "add", "add", "add", "protected"],
    }
    plan = {"nodes": 5, "backup": "fragments", "acts": acts}
    events = runs.run(source, tmp_path / "work", **plan)
    runs.same(tmp_path / "work", undisturbed[False])
    assert kinds(events).count("failure") >= 5
    assert "recovery" in kinds(events)
    assert "going back" not in kinds(events)
    assert "part mended" in kinds(events)


def test_nodes_with_links_of_a_limited_rate(
    source: Path, undisturbed: dict[bool, Path], tmp_path: Path
) -> None:
    """A node is killed and returns, and all that passes between nodes and driver is slow."""
    network = open_network(10_000_000)
    if network is None:
        pytest.skip("network namespaces cannot be made here")
    remove(network.number)
    network.release()
    acts = {"3": ["kill 0"], "5": ["~add", "~scale users 3"]}
    plan = {"nodes": 3, "link": "100 Mbit", "backup": "upstream", "acts": acts}
    events = runs.run(source, tmp_path / "work", **plan)
    runs.same(tmp_path / "work", undisturbed[False])
    assert "recovery" in kinds(events)


def test_fragments_adapt_to_what_was_measured(
    source: Path, undisturbed: dict[bool, Path], tmp_path: Path
) -> None:
    """Then two nodes of five are killed at once: that of a slice, and a holder of its fragments."""
    add = ["add", "add", "protected"]
    acts = {
        **{str(file): ["checkpoint"] for file in range(5)},
        "5": ["protected", "kill 0 1", *add],
        "8": ["~scale users 4", "kill 0 1", *add],
    }
    work = tmp_path / "work"
    events = runs.run(source, work, nodes=5, backup="adapting", acts=acts)
    runs.same(work, undisturbed[False])
    told = [event for event in events if event["kind"] == "fragments adapted"]
    assert (told[0]["before"], told[0]["data"], told[0]["parity"]) == ([2, 2], 3, 1)
    assert "3 + 1 stores least within the limits: recovery in" in told[0]["reason"]
    assert kinds(events).count("failure") >= 4
    assert "going back" not in kinds(events)
    shown = json.loads((work / "fragments.json").read_text())
    assert shown == {name: told[-1][name] for name in ("data", "parity", "stripe")}


def test_standing_nodes_outlive_the_driver_and_all_nodes(
    source: Path, undisturbed: dict[bool, Path], tmp_path: Path
) -> None:
    """The cluster is killed with its driver, and two standing nodes: another cluster carries on."""
    with LocalRing(tmp_path / "ring", hosts(6, start=100)) as ring:
        plan = {"nodes": 2, "ordered": True, "seconds": 0.2, "ring": str(ring.file)}
        with LocalCluster(nodes=2, memory="600m") as cluster:
            runs.kill_after(source, tmp_path / "work", "committed 6", **plan, master=cluster.master)
            for host in cluster.nodes:
                cluster.kill(host)
        ring.kill(ring.hosts[:2])
        assert list((tmp_path / "work" / "checkpoint").glob("**/parts/*")) == []
        events = runs.run(source, tmp_path / "work", **plan)
    runs.same(tmp_path / "work", undisturbed[True])
    (restarted,) = [event for event in events if event["kind"] == "restarted"]
    assert restarted["start"] >= 0, "it went on from a checkpoint, not from the sources"
    assert "going back" not in kinds(events)


def test_the_pool_is_refilled(source: Path, tmp_path: Path) -> None:
    plan = {"nodes": 3, "instances": 1, "pool": 2, "acts": {"2": ["retire"], "5": ["wait 3"]}}
    events = runs.run(source, tmp_path / "work", **plan)
    assert [event["missing"] for event in events if event["kind"] == "pool short"] == [1]
