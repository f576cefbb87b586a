"""Reading a state from its fragments at nodes of the ring: all holders in turn, some at once.

A state is read in blocks of stripes. For each block any m holders are asked, in turn over all n, so
that each sends as much as the others. One that is slow, dead or corrupt costs a block: another is
asked in its place, and it is asked last, or not at all, for those that follow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from anabranch.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, StoreError
from anabranch.fragments import Decoder, Label, turn
from anabranch.fragments.code import Row
from anabranch.fragments.decoder import Gathering
from anabranch.nodes.remote import NodeStore
from anabranch.nodes.standing.client import Ring
from anabranch.nodes.standing.survey import Piece, read_label
from anabranch.ring import Contact
from anabranch.stores.room import room

BLOCK = 1 << 20
"""So many bytes of a fragment are read at a time."""
_BLOCKS = 3
"""Blocks that are read at the same time."""
SLOW = 2.0
"""After so many seconds another holder is asked too."""
_GRACE = 0.5
"""Once enough labels are there, the others are waited for so many seconds."""


@dataclass(frozen=True)
class Source:
    """A fragment at a node, whose label was read."""

    piece: Piece
    label: Label
    store: NodeStore

    def read(self, offset: int, size: int) -> memoryview:
        """These of its bytes. See :class:`~anabranch.fragments.Source`."""
        return memoryview(self.store.get(str(self.piece.name), offset, size))


class Threads:
    """The threads that read from nodes, shared by the states that are read."""

    def __init__(self, count: int = 48) -> None:
        self.reading = ThreadPoolExecutor(count, "anabranch-gather")
        self.blocks = ThreadPoolExecutor(_BLOCKS, "anabranch-block")

    def close(self) -> None:
        """Read nothing more. Slow holders are not waited for."""
        for pool in (self.blocks, self.reading):
            pool.shutdown(wait=False, cancel_futures=True)


class Gathered:
    """A state that can be read."""

    def __init__(self, ring: Ring, pieces: Sequence[Piece], threads: Threads) -> None:
        """``pieces`` of one coding of the state. CheckpointNotFound if too few can be read;
        a StoreError if nodes do not answer that may have the others."""
        self.name = pieces[0].name.state
        self._needed = pieces[0].name.data
        self._failed: dict[Contact, StoreError] = {}
        self._corrupt: list[str] = []
        self._slow: set[int] = set()
        self._lock = threading.Lock()
        self._pool = threads.reading
        self._blocks = threads.blocks
        self._sources = self._open(ring, pieces)
        if len(self._sources) < self._needed:
            raise self._failure()
        self._decoder = Decoder(source.label for source in self._sources.values())
        self.layout = self._decoder.layout

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return self.layout.size

    @property
    def sources(self) -> Sequence[Source]:
        """The fragments whose labels could be read."""
        return list(self._sources.values())

    @property
    def corrupt(self) -> Sequence[str]:
        """The fragments of which some bytes were not as they were written."""
        return list(self._corrupt)

    def read(self, start: int, end: int) -> pa.Buffer:
        """The bytes from ``start`` to ``end``."""
        target = room(end - start)
        data = np.frombuffer(target, np.uint8)
        stripes = self.layout.stripes_of(start, end)
        per = max(1, BLOCK // self.layout.row)
        firsts = range(stripes.start // per * per, stripes.stop, per)
        blocks = [
            range(max(first, stripes.start), min(first + per, stripes.stop)) for first in firsts
        ]
        reading = [
            self._blocks.submit(self._read_block, block, block.start // per, start, data)
            for block in blocks
        ]
        for future in reading:
            future.result()
        return pa.py_buffer(target)

    def _open(self, ring: Ring, pieces: Sequence[Piece]) -> dict[int, Source]:
        opening = {self._pool.submit(_opened, ring, piece): piece for piece in pieces}
        found: dict[int, Source] = {}
        left = set(opening)
        enough: float | None = None
        while left:
            timeout = None if enough is None else max(0.0, enough - time.monotonic())
            done, left = wait(left, timeout, FIRST_COMPLETED)
            for future in done:
                try:
                    source = future.result()
                except StoreError as error:
                    self._failed[opening[future].node] = error
                except CheckpointError as error:
                    self._corrupt.append(str(error))
                else:
                    found.setdefault(source.label.index, source)
            if enough is None and len(found) >= self._needed:
                enough = time.monotonic() + _GRACE
            if enough is not None and time.monotonic() >= enough:
                break
        return dict(sorted(found.items()))

    def _read_block(self, stripes: range, number: int, start: int, target: Row) -> None:
        """Fill the part of ``target``, which begins at byte ``start`` of the state."""
        end = start + len(target)
        layout = self.layout
        if len(stripes) == 1:
            rows = layout.rows_of(stripes.start, start, end)
            if len(rows) < layout.data and all(index in self._sources for index in rows):
                gathering = self._gather(stripes, list(rows), list(rows))[0]
                if all(gathering.has(index) for index in rows):
                    _copy_rows(gathering, rows, layout.span(stripes.start)[0], start, target)
                    return
        order = [index for index in turn(layout, number) if index in self._sources]
        order.sort(key=lambda index: index in self._slow)
        for gathering in self._gather(stripes, order, order[: layout.data]):
            if gathering.needed:
                raise self._failure(gathering)
            self._decode(gathering, start, end, target)

    def _decode(self, gathering: Gathering, start: int, end: int, target: Row) -> None:
        first, last = self.layout.span(gathering.stripe)
        padded = self.layout.data * gathering.size
        if start <= first and first + padded <= end:
            gathering.into(target[first - start : first - start + padded])
            return
        data = np.empty(padded, np.uint8)
        gathering.into(data)
        low, high = max(start, first), min(end, last)
        target[low - start : high - start] = data[low - first : high - first]

    def _gather(self, stripes: range, order: list[int], first: list[int]) -> list[Gathering]:
        """The rows of some stripes: ``first`` are asked for them, and others of ``order`` in the
        place of those that fail."""
        gatherings = [self._decoder.gather(stripe) for stripe in stripes]
        offset = stripes.start * self.layout.row
        size = sum(gathering.size for gathering in gatherings)
        spare = [index for index in order if index not in first]
        asked: dict[Future[memoryview], int] = {}

        def ask(indexes: list[int]) -> None:
            for index in indexes:
                asked[self._pool.submit(self._sources[index].read, offset, size)] = index

        ask(first)
        until = time.monotonic() + SLOW
        while asked:
            done, _ = wait(asked, max(0.0, until - time.monotonic()), FIRST_COMPLETED)
            if not done:
                self._slow |= set(asked.values())
                ask(_taken(spare, len(asked)))
                until = time.monotonic() + SLOW * 5
                continue
            for future in done:
                index = asked.pop(future)
                if not self._take(index, future, gatherings):
                    ask(_taken(spare, 1))
            if all(not each.needed for each in gatherings):
                break
            if len(first) < self.layout.data and all(
                each.has(index) for each in gatherings for index in first
            ):
                break
        return gatherings

    def _take(self, index: int, future: Future[memoryview], gatherings: list[Gathering]) -> bool:
        """Take the rows of a fragment. Whether all of them are as they were written."""
        try:
            data = future.result()
        except (StoreError, CheckpointError) as error:
            with self._lock:
                source = self._sources[index]
                if isinstance(error, StoreError):
                    self._failed[source.piece.node] = error
                else:
                    self._corrupt.append(str(error))
                self._slow.add(index)
            return False
        at, right = 0, True
        for gathering in gatherings:
            if not gathering.add(index, data[at : at + gathering.size]):
                right = False
            at += gathering.size
        if not right:
            with self._lock:
                source = self._sources[index]
                self._corrupt.append(f"{source.label.title} at {source.piece.node.host}")
                self._slow.add(index)
        return right

    def _failure(self, gathering: Gathering | None = None) -> CheckpointError | StoreError:
        """Why the state cannot be read: nodes that do not answer may have what others lack."""
        if gathering is None:
            have = f"{len(self._sources)} of the {self._needed} needed fragments can be read"
        else:
            count = self._needed - gathering.needed
            have = f"{count} of the {self._needed} needed rows of stripe {gathering.stripe} are"
        why = [*map(str, self._failed.values()), *self._corrupt]
        message = f"{self.name}: {have} there; {'; '.join(why[:6]) or 'no more were found'}"
        if self._failed:
            kind = type(next(iter(self._failed.values())))
            return kind(message, part=self.name)
        error = CheckpointCorrupt if self._corrupt else CheckpointNotFound
        return error(message, part=self.name)


def _opened(ring: Ring, piece: Piece) -> Source:
    label = read_label(ring, piece)
    if (label.name, label.index, label.layout.data) != (
        piece.name.state,
        piece.name.index,
        piece.name.data,
    ):
        raise CheckpointCorrupt(f"{piece.name} at {piece.node.host} is {label.title}")
    return Source(piece, label, ring.store(piece.node.address))


def _copy_rows(gathering: Gathering, rows: range, first: int, start: int, target: Row) -> None:
    """Copy rows of data that were read into where they belong, as far as that is wanted."""
    for index in rows:
        at = first + index * gathering.size
        low, high = max(start, at), min(start + len(target), at + gathering.size)
        target[low - start : high - start] = gathering.row(index)[low - at : high - at]


def _taken(spare: list[int], count: int) -> list[int]:
    taken = spare[:count]
    del spare[:count]
    return taken
