"""Runs of the program on a cluster, and what came out of them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PROGRAM = Path(__file__).with_name("program.py")
OUTPUTS = {"users": "user", "sizes": "updates"}
STATES = {**OUTPUTS, "cities": "city"}


def make_input(folder: Path, seed: int, files: int, rows: int = 400) -> Path:
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(seed)
    for file in range(files):
        start = 1_700_000_000_000_000 + file * 1_000_000
        table = pa.table(
            {
                "at": pa.array(start + np.arange(rows), pa.timestamp("us", tz="UTC")),
                "user": [f"user-{n}" for n in numbers.zipf(1.3, rows) % 300],
                "city": pa.array(numbers.integers(0, 20, rows), pa.int32()),
                "fare": numbers.gamma(2.0, 7.5, rows),
            }
        )
        path = folder / f"{file:04d}.parquet"
        pq.write_table(table, path)
        # The file source takes files in the order of their times.
        os.utime(path, (1_700_000_000 + file, 1_700_000_000 + file))
    return folder


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


def run(source: Path, work: Path, timeout: float = 400, **plan: Any) -> list[dict[str, Any]]:
    """Run the program to its end; the events of the query. All that it was told to do succeeds."""
    run_anyhow(source, work, timeout, **plan)
    failures = json.loads((work / "failures.json").read_text())
    assert failures == [], failures
    events: list[dict[str, Any]] = json.loads((work / "events.json").read_text())
    return events


def run_anyhow(source: Path, work: Path, timeout: float, **plan: Any) -> None:
    """Run the program to its end, though something that it was told to do may have failed.

    If it kills itself, it is started again.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / "log").open("a") as log:
        for _ in range(2):
            finished = subprocess.run(
                [sys.executable, str(PROGRAM), str(source), str(work), json.dumps(plan)],
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
                start_new_session=True,
            )
            if finished.returncode != -signal.SIGKILL:
                break
    assert finished.returncode == 0, (work / "log").read_text()[-6000:]


def kill_after(source: Path, work: Path, line: str, **plan: Any) -> None:
    """Run the program, and kill it with its JVM once it has printed a line."""
    work.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(source), str(work), json.dumps(plan)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = next((text for text in process.stdout if text.startswith(line)), None)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert said is not None, f"it ended without {line!r}"


def results(work: Path) -> dict[str, pa.Table]:
    """Everything the query has made: all rows of every output, batch by batch, and its state."""
    found = {}
    for name, key in OUTPUTS.items():
        tables = []
        for file in sorted((work / "out" / name).glob("part-*.parquet")):
            rows = pq.read_table(file)
            # Names are part-<query>-<version>-<partition>.
            batch = [int(file.name.split("-")[2])] * rows.num_rows
            tables.append(rows.append_column("batch", pa.array(batch, pa.int64())))
        order = [("batch", "ascending"), (key, "ascending")]
        found[f"output of {name}"] = pa.concat_tables(tables).sort_by(order)
    for name, key in STATES.items():
        found[f"state of {name}"] = pq.read_table(work / "state" / f"{name}.parquet").sort_by(key)
    return found


def same(work: Path, undisturbed: Path) -> None:
    expected = results(undisturbed)
    for what, table in results(work).items():
        assert table.equals(expected[what]), f"{what} of {work} differs"
