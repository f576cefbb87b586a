"""Nodes: what they hold that nothing needs is dropped, and those that are lacking are asked for."""

from dataclasses import replace

from anabranch.protocols import orders as o
from anabranch.protocols.events import Inspected, NodeCame
from anabranch.protocols.model import Inventory, SliceId
from anabranch.state.part import own_name
from anabranch.units import Version
from protocols.played import AtPeers, Play


def probe(play: Play, host: str, *parts: str) -> None:
    """A node is asked what it has, and says these parts beside those that the query knows."""
    play.let_go(o.Inspect)
    play.hold(o.Inspect)
    asked: list[o.Inspect] = []
    while not asked:
        play.wait(1)
        asked = [each for each in play.waiting(o.Inspect) if each.host == host]
    known = {part.name for part in play.query.inventory["op"].parts if host in part.holders}
    tables: dict[SliceId, frozenset[o.Version]] = {each.id: frozenset() for each in play.at(host)}
    play.finish(asked[0], Inspected(tables, frozenset(parts) | known))


def dropped(play: Play, host: str) -> set[str]:
    parts = [part for each in play.given(o.Withdraw) for part in each.parts]
    return {part.name for part in parts if part.holders == (host,) and part.name.startswith("q/")}


def test_parts_that_nothing_names_are_dropped() -> None:
    """A node that was away has parts of versions that were withdrawn meanwhile."""
    play = Play.started(hosts="abc", backup=AtPeers())
    play.batches(4)
    assert any("a" in part.holders for part in play.query.inventory["op"].parts)
    probe(play, "a", "q/old", "q/older")
    assert dropped(play, "a") == {"q/old", "q/older"}
    assert dropped(play, "b") == dropped(play, "c") == set()


def test_what_an_owner_keeps_is_dropped_when_nothing_names_the_part() -> None:
    play = Play.started(hosts="abc", backup=AtPeers())
    play.batches(4)
    part = next(each for each in play.query.inventory["op"].parts if "a" not in each.holders)
    of = play.query.inventory["op"]
    kept = Inventory(replace(p, owner="a") if p is part else p for p in of.parts)
    play.query = replace(play.query, inventory={"op": kept})
    probe(play, "a", part.own_name, own_name("q/old"))
    withdrawn = {p.name for each in play.given(o.Withdraw) for p in each.parts}
    assert own_name("q/old") in withdrawn
    assert part.own_name not in withdrawn


def test_a_part_that_is_just_being_stored_is_no_stray() -> None:
    play = Play.started(hosts="abc", backup=AtPeers())
    play.batches(3)
    play.hold(o.Store)
    play.batches(1)
    (store, *_) = [each for each in play.waiting(o.Store) if "a" in each.holders]
    probe(play, "a", "q/new", "q/old")
    assert dropped(play, "a") == set(), "one of them may be what is being stored"
    play.finish(store, play.part(3, holders=("a",)))
    play.let_go(o.Store)
    probe(play, "a", "q/old")
    assert dropped(play, "a") == {"q/old"}


def test_what_was_stray_before_is_dropped_while_something_else_is_stored() -> None:
    """Or nothing would ever be dropped where checkpoints follow on one another."""
    play = Play.started(hosts="abc", backup=AtPeers())
    play.batches(3)
    play.hold(o.Store)
    play.batches(1)
    probe(play, "a", "q/old")
    assert dropped(play, "a") == set()
    play.let_go(o.Store)
    play.hold(o.Store)
    play.batch()
    play.checkpoint()
    play.wait(1)
    assert [each for each in play.waiting(o.Store) if "a" in each.holders]
    probe(play, "a", "q/old", "q/new")
    assert dropped(play, "a") == {"q/old"}


def test_nothing_is_stray_while_a_manifest_cannot_be_read() -> None:
    """It may be mended, and nobody knows which parts it names."""
    play = Play.started(hosts="abc", backup=AtPeers())
    play.batches(4)
    play.query = replace(play.query, unreadable=(Version(1),))
    probe(play, "a", "q/old")
    assert dropped(play, "a") == set()
    play.query = replace(play.query, unreadable=())
    probe(play, "a", "q/old")
    assert dropped(play, "a") == {"q/old"}


def test_nothing_is_stray_while_a_driver_takes_over() -> None:
    play = Play.of(backup=AtPeers())
    play.hold(o.Prepare)
    play.happen(NodeCame("a"))
    (prepare,) = play.waiting(o.Prepare)
    play.finish(prepare, Inspected({}, frozenset({"q/of the driver before"})))
    assert play.given(o.Withdraw) == play.given(o.Drop) == []


def test_nodes_that_are_lacking_are_asked_for_again_and_again() -> None:
    play = Play.started(hosts="ab", pool=2)
    asked, told = len(play.given(o.AskNodes)), len(play.told("pool short"))
    assert play.last(o.AskNodes) == o.AskNodes(3)
    play.wait(200)
    assert play.given(o.AskNodes)[asked:] == 3 * [o.AskNodes(3)]
    assert len(play.told("pool short")) == told, "that they are lacking is told once"
    play.come("c")
    asked = len(play.given(o.AskNodes))
    play.wait(200)
    assert len(play.given(o.AskNodes)) == asked
    play.lose("c")
    assert len(play.given(o.AskNodes)) == asked + 1
    assert len(play.told("pool short")) == told + 1
