"""Epochs: a query belongs to the driver with the highest epoch number in its checkpoint folder.

A driver claims the number after the highest by a file, ``epochs/<number>-<nonce>``. It then lists
the folder. It has the query if nobody else has claimed that number or a higher one. Otherwise it
deletes its claim, and tries a higher number after a random pause. Of two drivers that claim one
number, the one that lists last sees the claim of the other, so at most one of them goes on. This
needs a store that lists a file as soon as it is written, as HDFS, S3, GCS and Azure do. It does not
need a store that creates a file only once. On a local disk, which does, the claim has no nonce, and
only one driver can create it.

A driver is deposed by any higher number, and by a smaller nonce at its own number. The second rule
is for a store that lists a file late all the same: of two drivers that both go on, one gives up. A
driver looks for such claims before it writes anything durable.
"""

from __future__ import annotations

import logging
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from anabranch.errors import Deposed, DidNotHappen, StoreError
from anabranch.nodes.requests import Epoch

_log = logging.getLogger("anabranch")
_FOLDER = "epochs/"
_NAME = re.compile(rf"{_FOLDER}(\d{{9}})(?:-([0-9a-f]+))?")
_NONCE_BYTES = 8
_KEPT = 3
_TRIES = 100
_LONGEST_PAUSE = 0.5
_LOOK_SECONDS = 10.0


class EpochStore(Protocol):
    """The store of the claims: it lists a file as soon as it is written, until it is deleted."""

    @property
    def creates_once(self) -> bool:
        """Whether exactly one of several callers of :meth:`create` gets True."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Store bytes under a new name. False if the name exists already."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store bytes under a name."""
        ...

    def list(self, prefix: str = "") -> Sequence[str]:
        """The names that start with a prefix."""
        ...

    def delete(self, name: str) -> None:
        """Delete a name."""
        ...


@dataclass(frozen=True, order=True)
class Claim:
    """The file by which a driver has a number."""

    number: int
    nonce: str = ""
    """None where a file can be made only once."""

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{_FOLDER}{self.number:09d}" + (f"-{self.nonce}" if self.nonce else "")


class Reign:
    """The ownership of a query by one driver, under its epoch."""

    def __init__(self, store: EpochStore, claim: Claim) -> None:
        self._store = store
        self._claim = claim
        self.epoch = Epoch(claim.number)

    @classmethod
    def begin(cls, store: EpochStore, driver: str, *, above: int = 0) -> Reign:
        """Take the query over. ``driver`` identifies this driver in the epoch file."""
        for _ in range(_TRIES):
            before = _claims(store)
            number = max([above, *(each.number for each in before)]) + 1
            claim = _claimed(store, number, driver)
            if claim is None:
                continue
            # A claim with a higher number may have come meanwhile, and tidied this one's away.
            if all(each == claim or each.number < number for each in _claims(store)):
                reign = cls(store, claim)
                reign._tidy(before)
                return reign
            store.delete(claim.name)
            _pause()
        raise DidNotHappen(
            f"{_TRIES} other drivers took the query over while this one started; check whether "
            "something starts the query again and again"
        )

    def check(self) -> None:
        """Deposed if another driver has taken the query over."""
        mine = self._claim
        # The highest is looked for, as the one after this may have been tidied away.
        for each in reversed(_claims(self._store)):
            if each.number > mine.number or (each.number == mine.number and each < mine):
                raise Deposed(
                    f"driver {each.number} has taken the query over; this one, driver "
                    f"{self.epoch}, stops and writes nothing more"
                )

    def _tidy(self, before: Collection[Claim]) -> None:
        for each in sorted(before)[: -_KEPT or None]:
            try:
                self._store.delete(each.name)
            except StoreError as error:
                _log.info(
                    "The epoch file of earlier driver %s was not deleted: %s", each.number, error
                )


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


def _claimed(store: EpochStore, number: int, driver: str) -> Claim | None:
    """Claim a number; None if it is known at once that somebody was first."""
    if store.creates_once:
        claim = Claim(number)
        return claim if store.create(claim.name, driver.encode()) else None
    claim = Claim(number, secrets.token_hex(_NONCE_BYTES))
    store.put(claim.name, driver.encode())
    return claim


def _claims(store: EpochStore) -> list[Claim]:
    found = (_NAME.fullmatch(name) for name in store.list(_FOLDER))
    return sorted(Claim(int(match[1]), match[2] or "") for match in found if match)


def _pause() -> None:
    """Let one of several that have seen each other be first the next time."""
    time.sleep(random.uniform(0, _LONGEST_PAUSE))
