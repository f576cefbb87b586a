"""Epochs: a query belongs to the driver with the highest epoch number in its checkpoint folder.

A driver takes the number after the highest, by creating a file that did not exist. Two drivers on
whatever machines therefore never have the same number. A driver is deposed once a file with a
higher number exists. It looks for such a file before it writes anything durable.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from anabranch.errors import Deposed, DidNotHappen, StoreError
from anabranch.nodes.requests import Epoch

_log = logging.getLogger("anabranch")
_FOLDER = "epochs/"
_NAME = re.compile(rf"{_FOLDER}(\d{{9}})")
_KEPT = 3
_TRIES = 100
_LOOK_SECONDS = 10.0


class EpochStore(Protocol):
    """The store of the epoch files, in which a name can be created only once."""

    def create(self, name: str, data: bytes) -> bool:
        """Store bytes under a new name. False if the name exists already."""
        ...

    def list(self, prefix: str = "") -> Sequence[str]:
        """The names that start with a prefix."""
        ...

    def size(self, name: str) -> int:
        """How many bytes are under a name; CheckpointNotFound if none are."""
        ...

    def delete(self, name: str) -> None:
        """Delete a name."""
        ...


class Reign:
    """The ownership of a query by one driver, under its epoch."""

    def __init__(self, store: EpochStore, epoch: Epoch) -> None:
        self._store = store
        self.epoch = epoch

    @classmethod
    def begin(cls, store: EpochStore, driver: str, *, above: int = 0) -> Reign:
        """Take the query over. ``driver`` identifies this driver in the epoch file."""
        for _ in range(_TRIES):
            taken = _taken(store)
            epoch = max([above, *taken]) + 1
            if not store.create(_name(epoch), driver.encode()):
                continue
            if max(_taken(store), default=0) > epoch:
                # Others came meanwhile, and the number may be one that was tidied away since.
                store.delete(_name(epoch))
                continue
            reign = cls(store, Epoch(epoch))
            reign._tidy(taken)
            return reign
        raise DidNotHappen(
            f"{_TRIES} other drivers took the query over while this one started; check whether "
            "something starts the query again and again"
        )

    def check(self) -> None:
        """Deposed if another driver has taken the query over."""
        # The highest is looked for, as the one after this may have been tidied away.
        newest = max(_taken(self._store), default=0)
        if newest > self.epoch:
            raise Deposed(
                f"driver {newest} has taken the query over; this one, driver {self.epoch}, stops "
                "and writes nothing more"
            )

    def _tidy(self, taken: Sequence[int]) -> None:
        for epoch in sorted(taken)[: -_KEPT or None]:
            try:
                self._store.delete(_name(epoch))
            except StoreError as error:
                _log.info("The epoch file of earlier driver %s was not deleted: %s", epoch, error)


class Lookout:
    """Checks periodically whether this driver still has the query.

    A driver checks before every durable write too. A deposed driver that has nothing to write would
    never find out without this, and would keep cluster resources from its successor.
    """

    def __init__(
        self, reign: Reign, deposed: Callable[[Deposed], None], seconds: float = _LOOK_SECONDS
    ) -> None:
        self._reign = reign
        self._deposed = deposed
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="anabranch-epochs", daemon=True)

    def begin(self) -> None:
        """Start to check."""
        self._thread.start()

    def close(self) -> None:
        """Stop to check, and wait for the thread."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self._reign.check()
            except Deposed as error:
                self._deposed(error)
                return
            except StoreError as error:
                _log.info(
                    "The epochs in the checkpoint folder cannot be read; trying again in %.0f s: "
                    "%s",
                    self._seconds,
                    error,
                )


def _taken(store: EpochStore) -> list[int]:
    found = (_NAME.fullmatch(name) for name in store.list(_FOLDER))
    return sorted(int(match[1]) for match in found if match)


def _name(epoch: int) -> str:
    return f"{_FOLDER}{epoch:09d}"
