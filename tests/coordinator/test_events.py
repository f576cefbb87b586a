"""The event log of a query."""

from pathlib import Path

import pytest

from anabranch.backup import Files
from anabranch.coordinator.events import Events, read_events


def test_what_fails_is_written_too(tmp_path: Path) -> None:
    store = Files(str(tmp_path)).open()
    events = Events(store, 1)
    with events.timed("checkpoint", version=3) as details:
        details["bytes"] = 10
    with pytest.raises(OSError, match="no room"), events.timed("checkpoint", version=4):
        raise OSError("no room")
    done, failed = read_events(store)
    assert not done.failed
    assert done.details == {"version": 3, "bytes": 10}
    assert failed.failed
    assert failed.details == {"version": 4, "error": "OSError: no room"}
    assert list(events.recent) == [done, failed]
