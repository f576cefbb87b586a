"""The hosts that have an executor, as they are looked up many times a second."""

import time

import pytest

from anabranch.spark import nodes
from anabranch.spark.nodes import Executors


class Played(Executors):
    """A scheduler and a block manager that say what a test wants."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.listed: list[str] = []
        self.looked = 0
        self._known = None

    def _ids(self) -> str:
        return ",".join(self.ids)

    def _hosts(self) -> list[str]:
        self.looked += 1
        return list(self.listed)


def test_the_list_is_asked_for_when_executors_come_or_go() -> None:
    played = Played()
    assert played.hosts() == frozenset()
    played.ids, played.listed = ["0", "1"], ["a", "b"]
    assert played.hosts() == {"a", "b"}
    looked = played.looked
    for _ in range(5):
        assert played.hosts() == {"a", "b"}
    assert played.looked == looked
    played.ids, played.listed = ["1"], ["b"]
    assert played.hosts() == {"b"}


def test_two_executors_of_one_host_are_one_node() -> None:
    played = Played()
    played.ids, played.listed = ["0", "1"], ["a", "a"]
    assert played.hosts() == {"a"}
    played.ids, played.listed = ["1"], ["a"]
    assert played.hosts() == {"a"}


def test_an_executor_that_is_not_listed_yet_is_looked_for_again() -> None:
    played = Played()
    played.ids = ["0"]
    assert played.hosts() == frozenset()
    played.listed = ["a"]
    assert played.hosts() == {"a"}


def test_the_list_is_asked_for_now_and_then_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    played.ids, played.listed = ["0"], ["a"]
    played.hosts()
    played.listed = ["b"]
    assert played.hosts() == {"a"}
    later = time.monotonic() + 1.1
    monkeypatch.setattr(nodes.time, "monotonic", lambda: later)
    assert played.hosts() == {"b"}
