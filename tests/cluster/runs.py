"""Runs of the program on a cluster, and what came out of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cluster import faults, model

PROGRAM = (sys.executable, "-m", "cluster.program")
_HERE = str(Path(__file__).parents[1])
OUTPUTS = {
    "users": ("user",),
    "sizes": ("updates",),
    "once": ("ride", "at"),
    "windows": ("user", "window_start"),
}
STATES = {
    "users": ("user",),
    "sizes": ("updates",),
    "cities": ("city",),
    "once": ("ride",),
    "windows": ("user", "window_start"),
}


def make_input(
    folder: Path, seed: int, files: int, rows: int = 400, others: dict[int, int] | None = None
) -> Path:
    """Files of a second of event time each. ``others`` have more rows, or fewer: how many.

    Rides have texts of all lengths as ids. A few come again: as they are in the next file, or
    with other values behind them in the same one.
    """
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(seed)
    before = _rides(numbers, 0, 0, 0)
    known = 0
    for file in range(files):
        count = (others or {}).get(file, rows)
        fresh = _rides(numbers, file, known, count)
        known += count
        rivals = fresh.take(pa.array(np.flatnonzero(numbers.random(count) < 0.02)))
        rivals = rivals.set_column(4, "cents", pa.array(numbers.integers(0, 9999, len(rivals))))
        copies = before.take(pa.array(np.flatnonzero(numbers.random(len(before)) < 0.05)))
        path = folder / f"{file:04d}.parquet"
        pq.write_table(pa.concat_tables([fresh, copies, rivals]), path)
        # The file source takes files in the order of their times.
        os.utime(path, (1_700_000_000 + file, 1_700_000_000 + file))
        before = fresh
    return folder


def _rides(numbers: np.random.Generator, file: int, first: int, count: int) -> pa.Table:
    start = 1_700_000_000_000_000 + file * 1_000_000
    fare = numbers.gamma(2.0, 7.5, count)
    users = numbers.zipf(1.3, count) % 300
    rides = first + np.arange(count)
    return pa.table(
        {
            "at": pa.array(start + np.arange(count), pa.timestamp("us", tz="UTC")),
            "user": pa.array([f"user-{n}" + "~" * (n % 31) for n in users.tolist()], pa.string()),
            "city": pa.array(numbers.integers(0, 20, count), pa.int32()),
            "fare": fare,
            "cents": pa.array((fare * 100).astype(np.int64)),
            "ride": pa.array([f"{n:x}" + "-" * (n * 7 % 45) for n in rides.tolist()], pa.string()),
        }
    )


def make_certificate(folder: Path, hosts: int = 20) -> list[str]:
    """A certificate for the addresses of a local cluster: its file, the key's, and the root's."""
    folder.mkdir(parents=True)
    names = ",".join(f"IP:127.0.0.{n}" for n in range(1, hosts))
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=nodes", "-addext", f"subjectAltName={names}",
         "-keyout", key, "-out", certificate],
        capture_output=True, check=True,
    )  # fmt: skip
    return [str(certificate), str(key), str(certificate)]


def launch(source: Path, work: Path, plan: dict[str, Any], **how: Any) -> subprocess.Popen[Any]:
    """Start the program; ``how`` is as for Popen."""
    found = [_HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(found)}
    command = [*PROGRAM, str(source), str(work), json.dumps(plan)]
    return subprocess.Popen(command, env=environment, **how)


def run(source: Path, work: Path, timeout: float = 400, **plan: Any) -> list[dict[str, Any]]:
    """Run the program to its end; the events of the query. All that it was told to do succeeds.

    Its results are compared with those of the model.
    """
    run_anyhow(source, work, timeout, **plan)
    model.check(work, source, ordered=plan.get("ordered", False))
    check_scales(work)
    failures = json.loads((work / "failures.json").read_text())
    assert failures == [], failures
    events: list[dict[str, Any]] = json.loads((work / "events.json").read_text())
    return events


def run_anyhow(source: Path, work: Path, timeout: float, **plan: Any) -> None:
    """Run the program to its end, though something that it was told to do may have failed.

    If it kills itself, it is started again; so it is if its disk had no room.
    """
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, (work / "log").open("a") as log:
        if "disk" in plan:
            stack.enter_context(faults.disk(work / "disk", plan["disk"]))
            for name in plan["on_disk"]:
                (work / "disk" / name).mkdir()
                (work / name).symlink_to(work / "disk" / name)
        ended = [_run_once(source, work, timeout, plan, log)]
        while _comes_back(ended, plan):
            ended.append(_run_once(source, work, timeout, plan, log))
        if "disk" in plan:
            for name in plan["on_disk"]:
                (work / name).unlink()
                shutil.copytree(work / "disk" / name, work / name)
    assert ended[-1] == 0, (work / "log").read_text()[-6000:]


def _run_once(source: Path, work: Path, timeout: float, plan: dict[str, Any], log: IO[str]) -> int:
    how = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
    process = launch(source, work, plan, **how)
    try:
        return process.wait(timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _comes_back(ended: list[int], plan: dict[str, Any]) -> bool:
    """Whether a program that ended so is started again, as a service manager would."""
    if ended[-1] == -signal.SIGKILL:
        return ended.count(-signal.SIGKILL) == 1
    fills = sum("fill" in act for acts in plan.get("acts", {}).values() for act in acts)
    return ended[-1] != 0 and len(ended) - ended.count(-signal.SIGKILL) <= fills


def kill_after(source: Path, work: Path, line: str, **plan: Any) -> None:
    """Run the program, and kill it with its JVM once it has printed a line."""
    work.mkdir(parents=True)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = launch(source, work, plan, text=True, **how)
    assert process.stdout is not None
    said = next((text for text in process.stdout if text.startswith(line)), None)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert said is not None, f"it ended without {line!r}"


def check_scales(work: Path) -> tuple[int, int]:
    """How many scales have happened, and how many had nothing to change.

    The routing and an event say so of each that was reported as done.
    """
    noted = work / "scales"
    scales = [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []
    changed = [scale for scale in scales if scale["wanted"] != scale["before"]]
    for scale in changed:
        assert scale["routed"] == scale["wanted"], f"{scale}: rows go to other instances"
        assert scale["told"] == [scale["wanted"]], f"{scale}: no event tells of it"
    return len(changed), len(scales) - len(changed)


def results(work: Path) -> dict[str, pa.Table]:
    """Everything the query has made: all rows of every output, batch by batch, and its state."""
    found = {}
    for name, keys in OUTPUTS.items():
        tables = []
        for file in sorted((work / "out" / name).glob("part-*.parquet")):
            rows = pq.read_table(file)
            # Names are part-<query>-<version>-<partition>.
            batch = [int(file.name.split("-")[2])] * rows.num_rows
            tables.append(rows.append_column("batch", pa.array(batch, pa.int64())))
        order = [(name, "ascending") for name in ("batch", *keys)]
        found[f"output of {name}"] = pa.concat_tables(tables).sort_by(order)
    for name, keys in STATES.items():
        table = pq.read_table(work / "state" / f"{name}.parquet")
        found[f"state of {name}"] = table.sort_by([(key, "ascending") for key in keys])
    return found


def same(work: Path, undisturbed: Path) -> None:
    """Equal to a run of the same program in which nothing happened, the order of rows included."""
    expected = results(undisturbed)
    for what, table in results(work).items():
        assert table.equals(expected[what]), f"{what} of {work} differs"
