"""Manifests: what they name, what they refuse, and what pruning may never take away."""

from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.backup import BackupStore, Manifest, Manifests, OperatorManifest, Part
from anabranch.backup.manifests import part_name
from anabranch.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    StoreError,
)
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import assign
from anabranch.testing import FaultyStore, MemoryStore
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
            instance,
            Version(version),
            None if base is None else Version(base),
            groups,
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


STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(1, 3)), max_size=8)


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


@given(STEPS, st.integers(1, 4))
def test_prune_keeps_what_is_retained(steps: list[tuple[bool, int, int]], retain: int) -> None:
    store = MemoryStore()
    history = written(store, steps)
    Manifests(store).prune(retain=retain)
    kept = history[-retain:]
    assert [Manifests(store).get(v) for v in Manifests(store).versions()] == kept
    assert set(store.list("parts/")) == set().union(*map(names, kept))


@settings(max_examples=40)
@given(STEPS, st.integers(1, 3), st.integers(0, 10_000))
def test_prune_that_fails_takes_nothing_needed(
    steps: list[tuple[bool, int, int]], retain: int, seed: int
) -> None:
    """Whatever fails at whatever moment, every manifest that is there can still be used."""
    store = MemoryStore()
    history = written(store, steps)
    faulty = FaultyStore(store, seed=seed, rate=0.2)
    for _ in range(100):
        try:
            Manifests(faulty).prune(retain=retain)
            break
        except StoreError:
            there = set(store.list("parts/"))
            for version in Manifests(store).versions():
                assert names(Manifests(store).get(version)) <= there
    assert [Manifests(store).get(v) for v in Manifests(store).versions()] == history[-retain:]
    assert set(store.list("parts/")) == set().union(*map(names, history[-retain:]))


def test_prune_takes_what_was_never_finished_but_not_what_may_be() -> None:
    store = MemoryStore()
    history = written(store, [(False, 2, 5)])
    old, same, new = (part_name("counter", 0, Version(v), True, "f" * 16) for v in (4, 5, 6))
    for name in (old, same, new, "parts/notes.txt"):
        store.put(name, b"")
    Manifests(store).prune(retain=2)
    assert set(store.list("parts/")) - names(history[-1]) == {same, new, "parts/notes.txt"}


def test_prune_drops_nothing_if_it_cannot_tell() -> None:
    store = MemoryStore()
    written(store, [(True, 2, 1), (True, 2, 1)])
    store.put("manifests/000000000001.json", b"{}")
    before = store.list()
    with pytest.raises(CheckpointCorrupt, match=r"manifests/000000000001\.json"):
        Manifests(store).prune(retain=2)
    assert store.list() == before
    Manifests(store).prune(retain=1)
    with pytest.raises(ValueError, match="retain=0"):
        Manifests(store).prune(retain=0)
    Manifests(MemoryStore()).prune(retain=1)
