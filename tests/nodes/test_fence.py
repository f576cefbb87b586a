"""A driver that another one has taken the query over from changes nothing any more."""

import os
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_tools import Reached, Starter, is_gone
from raw import Asking, Raw, declared

from anabranch.errors import DidNotHappen, Fenced
from anabranch.nodes import AgentAddress, Deadline, Fence, Secret, Signer
from anabranch.nodes.fence import EPOCH, FencedStore
from anabranch.nodes.requests import Drop, Epoch, Stop
from anabranch.stores.peers import AT_PEERS
from anabranch.testing import MemoryStore

SOON = 60.0


def enter(fence: Fence, epoch: int, seconds: float = SOON) -> None:
    """Change nothing, for the driver of an epoch."""
    with fence.admit(Epoch(epoch), Deadline(seconds)):
        pass


def test_only_the_greatest_epoch_is_admitted(tmp_path: Path) -> None:
    fence = Fence(tmp_path / "new" / EPOCH)
    assert fence.greatest() == 0
    for epoch in (0, 3, 3, 7):
        enter(fence, epoch)
        assert fence.greatest() == epoch
    for epoch in (0, 6):
        with pytest.raises(Fenced, match=f"driver 7 has taken .* driver {epoch} changes nothing"):
            enter(fence, epoch)
        with pytest.raises(Fenced):
            fence.check(Epoch(epoch))
    assert fence.greatest() == 7
    enter(fence, 7)


def test_it_outlives_its_process_and_is_one_for_all_processes(tmp_path: Path) -> None:
    first, second = Fence(tmp_path / EPOCH), Fence(tmp_path / EPOCH)
    enter(first, 4)
    with pytest.raises(Fenced):
        enter(second, 3)
    enter(second, 5)
    with pytest.raises(Fenced):
        enter(first, 4)
    assert stat.S_IMODE((tmp_path / EPOCH).stat().st_mode) == 0o600


@settings(max_examples=200)
@given(epochs=st.lists(st.integers(1, (1 << 62)), min_size=1, max_size=5), data=st.data())
def test_what_a_power_failure_cuts_short_is_not_believed(
    tmp_path_factory: pytest.TempPathFactory, epochs: list[int], data: st.DataObject
) -> None:
    """Of a line that was being written any part may be there, or bytes that are none of it."""
    path = tmp_path_factory.mktemp("fence") / EPOCH
    noted = 0
    for epoch in sorted(epochs):
        before = path.read_bytes() if path.exists() else b""
        enter(Fence(path), epoch)
        written = path.read_bytes()
        assert written.startswith(before)
        line = written[len(before) :]
        if line and data.draw(st.booleans()):
            cut = data.draw(st.integers(0, len(line) - 2))
            filler = data.draw(st.sampled_from([b"", b"\0" * (len(line) - cut)]))
            path.write_bytes(before + line[:cut] + filler)
        else:
            noted = epoch
        assert Fence(path).greatest() in (noted, epoch)
        assert Fence(path).greatest() >= noted


def test_a_later_driver_waits_for_what_is_under_way(tmp_path: Path) -> None:
    fence = Fence(tmp_path / EPOCH)
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def earlier() -> None:
        with fence.admit(Epoch(1), Deadline(SOON)):
            begun.set()
            assert go_on.wait(SOON)
            order.append("earlier")

    def later() -> None:
        with fence.admit(Epoch(2), Deadline(SOON)):
            order.append("later")

    threads = [threading.Thread(target=each) for each in (earlier, later, later)]
    threads[0].start()
    assert begun.wait(SOON)
    with fence.admit(Epoch(1), Deadline(SOON)):
        pass  # of the same driver there may be several
    with pytest.raises(DidNotHappen, match="changes of driver 1 are still under way"):
        enter(fence, 2, 0.2)
    with pytest.raises(Fenced):  # though nothing of the later one has been done yet
        enter(fence, 1)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(SOON)
    assert order == ["earlier", "later", "later"]


def test_whoever_waits_is_fenced_by_a_still_later_one(tmp_path: Path) -> None:
    fence = Fence(tmp_path / EPOCH)
    failed: list[Exception] = []

    def second() -> None:
        try:
            enter(fence, 2)
        except Fenced as error:
            failed.append(error)

    with fence.admit(Epoch(1), Deadline(SOON)):
        waiting = threading.Thread(target=second)
        waiting.start()
        while fence.greatest() < 2:
            threading.Event().wait(0.01)
        with pytest.raises(DidNotHappen):
            enter(fence, 3, 0.1)
    waiting.join(SOON)
    assert len(failed) == 1


