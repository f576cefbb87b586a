"""Nobody waits for a node longer than he said."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from acting import Echo, Look, Sleep
from node_tools import EPOCH, Reached, wait_until
from test_nodes import Case

from anabranch.backup.files import Files
from anabranch.errors import CheckpointError, DidNotHappen, MayHaveHappened, StateLocked
from anabranch.fragments.cost import Cost
from anabranch.nodes import AgentAddress, Deadline, RemoteNode, Secret, Signer
from anabranch.nodes.local import LocalNode
from anabranch.nodes.requests import Make, Merge, Ping, Prefix, TableName
from anabranch.state import schema as types
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.state.keys import KeyLayout
from anabranch.state.table import TableLayout
from anabranch.testing import MemoryStore
from anabranch.units import Version

LAYOUT = TableLayout(KeyLayout([pa.field("key", pa.int64())], [], 8), types.schema(n=types.int64))
TABLE = TableName("op/0-0")


@contextmanager
def taking(least: float, most: float = 20) -> Iterator[None]:
    since = time.monotonic()
    yield
    assert least <= time.monotonic() - since < most


def test_a_deadline() -> None:
    deadline = Deadline(0.2)
    assert 0 < deadline.left() <= 0.2
    deadline.check("something")
    assert not deadline.wait(0.01)
    with taking(0.1):
        assert deadline.wait(60)
    assert deadline.left() == 0
    with pytest.raises(DidNotHappen, match=r"something: given up, as it took longer than 0\.2 s"):
        deadline.check("something")


def test_a_deadline_that_somebody_brings_forward() -> None:
    stopped = threading.Event()
    deadline = Deadline(60, stopped)
    threading.Timer(0.1, stopped.set).start()
    with taking(0.05):
        assert deadline.wait(50)
    assert deadline.left() == 0


def test_a_node_that_works_for_too_long_is_given_up(node: Reached) -> None:
    """It says all the while that it lives; whether it was done in the end nobody knows."""
    with taking(1), pytest.raises(MayHaveHappened, match=r"sleep at .*it took longer than 1 s"):
        node.ask(Sleep(epoch=EPOCH, milliseconds=30_000), within=1)
    with taking(1), pytest.raises(DidNotHappen, match=r"look at .*it took longer than 1 s"):
        node.ask(Look(milliseconds=30_000), within=1)
    node.ping()


def test_a_caller_can_give_up_early(node: Reached) -> None:
    stopped = threading.Event()
    threading.Timer(0.5, stopped.set).start()
    with taking(0.4), pytest.raises(DidNotHappen):
        node.node.ask(Look(milliseconds=30_000), Deadline(100, stopped))


def test_a_caller_can_give_up_an_agent_that_is_silent(agent: AgentAddress, secret: Secret) -> None:
    """It need not say anything for the caller to see that the query has ended."""
    stopped = threading.Event()
    with RemoteNode(str(agent), Signer(secret), silence=100) as node:
        node.ask(Ping(), Deadline(20))
        os.kill(agent.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: psutil.Process(agent.pid).status() == psutil.STATUS_STOPPED)
            threading.Timer(0.5, stopped.set).start()
            with taking(0.4, 5), pytest.raises(DidNotHappen, match="the query has ended"):
                node.ask(Ping(), Deadline(60, stopped))
        finally:
            os.kill(agent.pid, signal.SIGCONT)


def test_a_stopped_agent_costs_the_deadline(
    node: Reached, agent: AgentAddress, secret: Secret
) -> None:
    """The process lives, and says nothing: the deadline is over before the silence is too long."""
    store = Reached(str(agent), Signer(secret), timeout=100, within=1)
    store.put("kept", b"x")
    os.kill(agent.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(agent.pid).status() == psutil.STATUS_STOPPED)
    asked: list[tuple[Any, type[Exception]]] = [
        (lambda: store.ask(Echo(epoch=EPOCH), within=1), MayHaveHappened),
        (lambda: store.ask(Ping(), within=1), DidNotHappen),
        (lambda: store.get("kept"), DidNotHappen),
        (lambda: store.put("kept", b"y"), DidNotHappen),
        (lambda: store.delete("kept"), MayHaveHappened),
    ]
    try:
        for ask, error in asked:
            with taking(0.9), pytest.raises(error, match=r"it took longer than 1 s"):
                ask()
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    wait_until(lambda: node.ping().pid == agent.pid)


def test_a_host_that_does_not_answer_costs_the_deadline() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        node = RemoteNode(f"127.0.0.1:{address[1]}", Signer(Secret.new()), silence=100)
        with taking(0.9), pytest.raises(DidNotHappen):
            node.ask(Ping(), Deadline(1))
        for each in waiting:
            each.close()


def test_what_is_too_late_is_not_even_asked(node: Reached) -> None:
    for request in (Ping(), Echo(epoch=EPOCH)):
        with pytest.raises(DidNotHappen, match="given up"):
            node.ask(request, within=0)


class Slow(MemoryStore):
    """A store whose reads wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.open = threading.Event()

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        self.entered.set()
        assert self.open.wait(60)
        return super().get(name, offset, length)


