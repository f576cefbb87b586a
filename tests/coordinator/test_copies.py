"""Whether a checkpoint folder is a copy, was moved, or has just two names."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.boot import boot_id
from anabranch.coordinator import copies, identity
from anabranch.coordinator.folder import CheckpointFolder
from anabranch.coordinator.identity import Identity
from anabranch.errors import PlanError
from anabranch.protocols.model import Role, Slice, SliceId
from anabranch.spark.logs import SparkLogs
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.stores.manifests import Manifest, Manifests, OperatorManifest
from anabranch.units import Version
from coordinator.mini import GROUPS, HERE, LAYOUT, QUERY
from coordinator.test_ledger import ROUTING

EVERYTHING = KeyGroups.all(GROUPS)
SERVED = Slice(SliceId("1-2"), "op", 0, HERE, EVERYTHING, Role.SERVING)


@pytest.fixture
def first(tmp_path: Path) -> CheckpointFolder:
    """The folder of a query that was started."""
    return started(CheckpointFolder.of(tmp_path / "ck"))


def started(folder: CheckpointFolder) -> CheckpointFolder:
    query = Identity(
        QUERY, 3, {"op": {}}, {"op": ROUTING}, asked={"op": 2}, boot=boot_id(), arrangement=7,
        slices=(SERVED,), folder=folder.uri,
    )  # fmt: skip
    identity.save(folder.store, query)
    return folder


def noted(folder: CheckpointFolder) -> Identity:
    found = identity.load(folder.store)
    assert found is not None
    return found


def copied(folder: CheckpointFolder, to: str = "copy") -> CheckpointFolder:
    assert folder.path is not None
    target = folder.path.with_name(to)
    shutil.copytree(folder.path, target)
    return CheckpointFolder.of(target)


def test_a_folder_notes_where_it_is(first: CheckpointFolder) -> None:
    assert noted(first).folder == first.uri
    assert copies.original(first, noted(first)) is None


def test_a_copy_is_a_query_of_its_own(first: CheckpointFolder) -> None:
    copy = copied(first)
    of = copies.original(copy, noted(copy))
    assert of == first
    before = noted(copy)
    now = copies.separated(copy, of, before)
    assert now.query not in ("", QUERY)
    assert (now.slices, now.placement) == ((), {}), "its tables are those of the first one"
    assert (now.run, now.routing, now.asked) == (before.run, before.routing, before.asked)
    identity.save(copy.store, replace(now, folder=copy.uri))
    assert copies.original(copy, noted(copy)) is None, "it is a copy once"
    assert copies.original(first, noted(first)) is None


def test_a_folder_that_was_moved_is_the_same_query(first: CheckpointFolder) -> None:
    copy = copied(first)
    assert first.path is not None
    shutil.rmtree(first.path)
    assert copies.original(copy, noted(copy)) is None


def test_a_folder_in_whose_place_another_query_is_was_moved(first: CheckpointFolder) -> None:
    copy = copied(first)
    identity.save(first.store, replace(noted(first), query="1" * 12))
    assert copies.original(copy, noted(copy)) is None


def test_a_folder_that_is_damaged_is_there(first: CheckpointFolder) -> None:
    copy = copied(first)
    first.store.put("query.json", b"{}")
    assert copies.original(copy, noted(copy)) == first


@pytest.mark.parametrize("name", ["link", "file:{folder}"])
def test_a_folder_with_two_names_is_no_copy(first: CheckpointFolder, name: str) -> None:
    assert first.path is not None
    first.path.with_name("link").symlink_to(first.path)
    given = str(first.path.with_name("link")) if name == "link" else name.format(folder=first.path)
    other = CheckpointFolder.of(given)
    assert other.uri != first.uri
    assert copies.original(other, noted(other)) is None
    assert sorted(path.name for path in first.path.iterdir() if path.is_file()) == ["query.json"]


def test_a_folder_that_cannot_be_looked_at_was_moved(
    first: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    before = replace(noted(first), folder="nowhere://bucket/ck")
    assert copies.original(first, before) is None
    assert f"{first.uri} was in nowhere://bucket/ck when" in caplog.text
    assert "taking it to have been moved" in caplog.text


def test_a_copy_without_its_checkpoint_files_is_refused(first: CheckpointFolder) -> None:
    copy = copied(first)
    before = replace(noted(copy), backup="/backups/words")
    with pytest.raises(PlanError, match=f"{copy.uri} is a copy of {first.uri}.*/backups/words"):
        copies.separated(copy, first, before)
    redis = {"opener": "shop.stores:redis", "arguments": {"password": "secret"}}
    with pytest.raises(PlanError, match=r"in a store of shop\.stores:redis") as refused:
        copies.separated(copy, first, replace(before, backup=redis))
    assert "secret" not in str(refused.value)


def test_a_copy_whose_checkpoint_files_are_at_nodes_is_refused(first: CheckpointFolder) -> None:
    part = Part("parts/x", "op", Version(4), None, EVERYTHING, ("10.0.0.1",), checksum="0" * 16)
    manifest = Manifest(
        Version(4), {"op": OperatorManifest(CheckpointSchema.of(LAYOUT), (part,))}, {}
    )
    Manifests(first.store).put(manifest)
    copy = copied(first)
    with pytest.raises(PlanError, match=rf"at the nodes 10\.0\.0\.1.*remove {first.uri}"):
        copies.separated(copy, first, noted(copy))
    here = replace(part, holders=())
    of = {"op": OperatorManifest(CheckpointSchema.of(LAYOUT), (here,))}
    Manifests(copy.store).put(replace(manifest, operators=of))
    assert copies.separated(copy, first, noted(copy)).query != QUERY


@pytest.mark.parametrize("dies_at", range(5))
def test_spark_takes_a_copy_for_another_query_or_for_the_same(
    first: CheckpointFolder, dies_at: int
) -> None:
    """Whichever step the driver dies before, Spark can read the file, and its checksum fits."""
    spark = Path(first.spark)
    spark.mkdir()
    before = '{"id":"11111111-1111-1111-1111-111111111111"}'
    (spark / "metadata").write_text(before)
    logs = SparkLogs(first.spark)
    logs._write_sums(str(spark / "metadata"), before.encode())
    steps = iter(range(5))

    def dying(real: Any) -> Any:
        def step(*arguments: Any) -> Any:
            if next(steps) == dies_at:
                raise OSError("it died")
            return real(*arguments)

        return step

    real = logs._fs
    names = ("open_output_stream", "delete_file", "move")
    rest = ("get_file_info", "open_input_file")
    played = {name: dying(getattr(real, name)) for name in names}
    logs._fs = SimpleNamespace(**played, **{name: getattr(real, name) for name in rest})  # type: ignore[assignment]
    with pytest.raises(OSError, match="it died"):
        logs.rename()
    SparkLogs(first.spark)._check_sums()
    now = json.loads((spark / "metadata").read_text())["id"]
    assert (now != json.loads(before)["id"]) == (dies_at >= 3)
    SparkLogs(first.spark).rename()
    after = json.loads((spark / "metadata").read_text())["id"]
    assert after not in (now, json.loads(before)["id"])
    SparkLogs(first.spark)._check_sums()
    assert sorted(path.name for path in spark.iterdir()) == [".metadata.crc", "metadata"]
