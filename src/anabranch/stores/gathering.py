"""The bytes of states that are in fragments, gathered from as many holders as suffice.

For every few stripes any m holders are asked, those first that were asked for least, so that all n
send equally much in turn. One that is slow, silent or has a corrupt fragment costs these stripes,
and is asked again only if the others are too few. Who the holders are, and under which names they
have their fragments, does not matter here: nodes of a query, or standing nodes of a ring.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
from anabranch.stores.meter import Meter, Stopwatch
from anabranch.stores.room import room

_ROUND = 4 << 20
"""About how many bytes of a state are asked for at a time,"""
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
_UNANSWERED = 4.0
"""It also does after so many seconds in which none has answered that could be compared with it."""
_THREADS = 64


class Ranges(Protocol):
    """Gives out ranges of fragments: a holder, or a store that reaches several.

    Errors are those of a :class:`~anabranch.stores.store.BackupStore`.
    """

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """The bytes under a name, or a range of them."""

    def size(self, name: str) -> int:
        """The number of bytes under a name."""


@dataclass(frozen=True)
class Held:
    """A fragment that a holder should have."""

    holder: str
    at: Ranges
    name: str
    """Its name there."""


@dataclass(frozen=True)
class Wanted:
    """A state that is in fragments, and who should have them."""

    name: str
    needed: int
    """How many fragments give it."""
    held: tuple[Held, ...]
    bytes: int | None = None
    """How long the state is, if that is known: then nobody is asked how long fragments are."""


def threads() -> ThreadPoolExecutor:
    """The threads that read from holders. Many states can share them."""
    return ThreadPoolExecutor(_THREADS, "anabranch-gather")


class Holders:
    """Which holders were slow or failed so far, and how much each was asked for.

    Of several fragments the one at the host ``near`` is taken first. ``meter`` is told what was
    computed.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, near: str = "", meter: Meter | None = None
    ) -> None:
        self.pool = pool
        self.near = near
        self.meter = meter
        self.doubtful: set[str] = set()
        """Those that are asked last."""
        self.asked: Counter[str] = Counter()
        """How many bytes each was asked for, all states together."""


@dataclass(frozen=True, eq=False)
class _Fragment:
    """A fragment at a holder, of which the end was read."""

    held: Held
    label: Label
    at: int
    """Where the end begins that was read."""
    end: pa.Buffer

    @property
    def holder(self) -> str:
        return self.held.holder

    @property
    def index(self) -> int:
        return self.label.index

    def read(self, offset: int, length: int) -> pa.Buffer:
        """Some of its bytes."""
        if offset >= self.at:
            return self.end.slice(offset - self.at, min(length, self.at + self.end.size - offset))
        return self.held.at.get(self.held.name, offset, length)


