"""scripts/setup on machines that lack something and have no package manager."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup"
INPUTS = ("requirements.lock", "pyproject.toml", "bench/pyproject.toml")
TOOLS = ("bash", "cat", "dirname", "env", "grep", "id", "mktemp", "rm", "sed", "sha256sum")


class Machine:
    """A checkout and a PATH with nothing but the tools that every system has."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.bin = folder / "bin"
        self.env = {"PATH": str(self.bin), "TMPDIR": str(folder), "HOME": str(folder)}
        (self.checkout / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(SCRIPT, self.checkout / "scripts")
        (self.checkout / "bench").mkdir()
        for name in INPUTS:
            (self.checkout / name).write_text(name)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found
            (self.bin / tool).symlink_to(found)

    def program(self, path: Path, script: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{self.bin / 'bash'}\n{script}\n")
        path.chmod(0o755)

    def java(self, version: str, home: Path | None = None) -> None:
        where = self.bin if home is None else home / "bin"
        self.program(where / "java", f"echo 'openjdk version \"{version}\" 2025-01-01' >&2")

    def setup(self, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.checkout / "scripts" / "setup"],
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def assert_one_line(ran: subprocess.CompletedProcess[str], *says: str) -> None:
    assert ran.returncode == 1
    (line,) = (ran.stdout + ran.stderr).splitlines()
    assert line.startswith("setup: ")
    for text in says:
        assert text in line


@pytest.mark.parametrize("version", [None, "1.8.0_392", "11.0.2"])
def test_no_java_or_an_old_one_is_one_clear_line(machine: Machine, version: str | None) -> None:
    if version is not None:
        machine.java(version)
    assert_one_line(machine.setup(), "Java 17 or newer", "apt-get install openjdk-17-jre-headless")


def test_java_home_comes_before_the_path_as_it_does_for_spark(
    machine: Machine, tmp_path: Path
) -> None:
    machine.java("17.0.1")
    machine.java("11.0.2", home=tmp_path / "old")
    assert_one_line(machine.setup(JAVA_HOME=str(tmp_path / "old")), "JAVA_HOME", "Java 11")


def test_no_python_is_one_clear_line(machine: Machine) -> None:
    machine.java("21.0.5")
    assert_one_line(machine.setup(), "Python 3.11", "apt-get install python3.11-venv")


def test_nothing_is_done_or_said_when_all_is_there(machine: Machine) -> None:
    machine.java("17.0.15")
    python = machine.checkout / ".venv" / "bin" / "python"
    machine.program(python, f'exec {sys.executable} "$@"')
    hashed = subprocess.run(
        ["sha256sum"], input="".join(INPUTS), capture_output=True, text=True, check=True
    )
    (machine.checkout / ".venv" / ".setup").write_text(hashed.stdout)
    ran = machine.setup()
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert not list(Path(machine.env["TMPDIR"]).glob("anabranch-setup*"))


def test_a_changed_lock_file_is_installed_again(machine: Machine) -> None:
    machine.java("17.0.15")
    machine.program(machine.checkout / ".venv/bin/python", f'exec {sys.executable} "$@"')
    (machine.checkout / ".venv" / ".setup").write_text("of an older lock file")
    machine.program(machine.bin / "uv", 'echo "$*" >>"$HOME/uv.log"')
    ran = machine.setup()
    assert ran.returncode == 0, ran.stderr
    calls = (Path(machine.env["HOME"]) / "uv.log").read_text()
    assert "pip sync" in calls
    assert "--require-hashes requirements.lock" in calls
    assert "--no-deps -e . -e bench" in calls
    assert machine.setup().stderr == ""
