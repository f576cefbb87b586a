"""The log of an agent: a few lines for each kind of failure, and a size that stays small."""

import logging
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.errors import CheckpointNotFound, Refused
from anabranch.nodes import log
from anabranch.nodes.log import MOST_LINES, PERIOD, FailureLog, private_file, trim


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_flood_of_failures_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    failures = FailureLog(clock)
    for _ in range(30):
        for number in range(1000):
            failures.note("A request", "10.0.0.1", Refused(f"the request is {number} s old"))
        clock.now += 1.0
        failures.summarize()
    assert failures.counts() == {"Refused": 30_000}
    periods = 30 / PERIOD
    assert len(caplog.records) <= (MOST_LINES + 1) * (periods + 1)
    summaries = [each.message for each in caplog.records if "times more" in each.message]
    assert (
        "A request failed with Refused 9997 times more in 10 s; the last from 10.0.0.1: the"
        in summaries[0]
    )


def test_kinds_of_failures_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    failures = FailureLog(Clock())
    for doing in ("get", "put"):
        for error in (Refused("no"), CheckpointNotFound("none"), ZeroDivisionError("bug")):
            for _ in range(MOST_LINES + 5):
                failures.note(doing, "a", error)
    assert len(caplog.records) == 6 * MOST_LINES
    caplog.clear()
    failures.summarize()
    assert caplog.records == []
    failures.summarize(everything=True)
    assert len(caplog.records) == 6
    assert all(" 5 times more" in record.message for record in caplog.records)


def test_what_a_stranger_sent_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    FailureLog().note("request", "a", Refused("x" * 100_000))
    assert len(caplog.records[0].message) < 1000


def test_a_log_is_trimmed_under_whoever_writes_to_it(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    with private_file(path) as output:
        for number in range(50):
            output.write(f"line {number:04d}\n".encode())
            output.flush()
            trim(path, 100)
            assert path.stat().st_size <= 100
    both = [tmp_path / "agent.log.1", path]
    assert all(each.stat().st_size <= 100 for each in both)
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in both)
    lines = "".join(each.read_text() for each in both).splitlines()
    assert lines[-1] == "line 0049"
    assert lines[1:] == [f"line {number:04d}" for number in range(50 - len(lines) + 1, 50)]


def test_loggers_and_all_else_that_is_written_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    program = f"""
import logging, os, sys
from pathlib import Path
from anabranch.nodes import log
log.LARGEST = 10_000
log.trim.__defaults__ = (10_000,)
logging.basicConfig(handlers=[log.Trimmed(Path({str(path)!r}))])
for number in range(3000):
    os.write(2, b"from elsewhere\\n")
    logging.getLogger("x").warning("number %d", number)
"""
    with private_file(path) as output:
        subprocess.run([sys.executable, "-c", program], stderr=output, check=True, timeout=60)
    sizes = [each.stat().st_size for each in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 10_100
    assert "number 2999" in path.read_text()


def test_the_limits_are_below_the_promise() -> None:
    assert 2 * log.LARGEST < 10 << 20