class Gathered:
    """A state that is in fragments, to be read; see :class:`~anabranch.state.part_file.Source`.

    CheckpointError, with the name of the state, if too few holders have a fragment of it; a
    StoreError if others, which are silent, may have them. Of several threads one at a time reads.
    """

    def __init__(self, wanted: Wanted, holders: Holders) -> None:
        self._wanted = wanted
        self._holders = holders
        self._decoder: Decoder
        self._found: list[_Fragment] = []
        self._errors: dict[str, CheckpointError | StoreError] = {}
        self._alone = threading.Lock()
        self._slowest = 0.0
        """The seconds that the slowest answer took of those that were waited for."""
        self._computing = Stopwatch()
        """Runs while rows are verified and decoded."""
        self._opening = {
            holders.pool.submit(_opened, wanted, held): held.holder for held in wanted.held
        }
        expected = [f for f, holder in self._opening.items() if holder not in holders.doubtful]
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
        return len({each.index for each in self._found}) >= self._wanted.needed

    def _add_more(self) -> bool:
        """Wait for another holder whose label has not come. False if there is none."""
        if not self._opening:
            return False
        done, _ = wait(self._opening, return_when=FIRST_COMPLETED)
        self._add(list(done))
        return True

    def _add(self, opened: Sequence[Future[_Fragment]]) -> None:
        for each in opened:
            holder = self._opening.pop(each)
            try:
                found = each.result()
                if self._found:
                    self._decoder.add(found.label)
                else:
                    self._decoder = Decoder([found.label])
                self._found.append(found)
            except (StoreError, CheckpointError) as error:
                self._fail(holder, error)

    def _fail(self, holder: str, error: StoreError | CheckpointError) -> None:
        self._errors[holder] = error
        self._holders.doubtful.add(holder)

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return self._decoder.layout.size

    @property
    def holders(self) -> tuple[str, ...]:
        """The holders whose labels could be read."""
        return tuple(each.holder for each in self._found)

    @property
    def missing(self) -> list[int]:
        """The fragments that no holder has."""
        there = {each.index for each in self._found}
        return [index for index in range(self._decoder.layout.total) if index not in there]

    def read(self, offset: int, length: int) -> pa.Buffer:
        """See :class:`~anabranch.state.part_file.Source`."""
        layout = self._decoder.layout
        end = min(offset + length, self.size)
        target = room(end - offset)
        view = np.frombuffer(target, np.uint8)
        with self._alone:
            computing = self._computing = Stopwatch()
            for gathering, rows in self._gathered(offset, end):
                with computing.running():
                    self._into(view, offset, end, gathering, rows)
        if self._holders.meter is not None:
            shape = layout.data, layout.parity
            self._holders.meter.recomputed(shape, end - offset, computing.seconds)
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

    def remake(self, lost: Mapping[int, Path], whole: pa.Buffer | None = None) -> dict[int, Label]:
        """Write some lost fragments to files, all in one pass over the state. Their labels, too.

        ``whole`` has all bytes of the state, verified; without it they are gathered. Each file ends
        with its label, which notes the holders that the others note.
        """
        remaking = Remaking(self._decoder, tuple(lost))
        with self._alone, ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in lost.values()]
            for number, stripe in self._stripes_of(whole):
                for file, row in zip(files, remaking.rows(number, stripe), strict=True):
                    file.write(row)
            labels = dict(zip(lost, remaking.labels(), strict=True))
            for file, label in zip(files, labels.values(), strict=True):
                file.write(label.to_bytes())
        return labels

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
                following.before = self._slowest
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
            if each.holder not in self._errors and of.lacks(each.index) and each not in of.asked
        ]
        sound = {each.index for each in able if each.holder not in self._holders.doubtful}
        if of.rows is not None and not sound >= of.lacking:
            of.rows = None
        wanted = set(places) if of.rows is None else of.lacking
        short = of.short

        def place(each: _Fragment) -> tuple[bool, bool, int, int]:
            holder, asked = each.holder, self._holders.asked[each.holder]
            doubtful = holder in self._holders.doubtful
            return doubtful, holder != self._holders.near, asked, places[each.index]

        for each in sorted(able, key=place):
            if short > 0 and each.index in wanted:
                of.start(each, self._holders, self._decoder.layout)
                wanted.remove(each.index)  # another holder may have the same fragment
                short -= 1

    def _complete(self, of: _Round) -> None:
        """Wait until a round has all rows that it needs."""
        while not of.is_whole:
            now = time.monotonic()
            self._holders.doubtful.update(each.holder for each in of.late(now))
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
                    self._fail(fragment.holder, error)
                else:
                    if not sound:
                        self._holders.doubtful.add(fragment.holder)
        self._slowest = max(self._slowest, of.slowest)

    def _failure(self, of: _Round | None = None) -> CheckpointError | StoreError:
        """Why the state cannot be read: silent holders may have what others lack."""
        name = self._wanted.name
        short = None if of is None else next((g for g in of.gatherings if g.needed), None)
        if short is None:
            count = len({each.index for each in self._found})
            what = f"{count} of its holders have a fragment that can be read"
        else:
            what = f"too few rows of stripe {short.stripe} can be read"
        reasons = [f"{holder}: {error}" for holder, error in self._errors.items()]
        if short is not None:
            reasons += [f"{title} is corrupt there" for title in short.corrupt]
        message = f"{name}: {what}, and {self._wanted.needed} are needed: {'; '.join(reasons)}"
        silent = [each for each in self._errors.values() if isinstance(each, StoreError)]
        if silent:
            lacking = [h for h, each in self._errors.items() if isinstance(each, CheckpointError)]
            # Nothing is known to be lost as long as it may be at those that are silent.
            part = name if lacking else None
            return type(silent[0])(message, host=silent[0].host, part=part, without=lacking)
        # Missing and corrupt are different things to those that look for another version.
        errors = [each for each in self._errors.values() if isinstance(each, CheckpointCorrupt)]
        corrupt = errors if short is None else short.corrupt
        return (CheckpointCorrupt if corrupt else CheckpointNotFound)(message, part=name)


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
        self.asked: set[_Fragment] = set()
        self.pending: dict[Future[pa.Buffer], _Asked] = {}
        self.slowest = 0.0
        """The seconds that the slowest answer took; 0 if none has come."""
        self.before = 0.0
        """What that was in the rounds before, when this one was begun."""
        self._late: set[Future[pa.Buffer]] = set()

    @property
    def is_whole(self) -> bool:
        """Whether all needed rows have come."""
        if self.rows is not None:
            return all(self.gatherings[0].has(index) for index in self.rows)
        return all(not each.needed for each in self.gatherings)

    def lacks(self, index: int) -> bool:
        """Whether rows of a fragment are neither there nor on their way."""
        there = all(each.has(index) for each in self.gatherings)
        return not there and index not in self._punctual

    @property
    def lacking(self) -> set[int]:
        """Those of ``rows`` that are neither there nor on their way."""
        assert self.rows is not None
        return set(filter(self.lacks, self.rows))

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
        return {each.fragment.index for each in punctual}

    def start(self, fragment: _Fragment, holders: Holders, layout: Layout) -> None:
        """Ask the holder of a fragment for its rows."""
        first, last = self.gatherings[0].stripe, self.gatherings[-1].stripe
        offset = first * layout.row
        length = last * layout.row + layout.row_size(last) - offset
        self.asked.add(fragment)
        holders.asked[fragment.holder] += length
        future = holders.pool.submit(fragment.read, offset, length)
        self.pending[future] = _Asked(fragment, time.monotonic())

    def take(self, block: Future[pa.Buffer]) -> bool:
        """Take the rows that have come. False if one is corrupt; the error if they did not come."""
        asked = self.pending.pop(block)
        data = memoryview(block.result())
        self.slowest = max(self.slowest, time.monotonic() - asked.since)
        sound, at = True, 0
        for each in self.gatherings:
            sound &= each.add(asked.fragment.index, data[at : at + each.size])
            at += each.size
        return sound

    def late(self, now: float) -> list[_Fragment]:
        """Those that have taken much longer than the others, and count as slow from now on."""
        late = {f for f, each in self.pending.items() if self._due(each) <= now} - self._late
        self._late |= late
        return [self.pending[each].fragment for each in late]

    def patience(self, now: float) -> float | None:
        """After how many seconds the next one is late; None if all are."""
        due = [self._due(each) for f, each in self.pending.items() if f not in self._late]
        return max(0.0, min(due) - now) if due else None

    def _due(self, asked: _Asked) -> float:
        if self.slowest:
            return asked.since + max(_GRACE, _PATIENCE * self.slowest)
        return asked.since + max(_UNANSWERED, _PATIENCE * self.before)


def _opened(wanted: Wanted, held: Held) -> _Fragment:
    """The fragment of a state at a holder. Its end, which has the label, is read at once."""
    rows = _rows_size(wanted, held)
    at = rows - _LABEL if rows > _SMALL else 0
    end = held.at.get(held.name, at)

    def read(offset: int, length: int) -> pa.Buffer:
        if offset >= at:
            return end.slice(offset - at, length)
        return held.at.get(held.name, offset, length)

    label = Label.read(read, at + end.size, name=held.name)
    if (label.name, label.layout.data) != (wanted.name, wanted.needed):
        raise CheckpointNotFound(
            f"{held.name} is a fragment of {label.state}, not of {wanted.name}"
        )
    return _Fragment(held, label, at, end)


def _rows_size(wanted: Wanted, held: Held) -> int:
    """About how many bytes are before the label of a fragment."""
    if wanted.bytes is None:
        return held.at.size(held.name)
    row = row_for(len(wanted.held))
    return Layout(wanted.needed, 1, row, wanted.bytes).rows_size
