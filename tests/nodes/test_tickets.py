"""Signed requests: what is taken, once, and what is not."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import PlanError, Refused
from anabranch.nodes import tickets
from anabranch.nodes.tickets import Secret, Signer, Verifier
from anabranch.nodes.wire import HEAD_BYTES, LARGEST_REQUEST, Head

SECRET = Secret.new()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
REQUESTS = st.dictionaries(st.text(), VALUES, max_size=5)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@given(REQUESTS)
def test_any_request_comes_through(request_: dict[str, object]) -> None:
    data = Signer(SECRET).sign(request_)
    assert Verifier(SECRET).verify(data) == request_
    assert json.loads(data[HEAD_BYTES:]) == request_


@given(REQUESTS, st.data())
def test_any_changed_byte_is_refused(request_: dict[str, object], data: st.DataObject) -> None:
    signed = bytearray(Signer(SECRET, lambda: 1.5).sign(request_))
    at = data.draw(st.integers(0, len(signed) - 1))
    signed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Refused):
        Verifier(SECRET, clock=lambda: 1.5).verify(bytes(signed))


def test_any_truncation_and_any_addition_is_refused() -> None:
    signed = Signer(SECRET).sign({"op": "ping"})
    for size in range(len(signed)):
        with pytest.raises(Refused, match="signed"):
            Verifier(SECRET).verify(signed[:size])
    for more in (b" ", b"\n", b"}", b"\0"):
        with pytest.raises(Refused, match="not the one that was signed"):
            Verifier(SECRET).verify(signed + more)


@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(Refused, match="not a signed request"):
        Verifier(SECRET).verify(garbage)


def test_no_or_another_secret() -> None:
    with pytest.raises(Refused, match="not signed with the secret"):
        Verifier(SECRET).verify(Signer(Secret.new()).sign({}))
    signed = Signer(SECRET).sign({})
    without = signed[: HEAD_BYTES - 32] + bytes(32) + signed[HEAD_BYTES:]
    with pytest.raises(Refused, match="not signed with the secret"):
        Verifier(SECRET).verify(without)


def signed_by_a_friend(body: bytes, time: float = 1.0) -> bytes:
    head = Head.of(body, bytes(16), time, "").pack()
    return head + tickets._code(SECRET, head) + body


@pytest.mark.parametrize("body", [b"", b"}", b"[]", b"1", b'"x"', b"\xff", b"[" * 100_000])
def test_nonsense_of_a_friend_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="malformed"):
        Verifier(SECRET, clock=lambda: 1.0).verify(signed_by_a_friend(body))


@pytest.mark.parametrize("time", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_impossible_times_of_a_friend_are_refused(time: float) -> None:
    verifier = Verifier(SECRET, clock=lambda: 1.0)
    with pytest.raises(Refused):
        verifier.verify(signed_by_a_friend(b"{}", time))
    assert verifier._seen == {}


def test_a_request_is_good_for_one_time(clock: Clock) -> None:
    verifier = Verifier(SECRET, 60, clock)
    signer = Signer(SECRET, clock)
    first, second = signer.sign({"op": "a"}), signer.sign({"op": "a"})
    assert verifier.verify(first) == verifier.verify(second)
    for later in (0, 30, 30, 1, 1000):
        clock.now += later
        for data in (first, second):
            with pytest.raises(Refused, match="received before" if clock.now <= 1060 else "old"):
                verifier.verify(data)


def test_old_and_future_requests(clock: Clock) -> None:
    verifier = Verifier(SECRET, 60, clock)
    for age, refusal in ((59, None), (61, "61 s old"), (-59, None), (-61, "61 s in the future")):
        signed = Signer(SECRET, lambda age=age: clock.now - age).sign({})
        if refusal is None:
            assert verifier.verify(signed) == {}
        else:
            with pytest.raises(Refused, match=refusal):
                verifier.verify(signed)


def test_a_process_does_not_take_what_the_one_before_was_sent(clock: Clock) -> None:
    signer = Signer(SECRET, clock)
    captured = signer.sign({}, "a:1")
    before = Verifier(SECRET, 60, clock)
    before.address = "a:1"
    before.verify(captured)
    clock.now += 1
    after = Verifier(SECRET, 60, clock, since=clock.now)
    after.address = "a:1"
    with pytest.raises(Refused, match="was not there"):
        after.verify(captured)
    after.verify(signer.sign({}, "a:1"))


def test_a_clock_set_back_makes_nothing_good_again(clock: Clock) -> None:
    verifier = Verifier(SECRET, 60, clock)
    signer = Signer(SECRET, clock)
    signed = signer.sign({})
    verifier.verify(signed)
    clock.now += 100
    verifier.verify(signer.sign({}))
    assert len(verifier._seen) == 1, "what is too old is not remembered"
    clock.now -= 90
    with pytest.raises(Refused, match="old"):
        verifier.verify(signed)
    verifier.verify(signer.sign({}))


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(-60, 60)), max_size=60))
def test_memory_is_bounded_and_nothing_passes_twice(steps: list[tuple[float, float]]) -> None:
    clock = Clock()
    verifier = Verifier(SECRET, 60, clock)
    sent: list[tuple[float, bytes]] = []
    for pause, skew in steps:
        clock.now += pause
        signed_at = clock.now + skew
        sent.append((signed_at, Signer(SECRET, lambda at=signed_at: at).sign({})))
        try:
            verifier.verify(sent[-1][1])
        except Refused as refusal:
            assert "old" in str(refusal)  # noqa: PT017
        for _, data in sent:
            with pytest.raises(Refused):
                verifier.verify(data)
        remembered = sum(len(nonces) for nonces in verifier._seen.values())
        assert remembered == verifier._count.total()
        assert remembered <= sum(at >= clock.now - 61 for at, _ in sent)


QUERIES = st.from_regex(r"[A-Za-z0-9_=+~-][A-Za-z0-9_=+~.-]{0,31}", fullmatch=True)


@given(QUERIES, QUERIES)
def test_a_query_signs_for_itself_only(query: str, other: str) -> None:
    verifier = Verifier(SECRET, shared=True)
    assert verifier.verify(Signer(SECRET.of_query(query), by=query).sign({"n": 1})) == {"n": 1}
    assert verifier.verify(Signer(SECRET).sign({"n": 2})) == {"n": 2}
    for secret, by in (
        (SECRET.of_query(query), ""),
        (SECRET, query),
        (SECRET.of_query(query), other),
    ):
        if (secret, by) != (SECRET.of_query(other), other):
            with pytest.raises(Refused, match="not signed with"):
                verifier.verify(Signer(secret, by=by).sign({}))


def test_a_query_cannot_use_up_the_memory_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "MOST_REMEMBERED", 3)
    verifier = Verifier(SECRET, shared=True)
    greedy = Signer(SECRET.of_query("a"), by="a")
    for _ in range(3):
        verifier.verify(greedy.sign({}))
    with pytest.raises(Refused, match="more than 3 requests"):
        verifier.verify(greedy.sign({}))
    verifier.verify(Signer(SECRET.of_query("b"), by="b").sign({}))
    verifier.verify(Signer(SECRET).sign({}))


@pytest.mark.parametrize("query", ["a/b", ".a", "ä", "a" * 33, "a\0", " "])
def test_what_is_no_id_of_a_query(query: str) -> None:
    with pytest.raises(ValueError, match="id of a query"):
        Signer(SECRET, by=query)


def test_too_many_are_refused_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "MOST_REMEMBERED", 3)
    verifier = Verifier(SECRET)
    signed = [Signer(SECRET).sign({}) for _ in range(4)]
    for data in signed[:3]:
        verifier.verify(data)
    with pytest.raises(Refused, match="more than 3 requests"):
        verifier.verify(signed[3])
    with pytest.raises(Refused, match="received before"):
        verifier.verify(signed[0])


def test_sizes() -> None:
    room = LARGEST_REQUEST + HEAD_BYTES - len(Signer(SECRET, lambda: 1.0).sign({"x": ""}))
    verifier = Verifier(SECRET, clock=lambda: 1.0)
    whole = Signer(SECRET, lambda: 1.0).sign({"x": "a" * room})
    assert len(whole) == HEAD_BYTES + LARGEST_REQUEST
    assert len(verifier.verify(whole)["x"]) == room
    with pytest.raises(Refused, match=f"{LARGEST_REQUEST + 1} bytes"):
        Signer(SECRET, lambda: 1.0).sign({"x": "a" * (room + 1)})
    with pytest.raises(Refused, match=f"{LARGEST_REQUEST + 1} bytes"):
        verifier.verify(signed_by_a_friend(b" " * (LARGEST_REQUEST + 1)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"x", {1, 2}, object()])
def test_what_json_cannot_hold_is_not_signed(value: object) -> None:
    with pytest.raises(Refused, match="as JSON"):
        Signer(SECRET).sign({"x": value})


def test_threads_cannot_use_one_request_twice() -> None:
    verifier = Verifier(SECRET)
    requests = [Signer(SECRET).sign({"n": n}) for n in range(200)]
    taken: list[int] = []

    def take() -> None:
        for data in requests:
            try:
                taken.append(verifier.verify(data)["n"])
            except Refused:
                continue

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(200))


def test_a_secret_does_not_show() -> None:
    secret = Secret.new()
    assert secret != Secret.new()
    assert Secret.from_hex(secret.to_hex()) == secret
    assert secret.to_hex() not in repr(secret)
    assert repr(secret.key) not in repr(secret)
    for text in ("", "abc", secret.to_hex()[:-2], secret.to_hex() + "x"):
        with pytest.raises(PlanError, match="a secret") as refusal:
            Secret.from_hex(text)
        assert secret.to_hex()[:8] not in str(refusal.value)
        assert refusal.value.__cause__ is None
