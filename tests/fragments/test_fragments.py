"""Any m of the n fragments give the state again, and nothing else is ever taken for it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import CheckpointCorrupt, CheckpointNotFound, DidNotHappen, PlanError
from anabranch.fragments import (
    Decoder,
    Encoder,
    Fragment,
    Label,
    Layout,
    Reader,
    Remaking,
    encode,
    recompute,
    turn,
)
from fragments import slow

ROW = 128


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, bytes]:
    """A shape, and a state about as long as some stripes."""
    m, k = draw(st.integers(1, 10)), draw(st.integers(1, 10))
    stripes = draw(st.integers(0, 3))
    size = max(0, stripes * m * ROW + draw(st.sampled_from([-65, -64, -1, 0, 1, 63, 64, 200])))
    return m, k, random.Random(draw(st.integers(0, 99))).randbytes(size)


def some(fragments: Sequence[Fragment], chance: random.Random) -> list[Fragment]:
    """Any m of them or more, in any order, as they are read from disks."""
    m, n = fragments[0].label.layout.data, len(fragments)
    chosen = chance.sample(list(fragments), chance.randint(m, n))
    return [Fragment.parse(one.to_bytes(), name="a file") for one in chosen]


@given(cases(), st.integers(0, 2**32))
@settings(max_examples=150)
def test_any_m_fragments_give_the_state(case: tuple[int, int, bytes], seed: int) -> None:
    m, k, state = case
    chance = random.Random(seed)
    fragments = encode(m, k, state, row=ROW)
    assert len(fragments) == m + k
    left = some(fragments, chance)
    assert bytes(recompute(left)) == state
    start, end = sorted((chance.randint(0, len(state)), chance.randint(0, len(state))))
    assert bytes(recompute(left, start, end)) == state[start:end]
    assert b"".join(Reader(left).read(start, end)) == state[start:end]


@given(cases())
@settings(max_examples=40)
def test_the_rows_are_those_of_the_model(case: tuple[int, int, bytes]) -> None:
    m, k, state = case
    fragments = encode(m, k, state, row=ROW)
    for stripe in range(-(-len(state) // (m * ROW))):
        part = state[stripe * m * ROW : (stripe + 1) * m * ROW]
        size = -(-len(part) // (64 * m)) * 64
        part = part.ljust(m * size, b"\0")
        data = [part[at : at + size] for at in range(0, m * size, size)]
        rows = [one.to_bytes()[stripe * ROW : stripe * ROW + size] for one in fragments]
        assert rows == data + slow.encode(m, k, data)


@given(cases(), st.lists(st.integers(0, 400), max_size=20))
@settings(max_examples=60)
def test_it_does_not_matter_in_which_pieces_a_state_comes(
    case: tuple[int, int, bytes], sizes: list[int]
) -> None:
    m, k, state = case
    pieces, at = [], 0
    for size in sizes:
        pieces.append(state[at : at + size])
        at += size
    pieces.append(state[at:])
    encoder = Encoder(m, k, row=ROW)
    kept: list[list[memoryview]] = [[] for _ in range(m + k)]
    for stripe in encoder.stripes(pieces):
        for column, row in zip(kept, stripe.rows, strict=True):
            column.append(row)
    files = [
        b"".join([*column, encoder.label(index, name="state", version=0, owner="").to_bytes()])
        for index, column in enumerate(kept)
    ]
    assert encoder.size == len(state)
    assert files == [one.to_bytes() for one in encode(m, k, state, row=ROW)]


@given(cases(), st.integers(0, 2**32))
@settings(max_examples=60)
def test_a_lost_fragment_is_made_again_as_it_was(case: tuple[int, int, bytes], seed: int) -> None:
    m, k, state = case
    chance = random.Random(seed)
    fragments = encode(m, k, state, row=ROW, name="counter/2", version=7)
    lost = chance.choice(fragments)
    left = some([one for one in fragments if one is not lost], chance)
    remaking = Remaking(Decoder(one.label for one in left), (lost.label.index,))
    made = b""
    for stripe, rows in enumerate(Reader(left).read()):
        data = np.zeros(m * lost.label.layout.row_size(stripe), np.uint8)
        data[: len(rows)] = rows
        made += b"".join(map(bytes, remaking.rows(stripe, data)))
    (label,) = remaking.labels()
    assert made + label.to_bytes() == lost.to_bytes()


def test_a_label_tells_what_a_fragment_is_a_part_of() -> None:
    holders = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    fragments = encode(
        2, 1, b"x" * 1000, name="counter/2", version=7, owner="10.0.0.9", holders=holders, row=64
    )
    for index, fragment in enumerate(fragments):
        label = Fragment.parse(fragment.to_bytes(), name="a file").label
        assert label == fragment.label
        assert (label.name, label.version, label.owner) == ("counter/2", 7, "10.0.0.9")
        assert (label.index, label.holders) == (index, holders)
        assert label.layout == Layout(data=2, parity=1, row=64, size=1000)


class Counting:
    """A fragment that notes what is read of it, or fails."""

    def __init__(self, fragment: Fragment, failure: Exception | None = None) -> None:
        self.fragment = fragment
        self.failure = failure
        self.reads: list[tuple[int, int]] = []

    @property
    def label(self) -> Label:
        return self.fragment.label

    def read(self, offset: int, size: int) -> memoryview:
        self.reads.append((offset, size))
        if self.failure:
            raise self.failure
        return self.fragment.read(offset, size)


def test_a_range_reads_only_the_rows_that_it_needs() -> None:
    state = random.Random(1).randbytes(10 * 4 * ROW)
    sources = [Counting(one) for one in encode(4, 2, state, row=ROW)]
    start = 3 * 4 * ROW + ROW + 5
    assert b"".join(Reader(sources).read(start, start + ROW)) == state[start:][:ROW]
    assert [source.reads for source in sources] == [[], *[[(3 * ROW, ROW)]] * 2, [], [], []]
    assert sources[1].fragment.read(3 * ROW + 5, 7) == state[start:][:7]


def test_a_range_without_its_rows_reads_m_others_of_its_stripes() -> None:
    state = random.Random(1).randbytes(10 * 4 * ROW)
    sources = [Counting(one) for one in encode(4, 2, state, row=ROW)]
    del sources[1]
    start = 3 * 4 * ROW + ROW + 5
    assert b"".join(Reader(sources).read(start, start + 10)) == state[start:][:10]
    assert [source.reads for source in sources] == [*[[(3 * ROW, ROW)]] * 4, []]


def test_a_source_that_fails_is_not_asked_again() -> None:
    state = random.Random(1).randbytes(10 * 4 * ROW)
    sources = [Counting(one) for one in encode(4, 2, state, row=ROW)]
    sources[0].failure = DidNotHappen("10.0.0.1 does not answer")
    sources[2].failure = OSError("disk")
    assert b"".join(Reader(sources).read()) == state
    assert [len(source.reads) for source in sources] == [1, 10, 1, 10, 10, 10]
    sources[1].failure = CheckpointNotFound("it was deleted")
    with pytest.raises(CheckpointNotFound, match=r"3 of the 4 needed rows.*answer.*deleted"):
        list(Reader(sources).read())


def test_all_holders_send_equally_much_in_turn() -> None:
    layout = Layout(data=4, parity=3, row=64, size=4 * 64 * 7 * 5)
    asked = [index for stripe in range(layout.stripes) for index in turn(layout, stripe)[:4]]
    assert {asked.count(index) for index in range(7)} == {20}
    assert all(sorted(turn(layout, stripe)) == list(range(7)) for stripe in range(35))


def test_rows_can_be_gathered_as_they_come() -> None:
    state = random.Random(1).randbytes(1000)
    fragments = encode(3, 2, state, row=ROW)
    gathering = Decoder(one.label for one in fragments).gather(1)
    rows = [one.read(ROW, ROW) for one in fragments]
    target = np.zeros(3 * ROW, np.uint8)
    assert gathering.add(4, rows[4])
    assert not gathering.add(1, rows[3])
    assert not gathering.add(0, rows[0][:-1])
    assert not gathering.add(0, b"")
    assert gathering.needed == 2
    with pytest.raises(CheckpointCorrupt, match="needs 2 more rows; corrupt are those of fragment"):
        gathering.into(target)
    assert gathering.add(3, rows[3])
    assert gathering.add(1, rows[1])
    assert gathering.needed == 0
    gathering.into(target)
    assert target.tobytes() == state[3 * ROW : 6 * ROW]


def damaged(fragment: Fragment, bit: int) -> bytes:
    data = bytearray(fragment.to_bytes())
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def test_every_flipped_bit_is_detected() -> None:
    state = random.Random(1).randbytes(100)
    holders = ("a", "b")
    fragments = encode(1, 1, state, row=64, name="n", holders=holders)
    for fragment in fragments:
        size = len(fragment.to_bytes())
        assert size < 600
        rows = fragment.label.layout.rows_size
        for bit in range(8 * size):
            data = damaged(fragment, bit)
            with pytest.raises(CheckpointCorrupt, match=r"fragment|a file"):
                recompute([Fragment.parse(data, name="a file")])
            if bit < 8 * rows:
                other = fragments[1 - fragment.label.index]
                assert bytes(recompute([Fragment.parse(data, name="a file"), other])) == state


def test_every_truncation_is_detected() -> None:
    fragment = encode(2, 1, bytes(300), row=64)[1]
    whole = fragment.to_bytes()
    for size in range(len(whole)):
        with pytest.raises(CheckpointCorrupt, match="a file"):
            Fragment.parse(whole[:size], name="a file")
        with pytest.raises(CheckpointCorrupt, match="a file"):
            Fragment.parse(whole[len(whole) - size :], name="a file")
    with pytest.raises(CheckpointCorrupt, match="a file: should have"):
        Fragment.parse(b"\0" + whole, name="a file")


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9)), max_size=60, unique=True))
@settings(max_examples=60)
def test_a_corrupt_row_is_missing_in_its_stripe_only(hits: list[tuple[int, int]]) -> None:
    """Every stripe with at least m good rows can be read, and with it the whole if all can."""
    m, stripes = 4, 10
    state = random.Random(1).randbytes(stripes * m * ROW)
    files = [bytearray(one.to_bytes()) for one in encode(m, 8, state, row=ROW)]
    for index, stripe in hits:
        files[index][stripe * ROW + (index + stripe) % ROW] ^= 0x10
    reader = Reader([Fragment.parse(file, name="a file") for file in files])
    for stripe in range(stripes):
        lost = [index for index, at in hits if at == stripe]
        start, end = reader.layout.span(stripe)
        if len(lost) <= 8:
            assert b"".join(reader.read(start, end)) == state[start:end]
        else:
            with pytest.raises(CheckpointCorrupt, match=rf"fragment {lost[0]} of state at version"):
                list(reader.read(start, end))


def test_fragments_of_different_states_are_refused() -> None:
    state = bytes(1000)
    ours = encode(2, 2, state, row=64, name="counter/2", version=7, owner="a")
    for others in (
        encode(2, 2, state, row=64, name="counter/3", version=7, owner="a"),
        encode(2, 2, state, row=64, name="counter/2", version=8, owner="a"),
        encode(2, 2, state, row=64, name="counter/2", version=7, owner="b"),
        encode(2, 1, state, row=64, name="counter/2", version=7, owner="a"),
        encode(1, 3, state, row=64, name="counter/2", version=7, owner="a"),
        encode(2, 2, state, row=128, name="counter/2", version=7, owner="a"),
        encode(2, 2, state[1:], row=64, name="counter/2", version=7, owner="a"),
        encode(2, 2, state[1:] + b"1", row=64, name="counter/2", version=7, owner="a"),
    ):
        with pytest.raises(CheckpointCorrupt, match=r"fragment 1 of counter/. at version . is of"):
            recompute([ours[0], others[1]])


def test_two_fragments_of_one_number_must_be_equal() -> None:
    fragments = encode(2, 1, bytes(range(256)), row=64)
    assert recompute([fragments[0], fragments[0], fragments[2]]) == bytes(range(256))
    rows = [number ^ 1 for number in fragments[2].label.rows]
    forged = replace(fragments[2], label=replace(fragments[2].label, rows=rows))
    with pytest.raises(CheckpointCorrupt, match="fragment 2 of state at version 0: there are two"):
        recompute([fragments[2], forged])


def test_the_data_of_a_stripe_is_verified_once_more() -> None:
    """Rows that have the checksums of their labels, and were never those of one stripe."""
    fragments = encode(2, 2, bytes(range(128)), row=64)
    other = encode(2, 2, bytes(128), row=64)
    label = replace(fragments[3].label, rows=other[3].label.rows)
    with pytest.raises(CheckpointCorrupt, match="its rows are as written, and together"):
        recompute([fragments[1], replace(other[3], label=label)])
    label = replace(fragments[0].label, rows=other[0].label.rows)
    with pytest.raises(CheckpointCorrupt, match="its rows are as written, and together"):
        recompute([fragments[1], replace(other[0], label=label)])


def test_too_few_fragments_are_not_a_state() -> None:
    fragments = encode(3, 2, bytes(1000), row=64, name="counter/2", version=7)
    with pytest.raises(CheckpointNotFound, match=r"2 of the 3 needed.*fragments 0, 1, 3 are missi"):
        recompute([fragments[2], fragments[4]])
    with pytest.raises(CheckpointNotFound, match="2 of the 3"):
        recompute([fragments[2], fragments[4], fragments[2]])
    with pytest.raises(CheckpointNotFound, match="1 of the 3"):
        recompute(encode(3, 2, b"")[:1])
    with pytest.raises(CheckpointCorrupt, match="no fragments"):
        recompute([])


def test_wrong_use_is_refused() -> None:
    for row in (0, 1, 63, 65, 1 << 31):
        with pytest.raises(PlanError, match=f"rows of {row} bytes"):
            encode(2, 1, b"", row=row)
    with pytest.raises(PlanError, match="2 holders of 3 fragments"):
        encode(2, 1, b"", holders=("a", "b"))
    fragments = encode(2, 1, bytes(100))
    for start, end in ((-1, 5), (5, 4), (0, 101)):
        with pytest.raises(ValueError, match="of a state of 100"):
            recompute(fragments, start, end)
    encoder = Encoder(2, 1)
    with pytest.raises(ValueError, match="to its end"):
        encoder.label(0, name="n", version=1, owner="")
    assert list(encoder.stripes([])) == []
    with pytest.raises(ValueError, match="one state only"):
        list(encoder.stripes([]))


LARGE = """
import resource
import numpy as np
from anabranch.fragments import Encoder, Reader, encode, recompute

class Zeros:
    def __init__(self, label):
        self.label = label

    def read(self, offset, size):
        return bytes(size)

recompute(encode(10, 10, bytes(5_000_000))[10:])  # so that the library is there
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
encoder = Encoder(10, 10)
piece = np.zeros(3_000_001, np.uint8)
for _ in encoder.stripes(piece for _ in range(SIZE // len(piece))):
    pass
labels = [encoder.label(index, name="large", version=1, owner="") for index in range(10, 20)]
read = sum(map(len, Reader([Zeros(label) for label in labels]).read()))
assert read == encoder.size > 0.9 * SIZE
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_does_not_grow_with_the_state() -> None:
    grown = []
    for size in (100_000_000, 1_000_000_000):
        program = LARGE.replace("SIZE", str(size))
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
        )
        grown.append(int(ran.stdout))
    assert max(grown) < 20_000_000
    assert grown[1] - grown[0] < 5_000_000
