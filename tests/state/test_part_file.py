"""The files of parts: rows in the order of their groups, read by segments."""

import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import FULL, GROUPS, SCHEMA, Changes, captured, content, group, histories

from anabranch.errors import CheckpointCorrupt, SchemaChanged
from anabranch.state import checkpoint, group_order, part_file
from anabranch.state.capture import Capture, CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.state.part_file import BufferSource
from anabranch.units import Version


@dataclass
class Counting:
    """A file of which it is known what was read."""

    data: pa.Buffer
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return int(self.data.size)

    def read(self, offset: int, length: int) -> pa.Buffer:
        self.reads.append((offset, min(length, self.size - offset)))
        return BufferSource(self.data).read(offset, length)

    @property
    def bytes(self) -> int:
        return sum(length for _, length in self.reads)


def saved(capture: Capture, folder: Path, segment: int | None = None) -> pa.Buffer:
    path = folder / "part"
    part_file.save(capture, path, segment)
    return pa.py_buffer(path.read_bytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@given(histories(), st.integers(1, 3), st.sampled_from([1, 64, 200, 1 << 20]))
def test_a_file_gives_back_what_was_written(
    folder: Path, history: list[Changes], version: int, segment: int
) -> None:
    for changes in history:
        capture = captured(changes, version, version - 1, KeyGroups.all(GROUPS))
        back = part_file.read(
            BufferSource(saved(capture, folder, segment)), name="f", schema=SCHEMA
        )
        assert replace(back, rows=capture.rows) == capture
        assert content(back) == content(capture)
        groups = back.rows.column("__group").to_pylist()
        assert groups == sorted(groups)


@given(
    st.frozensets(st.integers(0, GROUPS - 1)).map(KeyGroups.of), st.sampled_from([1, 64, 1 << 20])
)
def test_a_file_gives_the_groups_asked_for(folder: Path, groups: KeyGroups, segment: int) -> None:
    some = part_file.read(BufferSource(saved(FULL, folder, segment)), name="f", groups=groups)
    assert some.groups == groups
    assert content(some) == {k: v for k, v in content(FULL).items() if group(k) in groups}


WIDE = CheckpointSchema(
    keys=(pa.field("id", pa.int64(), nullable=False),),
    sub=(),
    values=(pa.field("text", pa.string()),),
    timers=False,
    key_groups=128,
)


def many(rows: int, of_group: np.ndarray | None = None) -> Capture:
    """Rows in the order in which a table has them: of any group."""
    ids = np.arange(rows)
    groups = (ids * 7919 % 128 if of_group is None else of_group).astype(np.uint16)
    table = pa.Table.from_arrays(
        [
            pa.array(ids),
            pa.array(ids.astype(np.uint64)),
            pa.array(groups),
            pa.array(np.zeros(rows, bool)),
            pa.array([f"text of {each}" for each in ids.tolist()]),
        ],
        schema=WIDE.arrow(),
    )
    chunks = pa.Table.from_batches(table.to_batches(max_chunksize=1 << 14))
    every = KeyGroups.all(128)
    return Capture("op", 0, Version(5), None, every, WIDE, chunks)


MANY = many(200_000)


def test_only_the_segments_of_the_wanted_groups_are_read(tmp_path: Path) -> None:
    source = Counting(saved(MANY, tmp_path, segment=1 << 15))
    wanted = KeyGroups.parse("32-47")
    some = part_file.read(source, name="f", groups=wanted)
    assert some.rows.num_rows == 200_000 // 8
    assert source.bytes < source.size / 6
    assert len(source.reads) <= 3, "the wanted segments are beside each other"


def test_rows_of_a_group_stay_in_order(tmp_path: Path) -> None:
    back = part_file.read(BufferSource(saved(MANY, tmp_path, 1 << 14)), name="f")
    groups = back.rows.column("__group").to_numpy()
    ids = back.rows.column("id").to_numpy()
    assert (np.diff(groups.astype(int)) >= 0).all()
    assert (np.diff(ids)[np.diff(groups.astype(int)) == 0] > 0).all()
    assert back.rows.column("text").to_pylist() == [f"text of {each}" for each in ids.tolist()]


@pytest.mark.parametrize("skewed", ["not", "many rows", "long rows"])
def test_rows_are_put_in_order_a_little_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skewed: str
) -> None:
    """Whether groups are small or one is large: no more than some are copied at once."""
    monkeypatch.setattr(group_order, "_AT_ONCE", 1 << 18)
    capture = MANY
    if skewed == "many rows":
        groups = np.where(np.arange(200_000) % 5 == 0, np.arange(200_000) % 128, 3)
        capture = many(200_000, groups)
    elif skewed == "long rows":
        text = capture.rows.column("text").to_pylist()
        few = np.flatnonzero(capture.rows.column("__group").to_numpy() == 3)[::16]
        for row in few.tolist():
            text[row] = "long " * 4000
        rows = capture.rows.set_column(4, WIDE.arrow().field("text"), pa.chunked_array([text]))
        chunks = pa.Table.from_batches(rows.combine_chunks().to_batches(max_chunksize=1 << 14))
        capture = replace(capture, rows=chunks)
    largest = 0
    original = group_order._joined

    def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        nonlocal largest
        largest = max(largest, sum(batch.nbytes for batch in batches))
        return original(batches)

    monkeypatch.setattr(group_order, "_joined", joined)
    back = part_file.read(BufferSource(saved(capture, tmp_path, 1 << 14)), name="f")
    assert 0 < largest < 4 << 18
    assert back.rows.num_rows == 200_000
    assert sorted(back.rows.column("id").to_pylist()) == list(range(200_000))


