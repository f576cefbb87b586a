"""A real cluster: jobs run on its nodes, nodes die and come, and nothing is left of it."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from anabranch.cluster import ClusterFailed, LocalCluster
from anabranch.cluster.processes import of_folder, running
from anabranch.cluster.spark import LOG_BYTES
from anabranch.cluster.waiting import until
from anabranch.errors import PlanError
from cluster import driver
from cluster.driver import Driver, Seen

pytestmark = [pytest.mark.spark, pytest.mark.chaos]


class Cluster(NamedTuple):
    driver: Driver
    master: str
    folder: Path
    limited: bool


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    other = Driver()
    try:
        made = Cluster(other, *other.run(driver.start, 2, 0.9))
        other.run(driver.open_session)
        yield made
        other.run(driver.stop)
    finally:
        other.close()
    assert of_folder(made.folder) == set()
    assert not made.folder.exists()
    assert groups_named(made.folder.name) == []


def groups_named(name: str) -> list[Path]:
    return [*Path("/sys/fs/cgroup").glob(f"*/**/{name}")]


def job(cluster: Cluster, tasks: int, *, service: bool = False) -> list[Seen]:
    found: list[Seen] = cluster.driver.run(driver.job, tasks, service)
    return found


def node(cluster: Cluster, at: int) -> str:
    hosts: tuple[str, ...] = cluster.driver.run(driver.nodes)
    return hosts[at]


def test_tasks_run_on_every_node_and_know_its_state_folder(cluster: Cluster) -> None:
    seen = job(cluster, 4)
    assert {task.host for task in seen} == {"127.0.0.2", "127.0.0.3"}
    for task in seen:
        assert task.state == str(cluster.folder / task.host / "state")
        assert Path(task.state).is_dir()


def test_tasks_are_under_the_quota_of_their_node(cluster: Cluster) -> None:
    if not cluster.limited:
        pytest.skip("control groups cannot be made here")
    for task in job(cluster, 2):
        assert f"{cluster.folder.name}/{task.host}" in task.group


def test_executors_log_little_and_their_logs_stay_small(cluster: Cluster) -> None:
    def logs() -> list[Path]:
        return [*cluster.folder.glob("*/work/*/*/stderr*")]

    job(cluster, 20)
    assert logs()
    assert not [log for log in logs() if " INFO Executor: Running task" in log.read_text()]
    cluster.driver.run(driver.shout, 4 * LOG_BYTES)
    assert until(lambda: any("the end" in log.read_text() for log in logs()), 20)
    written: Counter[Path] = Counter()
    for log in logs():
        written[log.parent] += log.stat().st_size
    assert LOG_BYTES / 2 < max(written.values()) < 2.5 * LOG_BYTES


def test_a_killed_node_is_gone_with_all_it_started_and_a_new_one_takes_part(
    cluster: Cluster,
) -> None:
    lost = node(cluster, 0)
    seen = [task for task in job(cluster, 2, service=True) if task.host == lost]
    (cluster.folder / lost / "state" / "table").write_text("rows")
    processes = of_folder(cluster.folder / lost)
    assert {seen[0].pid, seen[0].executor} <= processes
    # The worker, its executor, the daemon, the task's process and the service.
    assert len(processes) >= 5

    cluster.driver.run(driver.call, "kill", lost)
    assert not processes & running().keys()
    assert not (cluster.folder / lost / "state").exists()
    assert lost not in cluster.driver.run(driver.nodes)
    assert until(lambda: lost not in cluster.driver.run(driver.executor_hosts), 20)
    assert lost not in {task.host for task in job(cluster, 2)}

    added = cluster.driver.run(driver.call, "add")
    assert added not in {lost, "127.0.0.2", "127.0.0.3"}
    cluster.driver.run(driver.call, "await_executors")
    assert added in {task.host for task in job(cluster, 4)}


def test_a_killed_node_can_come_back_to_its_kept_state(cluster: Cluster) -> None:
    host = node(cluster, 0)
    kept = cluster.folder / host / "state" / "table"
    kept.write_text("rows")
    cluster.driver.run(driver.kill_keeping_state, host)
    assert of_folder(cluster.folder / host) == set()
    assert cluster.driver.run(driver.call, "add", host) == host
    assert kept.read_text() == "rows"
    assert host in cluster.driver.run(driver.nodes)


def test_a_killed_executor_is_replaced_and_the_node_stays(cluster: Cluster) -> None:
    cluster.driver.run(driver.call, "await_executors")
    host = node(cluster, 0)
    before = {task.executor for task in job(cluster, 4) if task.host == host}
    cluster.driver.run(driver.call, "kill_executor", host)
    assert not before & running().keys()
    assert host in cluster.driver.run(driver.nodes)
    assert until(lambda: host not in cluster.driver.run(driver.executor_hosts), 20)
    cluster.driver.run(driver.call, "await_executors")
    after = {task.executor for task in job(cluster, 4) if task.host == host}
    assert after
    assert not before & after


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "worker", "127.0.0.3/24"])
def test_an_address_that_cannot_be_a_node_is_refused(cluster: Cluster, host: str) -> None:
    with pytest.raises(PlanError):
        cluster.driver.run(driver.call, "add", host)


def test_nodes_that_are_not_there_or_are_there_already_are_refused(cluster: Cluster) -> None:
    with pytest.raises(PlanError, match="up already"):
        cluster.driver.run(driver.call, "add", node(cluster, 0))
    with pytest.raises(PlanError, match=r"no node '127\.0\.0\.99' is up; there are"):
        cluster.driver.run(driver.call, "kill", "127.0.0.99")


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"nodes": 251},
        {"cores": 0},
        {"memory": "much"},
        {"memory": "100m"},
        {"cpus": 0.0},
        {"cpus": float("nan")},
        {"folder": os.sep},
        {"folder": "a folder"},
    ],
)
def test_a_cluster_that_cannot_be_is_refused_before_anything_starts(wrong: dict) -> None:
    with pytest.raises(PlanError, match=str(next(iter(wrong)))):
        LocalCluster(**wrong)


def test_a_cluster_that_is_not_started_says_so() -> None:
    made = LocalCluster()
    assert made.nodes == ()
    with pytest.raises(ClusterFailed, match="not running"):
        made.add()
    made.stop()


def test_a_failed_start_quotes_the_log_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    made = LocalCluster(1, folder=tmp_path / "cluster")
    with pytest.raises(ClusterFailed, match="nowhere/bin/java"):
        made.start()
    assert of_folder(tmp_path / "cluster") == set()
    assert not [*tmp_path.glob("cluster/*/state")]
    assert (tmp_path / "cluster" / "master" / "master.log").exists()


def test_nothing_stays_when_the_driver_is_killed() -> None:
    other = Driver()
    try:
        _, folder, _ = other.run(driver.start, 1, None)
        assert len(of_folder(folder)) >= 2
        os.kill(other.pid, signal.SIGKILL)
        assert until(lambda: not folder.exists() and not of_folder(folder), 30)
    finally:
        other.close()
