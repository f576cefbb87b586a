"""Manifests: what they name, what they refuse, and what pruning may never take away."""

from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.backup import Files
from anabranch.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    StoreError,
)
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import assign
from anabranch.state.part import Part
from anabranch.stores import BackupStore, Manifest, Manifests, OperatorManifest
from anabranch.stores.manifests import part_name
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
    faulty = Manifests(FaultyStore(store, seed=seed, rate=0.2))
    for _ in range(100):
        try:
            faulty.prune(retain=retain)
            break
        except StoreError:
            there = set(store.list("parts/"))
            for version in Manifests(store).versions():
                assert names(Manifests(store).get(version)) <= there
    assert [Manifests(store).get(v) for v in Manifests(store).versions()] == history[-retain:]
    assert set(store.list("parts/")) == set().union(*map(names, history[-retain:]))


def test_prune_takes_strays_but_nothing_that_is_named() -> None:
    store = MemoryStore()
    history = written(store, [(False, 2, 5)])
    stray = part_name("counter", 0, Version(4), True, "f" * 16)
    for name in (stray, "parts/notes.txt"):
        store.put(name, b"")
    Manifests(store).prune(retain=2, also=[stray, *names(history[-1])])
    assert set(store.list("parts/")) == names(history[-1]) | {"parts/notes.txt"}
    with pytest.raises(ValueError, match="retain=0"):
        Manifests(store).prune(retain=0)
    Manifests(MemoryStore()).prune(retain=1)


def test_damaged_manifests_do_not_count_among_those_that_are_kept() -> None:
    store = MemoryStore()
    history = written(store, [(True, 2, 1)] * 4)
    for damaged in (1, 3, 4):
        store.put(f"manifests/{damaged:012d}.json", b"{}")
    manifests = Manifests(store)
    manifests.prune(retain=2)
    assert manifests.versions() == [0, 1, 2, 3, 4], "0 and 2 are the newest that are whole"
    assert manifests.latest() == history[2]
    assert names(history[0]) | names(history[2]) <= set(store.list("parts/"))
    manifests.sweep("")
    assert names(history[3]) <= set(store.list("parts/")), "a damaged manifest may need them"
    manifests.put(after(history[2], 5, full=True, instances=1))
    manifests.prune(retain=1)
    assert manifests.versions() == [5]


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


class Sharing:
    """A query whose files are in a store that others use too, as its id and folder say."""

    def __init__(self, shared: BackupStore, folder: BackupStore, query: str) -> None:
        self.query, self.parts = query, shared
        self.manifests = Manifests(folder, shared)
        self.history: list[Manifest] = []

    def own(self, manifest: Manifest) -> Manifest:
        operators = {
            name: replace(
                operator,
                parts=tuple(
                    replace(part, name=f"{self.query}/{part.name.removeprefix(self.query + '/')}")
                    for part in operator.parts
                ),
            )
            for name, operator in manifest.operators.items()
        }
        return replace(manifest, operators=operators)

    def checkpoint(self, full: bool, instances: int, gap: int) -> None:
        last = self.history[-1] if self.history else None
        made = (
            first(0, instances)
            if last is None
            else after(last, last.version + gap, full=full, instances=instances)
        )
        made = self.own(made)
        for name in made.files:
            self.parts.put(name, name.encode())
        self.manifests.put(made)
        self.history.append(made)

    def check(self, retain: int) -> None:
        for manifest in self.history[-retain:]:
            assert self.manifests.get(manifest.version) == manifest
            for name in manifest.files:
                assert self.parts.get(name).to_pybytes() == name.encode()


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.one_of(
                st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 3)),
                st.sampled_from(["prune", "sweep", "restart"]),
            ),
        ),
        max_size=25,
    ),
    st.sampled_from(["one uri", "nested folders"]),
)
def test_queries_that_share_a_store_never_take_each_others_files(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, object]], sharing: str
) -> None:
    retain = 2
    root = tmp_path_factory.mktemp("shared")
    folders = [root / "ck", root / "ck" / "b", root / "ck" / "b" / "c"]
    shared = Files(str(root / "uri")).open()
    queries = []
    for number, folder in enumerate(folders):
        store = Files(str(folder)).open()
        parts = shared if sharing == "one uri" else store
        queries.append(Sharing(parts, store, f"{number:012x}"))
    for which, step in steps:
        query = queries[which]
        if step == "restart":
            query.manifests = Manifests(Files(str(folders[which])).open(), query.parts)
            query.manifests.sweep(f"{query.query}/")
        elif step == "prune":
            query.manifests.prune(retain=retain)
        elif step == "sweep":
            query.manifests.sweep(f"{query.query}/")
        else:
            query.checkpoint(*step)  # type: ignore[misc]
        for each in queries:
            each.check(retain)
