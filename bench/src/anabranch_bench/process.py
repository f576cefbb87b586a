"""Runs one side of a benchmark in a process of its own and reads its output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from anabranch.errors import QueryFailed
from anabranch_bench.harness import Timing
from anabranch_bench.plan import Outcome, Run, Side

_GRACE = 20.0

Tick = Callable[[int], None]
"""Called with the number of batches of the side that are done so far."""


def run_side(side: Side, tick: Tick = lambda done: None) -> dict[str, Outcome]:
    """Carry out the runs of a side, alone, and return what each has given by its name."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "anabranch_bench.side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYSPARK_PYTHON": sys.executable},
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(side.to_json())
            process.stdin.close()
            # A JVM that does not end keeps the output open, so nobody waits for its end.
            threading.Thread(target=_end_with, args=(process,), daemon=True).start()
            finished = _listen(process.stdout, tick, {run.name: run.batches for run in side.runs})
            status = process.wait()
        finally:
            _kill(process)
        if status:
            errors.seek(0)
            raise QueryFailed(f"the {side.engine} side of the benchmark: {_reason(errors.read())}")
    return finished


def _end_with(process: subprocess.Popen[str]) -> None:
    """Let everything that a process has started end soon after it."""
    process.wait()
    time.sleep(_GRACE)
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def timings(run: Run, outcome: Outcome) -> dict[str, Timing]:
    """The timing of each phase of a run that is measured, by the name of the phase."""
    return {
        phase.name: Timing(phase.rows, outcome.seconds[at])
        for phase, at in run.slices()
        if phase.measured
    }


def _listen(lines: IO[str], tick: Tick, batches: dict[str, int]) -> dict[str, Outcome]:
    finished: dict[str, Outcome] = {}
    before = 0
    for line in lines:
        if not line.startswith("{"):
            continue  # something that Spark has printed
        said: dict[str, Any] = json.loads(line)
        if "outcome" in said:
            finished[said["run"]] = Outcome.from_json(said["outcome"])
            before += batches[said["run"]]
            tick(before)
        else:
            tick(before + said["done"])
    return finished


def _reason(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "Exception" in line]
    return (named or lines or ["it ended without saying why"])[-1]
