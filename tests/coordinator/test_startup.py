"""Starting a query while its nodes come and go."""

from types import SimpleNamespace

import pytest

from anabranch.coordinator import startup
from anabranch.errors import DidNotHappen, StateMissing


def failing(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> list[int]:
    """Let the first attempts to recover fail; the returned list has one entry per attempt."""
    attempts: list[int] = []
    left = list(errors)

    def recover(place: object, running: object, before: object) -> None:
        attempts.append(len(attempts))
        if left:
            raise left.pop(0)

    monkeypatch.setattr(startup, "_recover", recover)
    monkeypatch.setattr(startup, "_LOOK_SECONDS", 0.0)
    return attempts


def start(*, cluster: bool) -> None:
    running = SimpleNamespace(cluster=object() if cluster else None)
    startup.recover(None, running, {})  # type: ignore[arg-type]


def test_a_node_that_goes_while_a_query_starts_costs_an_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = DidNotHappen("no executor is left on b")
    attempts = failing(monkeypatch, gone, gone)
    start(cluster=True)
    assert attempts == [0, 1, 2]


def test_what_comes_again_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = failing(monkeypatch, StateMissing("offsets are gone"))
    with pytest.raises(StateMissing):
        start(cluster=True)
    assert attempts == [0]


def test_it_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_RECOVER_SECONDS", -1.0)
    failing(monkeypatch, DidNotHappen("no executor is left on b"))
    with pytest.raises(DidNotHappen):
        start(cluster=True)


def test_on_one_machine_there_is_nobody_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, DidNotHappen("the disk is full"))
    with pytest.raises(DidNotHappen):
        start(cluster=False)
