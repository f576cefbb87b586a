"""What peers do when one thing happens to a ring, and that it takes no longer than it must."""

from __future__ import annotations

import ast
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch import ring
from anabranch.ring import (
    Came,
    Contact,
    Found,
    Join,
    KeepAlive,
    Leaving,
    Lookup,
    Message,
    NodeId,
    NotFound,
    Peer,
    Send,
    Settings,
    Status,
    Welcome,
    Went,
)
from anabranch.ring.converged import converged, leaf_set, routing_tables
from anabranch.ring.ids import shared_digits
from anabranch.ring.network import Faults, Network, contact_of
from anabranch.ring.table import RoutingTable

SETTINGS = Settings(leaves=8, period=1.0)


def nodes(count: int, racks: int = 1) -> list[Contact]:
    return [contact_of(f"h{i}", rack=f"r{i % racks}") for i in range(count)]


def whole(network: Network) -> bool:
    ids = sorted(peer.me.id for peer in network.peers.values())
    size = network.settings.leaves
    return all(
        set(peer.neighbours.leaves) == set(leaf_set(peer.me.id, ids, size))
        for peer in network.peers.values()
    )


def in_order(network: Network) -> list[str]:
    """The addresses of the nodes, along the ring."""
    return sorted(network.peers, key=lambda address: network.peers[address].me.id)


def test_a_node_whose_old_neighbours_are_gone_asks_the_next_ones_at_once() -> None:
    network = Network(SETTINGS, seed=1)
    network.add(contact_of("a"))
    network.add(contact_of("b"), seeds=[*(f"gone-{n}:1" for n in range(50)), "a:1"])
    network.run(0.9 * SETTINGS.period)
    assert network.peers["b:1"].status is Status.JOINED
    assert network.sent["Join"] == 51


def test_a_node_that_nobody_answers_asks_each_once_in_a_period() -> None:
    network = Network(SETTINGS, seed=1)
    network.add(contact_of("b"), seeds=["gone-1:1", "gone-2:1", "gone-3:1"])
    network.run(10 * SETTINGS.period)
    assert network.peers["b:1"].status is Status.JOINING
    assert network.sent["Join"] <= 11 * 5


def test_what_is_made_at_once_is_what_the_protocol_converges_to() -> None:
    members = nodes(150, racks=5)
    settings = Settings(leaves=16, period=1.0)
    joined = Network(settings, seed=3)
    for node in members:
        joined.add(node, [members[0].address])
        joined.run(0.02)
    joined.run(15)
    made = converged(members, settings)
    tables = routing_tables(sorted(node.id for node in members), random.Random(0))
    hops: list[Counter[int]] = []
    for network in (joined, made):
        assert whole(network)
        for node in members:
            peer = network.peers[node.address]
            assert peer.status is Status.JOINED
            assert peer.neighbours.table.places == RoutingTable(node.id, tables[node.id]).places
        asked = [(a.address, b.id) for a in members[::5] for b in members[::5]]
        for address, key in asked:
            network.find(address, key)
        network.run(0.5)
        answers = [network.answers[each][1] for each in asked]
        found = [answer for answer in answers if isinstance(answer, Found)]
        assert [answer.root.id for answer in found] == [key for _, key in asked]
        hops.append(Counter(answer.hops for answer in found))
    mean = [sum(n * count for n, count in each.items()) / each.total() for each in hops]
    assert mean[0] == pytest.approx(mean[1], abs=0.15)


def test_what_is_made_at_once_stays_as_it_is() -> None:
    network = converged(nodes(100), Settings(leaves=16, period=1.0))
    network.watched = True
    network.run(8)
    assert network.news == []
    assert set(network.sent) == {"KeepAlive"}


def test_a_join_takes_few_messages_and_no_period() -> None:
    network = converged(nodes(200), Settings(leaves=16, period=1000.0))
    newcomer = contact_of("new")
    network.add(newcomer, ["h7:1"])
    network.run(0.1)
    assert network.peers[newcomer.address].status is Status.JOINED
    assert whole(network)
    assert network.sent["Join"] <= 4
    assert network.sent["Welcome"] == 1
    assert network.sent["KeepAlive"] <= 4 * 16 + 4 * 40


