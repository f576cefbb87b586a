"""The bytes of parts that are in fragments, gathered from as many holders as suffice.

For every few stripes any m holders are asked, those first that were asked for least, so that all n
send equally much in turn. One that is slow, silent or has a corrupt fragment costs these stripes,
and is asked again only if the others are too few.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from anabranch.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    StoreError,
)
from anabranch.fragments import Decoder, Gathering, Label, Layout, Remaking, turn
from anabranch.fragments.code import Row
from anabranch.fragments.layout import row_for
from anabranch.state.part import Part, peer_name
from anabranch.stores.meter import Metered, Stopwatch
from anabranch.stores.room import room
from anabranch.stores.store import BackupStore

_ROUND = 4 << 20
"""About how many bytes of a part are asked for at a time,"""
_ROUNDS_AHEAD = 3
"""and how many times so many are on their way."""
_SMALL = 64 << 10
"""Of a fragment that is not larger all bytes come with its label,"""
_LABEL = 16 << 10
"""and of others so many before it: what is read first of a label, wherever it begins."""
_GRACE = 0.5
"""A holder may always take so many seconds,"""
_PATIENCE = 3.0
"""or so many times as long as the others, before it counts as slow."""
_THREADS = 64


class Holders:
    """The nodes that have fragments, and which of them were slow or failed so far.

    Of several fragments the one at the host ``near`` is taken first.
    """

    def __init__(self, store: BackupStore, near: str = "") -> None:
        self.store = store
        self.near = near
        self.doubtful: set[str] = set()
        """Those that are asked last."""
        self.asked: Counter[str] = Counter()
        """How many bytes each was asked for, all parts together."""
        self.pool = ThreadPoolExecutor(_THREADS, "anabranch-gather")

    def close(self) -> None:
        """End. A silent holder is not waited for."""
        self.pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def gathered(store: BackupStore, part: Part) -> Iterator[Scattered]:
    """A part that is in fragments, to be read; see :class:`Scattered`."""
    holders = Holders(store)
    try:
        yield Scattered(holders, part)
    finally:
        holders.close()


@dataclass(frozen=True, eq=False)
class _Fragment:
    """A fragment at a holder, of which the end was read."""

    host: str
    name: str
    label: Label
    at: int
    """Where the end begins that was read."""
    end: pa.Buffer

    def read(self, store: BackupStore, offset: int, length: int) -> pa.Buffer:
        """Some of its bytes."""
        if offset >= self.at:
            return self.end.slice(offset - self.at, min(length, self.at + self.end.size - offset))
        return store.get(self.name, offset, length)


class Scattered:
    """The bytes of a part that is in fragments; see :class:`~anabranch.state.part_file.Source`.

    CheckpointError, with the name of the part, if too few of its holders have a fragment of it;
    a StoreError if others, which are silent, may have them. One thread at a time may read.
    """

    def __init__(self, holders: Holders, part: Part) -> None:
        self._holders = holders
        self._part = part
        self._decoder: Decoder
        self._found: list[_Fragment] = []
        self._errors: dict[str, CheckpointError | StoreError] = {}
        self._computing = Stopwatch()
        """Runs while rows are verified and decoded."""
        self._opening = {
            holders.pool.submit(_opened, holders.store, host, part): host for host in part.holders
        }
        expected = [f for f, host in self._opening.items() if host not in holders.doubtful]
        wait(expected, timeout=_GRACE)
        holders.doubtful.update(self._opening[each] for each in expected if not each.done())
        self._add([each for each in self._opening if each.done()])
        while not self._sufficient:
            if not self._add_more():
                raise self._failure()
        layout = self._decoder.layout
        # So few stripes that there are enough rounds for every holder to have its turn.
        self._stripes = max(1, min(_ROUND // layout.stripe, layout.stripes // layout.total))

    @property
    def _sufficient(self) -> bool:
        return len({each.label.index for each in self._found}) >= self._part.needed

    def _add_more(self) -> bool:
        """Wait for another holder whose label has not come. False if there is none."""
        if not self._opening:
            return False
        done, _ = wait(self._opening, return_when=FIRST_COMPLETED)
        self._add(list(done))
        return True

    def _add(self, opened: Sequence[Future[_Fragment]]) -> None:
        for each in opened:
            host = self._opening.pop(each)
            try:
                found = each.result()
                if self._found:
                    self._decoder.add(found.label)
                else:
                    self._decoder = Decoder([found.label])
                self._found.append(found)
            except (StoreError, CheckpointError) as error:
                self._fail(host, error)

    def _fail(self, host: str, error: StoreError | CheckpointError) -> None:
        self._errors[host] = error
        self._holders.doubtful.add(host)

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return self._decoder.layout.size

    @property
    def hosts(self) -> tuple[str, ...]:
        """The holders whose labels could be read."""
        return tuple(each.host for each in self._found)

    @property
    def missing(self) -> list[int]:
        """The fragments that no holder has."""
        there = {each.label.index for each in self._found}
        return [index for index in range(self._decoder.layout.total) if index not in there]

    def read(self, offset: int, length: int) -> pa.Buffer:
        """See :class:`~anabranch.state.part_file.Source`."""
        layout = self._decoder.layout
        end = min(offset + length, self.size)
        target = room(end - offset)
        view = np.frombuffer(target, np.uint8)
        computing = self._computing = Stopwatch()
        for gathering, rows in self._gathered(offset, end):
            with computing.running():
                self._into(view, offset, end, gathering, rows)
        if isinstance(self._holders.store, Metered):
            shape = layout.data, layout.parity
            self._holders.store.recomputed(shape, end - offset, computing.seconds)
        return pa.py_buffer(target)

    def _into(
        self, view: Row, offset: int, end: int, gathering: Gathering, rows: range | None
    ) -> None:
        """Fill the part of a range that is in a stripe."""
        layout = self._decoder.layout
        first, last = layout.span(gathering.stripe)
        low, high = max(offset, first), min(end, last)
        padded = layout.data * gathering.size
        if rows is None and low == first and first + padded <= end:
            gathering.into(view[low - offset : low - offset + padded])
            return
        data = np.empty(padded, np.uint8)
        if rows is None:
            gathering.into(data)
        else:
            for index in rows:
                start = index * gathering.size
                data[start : start + gathering.size] = gathering.row(index)
        view[low - offset : high - offset] = data[low - first : high - first]

    def remade(
        self, lost: Sequence[int], whole: pa.Buffer | None = None
    ) -> Iterator[list[memoryview]]:
        """The bytes of some lost fragments, some of each at a time.

        ``whole`` has all bytes of the part, verified; without it they are gathered.
        """
        remaking = Remaking(self._decoder, lost)
        for number, stripe in self._stripes_of(whole):
            yield remaking.rows(number, stripe)
        yield [memoryview(label.to_bytes()) for label in remaking.labels()]

    def _stripes_of(self, whole: pa.Buffer | None) -> Iterator[tuple[int, Row]]:
        """All data of each stripe, with the zeros at its end. Valid until the next one."""
        layout = self._decoder.layout
        data = np.empty(layout.stripe, np.uint8)
        if whole is None:
            for gathering, _ in self._gathered(0, self.size):
                stripe = data[: layout.data * gathering.size]
                gathering.into(stripe)
                yield gathering.stripe, stripe
            return
        view = np.frombuffer(whole, np.uint8)
        for number in range(layout.stripes):
            first, last = layout.span(number)
            stripe = data[: layout.data * layout.row_size(number)]
            stripe[: last - first] = view[first:last]
            stripe[last - first :] = 0
            yield number, stripe

    def _gathered(self, start: int, end: int) -> Iterator[tuple[Gathering, range | None]]:
        """The stripes of a range, and which rows of data are there, if not all can be had."""
        coming: deque[_Round] = deque()
        rounds = iter(self._rounds(start, end))
        while True:
            while len(coming) < _ROUNDS_AHEAD and (following := next(rounds, None)) is not None:
                self._ask(following)
                coming.append(following)
            if not coming:
                return
            current = coming.popleft()
            self._complete(current)
            for gathering in current.gatherings:
                yield gathering, current.rows

    def _rounds(self, start: int, end: int) -> list[_Round]:
        """A range, divided into some stripes each. Of a stripe that is not wanted as a whole, the
        rows with the wanted data are enough."""
        layout = self._decoder.layout
        rounds: list[_Round] = []
        for stripe in layout.stripes_of(start, end):
            rows = layout.rows_of(stripe, start, end)
            gathering = self._decoder.gather(stripe)
            number = stripe // self._stripes
            if len(rows) < layout.data:
                rounds.append(_Round(number, [gathering], rows))
            elif rounds and rounds[-1].number == number and rounds[-1].rows is None:
                rounds[-1].gatherings.append(gathering)
            else:
                rounds.append(_Round(number, [gathering], None))
        return rounds

    def _ask(self, of: _Round) -> None:
        """Ask as many holders as are needed yet, those first whose turn it is."""
        places = {index: at for at, index in enumerate(turn(self._decoder.layout, of.number))}
        able = [
            each
            for each in self._found
            if each.host not in self._errors and each.label.index not in of.asked
        ]
        sound = {e.label.index for e in able if e.host not in self._holders.doubtful}
        if of.rows is not None and not sound >= of.lacking:
            of.rows = None
        wanted = places.keys() if of.rows is None else of.lacking
        short = of.short

        def place(each: _Fragment) -> tuple[bool, bool, int, int]:
            index, host = each.label.index, each.host
            asked = self._holders.asked[host]
            return index not in sound, host != self._holders.near, asked, places[index]

        for each in sorted(able, key=place):
            if short > 0 and each.label.index in wanted:
                of.start(each, self._holders, self._decoder.layout)
                short -= 1

    def _complete(self, of: _Round) -> None:
        """Wait until a round has all rows that it needs."""
        while not of.is_whole:
            now = time.monotonic()
            self._holders.doubtful.update(each.host for each in of.late(now))
            self._ask(of)
            if not of.pending:
                if not self._add_more():
                    raise self._failure(of)
                continue
            done, _ = wait(of.pending, of.patience(now), return_when=FIRST_COMPLETED)
            for each in done:
                fragment = of.pending[each].fragment
                try:
                    with self._computing.running():
                        sound = of.take(each)
                except (StoreError, CheckpointError) as error:
                    self._fail(fragment.host, error)
                else:
                    if not sound:
                        self._holders.doubtful.add(fragment.host)

    def _failure(self, of: _Round | None = None) -> CheckpointError | StoreError:
        """Why the part cannot be read: silent holders may have what others lack."""
        silent = [each for each in self._errors.values() if isinstance(each, StoreError)]
        if silent:
            lacking = (h for h, each in self._errors.items() if isinstance(each, CheckpointError))
            silent[0].part, silent[0].without = self._part.name, tuple(lacking)
            return silent[0]
        reasons = [str(each) for each in self._errors.values()]
        short = None if of is None else next((g for g in of.gatherings if g.needed), None)
        if short is None:
            what = f"{len(self._found)} of its holders have a fragment that can be read"
            kind: type[CheckpointError] = CheckpointNotFound
        else:
            what = f"too few rows of stripe {short.stripe} can be read"
            reasons += [f"{title} is corrupt there" for title in short.corrupt]
            # Missing and corrupt are different things to those that look for another version.
            kind = CheckpointCorrupt if short.corrupt else CheckpointNotFound
        return kind(
            f"{self._part.name}: {what}, and {self._part.needed} are needed: {'; '.join(reasons)}",
            part=self._part.name,
        )


@dataclass(frozen=True)
class _Asked:
    fragment: _Fragment
    since: float


class _Round:
    """Some stripes that are gathered together: of each as many rows as are needed."""

    def __init__(self, number: int, gatherings: list[Gathering], rows: range | None) -> None:
        self.number = number
        self.gatherings = gatherings
        self.rows = rows
        """The rows of data that are enough, unless one of them cannot be had. None: any m rows."""
        self.asked: set[int] = set()
        self.pending: dict[Future[pa.Buffer], _Asked] = {}
        self._late: set[Future[pa.Buffer]] = set()
        self._slowest: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all needed rows have come."""
        if self.rows is not None:
            return all(self.gatherings[0].has(index) for index in self.rows)
        return all(not each.needed for each in self.gatherings)

    @property
    def lacking(self) -> set[int]:
        """Those of ``rows`` that are neither there nor on their way."""
        assert self.rows is not None
        return {
            index
            for index in self.rows
            if not self.gatherings[0].has(index) and index not in self._punctual
        }

    @property
    def short(self) -> int:
        """How many more holders must be asked."""
        if self.rows is not None:
            return len(self.lacking)
        needed: int = max(each.needed for each in self.gatherings)
        return needed - len(self._punctual)

    @property
    def _punctual(self) -> set[int]:
        punctual = (each for future, each in self.pending.items() if future not in self._late)
        return {each.fragment.label.index for each in punctual}

    def start(self, fragment: _Fragment, holders: Holders, layout: Layout) -> None:
        """Ask the holder of a fragment for its rows."""
        first, last = self.gatherings[0].stripe, self.gatherings[-1].stripe
        offset = first * layout.row
        length = last * layout.row + layout.row_size(last) - offset
        self.asked.add(fragment.label.index)
        holders.asked[fragment.host] += length
        future = holders.pool.submit(fragment.read, holders.store, offset, length)
        self.pending[future] = _Asked(fragment, time.monotonic())

    def take(self, block: Future[pa.Buffer]) -> bool:
        """Take the rows that have come. False if one is corrupt; the error if they did not come."""
        asked = self.pending.pop(block)
        data = memoryview(block.result())
        self._slowest = max(self._slowest or 0.0, time.monotonic() - asked.since)
        sound, at = True, 0
        for each in self.gatherings:
            sound &= each.add(asked.fragment.label.index, data[at : at + each.size])
            at += each.size
        return sound

    def late(self, now: float) -> list[_Fragment]:
        """Those that have taken much longer than the others, and count as slow from now on."""
        late = {f for f, each in self.pending.items() if self._due(each) <= now} - self._late
        self._late |= late
        return [self.pending[each].fragment for each in late]

    def patience(self, now: float) -> float | None:
        """After how many seconds the next one is late; None if there is none to compare with."""
        due = [self._due(each) for f, each in self.pending.items() if f not in self._late]
        return max(0.0, min(due) - now) if due and self._slowest is not None else None

    def _due(self, asked: _Asked) -> float:
        if self._slowest is None:
            return float("inf")
        return asked.since + max(_GRACE, _PATIENCE * self._slowest)


def _opened(store: BackupStore, host: str, part: Part) -> _Fragment:
    """The fragment of a part at a holder. Its end, which has the label, is read at once."""
    name = peer_name(host, part.name)
    usual = Layout(part.needed, 1, row_for(len(part.holders)), part.bytes)
    at = usual.rows_size - _LABEL if usual.rows_size > _SMALL else 0
    end = store.get(name, at)

    def read(offset: int, length: int) -> pa.Buffer:
        return fragment_end(offset, length) if offset >= at else store.get(name, offset, length)

    def fragment_end(offset: int, length: int) -> pa.Buffer:
        return end.slice(offset - at, length)

    label = Label.read(read, at + end.size, name=name)
    if (label.name, label.layout.data) != (part.name, part.needed):
        raise CheckpointNotFound(f"{name} is a fragment of {label.state}, not of {part.name}")
    return _Fragment(host, name, label, at, end)
