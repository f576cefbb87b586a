"""Small files that notice every change."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import CheckpointCorrupt
from anabranch.stores.sealed import seal, unseal

BODIES = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=8,
    ),
    max_size=4,
)


@given(BODIES)
def test_a_sealed_value_comes_back(body: dict[str, object]) -> None:
    assert unseal("commit", seal("commit", body), name="f") == body


def test_numbers_as_keys_come_back_as_text() -> None:
    assert unseal("rewind", seal("rewind", {10: "a", 9: "b"}), name="f") == {"10": "a", "9": "b"}


DATA = seal("commit", {"version": 12, "times": {"op": [1_700_000_000_000_000, None]}})


@given(st.integers(0, 8 * len(DATA) - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    flipped = bytearray(DATA)
    flipped[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(CheckpointCorrupt, match=r"^commits/1\.json: not a commit as written"):
        unseal("commit", bytes(flipped), name="commits/1.json")


@given(st.integers(0, len(DATA) - 1))
def test_any_cut_is_refused(size: int) -> None:
    with pytest.raises(CheckpointCorrupt, match="not a commit as written"):
        unseal("commit", DATA[:size], name="commits/1.json")


@pytest.mark.parametrize("data", [DATA + b" ", DATA.replace(b"\n", b"\r\n"), b"[]", b"7", b"null"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="not a commit as written"):
        unseal("commit", data, name="f")


def test_a_file_of_an_earlier_version_is_told_apart() -> None:
    data = json.dumps({"query": "0123456789ab", "run": 3}).encode()
    with pytest.raises(CheckpointCorrupt, match="an earlier version wrote it"):
        unseal("query", data, name="query.json")
