"""Writes the input, at a steady rate with a backlog now and then."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch_bench.soak.traffic import SECOND, Traffic

SECONDS = 2.0
"""Event time in one file, and time between two."""
_FILLING = 4
_FIRST_TIME = 1_600_000_000
_BACKLOG = 0.012
"""The chance that a file is the first of several that are held back."""
_HELD = (8, 20)
"""How many files are held back then."""
_LOOK = 1.0


@dataclass
class Feeder:
    """A thread that writes files, and can be stopped between two of them."""

    folder: Path
    traffic: Traffic
    chance: random.Random
    lag: Callable[[], float]
    """How many seconds of event time the query is behind."""
    most_lag: float
    backlogs: int = 0
    waited: float = 0.0
    """Seconds for which nothing was written because the query was too far behind."""
    files: list[Path] = field(default_factory=list)
    """All that were written since they were last taken."""
    failure: BaseException | None = None
    _number: int = 0
    _go: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Write the rows that fill the state, and go on with the others."""
        self.folder.mkdir()
        for part in range(_FILLING):
            self._publish([self._write(self.traffic.fill(part, _FILLING))])
        self._go.set()
        threading.Thread(target=self._run, name="feeder", daemon=True).start()

    def hold(self) -> None:
        """Stop after the current file; nothing is held back any more when this returns."""
        self._go.clear()
        with self._turn:
            return

    def resume(self) -> None:
        """Go on."""
        self._go.set()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._go.set()

    def add(self, table: pa.Table) -> None:
        """Write a file of its own while the feeder is on hold."""
        self._publish([self._write(table)])

    def take_files(self) -> list[Path]:
        """The files since the last call."""
        taken, self.files = self.files, []
        return taken

    def _run(self) -> None:
        try:
            due = time.monotonic()
            while not self._over.is_set():
                self._go.wait()
                with self._turn:
                    if not self._go.is_set() or self._over.is_set():
                        continue
                    count = self._count()
                    paths = [self._write(self.traffic.make(SECONDS)) for _ in range(count)]
                    due = max(due, time.monotonic() - SECONDS) + count * SECONDS
                    while count > 1 and time.monotonic() < due and self._go.is_set():
                        self._over.wait(_LOOK / 4)
                    self._publish(paths)
                self._pace(due)
        except BaseException as error:
            self.failure = error

    def _count(self) -> int:
        if self.chance.random() >= _BACKLOG:
            return 1
        self.backlogs += 1
        return self.chance.randint(*_HELD)

    def _pace(self, due: float) -> None:
        while self._go.is_set() and not self._over.is_set():
            behind = self.lag() > self.most_lag
            left = due - time.monotonic()
            if left <= 0 and not behind:
                return
            pause = _LOOK if behind else min(_LOOK, left)
            self.waited += pause if behind and left <= 0 else 0.0
            self._over.wait(pause)

    def _write(self, table: pa.Table) -> Path:
        path = self.folder / f".{self._number:07d}.parquet"
        pq.write_table(table, path)
        # The file source takes files in the order of their times.
        when = _FIRST_TIME + self._number
        os.utime(path, (when, when))
        self._number += 1
        return path

    def _publish(self, paths: list[Path]) -> None:
        for path in paths:
            shown = path.with_name(path.name.removeprefix("."))
            path.rename(shown)
            self.files.append(shown)


def seconds(micros: int) -> float:
    """Microseconds of event time as seconds."""
    return micros / SECOND