def test_a_fence_that_cannot_be_written_admits_nobody(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / EPOCH).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DidNotHappen, match="cannot be written to"):
        enter(Fence(tmp_path / EPOCH), 1)


def test_a_store_behind_a_fence(tmp_path: Path) -> None:
    fence, store = Fence(tmp_path / EPOCH), MemoryStore()
    stale = FencedStore(store, fence, Epoch(1), Deadline(SOON))
    stale.put("a", b"first")
    FencedStore(store, fence, Epoch(2), Deadline(SOON)).put("b", b"second")
    for change in (lambda: stale.put("a", b"x"), lambda: stale.delete("a")):
        with pytest.raises(Fenced):
            change()
    assert stale.get("a").to_pybytes() == b"first"
    assert (list(stale.list()), stale.size("b")) == (["a", "b"], 6)


# Agents


def test_backups_at_an_agent_are_fenced(
    node: Reached, agent: AgentAddress, secret: Secret, start: Starter, tmp_path: Path
) -> None:
    address = start(folder=tmp_path)
    new, old = (Reached(str(address), Signer(secret), epoch=epoch) for epoch in (5, 4))
    old.put("kept", b"of before")
    new.put("also", b"x")
    refused: list[Any] = [lambda: old.put("kept", b"y"), lambda: old.put("more", b"y"),
                          lambda: old.delete("kept"), old.stop]  # fmt: skip
    for change in refused:
        with pytest.raises(Fenced, match="driver 5 has taken the query over"):
            change()
    assert list(old.list()) == ["also", "kept"]
    assert old.get("kept").to_pybytes() == b"of before"
    assert old.size("kept") == 9
    assert old.ping().pid == address.pid
    new.delete("kept")
    new.stop()
    assert is_gone(address.pid)


def test_a_fenced_upload_is_refused_before_its_bytes_come(
    start: Starter, secret: Secret, tmp_path: Path
) -> None:
    address = start(folder=tmp_path)
    with Reached(str(address), Signer(secret), epoch=5) as new, Raw(address) as raw:
        # One that was announced before the other driver came is refused when it is whole.
        raw.send(Asking(secret).sign(declared(b"xyz", epoch=4), str(address)))
        assert raw.answer() is not None
        new.put("a", b"kept")
        raw.send(b"xyz")
        answer = raw.answer()
        assert answer is not None
        assert answer[1]["error"] == "Deposed"
        answer = raw.ask(Asking(secret).sign(declared(b"xyz", epoch=4), str(address)))
        assert answer is not None
        assert answer[1]["error"] == "Deposed"
        assert new.get("a").to_pybytes() == b"kept"
        assert new.ping().used == 4
        assert list((tmp_path / "backups" / ".partial").iterdir()) == []


@pytest.mark.chaos
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_agent_that_is_started_again_remembers(
    start: Starter, secret: Secret, tmp_path: Path, how: signal.Signals
) -> None:
    root = tmp_path / "state" / "127.0.0.1" / "0123456789ab"
    context = {"root": str(root), "host": "127.0.0.1", "secret": secret.to_hex(),
               "store": AT_PEERS.to_json()}  # fmt: skip
    served = {
        "folder": tmp_path / "agent", "log": tmp_path / "agent" / "log",
        "node": "anabranch.nodes.serving:make", "context": context,
    }  # fmt: skip
    address = start(**served)
    with Reached(str(address), Signer(secret), epoch=7) as node:
        node.put("a", b"x")
        node.ask(Drop(epoch=Epoch(8)))
    os.kill(address.pid, how)
    assert is_gone(address.pid)
    again = start(**served)
    assert again.pid != address.pid
    with Reached(str(again), Signer(secret), epoch=6) as node:
        with pytest.raises(Fenced, match="driver 7"):
            node.put("a", b"y")
        with pytest.raises(Fenced, match="driver 7"):
            node.ask(Stop(epoch=Epoch(6)))
        with pytest.raises(Fenced, match="driver 8"):
            node.ask(Drop(epoch=Epoch(7)))
        assert node.get("a").to_pybytes() == b"x"
    with Reached(str(again), Signer(secret), epoch=7) as node:
        node.put("a", b"z")
        node.ask(Drop(epoch=Epoch(8)))