def test_a_join_collects_the_rows_of_the_routing_table_on_its_way() -> None:
    members = nodes(200)
    network = converged(members, SETTINGS)
    newcomer, peer = contact_of("new", rack="r0"), network.peers["h7:1"]
    (passed,) = peer.receive(Join(newcomer))
    assert isinstance(passed, Send)
    assert isinstance(passed.message, Join)
    shared = shared_digits(newcomer.id, peer.me.id)
    rows = [id for row in range(shared + 1) for id in peer.neighbours.table.row(row)]
    assert len(rows) > 10
    assert [each.id for each in passed.message.others] == rows
    assert passed.message.row == shared + 1


def test_all_can_start_at_once_and_know_each_other_alone() -> None:
    network = Network(SETTINGS, seed=1, faults=Faults(lost=0.1))
    members = nodes(30)
    for i, node in enumerate(members):
        network.add(node, [members[i - 1].address, members[i - 2].address])
    network.run(60, until=lambda: whole(network))
    assert whole(network)


def test_a_failed_node_is_replaced_as_soon_as_three_keep_alives_were_missed() -> None:
    network = converged(nodes(100), SETTINGS)
    network.run(2)
    network.kill(in_order(network)[50])
    at = network.now
    # Peers that heard it just before it was killed find out four of their own periods later.
    network.run(6, until=lambda: whole(network))
    assert whole(network)
    assert 2.9 < network.now - at < 4.2


def test_who_notices_a_failure_does_not_wait_for_the_next_keep_alive() -> None:
    """The farthest live node on that side is asked, and the node that it names."""
    network = converged(nodes(100), SETTINGS)
    around = in_order(network)
    network.run(1)
    peer, gone = network.peers[around[50]], network.peers[around[52]].me
    right = [network.peers[address].me for address in around[51:56]]
    network.kill(gone.address)
    while gone.id in peer.neighbours.leaves:
        before = peer.neighbours.period
        network.run(0.001)
    asked = Counter(network.sent)
    network.run(0.005)
    assert peer.neighbours.period == before + 1
    assert [peer.neighbours.contact(id) for id in peer.neighbours.leaves.clockwise] == [
        each for each in right if each != gone
    ]
    assert network.sent["KeepAlive"] - asked["KeepAlive"] < 60


def test_the_farthest_live_leaf_on_that_side_is_asked() -> None:
    members = sorted(nodes(30), key=lambda node: node.id)
    peer = Peer(members[10], SETTINGS, alive=[*members[:10], *members[11:]])
    near = peer.neighbours
    assert near.remove([members[12].id]) == [members[14]]
    assert near.remove([members[14].id, members[8].id]) == [members[13], members[6]]
    # A whole side, so the next node of the routing table that lies there.
    (asked,) = near.remove([members[11].id, members[13].id])
    assert asked == min(
        (near.contact(id) for id in near.table), key=lambda node: (node.id - peer.me.id) % 2**128
    )
    assert near.remove([]) == []


def test_a_whole_side_can_be_lost() -> None:
    network = converged(nodes(100), SETTINGS)
    network.run(2)
    for address in in_order(network)[40:60]:
        network.kill(address)
    network.run(15, until=lambda: whole(network))
    assert whole(network)


@pytest.mark.parametrize("refused", [0.0, 1.0])
def test_half_of_all_nodes_can_be_lost(refused: float) -> None:
    network = converged(nodes(120), SETTINGS)
    network.faults = Faults(refused=refused)
    network.run(2)
    for address in random.Random(1).sample(list(network.peers), 60):
        network.kill(address)
    network.run(15, until=lambda: whole(network))
    assert whole(network)


def test_who_leaves_is_replaced_at_once() -> None:
    network = converged(nodes(100), Settings(leaves=8, period=1000.0))
    network.leave(in_order(network)[50])
    network.run(0.1)
    assert whole(network)


def test_a_search_finds_its_way_around_what_refuses_connections() -> None:
    network = converged(nodes(100), Settings(leaves=8, period=1000.0))
    dead = random.Random(1).sample(in_order(network), 30)
    for address in dead:
        network.kill(address)
    live = {peer.me.id for peer in network.peers.values()}
    for i, address in enumerate(network.peers):
        key = NodeId.of(f"h{i}")
        network.find(address, key)
        network.run(0.2)
        _, answer = network.answers[address, key]
        assert isinstance(answer, Found)
        assert answer.root.id in live


