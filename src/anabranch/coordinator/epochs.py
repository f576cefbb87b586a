"""Which driver a query belongs to: whoever has taken the highest number in its checkpoint folder.

A number is taken by making a file that nobody has made before, and only the one after the highest
is taken. So two drivers never have the same, whatever machine they are on, and a driver is not the
newest any more once the file after its own is there. Whatever lasts is written after such a look.
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
    """What numbers are taken in: a store where a name can be made only once."""

    def create(self, name: str, data: bytes) -> bool:
        """Store bytes under a name that nobody has used; False if somebody was first."""
        ...

    def list(self, prefix: str = "") -> Sequence[str]:
        """The names that start with a text."""
        ...

    def size(self, name: str) -> int:
        """How many bytes are under a name; CheckpointNotFound if none are."""
        ...

    def delete(self, name: str) -> None:
        """Forget a name."""
        ...


class Reign:
    """The time in which one driver has the query."""

    def __init__(self, store: EpochStore, epoch: Epoch) -> None:
        self._store = store
        self.epoch = epoch

    @classmethod
    def begin(cls, store: EpochStore, driver: str, *, above: int = 0) -> Reign:
        """Take the query over from whoever had it; ``driver`` tells others who has it now."""
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
    """Looks now and then whether this driver still has the query.

    Whatever a driver writes, it looks first. One that has nothing to write would never find out,
    and keep what it has of a cluster from the one that has taken over.
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
        """Look from now on."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
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
