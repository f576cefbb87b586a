"""Nodes that began at the same time, or apart from each other, find each other by their seeds."""

import pytest

from anabranch.ring import Contact, NodeId, Peer, Send, Status


class Few:
    """Peers, and a network that loses nothing; nobody is at other addresses."""

    def __init__(self, seeds: dict[str, list[str]]) -> None:
        self.peers = {
            name: Peer(Contact(NodeId.of(name), name, name), seeds=of) for name, of in seeds.items()
        }
        self.sends: list[Send] = []
        for peer in self.peers.values():
            self.deliver(peer.start())

    def deliver(self, outputs: list) -> None:
        todo = list(outputs)
        while todo:
            output = todo.pop(0)
            if isinstance(output, Send):
                self.sends.append(output)
                to = self.peers.get(output.to)
                todo += [] if to is None else to.receive(output.message)

    def know(self, name: str, seeds: list[str]) -> None:
        self.deliver(self.peers[name].know(seeds))

    def tick(self, periods: int) -> None:
        for _ in range(periods):
            for peer in self.peers.values():
                self.deliver(peer.tick())

    def ring(self, name: str) -> set[str]:
        peer = self.peers[name]
        assert peer.status is Status.JOINED
        return {name, *(contact.host for contact in peer.neighbours.contacts())}


@pytest.mark.parametrize("seeds", [[], ["gone"]])
def test_nodes_that_began_at_the_same_time(seeds: list[str]) -> None:
    few = Few(dict.fromkeys("abcd", seeds))
    assert all(len(peer.neighbours.leaves) == 0 for peer in few.peers.values())
    for name in "abcd":
        few.know(name, list("abcd"))
    few.tick(3)
    assert all(few.ring(name) == set("abcd") for name in "abcd")


def test_two_rings_that_began_apart() -> None:
    few = Few({"a": [], "b": ["a"], "c": [], "d": ["c"]})
    assert few.ring("a") == {"a", "b"}
    assert few.ring("d") == {"c", "d"}
    few.know("b", ["a", "c"])
    few.tick(3)
    assert all(few.ring(name) == set("abcd") for name in "abcd")


def test_seeds_that_are_known_are_not_asked_again() -> None:
    few = Few({"a": [], "b": ["a"]})
    few.sends.clear()
    few.know("b", ["a", "b"])
    assert few.sends == []
