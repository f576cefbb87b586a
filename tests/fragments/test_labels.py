"""Labels that anyone may have written: they are read, or refused."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import CheckpointCorrupt
from anabranch.fragments import Fragment, encode, recompute
from anabranch.fragments.label import _END, _GUESS, _MARK, Label

FRAGMENT = encode(2, 1, bytes(range(250)), row=64, name="counter/2", version=7, owner="a")[1]
BODY = {
    "name": "counter/2",
    "version": 7,
    "owner": "a",
    "data": 2,
    "parity": 1,
    "index": 1,
    "size": 250,
    "row": 64,
    "checksum": f"{FRAGMENT.label.state.checksum:016x}",
    "holders": [],
}


def sealed(
    body: Any, *, tables: bytes | None = None, length: int | None = None, mark: bytes = _MARK
) -> bytes:
    """A fragment whose label has the right checksum, and whatever else is asked for."""
    written = FRAGMENT.to_bytes()
    if tables is None:
        tables = written[128:160]
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(tables) + len(text) + _END.size if length is None else length
    label = tables + text + _END.pack(size, len(text), mark, 0)[:-8]
    return written[:128] + label + struct.pack("<Q", xxhash.xxh3_64_intdigest(label))


def parse(data: bytes) -> Fragment:
    return Fragment.parse(data, name="a file")


def test_the_label_of_these_tests_is_as_it_is_written() -> None:
    assert sealed(BODY) == FRAGMENT.to_bytes()


WRONG: dict[str, Any] = {
    "name": 5,
    "version": "7",
    "owner": None,
    "data": 5,
    "parity": 0,
    "index": 3,
    "size": 251 + 128,
    "row": 63,
    "checksum": "0" * 16,
    "holders": ["a"],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_field_is_refused(field: str) -> None:
    for body in ({**BODY, field: WRONG[field]}, {k: v for k, v in BODY.items() if k != field}):
        with pytest.raises(CheckpointCorrupt, match="a file: "):
            parse(sealed(body))


@pytest.mark.parametrize(
    "value", [True, None, -1, 1.5, 1e400, 2**70, "", [], {}, 10**18, "a" * 100, "abc"], ids=repr
)
@pytest.mark.parametrize("field", WRONG)
def test_any_value_in_a_field_is_read_or_refused(field: str, value: Any) -> None:
    try:
        label = parse(sealed({**BODY, field: value})).label
    except CheckpointCorrupt:
        return
    assert field in ("name", "version", "owner", "holders", "parity")
    assert label.name in ("counter/2", value)
    assert label.holders == ()


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"7", b"\xff", b"[" * 100_000, b"{}", b'{"name": "x"'], ids=len
)
def test_what_is_no_label_is_refused(body: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="a file: "):
        parse(sealed(body))


@pytest.mark.parametrize("length", [0, 35, 36, 2**40, 2**64 - 1])
def test_a_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"a file: has .* bytes, and its label would have"):
        parse(sealed(BODY, length=length))


def test_another_format_is_refused() -> None:
    with pytest.raises(CheckpointCorrupt, match=r"a file: .* ends in b'anabranch frag 2'"):
        parse(sealed(BODY, mark=b"anabranch frag 2"))


def test_tables_of_another_size_are_refused() -> None:
    for tables in (b"", bytes(16), bytes(48), bytes(31)):
        with pytest.raises(CheckpointCorrupt, match="a file: "):
            parse(sealed(BODY, tables=tables))


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_any_bytes_are_refused(data: bytes) -> None:
    for tail in (data, data + _END.pack(len(data), 0, _MARK, 0), data + FRAGMENT.to_bytes()[-36:]):
        with pytest.raises(CheckpointCorrupt, match="a file: "):
            parse(tail)


@given(st.integers(0, 2**32), st.integers(1, 20))
@settings(max_examples=300)
def test_damaged_fragments_are_refused(seed: int, hits: int) -> None:
    chance = random.Random(seed)
    state = bytes(range(250))
    good = encode(2, 2, state, row=64)
    data = bytearray(good[0].to_bytes())
    for _ in range(hits):
        at = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at:at] = chance.randbytes(chance.randint(1, 9))
            case 2:
                del data[at : at + chance.randint(1, 9)]
            case 3:
                data[at : at + 8] = chance.choice([bytes(8), b"\xff" * 8, chance.randbytes(8)])
    try:
        fragment = parse(bytes(data))
    except CheckpointCorrupt:
        return
    assert bytes(recompute([fragment, good[1], good[3]])) == state


def test_a_long_label_is_read_in_two_pieces() -> None:
    fragment = encode(1, 1, bytes(64 * 2000), row=64)[1]
    data = fragment.to_bytes()
    reads = []

    def read(offset: int, size: int) -> bytes:
        reads.append(size)
        return data[offset : offset + size]

    assert Label.read(read, len(data), name="a file") == fragment.label
    assert reads == [_GUESS, len(data) - 64 * 2000]
    with pytest.raises(CheckpointCorrupt, match=f"a file: truncated; 0 of {_GUESS} bytes"):
        Label.read(lambda offset, size: b"", len(data), name="a file")
