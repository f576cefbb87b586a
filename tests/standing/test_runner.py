"""The thread of a ring's peer, and those who wait for its searches."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from anabranch.errors import DidNotHappen
from anabranch.nodes import Secret, Signer
from anabranch.nodes.node import Deadline
from anabranch.nodes.server import THREADS
from anabranch.nodes.standing import runner as module
from anabranch.nodes.standing.runner import MOST_SEARCHES, Runner
from anabranch.ring import Contact, NodeId, Settings

KEY = NodeId(7)


@pytest.fixture
def joining() -> Iterator[Runner]:
    """A node that has not joined, as nothing listens where it asks: no search is answered."""
    runner = Runner(
        Contact(NodeId.of("a"), "a", "127.0.0.1:2"),
        Settings(period=60.0),
        Signer(Secret.new()),
        ["127.0.0.1:1"],
        load=lambda: 0,
        news=lambda news: None,
        ended=pytest.fail,
    )
    runner.begin()
    yield runner
    runner.close()


def test_searches_leave_threads_for_the_messages_of_the_ring(joining: Runner) -> None:
    assert MOST_SEARCHES < THREADS
    with ThreadPoolExecutor(MOST_SEARCHES) as pool:
        waiting = [pool.submit(joining.find, KEY, Deadline(1.0)) for _ in range(MOST_SEARCHES)]
        while joining._searching.acquire(blocking=False):  # until all of them wait
            joining._searching.release()
        began = time.monotonic()
        with pytest.raises(DidNotHappen, match=f"{MOST_SEARCHES} searches to wait for"):
            joining.find(KEY, Deadline(60.0))
        assert time.monotonic() - began < 0.5, "it does not wait"
        for each in waiting:
            with pytest.raises(DidNotHappen, match="has answered a search"):
                each.result()


def test_a_search_waits_for_a_while_whatever_the_client_wants(
    joining: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_SEARCH", 0.1)
    with pytest.raises(DidNotHappen, match="has answered a search"):
        joining.find(KEY, Deadline(7 * 86_400.0))


def test_unanswered_searches_are_bounded(joining: Runner) -> None:
    for number in range(1000):
        with pytest.raises(DidNotHappen):
            joining.find(NodeId(number), Deadline(0.0))
    with pytest.raises(DidNotHappen, match="too many searches are unanswered"):
        joining.find(KEY, Deadline(5.0))
    assert sum(map(len, joining._searches.values())) == module._MOST_UNANSWERED


def test_the_thread_ends(joining: Runner) -> None:
    joining.close()
    assert "ring" not in {thread.name for thread in threading.enumerate()}
