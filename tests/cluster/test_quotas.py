"""CPU quotas: where groups are made, what is written into them, and that the kernel heeds it."""

import logging
import os
import sys
from pathlib import Path

import pytest

from anabranch.cluster import quotas
from anabranch.cluster.processes import MARK, end, of_folder, start
from anabranch.cluster.quotas import GroupsV1, GroupsV2, candidates, open_groups
from anabranch.cluster.waiting import until

BUSY = """
import time
began, spent = time.monotonic(), time.process_time()
while time.monotonic() - began < 1.5: pass
print("share", (time.process_time() - spent) / (time.monotonic() - began), flush=True)
"""


def test_version_1_groups_are_made_in_the_group_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "cpu" / "mine").mkdir(parents=True)
    mounts = (
        f"cgroup {tmp_path}/memory cgroup rw,memory 0 0\n"
        f"cgroup {tmp_path}/cpu cgroup rw,cpu,cpuacct 0 0\n"
    )
    found = list(candidates("c", mounts, "4:memory:/other\n1:cpu,cpuacct:/mine\n"))
    assert found == [GroupsV1(tmp_path / "cpu" / "mine" / "c")]


def test_a_group_path_of_the_host_falls_back_to_the_mount(tmp_path: Path) -> None:
    found = list(candidates("c", f"cgroup {tmp_path} cgroup rw,cpu 0 0", "1:cpu:/docker/abc\n"))
    assert found == [GroupsV1(tmp_path / "c")]


def test_version_2_groups_are_made_in_the_own_group_or_beside_it(tmp_path: Path) -> None:
    own = tmp_path / "user.slice" / "shell.scope"
    own.mkdir(parents=True)
    found = list(
        candidates("c", f"cgroup2 {tmp_path} cgroup2 rw 0 0", "0::/user.slice/shell.scope\n")
    )
    assert found == [GroupsV2(own / "c"), GroupsV2(own.parent / "c")]


def test_version_1_writes_a_quota_per_period(tmp_path: Path) -> None:
    groups = GroupsV1(tmp_path / "c")
    groups.add("node")
    groups.limit("node", 0.3)
    assert (tmp_path / "c" / "node" / "cpu.cfs_quota_us").read_text() == "30000"
    assert (tmp_path / "c" / "node" / "cpu.cfs_period_us").read_text() == "100000"
    groups.limit("node", None)
    assert (tmp_path / "c" / "node" / "cpu.cfs_quota_us").read_text() == "-1"


def test_version_2_hands_the_controller_down_and_writes_a_maximum(tmp_path: Path) -> None:
    groups = GroupsV2(tmp_path / "c")
    groups.add("node")
    groups.limit("node", 0.3)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / "c" / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / "c" / "node" / "cpu.max").read_text() == "30000 100000"
    groups.limit("node", None)
    assert (tmp_path / "c" / "node" / "cpu.max").read_text() == "max 100000"


def test_groups_are_removed_from_below(tmp_path: Path) -> None:
    (tmp_path / "c" / "node").mkdir(parents=True)
    GroupsV1(tmp_path / "c").remove()
    assert not (tmp_path / "c").exists()
    GroupsV1(tmp_path / "c").remove()


def test_without_permission_there_is_one_warning_and_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A folder below a file cannot be made, whoever asks.
    (tmp_path / "file").write_text("")
    refused = [GroupsV1(tmp_path / "file" / "c"), GroupsV2(tmp_path / "file" / "c")]
    monkeypatch.setattr(quotas, "candidates", lambda *_: iter(refused))
    with caplog.at_level(logging.WARNING):
        assert open_groups("c", 0.3) is None
    (record,) = caplog.records
    assert "limit of 0.3 CPUs for each node is not applied" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.chaos
def test_a_node_gets_its_quota_and_no_more(tmp_path: Path) -> None:
    groups = open_groups(f"anabranch-test-{os.getpid()}", 0.25)
    if groups is None:
        pytest.skip("control groups cannot be made here")
    try:
        groups.add("node")
        groups.limit("node", 0.25)
        log = tmp_path / "log"
        process = start(
            [sys.executable, "-S", "-c", BUSY],
            environment=dict(os.environ) | {MARK: str(tmp_path / "state")},
            log=log,
            group=groups.folder / "node" / "cgroup.procs",
        )
        try:
            assert until(lambda: "share" in log.read_text(), 30)
            assert float(log.read_text().split()[1]) < 0.35
        finally:
            end(lambda: of_folder(tmp_path, groups.folder))
            process.wait(10)
    finally:
        groups.remove()
    assert not groups.folder.exists()
