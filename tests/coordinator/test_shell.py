"""What the protocols see of the errors of those who carry orders out, and of nodes."""

import threading
from pathlib import Path
from typing import Any

import pytest

from anabranch.checkpointing import Periodic
from anabranch.coordinator.events import Events
from anabranch.coordinator.loop import Loop
from anabranch.coordinator.nodes import Watcher
from anabranch.coordinator.shell import Shell, failure
from anabranch.errors import (
    AnabranchError,
    CheckpointCorrupt,
    CheckpointNotFound,
    Deposed,
    DidNotHappen,
    Fenced,
    MayHaveHappened,
    PlanError,
    QueryFailed,
    Refused,
    SchemaChanged,
    StateFull,
    StateMissing,
)
from anabranch.placement.even import Even
from anabranch.protocols import orders as o
from anabranch.protocols.events import Done, Failed
from anabranch.protocols.model import OperatorPlan, Published, Role, Slice, SliceId
from anabranch.protocols.query import Policies, Query
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.testing import MemoryStore
from anabranch.units import Version
from protocols.played import InStore

EVERYTHING = KeyGroups.all(8)
SLICE = Slice(SliceId("1-2"), "op", 0, "a", EVERYTHING, Role.ARRIVING)
PART = Part("q/parts/one", "op", Version(3), None, EVERYTHING)
MAKE = o.Make(SLICE, (PART,), Version(3))
REWIND = o.Rewind(Version(3), Version(5), 1)
PUBLISH = o.Publish(Published(Version(3), {"op": (PART,)}))
NUMBER = o.OrderId(7)
SECONDS = 30


def seen(error: Exception, order: Any = MAKE) -> Failed:
    return failure(NUMBER, order, error)


@pytest.mark.parametrize("kind", [DidNotHappen, MayHaveHappened])
def test_a_node_that_does_not_answer_is_named(kind: type[AnabranchError]) -> None:
    assert seen(kind("no route")) == Failed(NUMBER, "no route", unreachable="a", kind=kind)


def test_a_node_that_refuses_has_answered() -> None:
    assert seen(Refused("not a name")) == Failed(NUMBER, "not a name", kind=Refused)


def test_a_store_that_is_no_node_makes_none_unreachable() -> None:
    found = seen(DidNotHappen("no room"), PUBLISH)
    assert found == Failed(NUMBER, "no room", kind=DidNotHappen)


def test_a_damaged_part_is_named() -> None:
    found = seen(CheckpointCorrupt(f"{PART.name}: bad checksum"))
    assert found.damaged == PART.name
    assert found.unreachable is None


def test_so_is_one_that_is_not_there() -> None:
    assert seen(CheckpointNotFound(f"there is no backup {PART.name}")).damaged == PART.name


def test_damage_elsewhere_is_of_no_part() -> None:
    assert seen(CheckpointCorrupt("q/parts/other: bad checksum")).damaged is None


def test_a_missing_table_is_that_of_the_slice() -> None:
    assert seen(StateMissing("op/1-2 is not there")).missing == SLICE.id


def test_another_driver_has_taken_over() -> None:
    assert seen(Deposed("driver 4")).fenced
    assert not seen(Fenced("a newer attempt")).fenced


@pytest.mark.parametrize("error", [StateMissing("no offsets"), CheckpointCorrupt("offsets/4")])
def test_a_rewind_without_its_offsets_fails_for_good(error: AnabranchError) -> None:
    assert seen(error, REWIND).final
    assert not seen(error).final
    assert not seen(DidNotHappen("no answer"), REWIND).final


def test_any_other_error_is_told_by_its_name() -> None:
    found = seen(ZeroDivisionError("oh"))
    assert found == Failed(NUMBER, "ZeroDivisionError: oh", kind=QueryFailed)
    assert seen(StateFull("no room")) == Failed(NUMBER, "no room", kind=StateFull)


@pytest.mark.parametrize("error", [SchemaChanged("other columns"), PlanError("no such codec")])
def test_some_errors_come_again_whatever_is_done(error: AnabranchError) -> None:
    assert seen(error).final
    assert not seen(StateFull("no room")).final


# Carrying out


