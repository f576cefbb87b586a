"""The counters of a table, changed atomically.

They are written to the slot that is not in use. One store of eight bytes then switches the slots. A
process that is killed leaves either the old counters or the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch import boot
from anabranch.errors import SchemaChanged, StateMissing

Array = npt.NDArray[Any]

NONE = -(1 << 62)
"""Stands for no version."""

_MAGIC = 0x68636E6172626E61
_FORMAT = 3
_ROWS, _RING = 5, 6
_BOOT = slice(8, 10)
_TEXT = 64
_TEXT_BYTES = 7000
_SLOTS = (4096, 5120)
_BEGIN = 6144
_SLOT_WORDS = 1024


@dataclass(frozen=True)
class Limits:
    """The capacity of a table, for which its arrays have addresses."""

    rows: int
    ring: int
    """Bytes of the values of one column of variable length."""


@dataclass
class HeapCounters:
    """Positions in a heap, in bytes since it was made; they only ever grow."""

    head: int = 0
    tail: int = 0
    live: int = 0
    """Bytes of the records that are in use."""


@dataclass
class Counters:
    """Everything about a table that is not in an array."""

    version: int
    previous: int = NONE
    unfinished: int = NONE
    fence: int = NONE
    attempt: int = NONE
    """With the fence, who was the last to begin a version."""
    maintaining: int = 0
    """Set while rows and heap records are moved about, with the undo log as the way back."""
    tick: int = 1
    """What a row touched now is marked with."""
    clean: int = 0
    """Rows with a greater mark changed since the last checkpoint."""
    clean_since: int = NONE
    """The version at which the last checkpoint was taken."""
    rows: int = 0
    live: int = 0
    dead: int = 0
    free: int = 0
    dirty_from: int = 0
    dirty_to: int = 0
    queue_from: int = 0
    queue_to: int = 0
    appended: int = 0
    """Bytes that the last version added to heaps; cleaning keeps pace with it."""
    changed: int = 0
    """Rows that the last version changed; releasing keeps pace with it."""
    shedding: int = NONE
    """A number for the set of groups that are being shed; NONE if there are none."""
    unshed: int = 0
    """Rows before this one are still to be looked at for rows of these groups."""
    mixed: int = 0
    """Whether rows of groups were shed since the last checkpoint, or will be."""
    shed: int = 0
    """How many in the list of changed rows were shed, and are no change to a checkpoint."""
    heaps: list[HeapCounters] = field(default_factory=list)


_NAMES = [f.name for f in fields(Counters) if f.name != "heaps"]
_NUMBERS = len(_NAMES)
_numbers_of = attrgetter(*_NAMES)


class Header:
    """The counters, the layout's fingerprint and two counts, in the first bytes of the file."""

    def __init__(self, words: Array, heaps: int) -> None:
        self._words = words
        self._heaps = heaps
        if _NUMBERS + 3 * heaps > _SLOT_WORDS:
            raise ValueError(f"{heaps} columns of strings and bytes are too many for one table")

    def write_layout(self, fingerprint: str, text: str, limits: Limits) -> None:
        """Write the layout of the table. The magic number is written last and makes it valid."""
        described = f"{fingerprint}\n{text}".encode()[:_TEXT_BYTES]
        room = self._words[_TEXT:1024].view(np.uint8)
        room[:] = 0
        room[: len(described)] = np.frombuffer(described, np.uint8)
        self._words[_ROWS], self._words[_RING] = limits.rows, limits.ring
        self._words[_BOOT] = np.frombuffer(bytes.fromhex(boot.boot_id()), np.int64)
        self._words[1] = _FORMAT
        self._words[0] = _MAGIC

    def check_layout(self, folder: object, fingerprint: str, text: str) -> None:
        """Refuse a file that is no table, has another layout, or is from before the last boot.

        Pages of a mapped file reach a disk in any order. After a crash of the machine the header
        may be on the disk without the rows, so the file cannot be trusted.
        """
        check_magic(self._words, folder)
        if not boot.same_boot(self._words[_BOOT].tobytes().hex()):
            raise StateMissing(
                f"the state table in {folder} was made before the machine was last started and may "
                "be incomplete; its state must be restored from a checkpoint"
            )
        described = bytes(self._words[_TEXT:1024].view(np.uint8)).rstrip(b"\0")
        found, _, found_text = described.decode(errors="replace").partition("\n")
        if found != fingerprint:
            raise SchemaChanged(
                f"the state table in {folder} was written as {found_text}; it was opened as {text}"
            )

    @property
    def limits(self) -> Limits:
        """The capacity of the table."""
        return Limits(int(self._words[_ROWS]), int(self._words[_RING]))

    def load(self) -> Counters:
        """A copy of the counters in use."""
        return self._unpack(_SLOTS[int(self._words[2])])

    def flip(self, counters: Counters) -> None:
        """Put these counters in use."""
        other = 1 - int(self._words[2])
        self._pack(_SLOTS[other], counters)
        self._words[2] = other

    def begun(self) -> Counters:
        """The counters as they were when the version in the journal began."""
        return self._unpack(_BEGIN)

    def save_begun(self, counters: Counters) -> None:
        """Keep the counters that a roll-back returns to."""
        self._pack(_BEGIN, counters)

    @property
    def images(self) -> int:
        """How many before-images of the journal are complete."""
        return int(self._words[3])

    @images.setter
    def images(self, count: int) -> None:
        self._words[3] = count

    @property
    def undos(self) -> int:
        """How many entries of the undo log are complete."""
        return int(self._words[4])

    @undos.setter
    def undos(self, count: int) -> None:
        self._words[4] = count

    def _pack(self, at: int, counters: Counters) -> None:
        # Not with dataclasses.astuple, which copies every number: this is done for all tables of an
        # instance with every batch.
        flat = list(_numbers_of(counters))
        for heap in counters.heaps:
            flat += heap.head, heap.tail, heap.live
        self._words[at : at + len(flat)] = flat

    def _unpack(self, at: int) -> Counters:
        flat = self._words[at : at + _NUMBERS + 3 * self._heaps].tolist()
        heaps = [
            HeapCounters(*flat[i : i + 3]) for i in range(_NUMBERS, _NUMBERS + 3 * self._heaps, 3)
        ]
        numbers = dict(zip(_NAMES, flat, strict=False))
        return Counters(heaps=heaps, **numbers)


def check_magic(words: Array, folder: object) -> None:
    """Refuse what is not a state table of this format."""
    if words[0] != _MAGIC or words[1] != _FORMAT:
        raise StateMissing(f"the file in {folder} is no state table that this version can read")
