import subprocess
import sys

import pytest

from anabranch.cli.quiet import quiet_start

NOISE = [sys.executable, "-c", "import sys; print('chatter', file=sys.stderr)"]


def test_what_starts_inside_is_not_heard(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_start():
        subprocess.run(NOISE, check=True)
    subprocess.run([*NOISE[:2], NOISE[2].replace("chatter", "after")], check=True)
    assert capfd.readouterr().err == "after\n"


def test_it_is_heard_if_the_start_fails(capfd: pytest.CaptureFixture[str]) -> None:
    failing = [*NOISE[:2], NOISE[2] + "; sys.exit(1)"]
    with pytest.raises(subprocess.CalledProcessError), quiet_start():
        subprocess.run(failing, check=True)
    assert capfd.readouterr().err == "chatter\n"
