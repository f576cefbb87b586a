"""Long chains of stored changes become full files again, beside everything else.

A restore reads every file of a chain, so chains must not grow for ever. To merge one reads and
writes all of the state, which is no work for the critical path, nor for the thread that stores
checkpoints: those go on meanwhile, each on top of the one before, and the first that is stored
after a merge names the merged file in the place of all that are in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from anabranch.backup.manifests import Manifest, OperatorManifest, Part
from anabranch.coordinator.events import Events

_LONGEST_CHAIN = 10

Merge = Callable[[str, int, OperatorManifest, threading.Event], Part]
"""Merges the stored files of an operator's instance into one, if it is not told to stop."""


class Shortening:
    """One merge at a time. Only :meth:`forget` is for any thread; the rest is for the one that
    stores checkpoints."""

    def __init__(self, merge: Merge, events: Events) -> None:
        self._merge = merge
        self._events = events
        self._run: _Run | None = None

    @property
    def idle(self) -> bool:
        """Whether there is no file that a later manifest may name and that none names yet."""
        return self._run is None

    def consider(self, manifest: Manifest) -> None:
        """Begin to merge the files of a manifest, if they are many and nothing is being merged."""
        chains = {name: _by_instance(operator) for name, operator in manifest.operators.items()}
        lengths = [len(chain.parts) for of in chains.values() for chain in of.values()]
        if self._run is None and max(lengths, default=0) > _LONGEST_CHAIN:
            self._run = _Run(self._merge, chains, self._events)
            self._run.start()

    def merged(self) -> Mapping[str, list[Part]]:
        """What has been merged since, for each operator; raises what a merge failed with."""
        run = self._run
        if run is None or run.is_alive():
            return {}
        self._run = None
        if run.failure is not None:
            raise run.failure
        return run.parts

    def forget(self) -> None:
        """Let what is being merged come to nothing: other files take the place of all of them."""
        run = self._run
        if run is not None:
            run.stopped.set()

    def close(self) -> None:
        """End what is going on."""
        self.forget()
        if self._run is not None:
            self._run.join()


class _Run(threading.Thread):
    def __init__(
        self, merge: Merge, chains: Mapping[str, Mapping[int, OperatorManifest]], events: Events
    ) -> None:
        super().__init__(name="shortening", daemon=True)
        self._merge_one, self._chains, self._events = merge, chains, events
        self.stopped = threading.Event()
        self.parts: dict[str, list[Part]] = {}
        self.failure: Exception | None = None

    def run(self) -> None:
        """Merge one chain after the other."""
        try:
            with self._events.timed("merge") as details:
                details["bytes"] = sum(self._merge_all())
        except Exception as error:
            self.failure = error
        if self.stopped.is_set():
            self.parts, self.failure = {}, None

    def _merge_all(self) -> list[int]:
        sizes: list[int] = []
        for name, of in self._chains.items():
            for instance, chain in of.items():
                if self.stopped.is_set():
                    return sizes
                part = self._merge_one(name, instance, chain, self.stopped)
                self.parts.setdefault(name, []).append(part)
                sizes.append(part.bytes)
        return sizes


def _by_instance(operator: OperatorManifest) -> dict[int, OperatorManifest]:
    instances = dict.fromkeys(part.instance for part in operator.parts)
    return {
        instance: replace(
            operator, parts=tuple(part for part in operator.parts if part.instance == instance)
        )
        for instance in instances
    }
