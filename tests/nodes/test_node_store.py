"""A node as a backup store: the suite of all stores, errors, and nodes that die."""

import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from acting import Echo, Echoed, Fail, Names, Odd
from node_tools import EPOCH, LIMIT, Reached, Starter, is_gone, wait_until

from anabranch.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    DidNotHappen,
    Fenced,
    MayHaveHappened,
    QueryFailed,
    Refused,
)
from anabranch.nodes import (
    Agent,
    AgentAddress,
    Deadline,
    Fence,
    Secret,
    Signer,
    Vault,
    Verifier,
    remote,
)
from anabranch.nodes.chunks import CHUNK
from anabranch.nodes.requests import MOST_BLOCKS, Epoch
from anabranch.nodes.together import Blocks
from anabranch.stores import BackupStore

_spec = importlib.util.spec_from_file_location(
    "suite_of_stores", Path(__file__).parents[1] / "stores" / "test_stores.py"
)
assert _spec is not None
assert _spec.loader is not None
suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(suite)

test_put_get_size = suite.test_put_get_size
test_put_replaces = suite.test_put_replaces
test_list_by_prefix = suite.test_list_by_prefix
test_delete_is_idempotent = suite.test_delete_is_idempotent
test_what_is_not_there = suite.test_what_is_not_there
test_names_are_checked = suite.test_names_are_checked
test_many_names_at_once = suite.test_many_names_at_once
test_one_bad_name_among_many = suite.test_one_bad_name_among_many


