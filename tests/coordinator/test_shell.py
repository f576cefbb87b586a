"""What the protocols see of the errors of those who carry orders out, and of nodes."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from anabranch.checkpointing import Periodic
from anabranch.coordinator import nodes
from anabranch.coordinator.asking import Asking
from anabranch.coordinator.events import Event, Events
from anabranch.coordinator.loop import Loop
from anabranch.coordinator.nodes import OneNode, Watcher
from anabranch.coordinator.shell import Shell, failure
from anabranch.errors import (
    AnabranchError,
    CheckpointCorrupt,
    CheckpointError,
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
    StoreError,
)
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import Epoch
from anabranch.placement.even import Even
from anabranch.protocols import orders as o
from anabranch.protocols.events import Done, Failed
from anabranch.protocols.model import OperatorPlan, Published, Role, Slice, SliceId
from anabranch.protocols.query import Policies, Query
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.testing import MemoryStore
from anabranch.units import Version
from coordinator.mini import LAYOUT
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
@pytest.mark.parametrize("host", ["a", "b"])
def test_the_node_that_does_not_answer_is_named(kind: type[StoreError], host: str) -> None:
    """It may be the one that carries the order out, or another one that it needs."""
    found = seen(kind("no route", host=host))
    assert found == Failed(NUMBER, "no route", unreachable=host, kind=kind)


def test_a_node_that_refuses_has_answered() -> None:
    assert seen(Refused("not a name")) == Failed(NUMBER, "not a name", kind=Refused)


@pytest.mark.parametrize("order", [MAKE, PUBLISH])
def test_a_store_that_fails_makes_no_node_unreachable(order: Any) -> None:
    assert seen(DidNotHappen("no room"), order) == Failed(NUMBER, "no room", kind=DidNotHappen)


@pytest.mark.parametrize("kind", [CheckpointCorrupt, CheckpointNotFound])
def test_a_damaged_part_is_named(kind: type[CheckpointError]) -> None:
    assert seen(kind("bad checksum", part=PART.name)) == Failed(
        NUMBER, "bad checksum", damaged=PART.name, kind=kind
    )


def test_the_text_of_an_error_names_no_part() -> None:
    assert seen(CheckpointCorrupt(f"{PART.name} does not follow")).damaged is None


def test_a_part_is_damaged_only_where_that_is_known() -> None:
    error = DidNotHappen("c is silent", host="c", part=PART.name, without=("b",))
    assert seen(error) == Failed(
        NUMBER,
        "c is silent",
        unreachable="c",
        damaged=PART.name,
        damaged_at=("b",),
        kind=DidNotHappen,
    )


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
        self.stopped = threading.Event()
        self.writer = ThreadPoolExecutor(1)
        self.called = threading.Condition()

    def stop(self) -> None:
        """No replay is in progress, however often the end of the query cancels it."""

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
    "note": o.Note(1, {}, ()),
    "publish": PUBLISH,
    "rewind": REWIND,
    "store": o.Merge(SLICE, (PART,), EVERYTHING, Version(3), ()),
}


@pytest.mark.parametrize("verb", ANSWERED)
def test_an_order_is_answered_under_its_number(
    shell: Shell, fakes: Fakes, loop: Listening, verb: str
) -> None:
    shell.carry_out(NUMBER, ANSWERED[verb])
    fakes.wait(verb)
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
    fakes.wait(verb)
    shell.close()
    assert loop.heard == [Failed(NUMBER, "ZeroDivisionError: oh", kind=QueryFailed)]


def test_what_nobody_waits_for_may_fail_and_is_told(
    shell: Shell, fakes: Fakes, loop: Listening
) -> None:
    fakes.fails["withdraw"] = DidNotHappen("no answer")
    fakes.fails["request_nodes"] = DidNotHappen("start them by hand")
    shell.carry_out(None, o.Withdraw((Version(1),), ()))
    shell.carry_out(None, o.Trim("op", Version(2)))
    shell.carry_out(None, o.AskNodes(3))
    for name in ("request_nodes", "trim"):
        fakes.wait(name)
    shell.close()
    assert loop.heard == []
    assert {name for name, _ in fakes.calls} == {"withdraw", "trim", "request_nodes"}
    events = shell._events
    assert {each.kind for each in events.recent} == {"order failed"}
    told = sorted(str(each) for each in events.recent)
    assert told == [
        "Deleting obsolete checkpoints failed: no answer.",
        "Requesting 3 nodes from the cluster manager failed: start them by hand.",
    ]
    written = [line for name in events._store.list() for line in lines(events._store, name)]
    assert sorted(str(Event.from_json(each)) for each in written) == told


def lines(store: Any, name: str) -> list[str]:
    found: list[str] = store.get(name).to_pybytes().decode().splitlines()
    return found


def test_that_nodes_are_not_granted_is_told_once(shell: Shell, fakes: Fakes) -> None:
    answers = [DidNotHappen("no"), DidNotHappen("no"), None, DidNotHappen("no")]

    def request_nodes(total: int) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    fakes.request_nodes = request_nodes  # type: ignore[attr-defined]
    while answers:
        left = len(answers)
        shell.carry_out(None, o.AskNodes(3))
        while len(answers) == left:
            time.sleep(0.001)
    shell.close()
    assert [each.kind for each in shell._events.recent] == 2 * ["order failed"]


class Endless(OneNode):
    """A node that takes as long as it may for whatever it is asked."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def ask(self, host: str, request: Any, deadline: Deadline) -> Any:
        self.asked.set()
        while not deadline.wait(1000):
            pass
        deadline.check("merge")


