"""The event log of a query."""

from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.backup import Files
from anabranch.coordinator.events import Event, Events
from anabranch.errors import DidNotHappen, MayHaveHappened, StoreError
from anabranch.testing import MemoryStore


def test_what_fails_is_written_too(tmp_path: Path) -> None:
    store = Files(str(tmp_path)).open()
    events = Events(store, 1)
    events.add("checkpoint", 0.5, version=3, bytes=10)
    events.add("checkpoint failed", 0.1, version=4, reason="no room")
    (name,) = store.list("events/")
    done, failed = map(Event.from_json, store.get(name).to_pybytes().decode().splitlines())
    assert not done.failed
    assert done.details == {"version": 3, "bytes": 10}
    assert failed.failed
    assert failed.details == {"version": 4, "reason": "no room"}
    assert list(events.recent) == [done, failed]


def test_only_the_newest_files_of_events_are_kept() -> None:
    store = MemoryStore()
    for run in range(3):
        events = Events(store, run)
        for number in range(20 * 256):
            events.add("checkpoint", version=number)
    files = store.list("events/")
    assert len(files) == 40
    assert files[-1] == "events/000002-000019.jsonl"
    assert files[0] == "events/000001-000000.jsonl"


def test_an_event_is_seen_before_it_is_stored() -> None:
    store = MemoryStore()
    events = Events(store, 1)
    event = events.note("scale", 2.0, operator="counter", before=1, after=3)
    assert list(events.recent) == [event]
    assert not store.list("events/")
    events.store(event)
    (name,) = store.list("events/")
    assert Event.from_json(store.get(name).to_pybytes().decode()) == event


class Unreliable(MemoryStore):
    """Fails with an error while it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.error: StoreError | None = None
        self.deletes = True

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        if isinstance(self.error, MayHaveHappened):
            super().put(name, data)
        if self.error is not None:
            raise self.error
        super().put(name, data)

    def delete(self, name: str) -> None:
        if not self.deletes:
            raise DidNotHappen("read-only")
        super().delete(name)


def versions(store: MemoryStore) -> list[int]:
    lines = [
        line
        for name in store.list("events/")
        for line in store.get(name).to_pybytes().decode().splitlines()
    ]
    return [Event.from_json(line).details["version"] for line in lines]


@pytest.mark.parametrize("error", [DidNotHappen("full"), MayHaveHappened("no answer")])
@pytest.mark.parametrize("until", [257, 600])
def test_events_that_could_not_be_written_are_written_with_the_next(
    error: StoreError, until: int
) -> None:
    """The store fails as the file is full, for a moment or for longer than another one."""
    store = Unreliable()
    events = Events(store, 1)
    for number in range(700):
        store.error = error if 250 <= number < until else None
        events.add("checkpoint", version=number)
    assert versions(store) == list(range(700))
    assert len(store.list("events/")) >= 2


def test_old_events_that_cannot_be_removed_do_not_keep_new_ones_from_being_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anabranch.coordinator.events._PER_FILE", 2)
    store = Unreliable()
    store.deletes = False
    events = Events(store, 1)
    for number in range(90):
        events.add("checkpoint", version=number)
    assert versions(store) == list(range(90))
    store.deletes = True
    events.add("checkpoint", version=90)
    assert versions(store) == list(range(90 - 2 * 39, 91))