def test_a_table_is_not_replaced_for_somebody_who_has_given_up(tmp_path: Path) -> None:
    store = Slow()
    case = Case(LocalNode(tmp_path, lambda *_: store), tmp_path, Prefix(""), {}, EPOCH)
    case.make(TABLE, -1)
    part = case.checkpoint(TABLE, 0, {1: 2}, None)
    case.batch(TABLE, 1, {1: 3})
    stopped, failed = threading.Event(), []
    request = Make(
        epoch=case.epoch, table=TABLE, layout=LAYOUT, version=Version(0), groups=KeyGroups.all(8),
        parts=(part,),
    )  # fmt: skip

    def make() -> None:
        try:
            case.node.ask(request, Deadline(60, stopped))
        except DidNotHappen as error:
            failed.append(error)

    making = threading.Thread(target=make)
    making.start()
    assert store.entered.wait(60)
    stopped.set()
    store.open.set()
    making.join(60)
    assert len(failed) == 1
    assert case.rows(TABLE) == {1: 3}


def test_a_table_that_is_being_changed_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    node = LocalNode(tmp_path, lambda *_: MemoryStore())
    request = Make(
        epoch=EPOCH, table=TABLE, layout=LAYOUT, version=Version(0), groups=KeyGroups.all(8)
    )
    with node._alone(Deadline(60), TABLE):
        with (
            taking(0.3),
            pytest.raises(StateLocked, match="another request is changing the tables"),
        ):
            node.ask(request, Deadline(0.3))
        others = TableName("op/0-1")
        assert node.ask(Make(**{**vars(request), "table": others}), Deadline(60)) == Cost()
    assert node.ask(request, Deadline(60)) == Cost()


def test_a_merge_ends_when_nobody_wants_it(tmp_path: Path) -> None:
    files = Files(str(tmp_path / "store"))
    store = files.open()
    node = LocalNode(tmp_path / "root", lambda *_: store, files.where)
    case = Case(node, tmp_path / "root", Prefix(""), {}, EPOCH)
    case.make(TABLE, -1)
    part = case.checkpoint(TABLE, 0, {1: 2}, None)
    request = Merge(
        epoch=case.epoch,
        schema=CheckpointSchema.of(LAYOUT),
        parts=(part,),
        groups=part.groups,
        version=part.version,
        under=Prefix("m/"),
    )
    stopped, before = threading.Event(), psutil.Process().children()
    stopped.set()
    with taking(0, 60), pytest.raises(CheckpointError, match="was cancelled"):
        node.ask(request, Deadline(600, stopped))
    assert psutil.Process().children() == before
    assert list(store.list("m/")) == []
