"""The file of a ring: for its user alone, and never half written."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from anabranch.errors import PlanError
from anabranch.nodes import Secret
from anabranch.nodes.standing.client import Access
from anabranch.nodes.standing.file import RingFile
from anabranch.ring import Settings


@pytest.fixture
def made(tmp_path: Path) -> RingFile:
    return RingFile.create(tmp_path / "ring.json", Settings(leaves=8, period=0.5))


def test_a_file_is_what_was_written(made: RingFile) -> None:
    made.remember(["a:1", "b:2"])
    made.remember(["c:3", "a:1"])
    found = RingFile.read(made.path)
    assert found.secret == made.secret
    assert found.settings == Settings(leaves=8, period=0.5)
    assert found.nodes == ("c:3", "a:1", "b:2")
    made.remember(["b:7"])
    assert RingFile.read(made.path).nodes == ("b:7", "c:3", "a:1"), "it has another port now"
    assert made.path.stat().st_mode & 0o777 == 0o600
    assert made.secret.to_hex() not in repr(found) + repr(Access.of(found, "words"))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_use_is_refused(made: RingFile, mode: int) -> None:
    made.path.chmod(mode)
    with pytest.raises(PlanError, match="chmod 600"):
        RingFile.read(made.path)


def test_a_file_is_not_made_over_another(made: RingFile) -> None:
    with pytest.raises(FileExistsError):
        RingFile.create(made.path, Settings())
    assert RingFile.read(made.path).secret == made.secret
    assert [path.name for path in made.path.parent.iterdir()] == ["ring.json"]


@pytest.mark.parametrize("change", [
    {"secret": "x"}, {"secret": None}, {"leaves": 3}, {"leaves": None}, {"period": "x"},
    {"period": -1}, {"nodes": "a:1"}, {"nodes": [1]},
])  # fmt: skip
def test_a_damaged_file_is_refused_without_its_secret(
    made: RingFile, change: dict[str, object]
) -> None:
    value = json.loads(made.path.read_text()) | change
    made.path.write_text(json.dumps(value))
    with pytest.raises(PlanError) as refusal:
        RingFile.read(made.path)
    assert made.secret.to_hex() not in f"{refusal.value} {refusal.value.__context__}"


def test_a_file_of_a_later_version_is_refused(made: RingFile) -> None:
    made.path.write_text(json.dumps(json.loads(made.path.read_text()) | {"ring": 2}))
    with pytest.raises(PlanError, match="same version"):
        RingFile.read(made.path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_file_of_a_ring_is_refused(made: RingFile, data: bytes) -> None:
    made.path.write_bytes(data)
    with pytest.raises(PlanError, match="no file of a ring"):
        RingFile.read(made.path)


def _remember(path: Path, number: int) -> None:
    for at in range(10):
        RingFile.read(path).remember([f"{number}-{at}:1"])


def test_processes_that_share_a_file_lose_nothing(made: RingFile) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_remember, args=(made.path, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert set(RingFile.read(made.path).nodes) == {
        f"{n}-{at}:1" for n in range(4) for at in range(10)
    }
    assert {path.name for path in made.path.parent.iterdir()} == {"ring.json", ".ring.json.lock"}


def test_the_keys_of_queries_differ_and_do_not_lead_back() -> None:
    secret = Secret(os.urandom(32))
    keys = {secret.of_query(f"query-{n}").key for n in range(100)} | {secret.key}
    assert len(keys) == 101
    assert secret.of_query("a") != secret.of_query("a").of_query("a")