def test_a_search_that_nobody_answers_ends() -> None:
    first, second = nodes(2)
    network = Network(SETTINGS, faults=Faults(lost=1.0))
    network.add(first, [second.address])
    network.find(first.address, second.id)
    network.run(SETTINGS.patience + 2)
    (answer,) = network.answers.values()
    assert answer[1] == NotFound(second.id)


def test_halves_that_were_cut_apart_are_two_rings_and_then_one() -> None:
    network = converged(nodes(60), SETTINGS)
    around = in_order(network)
    parts = around[::2], around[1::2]
    network.cut(*parts)
    network.run(10)
    for part in parts:
        ids = sorted(network.peers[address].me.id for address in part)
        for address in part:
            peer = network.peers[address]
            assert set(peer.neighbours.leaves) == set(leaf_set(peer.me.id, ids, 8))
    network.heal()
    network.run(20, until=lambda: whole(network))
    assert whole(network)


def test_rings_of_strangers_become_one_if_one_node_knows_a_node_of_the_other() -> None:
    one, other = nodes(60)[::2], nodes(60)[1::2]
    network = converged(one, SETTINGS)
    for node in other[:-1]:
        network.add(node, [] if node is other[0] else [other[0].address])
    network.run(10)
    assert not whole(network)
    network.add(other[-1], [other[0].address, one[0].address])
    network.run(60, until=lambda: whole(network))
    assert whole(network)


def peers_of(network: Network, contact: Contact) -> list[Contact]:
    """How the other nodes know a node."""
    return [
        peer.neighbours.contact(contact.id)
        for peer in network.peers.values()
        if contact.id in peer.neighbours.leaves
    ]


@pytest.mark.parametrize(
    ("address", "incarnation"),
    [("h5:1", 41), ("h5:1", 12), ("h5:2", 41), ("h5:2", 40), ("h5:2", 12)],
)
def test_a_node_that_returns_has_its_place_and_is_known_as_a_later_one(
    address: str, incarnation: int
) -> None:
    network = converged([replace(node, incarnation=40) for node in nodes(20)], SETTINGS)
    network.run(3)
    network.watched = True
    network.kill("h5:1")
    network.run(1)
    network.add(
        replace(contact_of("h5", rack="r0"), address=address, incarnation=incarnation), ["h0:1"]
    )
    network.run(2)
    me = network.peers[address].me
    assert me.address == address
    assert me.age > (40, "h5:1")
    network.run(13)
    assert whole(network)
    assert peers_of(network, me) == [me] * 8
    came = {news.node for _, _, news in network.news if isinstance(news, Came)}
    assert me in came


def test_a_process_that_was_replaced_ends() -> None:
    network = converged(nodes(20), SETTINGS)
    network.run(3)
    zombie = network.peers["h5:1"]
    network.add(replace(contact_of("h5", rack="r0"), address="h5:2", incarnation=7), ["h0:1"])
    network.run(10)
    assert zombie.status is Status.REPLACED
    assert zombie.tick() == zombie.receive(Lookup(1, "h0:1")) == []
    assert network.peers["h5:2"].status is Status.JOINED


def test_a_node_whose_dead_process_had_a_later_clock_is_not_replaced_by_it() -> None:
    network = converged(nodes(20), SETTINGS)
    network.run(3)
    me = network.peers["h5:1"].me
    dead = replace(me, address="h5:9", incarnation=1000)
    peer = network.peers["h0:1"]
    network._carry_out("h5:1", network.peers["h5:1"].receive(Welcome(peer.me, 10**6, (dead,), ())))
    network.run(10)
    assert network.peers["h5:1"].status is Status.JOINED
    assert network.peers["h5:1"].me.incarnation == 1001


def test_a_message_that_comes_again_is_no_sign_of_life() -> None:
    me, other, third = nodes(3)
    peer = Peer(me, SETTINGS, alive=[other, third])
    message = KeepAlive(other, 5, (me, third))
    peer.receive(message)
    for _ in range(SETTINGS.missed + 1):
        peer.tick()
        peer.receive(KeepAlive(third, 10 + peer.neighbours.period, (me, other)))
        peer.receive(message)
    assert [contact.host for contact in peer.neighbours.contacts()] == [third.host]
    # Nor is it one of a node that has ended.
    assert Went(third, failed=True) in peer.receive(Leaving(third, 999, (me,)))
    peer.receive(KeepAlive(third, 1000, (me, other)))
    assert peer.neighbours.contacts() == ()


