"""Mending: a part that has lost fragments gets new ones before it loses more."""

from dataclasses import replace

from anabranch.backup import Fragments
from anabranch.checkpointing.policy import Periodic
from anabranch.protocols import orders as o
from anabranch.protocols.events import Done
from anabranch.protocols.model import Inventory
from protocols.played import Play

OFTEN = Periodic("1 hour", at_most=3)


def with_fragments(hosts: str = "abcdefgh") -> Play:
    """One slice; its part is at four of the other nodes, and two are needed."""
    play = Play.started(hosts=hosts, instances=1, backup=Fragments(2, 2), checkpointing=OFTEN)
    play.batches(4)
    return play


def part_of(play: Play) -> o.Part:
    (part,) = play.query.inventory["op"].parts
    return part


def test_fragments_are_at_as_many_other_nodes_as_wanted() -> None:
    play = with_fragments()
    part = part_of(play)
    (each,) = play.slices
    assert (len(set(part.holders)), part.needed) == (4, 2)
    assert each.node not in part.holders
    assert not play.given(o.Mend)


def test_lost_fragments_are_made_again_by_a_node_that_is_to_hold_one() -> None:
    play = with_fragments()
    play.hold(o.Mend)
    part = part_of(play)
    gone = part.holders[1]
    play.lose(gone)
    (mend,) = play.waiting(o.Mend)
    assert mend.part == part
    assert len(mend.holders) == 1
    assert mend.host in mend.holders
    assert mend.host not in part.holders
    assert [change.kind for change in play.query.changes] == ["mend"]
    left = tuple(host for host in part.holders if host != gone)
    play.happen(Done(play._number(mend), part.at(*left, mend.host)))
    assert part_of(play).holders == (*left, mend.host)
    assert [p.parts["op"][0].holders for p in play.query.published] == [(*left, mend.host)]
    assert play.told("part mended")[0]["holders"] == [*left, mend.host]
    assert not play.waiting(o.Mend)


def test_lost_fragments_are_made_again_by_the_owner_if_it_keeps_the_file() -> None:
    play = with_fragments()
    play.hold(o.Mend)
    part = part_of(play)
    (each,) = play.slices
    kept = Inventory([replace(part, owner=each.node)])
    play.query = replace(play.query, inventory={"op": kept})
    play.lose(part.holders[1])
    (mend,) = play.waiting(o.Mend)
    assert mend.host == each.node
    assert each.node not in mend.holders


def test_without_another_node_nothing_is_mended_until_one_comes() -> None:
    play = with_fragments("abcde")
    play.lose(part_of(play).holders[0])
    assert not play.given(o.Mend)
    play.come("x")
    assert play.given(o.Mend)[0].holders == ("x",)


def test_one_part_is_mended_at_a_time_and_all_are_in_the_end() -> None:
    play = Play.started(
        hosts="abcdefghij", instances=3, backup=Fragments(2, 2), checkpointing=OFTEN
    )
    play.batches(4)
    play.hold(o.Mend)
    play.lose(max("abcdefghij", key=lambda host: len(of(play, host))))
    assert len(play.waiting(o.Mend)) <= 1
    play.let_go(o.Mend)
    play.wait(30)
    alive = play.query.nodes.keys()
    for part in play.query.inventory["op"].parts:
        assert sum(host in alive for host in part.holders) >= 4


def of(play: Play, host: str) -> list[str]:
    return [part.name for part in play.query.inventory["op"].parts if host in part.holders]


def test_after_a_failure_there_is_a_pause() -> None:
    play = with_fragments()
    play.hold(o.Mend)
    play.lose(part_of(play).holders[0])
    (first,) = play.waiting(o.Mend)
    play.fail(first, "no room")
    assert play.told("mending failed")[0]["reason"] == "no room"
    play.wait(9)
    assert not play.waiting(o.Mend)
    play.wait(2)
    assert len(play.waiting(o.Mend)) == 1


def test_a_part_that_nobody_needs_any_more_is_withdrawn_at_its_new_holder_too() -> None:
    play = with_fragments()
    play.hold(o.Mend)
    old = part_of(play)
    play.lose(old.holders[0])
    (mend,) = play.waiting(o.Mend)
    before = set(play.query.inventory["op"].parts)
    for _ in range(40):
        play.batch()
    assert old.name in {part.name for part in before}
    fresh = old.at(*old.holders[1:], mend.host)
    assert fresh is not None
    play.happen(Done(play._number(mend), fresh))
    held = {part.name: part for part in play.query.inventory["op"].parts}
    withdrawn = {
        (part.name, host)
        for order in play.given(o.Withdraw)
        for part in order.parts
        for host in part.holders
    }
    assert old.name in held or (old.name, mend.host) in withdrawn


def test_a_part_whose_new_holder_was_lost_meanwhile_keeps_its_other_fragments() -> None:
    play = with_fragments()
    play.hold(o.Mend)
    part = part_of(play)
    play.lose(part.holders[0])
    (mend,) = play.waiting(o.Mend)
    for host in (mend.host, *part.holders[1:3]):
        play.lose(host)
        play.come(host)
    fresh = part.at(*part.holders[1:], mend.host)
    assert fresh is not None
    play.happen(Done(play._number(mend), fresh))
    withdrawn = [each.name for order in play.given(o.Withdraw) for each in order.parts]
    assert part.name not in withdrawn or part.name not in of(play, part.holders[3])


def test_two_holders_and_the_node_of_the_slice_are_lost_at_once() -> None:
    play = with_fragments()
    (each,) = play.slices
    part = part_of(play)
    for host in (each.node, *part.holders[:2]):
        play.lose(host)
    play.wait(30)
    assert not play.told("going back")
    assert play.told("recovery")
    assert play.batch().version == 4


def test_a_new_driver_finds_fragments_where_they_were_made_again() -> None:
    play = with_fragments()
    part = part_of(play)
    manifest = play.query.published[0]
    moved = {host: frozenset([part.name]) for host in (*part.holders[1:], "z")}
    again = Play.of(backup=Fragments(2, 2), checkpointing=OFTEN)
    again.parts_at = moved
    again.take_over(1, published=(manifest,), committed=manifest.version)
    for host in ("a", "b", "c", "d", "e", "f", "g", "h", "z"):
        if host != part.holders[0]:
            again.come(host)
    again.wait(60)
    assert again.query.settled
    (found,) = again.query.inventory["op"].parts
    assert set(found.holders) >= {*part.holders[1:], "z"}