def test_the_end_of_a_query_waits_for_no_node(fakes: Any, loop: Listening) -> None:
    node = Endless()
    asking = Asking(node, Epoch(1), "q", {"op": LAYOUT})
    shell = Shell(loop, asking, fakes, Events(MemoryStore(), 1), fakes, fakes, fakes, print)
    shell.carry_out(NUMBER, ANSWERED["store"])
    assert node.asked.wait(SECONDS)
    began = time.monotonic()
    shell.close()
    assert time.monotonic() - began < 3
    reason = "merge: given up, as the query has ended"
    assert loop.heard == [Failed(NUMBER, reason, kind=DidNotHappen)]


def test_the_end_of_a_query_cancels_a_replay(fakes: Any, loop: Listening) -> None:
    cancelled = threading.Event()
    replaying = threading.Event()

    class Replays:
        def run(self, *_: Any) -> None:
            replaying.set()
            assert cancelled.wait(SECONDS)

        def stop(self) -> None:
            cancelled.set()

    shell = Shell(loop, fakes, fakes, Events(MemoryStore(), 1), fakes, Replays(), fakes, print)
    shell.carry_out(NUMBER, o.Replay((SLICE,), Version(3), 1))
    assert replaying.wait(SECONDS)
    began = time.monotonic()
    shell.close()
    assert time.monotonic() - began < 3
    assert cancelled.is_set()


def test_what_is_being_written_is_finished_first(shell: Shell, fakes: Fakes) -> None:
    written: list[str] = []

    def publish(_: Any) -> None:
        time.sleep(1)
        written.append("it")

    fakes.publish = publish  # type: ignore[attr-defined]
    shell.carry_out(NUMBER, PUBLISH)
    shell.close()
    assert written == ["it"]


def test_what_is_ordered_after_the_end_is_left(shell: Shell, loop: Listening) -> None:
    shell.close()
    shell.carry_out(NUMBER, MAKE)
    shell.carry_out(None, o.Drop("a"))
    assert loop.heard == []


def test_what_is_written_is_written_in_the_order_it_was_ordered(shell: Shell, fakes: Fakes) -> None:
    wanted = []
    for number in range(50):
        shell.carry_out(o.OrderId(2 * number), o.Note(number, {}, ()))
        shell.carry_out(o.OrderId(2 * number + 1), PUBLISH)
        wanted += ["note", "publish"]
    shell.close()
    assert [name for name, _ in fakes.calls] == wanted
    assert [given[0].arrangement for name, given in fakes.calls if name == "note"] == [*range(50)]


def test_spark_is_let_go_before_it_is_taken_back(shell: Shell, fakes: Fakes) -> None:
    shell.carry_out(NUMBER, REWIND)
    assert fakes.calls[0][0] == "end"  # at once, or the batch would wait for ever
    fakes.wait("rewind")
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


def test_the_watcher_goes_on_when_hosts_cannot_be_seen_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "_PAUSE_SECONDS", 0.01)
    told: list[tuple[str, str]] = []
    answers: list[frozenset[str] | Exception] = [
        frozenset({"a"}), OSError("no answer"), ValueError("odd"), frozenset({"b"}),
    ]  # fmt: skip
    over = threading.Event()

    def alive() -> frozenset[str]:
        if not answers:
            over.set()
            return frozenset({"b"})
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watcher = Watcher(
        alive, lambda host: told.append(("came", host)), lambda host: told.append(("lost", host))
    )
    with caplog.at_level(logging.WARNING, "anabranch"):
        watcher.begin()
        assert over.wait(SECONDS)
        watcher.close()
    assert told == [("came", "a"), ("lost", "a"), ("came", "b")]
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2, "once for all that fail in a row, and once when it is over"
    assert said[0].startswith("Executors cannot be polled, so new and lost nodes are not noticed")
    assert said[0].endswith("OSError: no answer")
