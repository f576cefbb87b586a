"""What dead queries have left on a machine is removed, and nothing else."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_claims import another_process

import anabranch.nodes.sweep as sweep_module
from anabranch.cli import main
from anabranch.nodes.captures import OF, spilled
from anabranch.nodes.claims import ALIVE, KEEP, Claim
from anabranch.nodes.folders import BACKUPS, StateRoot
from anabranch.nodes.sweep import sweep

DEAD, LIVING, THIRD = "d" * 12, "a" * 12, "3" * 12
HOLD = """
from anabranch.nodes.claims import Claim
from anabranch.nodes.folders import StateRoot
claim = Claim.of(StateRoot(sys.argv[2], sys.argv[1]), *sys.argv[3:])
table = claim.root / 'tables' / 'op@1' / '0'
table.mkdir(parents=True)
(table / 'table').write_bytes(bytes(100_000))
"""


@pytest.fixture
def backups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(BACKUPS, str(tmp_path / "backups"))
    return tmp_path / "backups"


@pytest.fixture
def base(tmp_path: Path, backups: Path) -> Path:
    (tmp_path / "base").mkdir()
    return tmp_path / "base"


def leave(root: Path) -> Path:
    """What a killed query leaves."""
    (root / "tables" / "op@1" / ".0.restoring").mkdir(parents=True)
    (root / "captures").mkdir()
    for name in ("alive", "driver.lock", "agent.log", "captures/a.arrow"):
        (root / name).write_bytes(bytes(5_000))
    return root


def test_queries_that_live_stay_and_killed_ones_go(base: Path) -> None:
    with (
        another_process(HOLD, base, LIVING) as living,
        another_process(HOLD, base, DEAD) as dead,
        another_process(HOLD, base, DEAD, "node-1") as far,
    ):
        assert sweep(base) == []
        for process in (dead, far):
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert sweep(base) == [base / DEAD, base / "node-1" / DEAD]
        assert (base / LIVING / "tables" / "op@1" / "0" / "table").exists()
        assert not (base / DEAD).exists()
        assert not (base / "node-1").exists()
        living.kill()
        living.wait()
    assert sweep(base) == [base / LIVING]


def test_a_driver_that_holds_its_lock_lives(base: Path) -> None:
    code = """
import fcntl
file = open(sys.argv[1], 'a')
fcntl.flock(file, fcntl.LOCK_EX)
"""
    leave(base / DEAD)
    with another_process(code, base / DEAD / "driver.lock"):
        assert sweep(base) == []
    assert sweep(base) == [base / DEAD]


def test_what_is_to_be_kept_and_what_is_starting_stays(base: Path) -> None:
    (leave(base / DEAD) / KEEP).touch()
    leave(base / THIRD)
    assert sweep(base, spare=[THIRD]) == []
    assert sweep(base, kept=True) == [base / THIRD, base / DEAD]


def test_what_is_not_certainly_ours_stays(base: Path) -> None:
    strange = [
        leave(base / DEAD) / "thesis.tex",
        leave(base / THIRD) / "tables.zip",
        base / "backups" / DEAD[:11] / "file",
        base / "project" / DEAD / "tables" / "file",
        base / "project" / "readme",
        base / "0123456789abc" / "tables" / "file",
        base / "0123456789AB" / "tables" / "file",
        base / "empty" / "sub" / "file",
    ]
    for file in strange:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (base / ("e" * 12)).symlink_to(base / "project")
    (base / "nothing").mkdir()
    assert sweep(base) == []
    assert all(file.exists() for file in strange)
    assert (base / "nothing").exists()
    assert sweep(base / "missing") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of others")
def test_what_is_another_users_stays(base: Path) -> None:
    os.chown(leave(base / DEAD), 65534, 65534)
    assert sweep(base) == []


def test_half_removed_folders_and_lost_captures_go(base: Path) -> None:
    half = leave(base / f".swept-{'0' * 32}")
    root = leave(base / LIVING)
    for of in (root, base / DEAD):
        spilled(of).mkdir(parents=True)
        (spilled(of) / OF).write_text(str(of))
        (spilled(of) / "a.arrow").touch()
    assert sweep(base, spare=[LIVING]) == [spilled(base / DEAD)]
    assert not half.exists()
    assert spilled(root).exists()
    assert sweep(base) == [root, spilled(root)]
    assert not spilled(root).parent.exists()


def test_claims_and_sweeps_at_the_same_time(base: Path) -> None:
    """Whoever has a claim has a folder that stays, whatever is swept meanwhile."""
    done = threading.Event()
    swept: list[Path] = []
    failures: list[str] = []

    def go_on() -> None:
        while not done.is_set():
            swept.extend(sweep(base))

    def claim(query: str) -> None:
        for number in range(150):
            with Claim.of(StateRoot(query, str(base))) as held:
                file = held.root / "tables" / str(number)
                file.parent.mkdir(exist_ok=True)
                file.touch()
                time.sleep(0.001)
                if not file.exists():
                    failures.append(f"{query} lost {number}")

    sweepers = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in sweepers:
        thread.start()
    with ThreadPoolExecutor() as pool:
        claimers = [pool.submit(claim, query) for query in (DEAD, LIVING, DEAD)]
    done.set()
    for thread in sweepers:
        thread.join()
    for each in claimers:
        each.result()
    assert failures == []
    assert swept, "nothing was ever swept"


def test_a_folder_that_was_removed_and_claimed_again_before_the_lock_stays(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that holds the lock of a removed folder does not remove the new one."""
    leave(base / DEAD)
    claims: list[Claim] = []
    lock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        if (
            operation & fcntl.LOCK_EX
            and not claims
            and Path(f"/proc/self/fd/{fd}").readlink() == alive
        ):
            shutil.rmtree(base / DEAD)
            claims.append(Claim.of(StateRoot(DEAD, str(base))))
        lock(fd, operation)

    alive = base / DEAD / ALIVE
    monkeypatch.setattr(sweep_module, "_lives", lambda folder: False)
    monkeypatch.setattr(fcntl, "flock", late)
    assert sweep(base) == []
    assert claims, "the folder was not removed in between"
    assert (base / DEAD / ALIVE).exists()
    for each in claims:
        each.close()


def test_the_command_lists_and_removes(base: Path, backups: Path) -> None:
    leave(base / DEAD)
    (leave(base / THIRD) / KEEP).touch()
    old, new = backups / "node-1" / DEAD, backups / "node-1" / LIVING
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(bytes(200_000))
    long_ago = time.time() - 8 * 86_400
    for path in (old / "part", old):
        os.utime(path, (long_ago, long_ago))

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["clean", "--state-folder", str(base), *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    told = run("--dry-run")
    assert f"Would remove {base / DEAD} (" in told
    assert f"Would remove {old} (204.8 kB)" in told.replace("208.9", "204.8")
    assert "Would remove 2 folders" in told
    assert (base / DEAD).exists()
    with another_process(HOLD, base, LIVING):
        told = run()
        assert "Removed 2 folders" in told
        assert not (base / DEAD).exists()
        assert not old.exists()
        assert new.exists()
        assert (base / THIRD).exists()
        assert (base / LIVING).exists()
    assert str(new) in run("--older", "0 seconds", "--kept")
    assert not (base / THIRD).exists()
    assert "Removed 0 folders" in run()
