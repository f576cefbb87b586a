"""The frames: any that is made is read, and nothing else is; whatever comes, only Malformed."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.nodes import wire
from anabranch.nodes.wire import FRAME_BYTES, HEAD_BYTES, Head, Kind, Malformed

VALUES = st.dictionaries(st.text(), st.none() | st.integers() | st.text(), max_size=5)


@given(
    st.binary(max_size=100), st.binary(min_size=16, max_size=16), st.floats(), st.text(max_size=30)
)
def test_heads(body: bytes, nonce: bytes, time: float, address: str) -> None:
    head = Head.of(body, nonce, time, address)
    code = bytes(range(32))
    assert len(head.pack() + code) == HEAD_BYTES
    found, signed, read = Head.unpack(head.pack() + code)
    assert (signed, read, found.size) == (head.pack(), code, len(body))
    assert found == head or math.isnan(time)


@given(st.binary(max_size=2 * HEAD_BYTES))
def test_garbage_is_no_head(garbage: bytes) -> None:
    with pytest.raises(Malformed):
        Head.unpack(garbage)


@given(st.data())
def test_a_cut_head_is_none(data: st.DataObject) -> None:
    whole = Head.of(b"{}", bytes(16), 1.0, "a:1").pack() + bytes(32)
    with pytest.raises(Malformed):
        Head.unpack(whole[: data.draw(st.integers(0, HEAD_BYTES - 1))])
    with pytest.raises(Malformed):
        Head.unpack(whole + data.draw(st.binary(min_size=1)))


@given(st.sampled_from(Kind), VALUES)
def test_frames(kind: Kind, value: dict[str, object]) -> None:
    data = wire.frame(kind, value)
    assert wire.frame_head(data[:FRAME_BYTES]) == (kind, len(data) - FRAME_BYTES)
    assert wire.frame_value(data[FRAME_BYTES:]) == value
    empty = wire.frame(kind)
    assert wire.frame_head(empty) == (kind, 0)
    assert wire.frame_value(b"") == {}


@given(st.binary(max_size=2 * FRAME_BYTES), st.booleans())
def test_garbage_is_a_frame_that_is_small_enough_or_none(garbage: bytes, marked: bool) -> None:
    data = b"anb1" + garbage if marked else garbage
    with contextlib.suppress(Malformed):
        kind, size = wire.frame_head(data)
        assert isinstance(kind, Kind)
        assert size <= wire.LARGEST_ANSWER
        assert marked


@given(st.binary(max_size=50) | st.sampled_from([b"[" * 100_000, b"[]", b"1", b"NaN", b'"a"']))
def test_garbage_is_a_value_or_none(garbage: bytes) -> None:
    with contextlib.suppress(Malformed):
        assert isinstance(wire.frame_value(garbage), dict)


@pytest.mark.parametrize("value", [{"x": object()}, {"x": float("nan")}, {"x": b""}])
def test_what_json_cannot_hold(value: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        wire.frame(Kind.DONE, value)


def test_an_answer_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LARGEST_ANSWER", 100)
    with pytest.raises(ValueError, match="at most 100"):
        wire.frame(Kind.DONE, {"x": "y" * 100})
