"""Manifests: what they name, what they refuse, and what a sweep may never take away."""

from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
)
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import assign
from anabranch.state.part import Part
from anabranch.stores import BackupStore, Manifest, Manifests, OperatorManifest
from anabranch.stores.manifests import part_name
from anabranch.testing import MemoryStore
from anabranch.units import Version

SCHEMA = CheckpointSchema(
    keys=(pa.field("word", pa.string()),),
    sub=(),
    values=(pa.field("n", pa.int64(), nullable=False),),
    timers=False,
    key_groups=8,
)
OPERATORS = ("counter", "top words/ü")


def parts_of(operator: str, version: int, base: int | None, instances: int) -> list[Part]:
    return [
        Part(
            part_name(operator, instance, Version(version), base is None, f"{version:016x}"),
            operator,
            Version(version),
            None if base is None else Version(base),
            groups,
            instance=instance,
            rows=3,
            bytes=100,
            checksum=f"{version:016x}",
        )
        for instance, groups in enumerate(assign(8, instances))
    ]


def first(version: int, instances: int = 2) -> Manifest:
    return Manifest(
        Version(version),
        {
            name: OperatorManifest(
                SCHEMA, tuple(parts_of(name, version, None, instances)), {"watermark": None}
            )
            for name in OPERATORS
        },
        {"routing": [1, 2]},
    )


def after(manifest: Manifest, version: int, *, full: bool, instances: int) -> Manifest:
    base = None if full else manifest.version
    operators = {
        name: operator.extended(parts_of(name, version, base, instances), {"watermark": version})
        for name, operator in manifest.operators.items()
    }
    return Manifest(Version(version), operators)


def written(store: BackupStore, steps: list[tuple[bool, int, int]]) -> list[Manifest]:
    """A run of a query: files and manifest of one version after the other."""
    history = [first(0)]
    for full, instances, gap in steps:
        version = history[-1].version + gap
        history.append(after(history[-1], version, full=full, instances=instances))
    for manifest in history:
        for operator in manifest.operators.values():
            for part in operator.parts:
                if part.version == manifest.version:
                    store.put(part.name, part.name.encode())
        Manifests(store).put(manifest)
    return history


def names(manifest: Manifest) -> set[str]:
    return {part.name for operator in manifest.operators.values() for part in operator.parts}


def test_a_manifest_comes_back() -> None:
    store = MemoryStore()
    manifests = Manifests(store)
    assert manifests.latest() is None
    assert manifests.versions() == []
    history = written(store, [(False, 3, 1), (False, 3, 5), (True, 1, 1), (False, 1, 1)])
    assert manifests.versions() == [0, 1, 6, 7, 8]
    assert [manifests.get(m.version) for m in history] == history
    assert manifests.latest() == history[-1]
    assert manifests.latest(upto=Version(5)) == history[1]
    assert manifests.latest(upto=Version(-1)) is None
    with pytest.raises(CheckpointNotFound, match=r"version 5; there are \[0, 1, 6, 7, 8\]"):
        manifests.get(Version(5))


def test_a_manifest_names_what_is_needed_and_no_more() -> None:
    history = written(MemoryStore(), [(False, 3, 1), (False, 3, 1), (True, 1, 1), (False, 1, 1)])
    counts = [len(manifest.operators["counter"].parts) for manifest in history]
    assert counts == [2, 5, 8, 1, 2]
    versions = [part.version for part in history[2].operators["counter"].parts]
    assert versions == sorted(versions)


def test_a_manifest_must_be_whole() -> None:
    whole = first(3)
    counter = whole.operators["counter"]
    for parts in (counter.parts[:1], (), tuple(parts_of("counter", 2, None, 2)),
                  tuple(parts_of("counter", 3, 2, 2))):  # fmt: skip
        with pytest.raises(CheckpointError):
            Manifest(Version(3), {"counter": replace(counter, parts=parts)})


DATA = first(3).to_bytes()


@given(st.integers(0, 8 * len(DATA) - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    flipped = bytearray(DATA)
    flipped[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(CheckpointCorrupt, match=r"^m\.json: \w"):
        Manifest.from_bytes(bytes(flipped), name="m.json")


def test_any_truncation_is_refused() -> None:
    assert Manifest.from_bytes(DATA, name="m.json") == first(3)
    for size in range(len(DATA)):
        with pytest.raises(CheckpointCorrupt, match=r"^m\.json: \w"):
            Manifest.from_bytes(DATA[:size], name="m.json")


def test_nothing_is_swept_while_a_manifest_is_damaged() -> None:
    store = MemoryStore()
    history = written(store, [(True, 2, 1)] * 4)
    for damaged in (1, 3, 4):
        store.put(f"manifests/{damaged:012d}.json", b"{}")
    manifests = Manifests(store)
    assert manifests.latest() == history[2]
    manifests.sweep("")
    assert names(history[3]) <= set(store.list("parts/")), "a damaged manifest may need them"
    for damaged in (1, 3, 4):
        manifests.drop(Version(damaged))
    manifests.sweep("")
    assert set(store.list("parts/")) == names(history[0]) | names(history[2])


def test_a_sweep_takes_what_no_manifest_names() -> None:
    store = MemoryStore()
    history = written(store, [(False, 2, 5)])
    store.put(part_name("counter", 7, Version(9), True, "f" * 16), b"")
    store.put("other/parts/1", b"")
    Manifests(store).sweep("parts/")
    assert set(store.list()) - {n for n in store.list() if n.startswith("manifests/")} == (
        names(history[-1]) | {"other/parts/1"}
    )


def test_a_manifest_under_the_name_of_another_is_refused() -> None:
    store = MemoryStore()
    written(store, [(True, 2, 1)])
    store.put("manifests/000000000001.json", store.get("manifests/000000000000.json"))
    with pytest.raises(
        CheckpointCorrupt, match=r"000000000001\.json has the manifest of version 0"
    ):
        Manifests(store).get(Version(1))
