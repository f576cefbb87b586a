"""A state of any length, as it comes, into the rows of its fragments."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from anabranch.fragments.code import Row, code_of, row_of
from anabranch.fragments.label import Label, checksum_of_row, checksum_of_stripe
from anabranch.fragments.layout import Layout, row_for, row_size
from anabranch.units import Version


@dataclass(frozen=True)
class Stripe:
    """The n rows of a stripe: the next bytes of each fragment."""

    number: int
    rows: tuple[memoryview, ...]


class Encoder:
    """Codes one state, a stripe at a time, so that memory does not grow with the state.

    Send the rows of each stripe to the fragments, and then their labels.

    >>> encoder = Encoder(data=2, parity=1, row=64)
    >>> files = [bytearray() for _ in range(3)]
    >>> for stripe in encoder.stripes([b"a river ", b"forks"]):
    ...     for file, row in zip(files, stripe.rows, strict=True):
    ...         file += row
    >>> encoder.size, [len(file) for file in files]
    (13, [64, 64, 64])
    >>> print(encoder.label(2, name="counter", version=7, owner="10.0.0.3").state)
    counter at version 7 (840087eb1de1cc9e), 2 + 1
    """

    def __init__(self, data: int, parity: int, *, row: int | None = None) -> None:
        """``row``: the bytes of each row of a whole stripe, a multiple of 64."""
        self._code = code_of(data, parity)
        self._shape = Layout(data, parity, row_for(data + parity) if row is None else row, 0)
        self._products = self._code.products(range(data), range(data, data + parity))
        self._size: int | None = None
        self._rows = [array("Q") for _ in range(data + parity)]
        self._stripes = array("Q")

    @property
    def size(self) -> int:
        """The bytes of the state, once it was coded."""
        if self._size is None:
            raise ValueError("the state has not been coded to its end")
        return self._size

    def stripes(self, state: Iterable[Any]) -> Iterator[Stripe]:
        """The stripes of a state that comes in buffers of any length.

        Rows of data are parts of a buffer that has a whole stripe. It must not change while they
        are in use.
        """
        if len(self._stripes) or self._size is not None:
            raise ValueError("an encoder codes one state only")
        m, whole = self._shape.data, self._shape.stripe
        held, pending = 0, None
        for buffer in state:
            new = row_of(buffer)
            while len(new):
                if pending is None and len(new) >= whole:
                    yield self._coded(new[:whole])
                    new = new[whole:]
                    continue
                if pending is None:
                    # In one piece with parity, which malloc can give again after each stripe.
                    pending = np.empty(self._shape.total * self._shape.row, np.uint8)
                took = min(whole - held, len(new))
                pending[held : held + took] = new[:took]
                held, new = held + took, new[took:]
                if held == whole:
                    yield self._coded(pending[:whole], pending[whole:])
                    held, pending = 0, None
        size = len(self._stripes) * whole + held
        if pending is not None:
            end = m * row_size(m, held)
            pending[held:end] = 0
            yield self._coded(pending[:end], pending[end:])
        self._size = size

    def label(
        self, index: int, *, name: str, version: int, owner: str, holders: tuple[str, ...] = ()
    ) -> Label:
        """The label that ends a fragment. The state must have been coded to its end."""
        shape = self._shape
        return Label(
            name=name,
            version=Version(version),
            owner=owner,
            layout=Layout(shape.data, shape.parity, shape.row, self.size),
            index=index,
            rows=self._rows[index],
            stripes=self._stripes,
            holders=holders,
        )

    def _coded(self, data: Row, parity: Row | None = None) -> Stripe:
        """``parity`` has room for all rows of parity."""
        m, k = self._shape.data, self._shape.parity
        size = len(data) // m
        if parity is None:
            parity = np.empty(k * size, np.uint8)
        rows = (
            *(data[at : at + size] for at in range(0, m * size, size)),
            *(parity[at : at + size] for at in range(0, k * size, size)),
        )
        self._code.compute(self._products, rows[:m], rows[m:])
        digests = [checksum_of_row(row) for row in rows]
        for column, digest in zip(self._rows, digests, strict=True):
            column.append(digest)
        self._stripes.append(checksum_of_stripe(digests[:m]))
        return Stripe(len(self._stripes) - 1, tuple(row.data for row in rows))
