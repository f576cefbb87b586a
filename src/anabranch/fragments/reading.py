"""The bytes of a state, or a range of them, from fragments that can be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from anabranch.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, StoreError
from anabranch.fragments.code import Row
from anabranch.fragments.decoder import Decoder, Gathering
from anabranch.fragments.label import Label


class Source(Protocol):
    """A fragment that can be read."""

    @property
    def label(self) -> Label:
        """What it is."""
        ...

    def read(self, offset: int, size: int) -> Any:
        """These of its bytes. An error of a store means that it cannot be read any more."""
        ...


class Reader:
    """Reads a state from its fragments, a stripe at a time, one row after the other.

    Rows of data are read first, as they need no decoding, and no more rows than are needed. A
    corrupt row counts as missing for its stripe, a source that fails for all that follow.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        """CheckpointCorrupt if they are of several states, CheckpointNotFound if too few."""
        self.decoder = Decoder(source.label for source in sources)
        self.layout = self.decoder.layout
        self._sources = sorted(sources, key=lambda source: source.label.index)
        self._errors: list[str] = []
        self._check(len(self.decoder.labels))

    def read(self, start: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """The bytes of the state from ``start`` to ``end``, a stripe at a time."""
        end = self.layout.size if end is None else end
        for stripe in self.layout.stripes_of(start, end):
            first, last = self.layout.span(stripe)
            data = np.empty(self.layout.data * self.layout.row_size(stripe), np.uint8)
            self._fill(stripe, start, end, data)
            yield data.data[max(start, first) - first : min(end, last) - first]

    def into(self, target: Row, start: int = 0) -> None:
        """Fill ``target`` with the bytes of the state from ``start`` on. Whole stripes are decoded
        where they belong, without a copy."""
        end = start + len(target)
        for stripe in self.layout.stripes_of(start, end):
            first, last = self.layout.span(stripe)
            padded = self.layout.data * self.layout.row_size(stripe)
            if start <= first and first + padded <= end:
                self._fill(stripe, first, last, target[first - start : first - start + padded])
            else:
                data = np.empty(padded, np.uint8)
                self._fill(stripe, start, end, data)
                low, high = max(start, first), min(end, last)
                target[low - start : high - start] = data[low - first : high - first]

    def _fill(self, stripe: int, start: int, end: int, data: Row) -> None:
        """Fill the part of a stripe's data that is in a range, and maybe more of it."""
        rows = self.layout.rows_of(stripe, start, end)
        gathering = self._gather(stripe, rows)
        if len(rows) < self.layout.data and all(gathering.has(index) for index in rows):
            size = gathering.size
            for index in rows:
                data[index * size : (index + 1) * size] = gathering.row(index)
        else:
            self._whole(gathering, data)

    def _whole(self, gathering: Gathering, data: Row) -> None:
        if gathering.needed:
            self._more(gathering, range(self.layout.total), self.layout.data)
        if gathering.needed:
            self._check(self.layout.data - gathering.needed, gathering)
        gathering.into(data)

    def _gather(self, stripe: int, rows: range) -> Gathering:
        """The rows of data that are wanted, as far as they can be read."""
        gathering = self.decoder.gather(stripe)
        self._more(gathering, rows, len(rows))
        return gathering

    def _more(self, gathering: Gathering, rows: range, count: int) -> None:
        """Read rows until there are so many of these."""
        offset = gathering.stripe * self.layout.row
        count -= sum(map(gathering.has, rows))
        for source in tuple(self._sources):
            if count <= 0:
                return
            label = source.label
            if label.index not in rows or gathering.has(label.index):
                continue
            try:
                row = source.read(offset, gathering.size)
            except (StoreError, CheckpointError, OSError) as error:
                self._sources.remove(source)
                self._errors.append(f"{label.title}: {error}")
            else:
                count -= gathering.add(label.index, row)

    def _check(self, count: int, gathering: Gathering | None = None) -> None:
        if count >= self.layout.data:
            return
        missing = sorted(set(range(self.layout.total)) - self.decoder.labels.keys())
        problems = [f"fragments {', '.join(map(str, missing))} are missing"] if missing else []
        problems += self._errors
        message = f"{self.decoder.state}: {count} of the {self.layout.data} needed "
        if gathering is None:
            raise CheckpointNotFound(f"{message}fragments are there; {'; '.join(problems)}")
        problems += [f"{title} is corrupt there" for title in gathering.corrupt]
        # Missing and corrupt are different things to those that look for another version.
        error = CheckpointCorrupt if gathering.corrupt else CheckpointNotFound
        raise error(
            f"{message}rows of stripe {gathering.stripe} can be read; {'; '.join(problems)}"
        )
