"""Captures, their files, partition and merge, on captures made by hand."""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import CheckpointCorrupt, CheckpointError, SchemaChanged
from anabranch.kernels.newest import first_of_each
from anabranch.state import checkpoint
from anabranch.state.capture import Capture, CheckpointSchema
from anabranch.state.chains import Chain, follow, needed
from anabranch.state.groups import KeyGroups, assign
from anabranch.state.partition import merge, partition
from anabranch.units import Version

GROUPS = 8
SCHEMA = CheckpointSchema(
    keys=(pa.field("word", pa.string()), pa.field("n", pa.int64(), nullable=False)),
    sub=("slot",),
    values=(pa.field("count", pa.int64(), nullable=False), pa.field("note", pa.string())),
    timers=True,
    key_groups=GROUPS,
)
Key = tuple[str | None, int, int]
Value = tuple[int, str | None, int | None]
Model = dict[Key, Value]
Changes = Mapping[Key, Value | None]

KEYS = st.tuples(
    st.sampled_from([None, "", "a", "b", "ab", "river"]), st.integers(0, 2), st.integers(0, 1)
)
VALUES = st.tuples(
    st.integers(-(2**63), 2**63 - 1), st.none() | st.text(max_size=3), st.none() | st.just(7)
)


def group(key: Key) -> int:
    return zlib.crc32(repr(key[:2]).encode()) % GROUPS


def captured(changes: Changes, version: int, base: int | None, groups: KeyGroups) -> Capture:
    """A capture as a table would give it; only two hashes, so that nearly all keys collide."""
    rows = [key for key in changes if group(key) in groups]
    values = [changes[key] or (0, None, None) for key in rows]
    arrays = [
        pa.array([key[0] for key in rows], pa.string()),
        pa.array([key[1] for key in rows], pa.int64()),
        pa.array([key[2] for key in rows], pa.int64()),
        pa.array([2**64 - 1 - (key[1] + key[2]) % 2 for key in rows], pa.uint64()),
        pa.array([group(key) for key in rows], pa.uint16()),
        pa.array([changes[key] is None for key in rows], pa.bool_()),
        pa.array([value[2] for value in values], pa.int64()),
        pa.array([value[0] for value in values], pa.int64()),
        pa.array([value[1] for value in values], pa.string()),
    ]
    table = pa.Table.from_arrays(arrays, schema=SCHEMA.arrow())
    return Capture(
        "counter", 0, Version(version), None if base is None else Version(base), groups, SCHEMA,
        table,
    )  # fmt: skip


def content(capture: Capture) -> dict[Key, Value | None]:
    found: dict[Key, Value | None] = {}
    for word, n, slot, _, in_group, deleted, timer, count, note in zip(
        *(column.to_pylist() for column in capture.rows.columns), strict=True
    ):
        assert (word, n, slot) not in found, "a key occurs twice"
        found[word, n, slot] = None if deleted else (count, note, timer)
        assert in_group == group((word, n, slot))
        assert in_group in capture.groups
    return found


@st.composite
def histories(draw: st.DrawFn) -> list[Changes]:
    """What changed in each version; a deleted key was there."""
    live: set[Key] = set()
    history: list[Changes] = []
    for _ in range(draw(st.integers(1, 5))):
        changes: dict[Key, Value | None] = dict(draw(st.dictionaries(KEYS, VALUES, max_size=8)))
        gone = draw(st.sets(st.sampled_from(sorted(live, key=repr)))) if live else set()
        changes |= dict.fromkeys(gone)
        live = (live | changes.keys()) - gone
        history.append(changes)
    return history


def state_after(history: list[Changes]) -> Model:
    state: Model = {}
    for changes in history:
        for key, value in changes.items():
            if value is None:
                del state[key]
            else:
                state[key] = value
    return state


def chain_of(history: list[Changes], instances: int) -> list[Capture]:
    """A full capture of the first version, and the changes of each later one."""
    return [
        captured(changes, version, version - 1 if version else None, groups)
        for version, changes in enumerate(history)
        for groups in assign(GROUPS, instances)
    ]


FULL = captured(
    {(word, n, 0): (n, word, None) for word in (None, "x", "yy") for n in range(5)},
    7, None, KeyGroups.all(GROUPS),
)  # fmt: skip


# --- the file ---


@given(histories(), st.integers(1, 3))
def test_a_file_gives_back_what_was_written(history: list[Changes], instances: int) -> None:
    for capture in chain_of(history, instances):
        back = checkpoint.read(checkpoint.write(capture), name="f", schema=SCHEMA)
        assert back == capture