@pytest.mark.parametrize("listed", [1 << 23, 50_000])
def test_rows_are_not_looked_at_once_for_each_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: int
) -> None:
    """Which would take a time that grows with the square of the state."""
    monkeypatch.setattr(group_order, "_AT_ONCE", 1 << 16)
    monkeypatch.setattr(group_order, "_LISTED", listed)
    looked_at = 0
    original = np.flatnonzero

    def flatnonzero(mask: np.ndarray) -> np.ndarray:
        nonlocal looked_at
        looked_at += len(mask)
        return original(mask)

    monkeypatch.setattr(np, "flatnonzero", flatnonzero)
    data = saved(MANY, tmp_path)
    monkeypatch.undo()
    assert looked_at <= (1 + 200_000 // listed) * 200_000 * 1.2
    back = part_file.read(BufferSource(data), name="f")
    groups, ids = (back.rows.column(name).to_numpy() for name in ("__group", "id"))
    assert sorted(ids.tolist()) == list(range(200_000))
    assert (np.diff(ids)[np.diff(groups.astype(int)) == 0] > 0).all()


def test_an_arrow_reader_can_open_it(tmp_path: Path) -> None:
    with pa.ipc.open_stream(saved(FULL, tmp_path, 64)) as stream:
        rows = stream.read_all()
    assert content(replace(FULL, rows=rows)) == content(FULL)


def test_no_rows(tmp_path: Path) -> None:
    none = replace(FULL, rows=FULL.rows.slice(0, 0))
    for groups in (None, KeyGroups.parse("0-1")):
        found = part_file.read(BufferSource(saved(none, tmp_path)), name="f", groups=groups)
        assert found.rows.num_rows == 0
        assert found.rows.schema == SCHEMA.arrow()


def test_a_capture_file_is_read_too() -> None:
    data = checkpoint.write(FULL)
    assert part_file.read(Counting(data), name="f", schema=SCHEMA) == FULL
    assert part_file.checksum(BufferSource(data)) == checkpoint.checksum(data)
    with pytest.raises(CheckpointCorrupt, match="f: an undamaged"):
        part_file.read(BufferSource(data), name="f", expected="0" * 16)


@pytest.fixture(scope="module")
def file(folder: Path) -> bytes:
    found: bytes = saved(FULL, folder, 64).to_pybytes()
    return found


@settings(max_examples=400)
@given(st.data())
def test_any_flipped_bit_is_refused(file: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(file) - 1))
    flipped = bytearray(file)
    flipped[bit // 8] ^= 1 << (bit % 8)
    source = BufferSource(pa.py_buffer(bytes(flipped)))
    with pytest.raises(CheckpointCorrupt, match=r"^parts/x\.arrow: \w"):
        part_file.read(source, name="parts/x.arrow", schema=SCHEMA)


@settings(max_examples=400)
@given(st.data())
def test_a_flipped_bit_never_changes_a_row(file: bytes, data: st.DataObject) -> None:
    """Whichever groups are read."""
    bit = data.draw(st.integers(0, 8 * len(file) - 1))
    groups = KeyGroups.of(data.draw(st.frozensets(st.integers(0, GROUPS - 1), min_size=1)))
    flipped = bytearray(file)
    flipped[bit // 8] ^= 1 << (bit % 8)
    try:
        some = part_file.read(BufferSource(pa.py_buffer(bytes(flipped))), name="x", groups=groups)
    except CheckpointCorrupt:
        return
    assert content(some) == content(FULL.select(groups))


def test_any_truncation_is_refused(file: bytes) -> None:
    for size in range(len(file)):
        with pytest.raises(CheckpointCorrupt, match="x: "):
            part_file.read(BufferSource(pa.py_buffer(file[:size])), name="x", schema=SCHEMA)


@settings(max_examples=400)
@given(st.data())
def test_bytes_that_are_missing_or_too_many_are_refused(file: bytes, data: st.DataObject) -> None:
    """Anywhere, and whichever groups are read."""
    start = data.draw(st.integers(0, len(file) - 1))
    end = data.draw(st.integers(start + 1, len(file)))
    groups = KeyGroups.of(data.draw(st.frozensets(st.integers(0, GROUPS - 1), min_size=1)))
    for other in (file[:start] + file[end:], file[:end] + file[start:]):
        for wanted in (None, groups):
            with pytest.raises(CheckpointCorrupt, match="x: "):
                part_file.read(BufferSource(pa.py_buffer(other)), name="x", groups=wanted)


@dataclass
class Shrinking(Counting):
    """A file that is cut off after its index was read."""

    def read(self, offset: int, length: int) -> pa.Buffer:
        if self.reads:
            self.data = self.data.slice(0, self.data.size // 2)
        return super().read(offset, length)


def test_a_file_that_is_cut_off_meanwhile_is_refused(tmp_path: Path) -> None:
    opened = part_file.opened(Shrinking(saved(MANY, tmp_path, 1 << 15)), name="x")
    with pytest.raises(CheckpointCorrupt, match="x: truncated; of "):
        opened.read(KeyGroups.parse("100-127"))


@given(st.binary(min_size=1, max_size=100))
def test_what_is_no_part_is_refused(file: bytes, other: bytes) -> None:
    for data in (other, file + other, other + file):
        with pytest.raises(CheckpointCorrupt, match="x: "):
            part_file.read(BufferSource(pa.py_buffer(data)), name="x")


def test_another_part_is_refused(file: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="x: an undamaged"):
        part_file.read(BufferSource(pa.py_buffer(file)), name="x", expected="0" * 16)


def test_other_columns_are_refused(file: bytes) -> None:
    other = replace(SCHEMA, sub=())
    with pytest.raises(SchemaChanged, match=r"x was written with the columns word string, n int64"):
        part_file.read(BufferSource(pa.py_buffer(file)), name="x", schema=other)


def test_the_same_values_in_another_type_are_read(file: bytes) -> None:
    wide = replace(SCHEMA, keys=(pa.field("word", pa.large_string()), SCHEMA.keys[1]))
    back = part_file.read(BufferSource(pa.py_buffer(file)), name="x", schema=wide)
    assert back.rows.schema == wide.arrow()
    assert content(back) == content(FULL)


_LARGE = """
import resource, sys
from pathlib import Path
import numpy as np
import pyarrow as pa
from anabranch.state import checkpoint, group_order, part_file
from anabranch.state.capture import Capture, CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.units import Version

folder = Path(sys.argv[1])
schema = CheckpointSchema(
    (pa.field("id", pa.int64(), False),), (), (pa.field("n", pa.int64(), False),), False, 128
)
def chunk(number):
    ids = np.arange(number << 18, (number + 1) << 18)
    columns = [ids, ids.astype(np.uint64), (ids * 7919 % 128).astype(np.uint16), ids < 0, ids]
    return pa.record_batch([pa.array(each) for each in columns], schema=schema.arrow())
with pa.OSFile(str(folder / "rows"), "wb") as sink, pa.ipc.new_stream(sink, schema.arrow()) as out:
    for number in range(64):
        out.write_batch(chunk(number))
with pa.memory_map(str(folder / "rows")) as mapped, pa.ipc.open_stream(mapped) as stream:
    rows = stream.read_all()
capture = Capture("op", 0, Version(3), None, KeyGroups.all(128), schema, rows)
before = pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()
part_file.save(capture, folder / "part")
print(rows.nbytes, pa.default_memory_pool().max_memory() - before[0])
"""


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    script = [sys.executable, "-c", _LARGE, str(tmp_path)]
    ran = subprocess.run(script, capture_output=True, text=True, check=True, timeout=120)
    size, used = map(int, ran.stdout.split())
    assert size > 400 << 20
    assert used < size / 3
