"""The log of an agent, whose size is bounded whatever requests it gets."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from anabranch.errors import AnabranchError, CheckpointNotFound

LARGEST = 4 << 20
"""The most bytes of a log; those before are in one more file of this size."""
PERIOD = 10.0
MOST_LINES = 3
_LONGEST = 400

_log = logging.getLogger(__name__)


def trim(path: Path, largest: int = LARGEST) -> None:
    """Move what is in a log to ``<name>.1`` if it is too large.

    The file is truncated in place: a process that has it open to append continues at its start.
    """
    if path.stat().st_size <= largest:
        return
    before = path.with_name(f"{path.name}.1")
    before.unlink(missing_ok=True)
    with path.open("rb") as source, private_file(before) as copy:
        # What was written last says most.
        source.seek(max(0, os.fstat(source.fileno()).st_size - largest))
        shutil.copyfileobj(source, copy)
    os.truncate(path, 0)


def private_file(path: Path) -> BinaryIO:
    """A file that only this user reads, open to append to."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.fchmod(descriptor, 0o600)  # it may have been there
    return os.fdopen(descriptor, "ab")


class Trimmed(logging.StreamHandler[TextIO]):
    """Writes to the standard error, which is the file at ``path``, and trims that."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        super().emit(record)
        trim(self._path)


@dataclass
class _Lately:
    """Failures of one kind since a time."""

    since: float
    count: int = 0
    said: int = 0
    last: str = ""


class FailureLog:
    """Counts failed requests by the name of their error, and logs them.

    A kind of failure is the operation and the class of the error. Each kind gets a few lines in
    ten seconds, then one line with the number of the others. May be used from several threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._lately: dict[tuple[str, str], _Lately] = {}
        self._lock = threading.Lock()

    def counts(self) -> dict[str, int]:
        """How many failed, by the name of the error."""
        with self._lock:
            return dict(self._counts)

    def note(self, doing: str, peer: str, error: Exception) -> None:
        """Count and log a failure. ``doing`` is its subject, such as ``"The request 'get'"``."""
        kind = type(error).__name__
        with self._lock:
            self._counts[kind] += 1
            lately = self._lately.setdefault((doing, kind), _Lately(self._clock()))
            lately.count += 1
            lately.last = f"{peer}: {error!s:.{_LONGEST}}"
            if lately.said == MOST_LINES:
                return
            lately.said += 1
        if isinstance(error, CheckpointNotFound):
            _log.info("%s from %s failed: %s", doing, peer, error)
        elif isinstance(error, AnabranchError):
            _log.warning("%s from %s failed: %s: %.*s", doing, peer, kind, _LONGEST, error)
        else:
            _log.error("%s from %s failed with an unexpected error.", doing, peer, exc_info=error)

    def summarize(self, *, everything: bool = False) -> None:
        """Log the number of failures that were not logged, for kinds whose ten seconds are over."""
        now = self._clock()
        with self._lock:
            over = {
                kind: lately
                for kind, lately in self._lately.items()
                if everything or now - lately.since >= PERIOD
            }
            for kind in over:
                del self._lately[kind]
        for (doing, name), lately in over.items():
            if lately.count > lately.said:
                _log.warning(
                    "%s failed with %s %d times more in %.0f s; the last from %s",
                    doing, name, lately.count - lately.said, now - lately.since, lately.last,
                )  # fmt: skip
