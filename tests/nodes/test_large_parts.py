"""Parts of any size go through nodes; nobody has one of them whole in memory."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from acting import PassOn, Sleep
from node_tools import EPOCH, Reached, Starter, Watching

from anabranch.backup.upstream import Upstream
from anabranch.errors import PlanError
from anabranch.nodes import AgentAddress, Secret, Signer
from anabranch.nodes.requests import Address
from anabranch.stores import parts
from anabranch.units import byte_count

BEYOND = (1 << 31) + (1 << 20)


@pytest.fixture
def beyond(tmp_path: Path) -> Iterator[pa.Buffer]:
    """More than 2 GiB, most of them zeros that are on no disk."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(BEYOND)
        for at in range(0, BEYOND, 1 << 28):
            file.seek(at)
            file.write(os.urandom(1000))
    with pa.memory_map(str(path)) as mapped:
        yield mapped.read_buffer()


def test_more_than_two_gibibytes(
    start: Starter, secret: Secret, tmp_path: Path, beyond: pa.Buffer
) -> None:
    agent = start(folder=tmp_path / "node", limit=None, log=tmp_path / "node" / "log")
    with (
        Reached(str(agent), Signer(secret)) as node,
        Watching(agent.pid, os.getpid()) as watching,
    ):
        node.put("large", beyond)
        assert node.size("large") == BEYOND
        found = node.get("large")
        assert found.equals(beyond)
        node.delete("large")
    assert max(watching.grown) < 64 << 20, watching.grown


def test_a_backup_from_a_capture_is_not_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is merged is written to a file, which is gone when it is stored."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[list[Path]] = []

    class Store:
        def put_all(self, blocks: Mapping[str, pa.Buffer]) -> None:
            (data,) = blocks.values()
            seen.append([path for path in tmp_path.rglob("*") if path.is_file()])
            assert not pa.total_allocated_bytes() - before > data.size // 2

    from anabranch.state.capture import Capture, CheckpointSchema
    from anabranch.state.groups import KeyGroups
    from anabranch.units import Version

    schema = CheckpointSchema(
        (pa.field("k", pa.int64()),), (), (pa.field("n", pa.int64()),), False, 8
    )
    count = 1_000_000
    keys, groups = np.arange(count), np.arange(count) % 8
    rows = pa.Table.from_arrays(
        [pa.array(keys), pa.array(keys.astype(np.uint64)), pa.array(groups.astype(np.uint16)),
         pa.array(np.zeros(count, bool)), pa.array(keys)],
        schema=schema.arrow(),
    )  # fmt: skip
    before = pa.total_allocated_bytes()
    taken = Capture("a", 0, Version(1), None, KeyGroups.all(8), schema, rows)
    part = parts.back_up(Store(), taken)  # type: ignore[arg-type]
    assert part.bytes > 24 * count
    assert seen == [[]], "the file has no name any more while it is mapped"


def test_work_that_takes_longer_than_the_timeout(agent: AgentAddress, secret: Secret) -> None:
    """A node that works says so; only silence counts."""
    with Reached(str(agent), Signer(secret), timeout=5) as node:
        since = time.monotonic()
        node.ask(Sleep(epoch=EPOCH, milliseconds=8000))
        assert time.monotonic() - since >= 8


@pytest.mark.parametrize("number", [3, 80])
def test_nodes_that_work_for_each_other_do_not_wait_for_each_other(
    start: Starter, secret: Secret, tmp_path: Path, number: int
) -> None:
    """More requests at once than threads, on two nodes, each of which stores at the other."""
    agents = [start(folder=tmp_path / name, limit=None, log=tmp_path / name / "log",
                    context={"secret": secret.to_hex()}) for name in ("one", "two")]  # fmt: skip
    failed: list[Exception] = []

    def pass_on(at: AgentAddress, to: AgentAddress, name: str) -> None:
        try:
            with Reached(str(at), Signer(secret), timeout=20) as node:
                node.ask(PassOn(epoch=EPOCH, to=Address(str(to)), name=name))
        except Exception as error:
            failed.append(error)

    threads = [
        threading.Thread(target=pass_on, args=(*agents[:: 1 if i % 2 else -1], f"n{i}"))
        for i in range(2 * number)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for agent in agents:
        with Reached(str(agent), Signer(secret)) as node:
            assert len(node.list()) == number


@pytest.mark.parametrize(
    ("size", "count"),
    [("64 GiB", 64 << 30), ("1.5 kB", 1500), ("10", 10), (" 2mib ", 2 << 20), (7, 7), ("0", 0),
     ("3 TB", 3 * 10**12), ("1 b", 1)],
)  # fmt: skip
def test_sizes(size: str | int, count: int) -> None:
    assert byte_count(size) == count
    assert Upstream(capacity=size).limits.capacity == count


@pytest.mark.parametrize(
    "size", ["", "x", "1 GX", "-1", -1, "1 GiB 2 MiB", True, 1.5, "1e9", "GiB"]
)
def test_no_sizes(size: object) -> None:
    with pytest.raises(PlanError, match="Upstream: capacity"):
        Upstream(capacity=size)  # type: ignore[arg-type]


def test_timeouts_of_a_policy() -> None:
    assert Upstream().limits.silence == 30
    assert Upstream().limits.capacity is None
    assert Upstream(timeout="2 minutes").limits.silence == 120
    for wrong in (0, -1, "2 hours", "0 seconds", "soon", True):
        with pytest.raises(PlanError, match="Upstream: timeout"):
            Upstream(timeout=wrong)
