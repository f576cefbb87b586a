"""The data of a stripe from any m of its rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from anabranch.errors import CheckpointCorrupt
from anabranch.fragments.code import Row, code_of, row_of
from anabranch.fragments.label import Label, checksum_of_row, checksum_of_stripe
from anabranch.fragments.layout import Layout


def one_state(labels: Iterable[Label]) -> dict[int, Label]:
    """The labels of different fragments of one state, by index.

    CheckpointCorrupt, which names a fragment, if they are of several states, versions or codings.
    """
    by_index: dict[int, Label] = {}
    state = None
    for label in labels:
        if state is None:
            state = label.state
        elif label.state != state:
            raise CheckpointCorrupt(f"{label.title} is of {label.state}, and the others of {state}")
        known = by_index.setdefault(label.index, label)
        if known is not label and list(known.rows) != list(label.rows):
            raise CheckpointCorrupt(f"{label.title}: there are two, with different checksums")
    if state is None:
        raise CheckpointCorrupt("no fragments were given")
    return by_index


def turn(layout: Layout, stripe: int) -> tuple[int, ...]:
    """All fragments, in the order in which to ask for their rows of a stripe.

    The first m of them move on by m with each stripe, so that all holders send equally much.

    >>> layout = Layout(data=2, parity=3, row=64, size=1000)
    >>> [turn(layout, stripe)[:2] for stripe in range(4)]
    [(0, 1), (2, 3), (4, 0), (1, 2)]
    """
    start = stripe * layout.data % layout.total
    return (*range(start, layout.total), *range(start))


class Decoder:
    """Decodes the stripes of one state. Threads may share it."""

    def __init__(self, labels: Iterable[Label]) -> None:
        self.labels = one_state(labels)
        self.state = next(iter(self.labels.values())).state
        self.layout = self.state.layout
        self._code = code_of(self.layout.data, self.layout.parity)

    def add(self, label: Label) -> None:
        """Admit the rows of another fragment. CheckpointCorrupt if it is of another state."""
        self.labels = one_state([*self.labels.values(), label])

    def gather(self, stripe: int) -> Gathering:
        """To be given the rows of a stripe as they come."""
        return Gathering(self, stripe)

    def _decode(self, stripe: int, rows: dict[int, Row], target: Row) -> None:
        m, size = self.layout.data, self.layout.row_size(stripe)
        into = [target[at : at + size] for at in range(0, m * size, size)]
        lost = [index for index in range(m) if index not in rows]
        have = sorted(rows)[:m]
        if lost:
            self._code.compute(
                self._code.products(have, lost),
                [rows[index] for index in have],
                [into[index] for index in lost],
            )
        for index in have:
            if index < m:
                into[index][:] = rows[index]
        self._verify(stripe, lost, into)

    def _verify(self, stripe: int, lost: list[int], data: list[Row]) -> None:
        """Before anyone sees the data: of rows that were decoded the checksums are computed."""
        found = checksum_of_stripe(
            checksum_of_row(row) if index in lost else self.labels[index].rows[stripe]
            for index, row in enumerate(data)
        )
        written = next(iter(self.labels.values())).stripes[stripe]
        if found != written:
            raise CheckpointCorrupt(
                f"stripe {stripe} of {self.state}: its rows are as written, and together they have "
                f"the checksum {found:016x} instead of {written:016x}"
            )


class Gathering:
    """The rows of one stripe that have come so far. Each is verified at once."""

    def __init__(self, decoder: Decoder, stripe: int) -> None:
        self.stripe = stripe
        self.size = decoder.layout.row_size(stripe)
        self.corrupt: list[str] = []
        """The fragments whose row of this stripe is not as it was written."""
        self._decoder = decoder
        self._rows: dict[int, Row] = {}

    def add(self, index: int, data: Any) -> bool:
        """Add the row of a fragment. False, and nothing is done, if it is corrupt or truncated.

        It must stay as it is until the stripe is decoded.
        """
        row = row_of(data)
        label = self._decoder.labels[index]
        if len(row) != self.size or checksum_of_row(row) != label.rows[self.stripe]:
            self.corrupt.append(label.title)
            return False
        self._rows[index] = row
        return True

    def has(self, index: int) -> bool:
        """Whether the row of a fragment is there."""
        return index in self._rows

    def row(self, index: int) -> Row:
        """A row that is there."""
        return self._rows[index]

    @property
    def needed(self) -> int:
        """How many more rows are needed; 0 if the stripe can be decoded."""
        return max(0, self._decoder.layout.data - len(self._rows))

    def into(self, target: Row) -> None:
        """Fill this with the data of the stripe: m rows, the last ones with zeros at their end."""
        if self.needed:
            raise CheckpointCorrupt(
                f"stripe {self.stripe} of {self._decoder.state} needs {self.needed} more rows; "
                f"corrupt are those of {', '.join(self.corrupt) or 'none'}"
            )
        self._decoder._decode(self.stripe, self._rows, target)
