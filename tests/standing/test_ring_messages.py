"""The messages of the ring: any is what it was once it has been JSON, and nothing else is one."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import Refused
from anabranch.nodes import codec
from anabranch.nodes.standing import messages
from anabranch.nodes.standing.requests import Describe, Find, Neighbour, Place, Tell, View
from anabranch.ring import (
    Contact,
    Found,
    Join,
    KeepAlive,
    Kind,
    Leaving,
    Lookup,
    Message,
    NodeId,
    Peer,
    Settings,
    Welcome,
)

ids = st.integers(0, (1 << 128) - 1).map(NodeId)
numbers = st.integers(0, (1 << 63) - 1)
hops = st.integers(0, 1 << 16)
addresses = st.from_regex(r"([A-Za-z0-9_.-]{1,20}|\[[0-9a-f:]{2,20}\]):[0-9]{1,5}", fullmatch=True)
hosts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
contacts = st.builds(Contact, ids, hosts, addresses, numbers)
several = st.lists(contacts, max_size=4).map(tuple)
any_message = st.one_of(
    st.builds(
        KeepAlive, contacts, numbers, several, st.sampled_from(Kind),
        st.none() | st.integers(0, 32), several, st.integers(0, 1000),
    ),
    st.builds(Join, contacts, st.integers(0, 32), several, hops),
    st.builds(Welcome, contacts, numbers, several, several),
    st.builds(Lookup, ids.map(int), addresses, hops),
    st.builds(Found, ids.map(int), contacts, several, hops),
    st.builds(Leaving, contacts, numbers, several),
)  # fmt: skip
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=4,
)


@given(any_message)
def test_any_message_comes_through(message: Message) -> None:
    sent = json.dumps(codec.encode(Tell(message=message), 3.0))
    assert codec.decode(json.loads(sent)) == (Tell(message=message), 3.0)


@given(ids, contacts, several, hops, st.booleans(), st.integers(0, 1000))
def test_questions_and_answers_come_through(
    id: NodeId, me: Contact, some: tuple[Contact, ...], passed: int, joined: bool, load: int
) -> None:
    place = Place(me, some, passed)
    near = tuple(Neighbour(each, load) for each in some)
    view = View(me, joined, near, load, 1, 2, 3, 4, 5)
    answers: list[tuple[Any, Any]] = [(Find(key=id), place), (Describe(), view)]
    for request, answer in answers:
        sent = json.loads(json.dumps(codec.encode_answer(request, answer)))
        assert codec.decode_answer(request, sent) == answer
        assert codec.decode(json.loads(json.dumps(codec.encode(request, 1.0))))[0] == request


def peers() -> list[Peer]:
    """A ring of three, as far as one of them knows."""
    settings = Settings(leaves=4)
    nodes = [Contact(NodeId.of(h), h, f"{h}:1", 1) for h in "abc"]
    return [Peer(nodes[0], settings, alive=nodes[1:])]


def known(peer: Peer) -> tuple[Any, ...]:
    near = peer.neighbours
    return peer.me, peer.status, near.contacts(), list(near.table), dict(near.lost)


@given(any_message, st.data())
def test_a_message_with_a_wrong_field_is_refused_and_the_ring_does_not_see_it(
    message: Message, data: st.DataObject
) -> None:
    (peer,) = peers()
    before = known(peer)
    value = codec.encode(Tell(message=message), 3.0)
    told: dict[str, Any] = value["message"]
    field = data.draw(st.sampled_from(sorted(told)))
    wrong = data.draw(junk.filter(lambda new: not _could_be(told, field, new)))
    change: Callable[[], object] = data.draw(
        st.sampled_from(
            [
                lambda: told.pop(field),
                lambda: told.update({field: wrong}),
                lambda: told.update({"more": wrong}),
                lambda: value.update({"message": wrong}),
            ]
        )
    )
    change()
    with pytest.raises(Refused):
        _receive(peer, json.dumps(value))
    assert known(peer) == before


def _receive(peer: Peer, sent: str) -> None:
    request, _ = codec.decode(json.loads(sent))
    assert isinstance(request, Tell)
    peer.receive(request.message)


def _could_be(told: dict[str, Any], field: str, value: Any) -> bool:
    """Whether a value could stand in this field: then it would be another right message."""
    try:
        messages.read({**told, field: value})
    except ValueError:
        return False
    return True


@given(junk)
def test_junk_is_no_message(value: Any) -> None:
    with pytest.raises(ValueError):
        messages.read(value)


BIG = Contact(NodeId.of("a"), "a", "a:1")
TOO_LARGE = [
    KeepAlive(BIG, 1, (BIG,) * (messages.MOST_CONTACTS + 1)),
    KeepAlive(BIG, 1, (), load=messages.MOST_LOAD + 1),
    KeepAlive(BIG, 1, (), row=33),
    Join(replace(BIG, host="a" * (messages.LONGEST_HOST + 1))),
    Join(replace(BIG, incarnation=1 << 63)),
    Join(BIG, hops=1 << 20),
    Lookup(1, "a" * 300 + ":1"),
    Lookup(1, "a:123456"),
]


@pytest.mark.parametrize("message", TOO_LARGE)
def test_sizes_are_bounded(message: Message) -> None:
    with pytest.raises(ValueError):
        messages.read(json.loads(json.dumps(messages.write(message))))