class Fakes:
    """Everything that a shell asks; every call is noted, and the ones that are to fail do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails: dict[str, Exception] = {}
        self.failure: AnabranchError | None = None
        self.called = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> str:
            with self.called:
                self.calls.append((name, given))
                self.called.notify_all()
            if name in self.fails:
                raise self.fails[name]
            return f"answer of {name}"

        return call

    def wait(self, name: str) -> None:
        with self.called:
            assert self.called.wait_for(lambda: name in [n for n, _ in self.calls], SECONDS)


class Listening(Loop):
    """A loop that only keeps what it is told."""

    def __init__(self) -> None:
        policies = Policies(Periodic(), InStore(), Even())
        super().__init__(Query({"op": OperatorPlan("op", 8)}, policies, 1))
        self.heard: list[Any] = []

    def tell(self, event: Any) -> None:
        self.heard.append(event)


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
def loop() -> Listening:
    return Listening()


@pytest.fixture
def stopped() -> list[AnabranchError]:
    return []


@pytest.fixture
def shell(fakes: Any, loop: Listening, stopped: list[AnabranchError]) -> Shell:
    events = Events(MemoryStore(), 1)
    return Shell(loop, fakes, fakes, events, fakes, fakes, fakes, stopped.append)


ANSWERED: dict[str, o.Order] = {
    "make": MAKE,
    "advance": o.Advance(SLICE, (PART,), Version(3), Version(4), 1),
    "prepare": o.Prepare("a"),
    "inspect": o.Inspect("a"),
    "publish": PUBLISH,
    "rewind": REWIND,
    "merge": o.Merge(SLICE, (PART,), EVERYTHING, Version(3), ()),
}


@pytest.mark.parametrize("verb", ANSWERED)
def test_an_order_is_answered_under_its_number(
    shell: Shell, fakes: Fakes, loop: Listening, verb: str
) -> None:
    shell.carry_out(NUMBER, ANSWERED[verb])
    shell.close()
    (told,) = loop.heard
    assert told == Done(NUMBER, None if verb == "rewind" else f"answer of {verb}")
    assert verb in [name for name, _ in fakes.calls]


@pytest.mark.parametrize("verb", ANSWERED)
def test_one_that_fails_is_answered_too(
    shell: Shell, fakes: Fakes, loop: Listening, verb: str
) -> None:
    fakes.fails[verb] = ZeroDivisionError("oh")
    shell.carry_out(NUMBER, ANSWERED[verb])
    shell.close()
    assert loop.heard == [Failed(NUMBER, "ZeroDivisionError: oh", kind=QueryFailed)]


def test_what_nobody_waits_for_may_fail(shell: Shell, fakes: Fakes, loop: Listening) -> None:
    fakes.fails["withdraw"] = DidNotHappen("no answer")
    fakes.fails["note"] = ZeroDivisionError("oh")
    shell.carry_out(None, o.Withdraw((Version(1),), ()))
    shell.carry_out(None, o.Note(1, {}, ()))
    shell.carry_out(None, o.Trim("op", Version(2)))
    shell.close()
    assert loop.heard == []
    assert {name for name, _ in fakes.calls} == {"withdraw", "note", "trim"}


def test_what_is_written_is_written_in_the_order_it_was_ordered(shell: Shell, fakes: Fakes) -> None:
    wanted = []
    for number in range(50):
        shell.carry_out(None, o.Note(number, {}, ()))
        shell.carry_out(o.OrderId(number), PUBLISH)
        wanted += ["note", "publish"]
    shell.close()
    assert [name for name, _ in fakes.calls] == wanted
    assert [given[0].arrangement for name, given in fakes.calls if name == "note"] == [*range(50)]


def test_spark_is_let_go_before_it_is_taken_back(shell: Shell, fakes: Fakes) -> None:
    shell.carry_out(NUMBER, REWIND)
    assert fakes.calls[0][0] == "end"  # at once, or the batch would wait for ever
    shell.close()
    assert [name for name, _ in fakes.calls] == ["end", "rewind"]


def test_spark_is_taken_back_once_what_was_ordered_before_is_written(
    shell: Shell, fakes: Fakes, loop: Listening
) -> None:
    """A version that is published after its logs were cut could not be gone on from."""
    go_on = threading.Event()

    def publish(*_: Any) -> None:
        assert go_on.wait(SECONDS)
        fakes.calls.append(("published", ()))

    fakes.publish = publish  # type: ignore[attr-defined]
    shell.carry_out(NUMBER, PUBLISH)
    shell.carry_out(NUMBER, REWIND)
    fakes.wait("end")
    assert "rewind" not in [name for name, _ in fakes.calls]
    go_on.set()
    shell.close()
    assert [name for name, _ in fakes.calls] == ["end", "published", "rewind"]


def test_the_error_of_a_batch_ends_the_query_as_what_it_is(
    shell: Shell, fakes: Fakes, stopped: list[AnabranchError]
) -> None:
    fakes.failure = StateFull("no room for op/1-2")
    shell.stop("batch 3: no room for op/1-2", QueryFailed)
    shell.stop("something else", QueryFailed)
    shell.stop("offsets are gone", StateMissing)
    assert [type(each) for each in stopped] == [StateFull, QueryFailed, StateMissing]
    shell.close()


# Nodes


def test_the_watcher_tells_of_hosts_that_come_and_go(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    seen = iter([{"a"}, {"a", "b"}, {"b"}, {"b"}, {"a", "c"}])
    over = threading.Event()

    def alive() -> frozenset[str]:
        found = next(seen, None)
        if found is None:
            over.set()
            return frozenset({"a", "c"})
        return frozenset(found)

    watcher = Watcher(
        alive, lambda host: told.append(("came", host)), lambda host: told.append(("lost", host))
    )
    watcher.begin()
    assert over.wait(SECONDS)
    watcher.close()
    assert told == [
        ("came", "a"),
        ("came", "b"),
        ("lost", "a"),
        ("lost", "b"),
        ("came", "a"),
        ("came", "c"),
    ]


def test_the_watcher_ends_when_nothing_can_be_asked_any_more() -> None:
    told: list[str] = []
    answers = iter([frozenset({"a"})])
    watcher = Watcher(lambda: next(answers), told.append, told.append)
    watcher.begin()
    watcher._thread.join(SECONDS)
    assert not watcher._thread.is_alive()
    assert told == ["a"]  # what cannot be seen is not lost
    watcher.close()