@pytest.fixture
def store(node: Reached) -> BackupStore:
    return node


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7])
def test_sizes_around_those_of_chunks(node: Reached, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    node.put("sized", data)
    assert node.get("sized").to_pybytes() == data
    assert node.size("sized") == size


def test_many_megabytes(node: Reached) -> None:
    data = pa.py_buffer(np.random.default_rng(1).bytes(64 << 20))
    start = time.monotonic()
    node.put("large", data)
    middle = time.monotonic()
    assert node.get("large").equals(data)
    end = time.monotonic()
    print(f"64 MB: put {middle - start:.2f} s, get {end - middle:.2f} s")
    assert node.ping().used == data.size


def test_threads_share_a_store(node: Reached) -> None:
    wrong: list[object] = []

    def use(number: int) -> None:
        try:
            for step in range(10):
                data = bytes([number]) * (step * CHUNK // 4)
                node.put(f"{number}", data)
                if node.get(f"{number}").to_pybytes() != data:
                    wrong.append((number, step))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_limit_of_the_vault(node: Reached) -> None:
    node.put("small", b"x" * CHUNK)
    with pytest.raises(DidNotHappen, match=rf"{CHUNK} bytes are used.* of {LIMIT}") as refusal:
        node.put("large", np.empty(LIMIT - CHUNK + 1, np.uint8))
    assert not isinstance(refusal.value, Refused)
    assert list(node.list()) == ["small"]


def test_of_many_blocks_all_are_kept_or_none(node: Reached) -> None:
    """The last one has no room."""
    blocks = {f"{number}": bytes(CHUNK) for number in range(5)}
    with pytest.raises(DidNotHappen, match="no room"):
        node.put_all({**blocks, "large": np.empty(LIMIT, np.uint8)})
    assert list(node.list()) == []
    assert node.ping().used == 0
    node.put_all(blocks)
    assert node.ping().used == 5 * CHUNK


def test_more_names_than_one_request_takes(node: Reached) -> None:
    blocks = {f"parts/{number}": f"{number}".encode() for number in range(2 * MOST_BLOCKS + 3)}
    node.put_all(blocks)
    assert len(node.list()) == len(blocks)
    assert node.get("parts/130").to_pybytes() == b"130"
    node.delete_all(list(blocks))
    assert list(node.list()) == []


def test_an_error_of_a_later_request_does_not_deny_the_ones_before(
    node: Reached, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = {f"parts/{number}": b"x" for number in range(MOST_BLOCKS)}
    large = {"large": np.empty(LIMIT, np.uint8)}
    with pytest.raises(MayHaveHappened, match=rf"{MOST_BLOCKS} of {MOST_BLOCKS + 1} .*no room"):
        node.put_all({**blocks, **large})
    assert len(node.list()) == MOST_BLOCKS
    monkeypatch.setattr(remote, "_MOST_NAMES", MOST_BLOCKS // 4)
    ask = node.node.ask

    def lose_the_first(request: Any, deadline: Deadline) -> Any:
        if "parts/0" in request.names:
            raise DidNotHappen("nobody there", host="h")
        return ask(request, deadline)

    monkeypatch.setattr(node.node, "ask", lose_the_first)
    with pytest.raises(DidNotHappen, match="nobody there"):
        node.delete_all(list(blocks))
    monkeypatch.undo()
    assert len(node.list()) == MOST_BLOCKS // 4, "the other requests were sent all the same"


def test_the_same_name_from_many_threads(node: Reached, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request has each name once: the next one replaces it."""
    sent: list[list[str]] = []
    first, go_on = threading.Event(), threading.Event()
    together = node.node._together
    original = together._send

    def upload(blocks: Blocks, epoch: Epoch, deadline: Deadline) -> None:
        sent.append([block.name for block, _ in blocks])
        if len(sent) == 1:
            first.set()
            assert go_on.wait(20)
        original(blocks, epoch, deadline)

    monkeypatch.setattr(together, "_send", upload)
    with ThreadPoolExecutor(5) as pool:
        puts = [pool.submit(node.put, "0", b"0")]
        assert first.wait(20)
        for number, name in enumerate(("u/x", "u/y") * 2):
            puts.append(pool.submit(node.put, name, f"{number}".encode()))
            wait_until(lambda: len(together._waiting) == len(puts) - 1)
        go_on.set()
    for each in puts:
        each.result()
    assert sent == [["0"], ["u/x", "u/y"], ["u/x", "u/y"]]
    assert [node.get(name).to_pybytes() for name in ("u/x", "u/y")] == [b"2", b"3"]


def test_small_blocks_from_many_threads_go_together(
    node: Reached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes while a request is on its way is in the next one; each caller gets its answer."""
    sent: list[int] = []
    first, go_on = threading.Event(), threading.Event()
    together = node.node._together
    original = together._send

    def upload(blocks: Blocks, epoch: Epoch, deadline: Deadline) -> None:
        sent.append(len(blocks))
        if len(sent) == 1:
            first.set()
            assert go_on.wait(20)
        original(blocks, epoch, deadline)

    monkeypatch.setattr(together, "_send", upload)
    with ThreadPoolExecutor(34) as pool:
        puts = [pool.submit(node.put, "0", b"0")]
        assert first.wait(20)
        puts += [pool.submit(node.put, f"{n}", f"{n}".encode()) for n in range(1, 33)]
        wait_until(lambda: len(together._waiting) == 32)
        go_on.set()
    for each in puts:
        each.result()
    assert sent == [1, 32]
    assert {name: node.get(name).to_pybytes() for name in node.list()} == {
        f"{n}": f"{n}".encode() for n in range(33)
    }
    monkeypatch.setattr(together, "_send", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        node.put("again", b"x")
    monkeypatch.undo()
    node.put("again", b"x")


def test_an_error_is_that_of_all_that_went_together(
    node: Reached, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, go_on = threading.Event(), threading.Event()

    def upload(blocks: Blocks, epoch: Epoch, deadline: Deadline) -> None:
        first.set()
        assert go_on.wait(20)
        if len(blocks) > 1:
            raise MayHaveHappened("the answer was lost", host="h")

    monkeypatch.setattr(node.node._together, "_send", upload)
    with ThreadPoolExecutor(5) as pool:
        good = pool.submit(node.put, "0", b"0")
        assert first.wait(20)
        bad = [pool.submit(node.put, f"{n}", b"x") for n in range(1, 4)]
        wait_until(lambda: len(node.node._together._waiting) == 3)
        late = Reached.__new__(Reached)
        late.__dict__ = {**node.__dict__, "_deadline": lambda: Deadline(0.05)}
        with pytest.raises(DidNotHappen, match="given up, as it took longer"):
            late.put("late", b"x")
        go_on.set()
    good.result()
    for each in bad:
        with pytest.raises(MayHaveHappened, match="the answer was lost") as lost:
            each.result()
        assert lost.value.host == "h"
    assert len({id(each.exception()) for each in bad}) == 3


# --- calls ---


def test_a_call_and_its_answer(node: Reached, agent: AgentAddress) -> None:
    answer = node.ask(Echo(epoch=EPOCH, text="ü", numbers=(1, 25)))
    assert answer == Echoed("here", "ü", (1, 25))
    assert node.ask(Names()) == ()
    pong = node.ping()
    assert (pong.pid, pong.used, pong.limit) == (agent.pid, 0, LIMIT)


def test_errors_of_a_node_arrive_as_what_they_are(node: Reached, home: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"^the bytes of ü are wrong$"):
        node.ask(Fail(kind="corrupt", message="the bytes of ü are wrong"))
    with pytest.raises(Fenced, match=r"^x$") as raised:
        node.ask(Fail(kind="special", message="x"))
    assert type(raised.value) is Fenced, "the nearest class that every node knows"
    with pytest.raises(QueryFailed, match=r"^fail failed: ZeroDivisionError: oops; see the log"):
        node.ask(Fail(kind="bug", message="oops"))
    with pytest.raises(QueryFailed, match=r"^odd failed: TypeError"):
        node.ask(Odd())
    log = (home / "agent.log").read_text()
    assert "Traceback" in log
    assert "acting.py" in log


@pytest.mark.parametrize("letter", ["a", "ü", "\0", "\n", "\ud800"])
def test_long_errors_are_cut(node: Reached, letter: str) -> None:
    with pytest.raises(CheckpointCorrupt) as raised:
        node.ask(Fail(kind="corrupt", message=letter * 100_000))
    assert 400 < len(str(raised.value)) <= 1000


# --- nodes that cannot be reached ---


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a node that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = Reached(f"127.0.0.1:{port}", Signer(Secret.new()))
    start = time.monotonic()
    for ask in (lambda: store.put("a", b"x"), lambda: store.put("a", b""), lambda: store.get("a"),
                store.list, lambda: store.size("a"), lambda: store.delete("a"),
                store.ping, lambda: store.ask(Echo(epoch=EPOCH))):  # fmt: skip
        with pytest.raises(DidNotHappen, match=rf"127\.0\.0\.1:{port}.*[Rr]efused"):
            ask()
    assert time.monotonic() - start < 5
    with pytest.raises(DidNotHappen, match="no address"):
        Reached("not an address", Signer(Secret.new())).list()


def test_a_silent_node_costs_the_timeout_and_no_more(silent: str) -> None:
    store = Reached(silent, Signer(Secret.new()), timeout=0.5)
    start = time.monotonic()
    for ask in (lambda: store.put("a", b"x"), lambda: store.get("a"), lambda: store.size("a")):
        with pytest.raises(DidNotHappen, match=silent):
            ask()
    with pytest.raises((DidNotHappen, MayHaveHappened), match=silent):
        store.delete("a")
    assert time.monotonic() - start < 10


def test_a_change_that_gets_no_answer_may_have_happened(
    node: Reached, agent: AgentAddress, secret: Secret
) -> None:
    """A node that stops after the connection was made."""
    store = Reached(str(agent), Signer(secret), timeout=1)
    store.put("kept", b"x")
    os.kill(agent.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(agent.pid).status() == psutil.STATUS_STOPPED)
    try:
        for change in (lambda: store.delete("kept"), lambda: store.ask(Echo(epoch=EPOCH))):
            with pytest.raises(MayHaveHappened, match=str(agent)):
                change()
            # The connection is made anew, so one that does not come about is known not to.
            with pytest.raises(DidNotHappen, match=str(agent)):
                store.get("kept")
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    wait_until(lambda: node.ping().pid == agent.pid)


@pytest.mark.chaos
def test_a_killed_node_is_noticed_and_comes_back_with_its_backups(
    start: Starter, secret: Secret, tmp_path: Path
) -> None:
    address = start(folder=tmp_path, limit=1 << 20)
    node = Reached(str(address), Signer(secret))
    node.put("a/b", b"kept")
    os.kill(address.pid, signal.SIGKILL)
    assert is_gone(address.pid)
    since = time.monotonic()
    for ask in (lambda: node.get("a/b"), node.list, lambda: node.size("a/b"),
                lambda: node.put("c", b"x")):  # fmt: skip
        with pytest.raises(DidNotHappen, match=str(address)):
            ask()
    assert time.monotonic() - since < 5
    again = start(folder=tmp_path, limit=1 << 20)
    assert again.pid != address.pid
    with Reached(str(again), Signer(secret)) as other:
        assert other.get("a/b").to_pybytes() == b"kept"
        assert other.ping().used == 4
        other.put("c", b"x")
        assert list(other.list()) == ["a/b", "c"]


@pytest.mark.chaos
def test_a_node_killed_while_it_reads_has_nothing_or_all(
    start: Starter, secret: Secret, tmp_path: Path
) -> None:
    """Whatever the client is told is true of what is found afterwards."""
    data = pa.py_buffer(bytes(48 << 20))
    for delay in (0.0, 0.02, 0.05, 0.1):
        address = start(folder=tmp_path, limit=LIMIT)
        node = Reached(str(address), Signer(secret))
        node.delete("a")
        killer = threading.Timer(delay, os.kill, (address.pid, signal.SIGKILL))
        killer.start()
        told: type[Exception] | None = None
        try:
            node.put("a", data)
        except (DidNotHappen, MayHaveHappened) as error:
            told = type(error)
        killer.join()
        assert is_gone(address.pid)
        left = [path.stat().st_size for path in (tmp_path / "backups").glob("a")]
        assert left in {None: ([data.size],), DidNotHappen: ([],)}.get(told, ([], [data.size]))


def test_a_store_connects_anew(start: Starter, secret: Secret, tmp_path: Path) -> None:
    """The same object works again when an agent is back at the same address."""
    address = start(folder=tmp_path / "one")
    node = Reached(str(address), Signer(secret))
    node.stop()
    assert is_gone(address.pid)
    with pytest.raises(DidNotHappen):
        node.list()
    verifier, vault = Verifier(secret), Vault(tmp_path / "two", 100)
    verifier.address = str(address)
    server = Agent(address.host, address.port, vault, Fence(tmp_path / "epoch"), verifier)
    try:
        assert list(node.list()) == []
        with pytest.raises(CheckpointNotFound):
            node.get("a")
    finally:
        server.shutdown()
