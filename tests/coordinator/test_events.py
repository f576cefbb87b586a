"""The event log of a query."""

from pathlib import Path

from anabranch.backup import Files
from anabranch.coordinator.events import Event, Events
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