@given(st.frozensets(st.integers(0, GROUPS - 1)).map(KeyGroups.of))
def test_a_file_gives_the_groups_asked_for(groups: KeyGroups) -> None:
    some = checkpoint.read(checkpoint.write(FULL), name="f", groups=groups)
    assert some.groups == groups
    assert content(some) == {k: v for k, v in content(FULL).items() if group(k) in groups}


FILE = checkpoint.write(FULL).to_pybytes()


def test_a_file_is_an_arrow_stream() -> None:
    with pa.ipc.open_stream(FILE) as stream:
        assert stream.read_all().replace_schema_metadata(None) == FULL.rows


@settings(max_examples=300)
@given(st.integers(0, 8 * len(FILE) - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    flipped = bytearray(FILE)
    flipped[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(CheckpointCorrupt, match=r"^parts/x\.arrow: \w"):
        checkpoint.read(pa.py_buffer(bytes(flipped)), name="parts/x.arrow", schema=SCHEMA)


def test_any_truncation_is_refused() -> None:
    for size in range(len(FILE)):
        with pytest.raises(CheckpointCorrupt, match="x: trunc"):
            checkpoint.read(pa.py_buffer(FILE[:size]), name="x", schema=SCHEMA)


@given(st.binary(min_size=1, max_size=100))
def test_what_is_no_checkpoint_is_refused(other: bytes) -> None:
    for data in (other, FILE + other, other + FILE):
        with pytest.raises(CheckpointCorrupt, match="x: "):
            checkpoint.read(pa.py_buffer(data), name="x")


def test_a_sealed_file_without_a_checkpoint_is_refused() -> None:
    """The right checksum over a stream that is not ours."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("a", pa.int64())])):
        pass
    for body in (sink.getvalue().to_pybytes(), b"not arrow"):
        sealed = bytearray(body + bytes(32))
        checkpoint.seal(memoryview(sealed))
        file = pa.py_buffer(sealed)
        with pytest.raises(CheckpointCorrupt, match="x: the checksum is right"):
            checkpoint.read(file, name="x")


@pytest.mark.parametrize(
    "other",
    [
        replace(SCHEMA, sub=("other",)),
        replace(SCHEMA, sub=()),
        replace(SCHEMA, timers=False),
        replace(SCHEMA, key_groups=4),
        replace(SCHEMA, keys=SCHEMA.keys[::-1]),
        replace(SCHEMA, values=SCHEMA.values[:1]),
        replace(SCHEMA, values=(pa.field("count", pa.int32()), SCHEMA.values[1])),
        replace(SCHEMA, keys=(pa.field("word", pa.binary()), SCHEMA.keys[1])),
    ],
)
def test_other_columns_are_refused(other: CheckpointSchema) -> None:
    with pytest.raises(SchemaChanged, match=r"x was written with the columns word string, n int64"):
        checkpoint.read(checkpoint.write(FULL), name="x", schema=other)


def test_the_same_values_in_another_type_are_read() -> None:
    wide = replace(SCHEMA, keys=(pa.field("word", pa.large_string()), SCHEMA.keys[1]))
    back = checkpoint.read(checkpoint.write(FULL), name="x", schema=wide)
    assert back.rows.schema == wide.arrow()
    assert content(back) == content(FULL)


def test_the_schema_is_json() -> None:
    assert CheckpointSchema.from_json(SCHEMA.to_json()) == SCHEMA
    nested = replace(
        SCHEMA,
        keys=(pa.field("k", pa.struct([("a", pa.list_(pa.int32()))])),),
        values=(pa.field("v", pa.list_(pa.float32(), 4)),),
        timers=False,
        sub=(),
    )
    assert CheckpointSchema.from_json(nested.to_json()) == nested
    for wrong in ({}, SCHEMA.to_json() | {"timers": False}, SCHEMA.to_json() | {"arrow": "AAAA"}):
        with pytest.raises(ValueError, match="schema of"):
            CheckpointSchema.from_json(wrong)


# --- chains ---


def test_a_chain_is_followed_over_a_scale() -> None:
    every = KeyGroups.all(GROUPS)
    chain = [
        *(captured({}, 3, None, groups) for groups in assign(GROUPS, 2)),
        *(captured({}, 5, 3, groups) for groups in assign(GROUPS, 2)),
        *(captured({}, 6, 5, groups) for groups in assign(GROUPS, 3)),
    ]
    assert follow(chain) == Chain(Version(6), None, every)
    assert follow(chain[2:]) == Chain(Version(6), Version(3), every)
    assert [c for c, _ in needed(chain)] == chain
    full = captured({}, 6, None, assign(GROUPS, 3)[0])
    assert needed([*chain[:4], full, *chain[5:]])[0] == (chain[0], KeyGroups.parse("2-3"))


@pytest.mark.parametrize(
    ("links", "told"),
    [
        ([], "no capture of any key group"),
        ([(1, None, "0-7"), (3, 2, "0-7")], r"groups 0-7: .*version 3 \(base 2\).* version 1"),
        ([(1, None, "0-7"), (1, None, "3-4")], "groups 3-4"),
        (
            [(1, None, "0-3"), (2, None, "4-7")],
            "same versions.*to 1 for groups 0-3, to 2 for groups 4-7",
        ),
        (
            [(1, None, "0-3"), (2, 1, "0-7")],
            "from the beginning for groups 0-3, from 1 for groups 4-7",
        ),
        ([(1, None, "0-7"), (2, 1, "0-5")], "same versions"),
        ([(1, None, "0-7"), (2, 1, "0-7"), (3, 1, "2")], "same versions.*to 3 for groups 2"),
        ([(1, 0, "0-7"), (1, 0, "2")], "groups 2: "),
    ],
)
def test_a_broken_chain_is_refused(links: list[tuple[int, int | None, str]], told: str) -> None:
    captures = [captured({}, v, base, KeyGroups.parse(groups)) for v, base, groups in links]
    for refuse in (follow, merge):
        with pytest.raises(CheckpointError, match=told):
            refuse(captures)


# --- merge and partition ---


@given(histories(), st.integers(1, 3))
def test_merge_of_a_chain_is_the_state(history: list[Changes], instances: int) -> None:
    merged = merge(chain_of(history, instances))
    assert content(merged) == state_after(history)
    assert (merged.version, merged.base) == (len(history) - 1, None)
    assert merged.groups == KeyGroups.all(GROUPS)


@given(histories(), st.integers(1, 3), st.integers(0, 4))
def test_merge_of_some_changes_is_changes(
    history: list[Changes], instances: int, first: int
) -> None:
    """Merging the tail of a chain into one capture of changes leaves the state as it was."""
    chain = chain_of(history, instances)
    cut = min(first, len(history) - 1) * instances
    merged = merge(chain[cut:])
    assert merged.base == chain[cut].base
    assert content(merge([*chain[:cut], merged])) == state_after(history)


@given(histories(), histories())
def test_a_full_capture_hides_what_was_before(old: list[Changes], new: list[Changes]) -> None:
    half, rest = assign(GROUPS, 2)
    state = state_after(new)
    chain = [*chain_of(old, 1), captured(state, len(old), None, half)]
    chain.append(captured(state, len(old), None, rest))
    assert content(merge(chain)) == state
    assert len(needed(chain)) == 2


@given(histories(), st.integers(1, 3), st.integers(1, GROUPS))
def test_partition_is_total_and_disjoint(
    history: list[Changes], before: int, instances: int
) -> None:
    routing = dict(enumerate(assign(GROUPS, instances)))
    parts = partition(chain_of(history, before), routing)
    merged = {instance: merge(captures) for instance, captures in parts.items()}
    assert {i: capture.groups for i, capture in merged.items()} == routing
    assert [capture.instance for capture in merged.values()] == list(routing)
    together: dict[Key, Value | None] = {}
    for capture in merged.values():
        assert not together.keys() & content(capture).keys()
        together |= content(capture)
    assert together == state_after(history)
    assert content(merge(list(merged.values()))) == state_after(history)


def test_partition_refuses_what_it_has_not() -> None:
    half, rest = assign(GROUPS, 2)
    with pytest.raises(CheckpointError, match=r"instance 1 needs groups 3-7.*lack 4-7"):
        partition([FULL.select(half)], {0: half, 1: rest | KeyGroups.of([3])})


def test_merge_refuses_another_operator() -> None:
    half, rest = assign(GROUPS, 2)
    other = replace(FULL.select(rest), operator="other")
    with pytest.raises(CheckpointError, match=r"other.*counter.*not of the same operator"):
        merge([FULL.select(half), other])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40), st.integers(0, 62))
def test_first_of_each_key(rows: list[tuple[int, int]], shift: int) -> None:
    hashes = np.array([h << shift for h, _ in rows], np.uint64)
    words = np.array([w for _, w in rows], np.uint64).reshape(-1, 1)
    none = np.empty((len(rows), 0), np.int64)
    keep = first_of_each(hashes, words, none, none.astype(np.int32), np.empty(0, np.uint8))
    assert keep.tolist() == [row not in rows[:i] for i, row in enumerate(rows)]
