"""The event log of a query: what happened, when, how long it took, how large it was.

Events are appended to the checkpoint folder, a few hundred to a file. The newest files are kept.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from anabranch.coordinator import story
from anabranch.errors import StoreError
from anabranch.stores.store import BackupStore

_log = logging.getLogger("anabranch")
_FOLDER = "events/"
_PER_FILE = 256
_RECENT = 1000
_FILES = 40
_MOST_WAITING = _FILES * _PER_FILE
"""So many events wait to be written at most: no more are kept in files either."""


@dataclass(frozen=True)
class Event:
    """An event of a query, such as a failure, a recovery or a checkpoint."""

    kind: str
    """``failure``, ``recovery``, ``scale``, ``checkpoint``, ``merge``, ``pool short``, ..."""
    at: float
    """When it was over, in seconds since 1970."""
    seconds: float = 0.0
    """How long it took."""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether an operation failed; ``details["reason"]`` says why."""
        return self.kind.endswith(" failed")

    def __str__(self) -> str:
        """The event as a sentence."""
        return story.sentence(self.kind, self.seconds, self.details)

    def to_json(self) -> str:
        """One line of the log."""
        return json.dumps(
            {"kind": self.kind, "at": self.at, "seconds": self.seconds, **self.details}
        )

    @classmethod
    def from_json(cls, line: str) -> Event:
        """Read a line of the log."""
        value = json.loads(line)
        return cls(value.pop("kind"), value.pop("at"), value.pop("seconds"), value)


class Events:
    """The event log of a running query. Every event is logged as a sentence too."""

    def __init__(self, store: BackupStore, run: int) -> None:
        self._store = store
        self._run = run
        self._file = 0
        self._lines: list[str] = []
        self._written = self._listed()
        self._lock = threading.Lock()
        self.recent: deque[Event] = deque(maxlen=_RECENT)

    def add(self, kind: str, seconds: float = 0.0, **details: Any) -> None:
        """Record and store an event."""
        self.store(self.note(kind, seconds, **details))

    def note(self, kind: str, seconds: float = 0.0, **details: Any) -> Event:
        """Record and log an event, which :meth:`store` then writes to the checkpoint folder."""
        event = Event(kind, time.time(), seconds, details)
        self.recent.append(event)
        _log.log(story.level(kind, details), "%s", event)
        return event

    def store(self, event: Event) -> None:
        """Write an event to the checkpoint folder; what cannot be written comes with the next."""
        with self._lock:
            self._lines.append(event.to_json())
            name = f"{_FOLDER}{self._run:06d}-{self._file:06d}.jsonl"
            try:
                self._store.put(name, ("\n".join(self._lines) + "\n").encode())
            except StoreError as error:
                _log.warning(
                    "The event %r was not written to the checkpoint folder; it is written with the "
                    "next one: %s",
                    event.kind,
                    error,
                )
                del self._lines[:-_MOST_WAITING]
                return
            if name not in self._written:
                self._written.append(name)
            if len(self._lines) >= _PER_FILE:
                self._file, self._lines = self._file + 1, []
            self._tidy()

    def _tidy(self) -> None:
        """Remove the oldest files; what cannot be removed goes with the next event."""
        while len(self._written) > _FILES:
            try:
                self._store.delete(self._written[0])
            except StoreError as error:
                _log.info("Old events in %s were not removed yet: %s", self._written[0], error)
                return
            del self._written[0]

    def _listed(self) -> list[str]:
        try:
            return list(self._store.list(_FOLDER))
        except StoreError as error:
            _log.warning(
                "The event files of earlier runs cannot be listed, so old ones are not deleted: %s",
                error,
            )
            return []