def test_only_who_was_heard_is_believed_to_live() -> None:
    me, other, third = nodes(3)
    peer = Peer(me, SETTINGS, alive=[other])
    outputs = peer.receive(KeepAlive(other, 1, (me, third)))
    assert third not in peer.neighbours.contacts()
    assert [out.to for out in outputs if isinstance(out, Send)] == [third.address]
    # It is asked once, not whenever it is named.
    assert peer.receive(KeepAlive(other, 2, (third, me), load=7)) == []
    assert peer.neighbours.load(other.id) == 7
    assert peer.receive(KeepAlive(third, 1, (me, other)))[0] == Came(third)


def test_who_ends_names_those_that_come_into_its_place() -> None:
    me, other, third, fourth = nodes(4)
    peer = Peer(me, SETTINGS, alive=[other, third])
    outputs = peer.receive(Leaving(third, 1, (me, fourth)))
    asked = {out.to for out in outputs if isinstance(out, Send)}
    assert asked == {other.address, fourth.address}
    assert peer.neighbours.lost == {}
    assert peer.receive(Leaving(third, 1, (me, fourth))) == []


def test_messages_do_not_go_round_for_ever() -> None:
    me, other, third = nodes(3)
    peer = Peer(me, SETTINGS, alive=[other])
    assert peer.receive(Lookup(other.id, third.address, hops=64)) == []
    (send,) = peer.receive(Lookup(other.id, third.address, hops=63))
    assert send == Send(other.address, Lookup(other.id, third.address, hops=64))
    near_other = replace(third, id=NodeId(other.id + 1))
    (passed,) = peer.receive(Join(near_other, hops=63))
    assert isinstance(passed, Send)
    assert passed.to == other.address
    (answer,) = peer.receive(Join(near_other, hops=64))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Welcome)


def test_no_class_does_everything() -> None:
    folder = Path(ring.__file__).parent
    sizes = {
        node.name: sum(isinstance(each, ast.FunctionDef) for each in node.body)
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert "Peer" in sizes
    assert {name: size for name, size in sizes.items() if size > 15} == {}


def test_any_message_does_no_harm() -> None:
    """Whatever comes in whatever order, no peer fails, or names itself as its neighbour."""
    chance = random.Random(5)
    members = nodes(12)
    members += [replace(node, incarnation=3, address=f"{node.host}:2") for node in members]
    for _ in range(200):
        peer = Peer(members[0], SETTINGS, alive=members[1:5])
        todo: list[Message] = []
        for _ in range(30):
            some = tuple(chance.choices(members, k=chance.randrange(12)))
            sender, beat = chance.choice(members), chance.randrange(5)
            todo += [
                KeepAlive(sender, beat, some, row=chance.choice([None, 0, 31, 99])),
                Join(sender, chance.randrange(40), some, chance.randrange(80)),
                Welcome(sender, beat, some, some),
                Lookup(sender.id + chance.randrange(-1, 2), sender.address, chance.randrange(80)),
                Found(sender.id, sender, some, 3),
                Leaving(sender, beat, some),
            ]
            outputs = peer.receive(chance.choice(todo))
            if chance.random() < 0.3:
                outputs += peer.tick()
            for output in outputs:
                if isinstance(output, Send) and chance.random() < 0.3:
                    peer.undelivered(output)
            ids = list(peer.neighbours.leaves)
            assert members[0].id not in ids
            assert len(ids) == len(set(ids)) <= SETTINGS.leaves


def test_what_a_peer_remembers_is_bounded() -> None:
    settings = Settings(leaves=4, period=1.0, remembered=10)
    peer = Peer(contact_of("me"), settings)
    for i in range(2000):
        peer.receive(KeepAlive(contact_of(f"x{i}"), 1, ()))
        if i % 10 == 0:
            peer.tick()
    assert len(peer.neighbours._known) < 150
    assert len(peer.neighbours.lost) <= 10
