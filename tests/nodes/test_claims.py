"""Who uses a folder of state."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from anabranch import boot, mounts
from anabranch.errors import PlanError
from anabranch.nodes import folders
from anabranch.nodes.claims import ALIVE, ALONE, HOSTS, Claim, try_alone
from anabranch.nodes.folders import BACKUPS, VARIABLE, StateRoot

QUERY = "0123456789ab"
OTHER = "5" * 32


@pytest.fixture(autouse=True)
def backups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKUPS, str(tmp_path / "backups"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def hosts(base: Path) -> Path:
    return base / f"{HOSTS}-{os.geteuid()}"


@contextmanager
def another_process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs some code, and says so when it is done with it; then it waits."""
    run = (
        f"import sys\nfrom pathlib import Path\n{code}\nprint('done', flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", run, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "done\n", process.stderr.read()
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_folder_is_held_until_its_process_dies(tmp_path: Path) -> None:
    code = "from anabranch.nodes.claims import Claim\n"
    code += "from anabranch.nodes.folders import StateRoot\n"
    code += "claim = Claim.of(StateRoot(sys.argv[2], sys.argv[1]))"
    with another_process(code, tmp_path, QUERY):
        assert try_alone(tmp_path / QUERY / ALIVE) is None
        with Claim.of(StateRoot(QUERY, str(tmp_path))) as second:
            assert second.root == tmp_path / QUERY
    fd = try_alone(tmp_path / QUERY / ALIVE)
    assert fd is not None
    os.close(fd)


def test_one_driver_uses_the_state_of_a_query(tmp_path: Path) -> None:
    """Two with copies of one checkpoint folder, of which neither sees the other one."""
    code = "import os\nfrom anabranch.nodes.claims import Claim\n"
    code += "from anabranch.nodes.folders import StateRoot\n"
    code += "claim = Claim.of(StateRoot(sys.argv[2], sys.argv[1]))\n"
    code += "claim.hold_alone('/one/ck')"
    with Claim.of(StateRoot(QUERY, str(tmp_path))) as second:
        with (
            another_process(code, tmp_path, QUERY),
            pytest.raises(PlanError, match=r"by process \d+ for .* /one/ck, .* for /two/ck"),
        ):
            second.hold_alone("/two/ck")
        second.hold_alone("/two/ck")
        assert (second.root / ALONE).read_text() == (
            f"process {os.getpid()} for the checkpoint folder /two/ck"
        )
    with Claim.of(StateRoot(QUERY, str(tmp_path))) as third:
        third.hold_alone("/three/ck")


def test_folders_are_for_their_user_alone(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with Claim.of(StateRoot(QUERY, str(base)), "node-1"):
        assert mode(base) == 0o700
        assert mode(base / "node-1" / QUERY) == 0o700
        assert mode(base / "node-1" / QUERY / ALIVE) == 0o600
    base.chmod(0o755)
    (base / QUERY).mkdir(mode=0o755)
    with Claim.of(StateRoot(QUERY, str(base))):
        assert mode(base) == 0o755, "a folder that somebody named is as it was made"
        assert mode(base / QUERY) == 0o700


def test_the_default_folders_are_of_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, BACKUPS):
        monkeypatch.delenv(name, raising=False)
    with mock.patch.object(os, "geteuid", return_value=4711):
        assert StateRoot(QUERY).path().parent.name == "anabranch-4711"
        assert StateRoot(QUERY).backups("a").parent.parent.name == "anabranch-backups-4711"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_two_users_are_not_in_each_others_way(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and not mode(folder) & 0o005:
            folder.chmod(mode(folder) | 0o055)
    code = """
import os
from anabranch.nodes.claims import Claim
from anabranch.nodes.folders import StateRoot
os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.environ['ANABRANCH_BACKUP_FOLDER'] = sys.argv[1] + '/backups-of-nobody'
claim = Claim.of(StateRoot(sys.argv[2], sys.argv[1]), 'node-1')
"""
    with Claim.of(StateRoot(QUERY, str(shared)), "node-1"), another_process(code, shared, "0" * 12):
        assert (shared / "node-1" / ("0" * 12)).stat().st_uid == 65534
        assert mode(shared / "node-1" / ("0" * 12)) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of others")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / QUERY).mkdir()
    os.chown(tmp_path / QUERY, 65534, 65534)
    with pytest.raises(PlanError, match="belongs to user 65534"):
        Claim.of(StateRoot(QUERY, str(tmp_path)))
    with (
        mock.patch.object(folders, "_SHARED_MEMORY", tmp_path),
        mock.patch.dict(os.environ),
    ):
        os.environ.pop(VARIABLE, None)
        default = folders.state_folder()
        default.mkdir()
        os.chown(default, 65534, 65534)
        with pytest.raises(PlanError, match="belongs to user 65534"):
            Claim.of(StateRoot("1" * 12))


def test_a_folder_that_another_machine_uses_is_refused(tmp_path: Path) -> None:
    with mock.patch.object(boot, "boot_id", return_value=OTHER):
        elsewhere = Claim.of(StateRoot("1" * 12, str(tmp_path)))
    with pytest.raises(PlanError, match=rf"{tmp_path} is used by another machine.*state_folder="):
        Claim.of(StateRoot(QUERY, str(tmp_path)))
    elsewhere.close()
    with Claim.of(StateRoot(QUERY, str(tmp_path))):
        assert [path.name for path in hosts(tmp_path).iterdir()] == [boot.boot_id()]


def test_a_refused_folder_is_not_held(tmp_path: Path) -> None:
    with mock.patch.object(boot, "boot_id", return_value=OTHER):
        elsewhere = Claim.of(StateRoot("1" * 12, str(tmp_path)))
        with (
            mock.patch.object(boot, "boot_id", return_value="6" * 32),
            pytest.raises(PlanError),
        ):
            Claim.of(StateRoot(QUERY, str(tmp_path)))
        elsewhere.close()
        Claim.of(StateRoot("1" * 12, str(tmp_path))).close()


def test_a_folder_on_a_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mountinfo"
    info.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"22 21 0:5 / {tmp_path}/with\\040space rw shared:1 - nfs4 server:/x rw\n"
    )
    monkeypatch.setattr(mounts, "_MOUNTS", info)
    (tmp_path / "with space").mkdir()
    with pytest.raises(PlanError, match=r"other machines can have too \(nfs4\)"):
        Claim.of(StateRoot(QUERY, str(tmp_path / "with space" / "new")))
    Claim.of(StateRoot(QUERY, str(tmp_path / "without"))).close()


SHARED = [
    "nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "orangefs", "virtiofs", "drvfs",
    "vboxsf", "prl_fs", "vmhgfs", "fuse", "fuse.sshfs", "fuse.s3fs", "fuse.vmhgfs-fuse",
    "fuse.grpcfuse", "fuse.goofys", "fuse.a-new-one", "fuse.ext4-over-http",
]  # fmt: skip
OWN = [
    "ext4", "tmpfs", "xfs", "btrfs", "zfs", "overlay", "fuseblk", "fuse.ext4", "fuse.ntfs-3g",
    "fuse.fuse-overlayfs", "fuse.lxcfs", "",
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shared"), [(k, True) for k in SHARED] + [(k, False) for k in OWN]
)
def test_file_systems_that_other_machines_can_have_are_known(kind: str, shared: bool) -> None:
    assert mounts.is_shared(kind) is shared


def test_shared_memory_is_of_this_machine() -> None:
    assert mounts.file_system(Path("/proc/self")) == "proc"
    assert not mounts.is_shared(mounts.file_system(folders.state_folder()))


def test_a_claim_waits_for_a_sweep_and_makes_the_folder_anew(tmp_path: Path) -> None:
    root = StateRoot(QUERY, str(tmp_path))
    Claim.of(root).close()
    fd = try_alone(tmp_path / QUERY / ALIVE)
    assert fd is not None
    claimed: list[Claim] = []
    claiming = threading.Thread(target=lambda: claimed.append(Claim.of(root)))
    claiming.start()
    (tmp_path / QUERY).rename(tmp_path / "away")
    os.close(fd)
    claiming.join(60)
    assert (tmp_path / QUERY / ALIVE).exists()
    assert try_alone(tmp_path / QUERY / ALIVE) is None
    claimed[0].close()
