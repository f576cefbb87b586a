"""Checkpoints of a running query: captured with a batch, stored asynchronously."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from anabranch.backup.manifests import Manifest, Manifests, OperatorManifest, Part
from anabranch.checkpointing.policy import Checkpointing, Situation
from anabranch.coordinator.commits import Commit
from anabranch.coordinator.events import Events
from anabranch.coordinator.retries import again
from anabranch.coordinator.shortening import Shortening
from anabranch.coordinator.tables import Tables
from anabranch.errors import AnabranchError, StateFull
from anabranch.priority import thread_gives_way
from anabranch.state.capture import CheckpointSchema
from anabranch.units import NO_VERSION, Version

T = TypeVar("T")

_log = logging.getLogger("anabranch")


@dataclass(frozen=True)
class Wanted:
    """A checkpoint to be captured with the next batch."""

    base: Version | None
    """The version on which it builds; None: it has all rows."""


@dataclass(frozen=True)
class Taken:
    """What the instances captured in one committed batch, not yet stored."""

    commit: Commit
    files: Mapping[str, Mapping[int, str]]
    """For each operator the capture files by instance, each on the node of its instance."""
    stored: Future[None] = field(default_factory=Future, compare=False)
    """Done when it is stored, or could not be."""


class Checkpoints:
    """Decides with every batch whether to checkpoint, and stores what was captured.

    Storing is done by one thread, one version after the other. While something is on its way no
    batch is told to capture, so a slow store makes checkpoints rarer and never batches slower.
    ``secure`` has everything on disk that a version says is done, before its manifest is written;
    it returns what the manifest notes beside the event times.
    """

    def __init__(
        self,
        policy: Checkpointing,
        manifests: Manifests,
        schemas: Mapping[str, CheckpointSchema],
        tables: Tables,
        events: Events,
        secure: Callable[[Version], Mapping[str, Any]] = lambda version: {},
    ) -> None:
        self.policy = policy
        self.manifests = manifests
        self.schemas = schemas
        self._tables = tables
        self._events = events
        self._retain = policy.retain
        self._shortening = Shortening(self._merge, events)
        self._base: Version | None = None
        self._last = self._ordered = time.monotonic_ns()
        self._batches = 0
        self._forced = False
        self._secure = secure
        self._strays: set[str] = set()
        """Files that were stored, and that no manifest names."""
        self._waiting = 0
        self._idle = threading.Condition()
        self._hurry = threading.Event()
        self._stored = NO_VERSION
        self.failure: Exception | None = None
        self._queue: queue.SimpleQueue[Taken | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    @property
    def stored(self) -> Version:
        """The newest version that is safely stored."""
        return self._stored

    @property
    def base(self) -> Version | None:
        """The version since which the tables know what has changed in them, if it is stored."""
        known = self.failure is None and self._base == self._stored
        return self._base if known else None

    def reset(self, stored: Version, base: Version | None) -> None:
        """Say what is stored, and on which version the tables' changes build (None: unknown)."""
        self._stored = stored
        self._base = base
        self._last = time.monotonic_ns()
        self._batches = 0

    def start_anew(self, *, soon: bool) -> None:
        """Let the next checkpoint be a full one; ``soon``, where backups were lost: at once."""
        self._base = None
        self._forced = self._forced or soon
        self._shortening.forget()

    def force(self) -> None:
        """Take a checkpoint with the next batch, whatever the policy says."""
        self._forced = True

    def order(self) -> Wanted | None:
        """What the next batch is to capture, if anything."""
        if self._waiting:
            return None
        now = time.monotonic_ns()
        situation = Situation(now // 1000, self._last // 1000, self._batches)
        kind = self.policy.decide(situation)
        if kind is None and not self._forced:
            return None
        self._ordered = now
        whole = kind == "full" or not self.policy.tracks_changes or self.failure is not None
        return Wanted(None if whole else self._base)

    def committed(self, taken: Taken | None) -> None:
        """A batch is committed; store what it captured, if it was asked to."""
        self._batches += 1
        if taken is None:
            return
        self._last, self._batches, self._forced = self._ordered, 0, False
        self._base = taken.commit.version
        self.failure = None
        self._put(taken)

    def skipped(self, taken: Taken, reason: str) -> None:
        """A batch is committed, and not all of its instances could capture what they were told to.

        The next checkpoint is a full one: some tables count as unchanged since this one.
        """
        self._last, self._batches = self._ordered, 0
        self.failure = StateFull(reason)
        _log.warning("There is no checkpoint of version %s: %s", taken.commit.version, reason)
        self._events.add("checkpoint skipped", version=taken.commit.version, reason=reason[:500])
        self._discard(taken)

    def store(self, taken: Taken) -> None:
        """Store full captures, after what is on its way; between two batches only.

        They were not taken by a batch, so the tables' changes do not build on them.
        """
        self._base = None
        self._shortening.forget()
        self._put(taken)

    def _put(self, taken: Taken) -> None:
        with self._idle:
            self._waiting += 1
        self._queue.put(taken)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is on its way any more."""
        with self._idle:
            return self._idle.wait_for(lambda: self._waiting == 0, timeout)

    def settle(self) -> None:
        """Have nothing on its way any more, soon: what fails now is not tried again."""
        self._hurry.set()
        try:
            self.wait()
        finally:
            self._hurry.clear()

    def close(self) -> None:
        """Finish what is on its way and end the threads."""
        self._queue.put(None)
        self._thread.join()
        self._shortening.close()

    def _work(self) -> None:
        thread_gives_way()
        while (taken := self._queue.get()) is not None:
            failed: Exception | None = None
            try:
                self._store_taken(taken)
            except Exception as error:  # the query goes on; the next checkpoint will be a full one
                failed = self.failure = error
                _log.warning("The checkpoint of version %s failed: %s", taken.commit.version, error)
                self._discard(taken)
            with self._idle:
                self._waiting -= 1
                self._idle.notify_all()
            if failed is None:
                taken.stored.set_result(None)
            else:
                taken.stored.set_exception(failed)

    def _store_taken(self, taken: Taken) -> None:
        with self._events.timed("checkpoint", version=taken.commit.version) as details:
            noted = self._secure(taken.commit.version)
            parts: dict[str, list[Part]] = {}
            for name, files in taken.files.items():
                for instance, file in files.items():
                    part = self._again(partial(self._tables.store, name, instance, file))
                    parts.setdefault(name, []).append(part)
                    self._strays.add(part.name)
            self._publish(taken.commit, parts, noted)
            stored = [part for of in parts.values() for part in of]
            details["bytes"] = sum(part.bytes for part in stored)
            details["full"] = all(part.base is None for part in stored)
        self._shortening.consider(self.manifests.get(taken.commit.version))

    def _discard(self, taken: Taken) -> None:
        """Remove captures that are of no use, so that they do not take up memory."""
        for name, files in taken.files.items():
            for instance, file in files.items():
                try:
                    self._tables.discard(name, instance, file)
                except AnabranchError as error:
                    _log.info("A capture of %s/%s was not removed: %s", name, instance, error)

    def _publish(
        self, commit: Commit, parts: Mapping[str, list[Part]], noted: Mapping[str, Any]
    ) -> None:
        """Make a version exist whose files are all stored, and drop the oldest."""
        incremental = any(part.base is not None for of in parts.values() for part in of)
        before = self.manifests.get(self._stored).operators if incremental else {}
        merged = self._merged()
        operators = {
            name: before[name].extended([*merged.get(name, ()), *new], {})
            if incremental
            else OperatorManifest(self.schemas[name], tuple(new))
            for name, new in parts.items()
        }
        manifest = Manifest(commit.version, operators, {"times": commit.times, **noted})
        self._again(lambda: self.manifests.put(manifest))
        self._stored = commit.version
        self._strays -= manifest.files
        if self._shortening.idle:  # a merge reads files that may be needed for nothing else
            self._again(lambda: self.manifests.prune(retain=self._retain, also=self._strays))
            self._strays.clear()

    def _merged(self) -> Mapping[str, list[Part]]:
        """Files that take the place of many."""
        try:
            return self._shortening.merged()
        except Exception as error:  # a chain that cannot be read must not grow any more
            self.failure = error
            _log.warning("Checkpoints could not be merged; the next will be a full one: %s", error)
            return {}

    def _merge(
        self, operator: str, instance: int, saved: OperatorManifest, stopped: threading.Event
    ) -> Part:
        part = self._again(lambda: self._tables.merge(operator, instance, saved, stopped))
        self._strays.add(part.name)
        return part

    def _again(self, operation: Callable[[], T]) -> T:
        return again(operation, self._hurry)
