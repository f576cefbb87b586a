"""Where the bytes of a state are in the rows of its fragments. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.errors import PlanError
from anabranch.fragments.code import check_shape

ALIGNED = 64
"""The length of every row is a multiple of it: a cache line, and the widest vector."""

ROW = 128 << 10
"""The bytes of a row in a whole stripe, unless others are asked for."""

LARGEST_ROW = 1 << 30

_STRIPE = 16 << 20
"""The limit of all rows of a stripe together, unless a length of rows is asked for."""


def row_for(total: int) -> int:
    """The length of rows by default, if there are so many in a stripe.

    A stripe should stay in the processor's cache while its rows are coded and their checksums
    taken, but its calls must be few, as each waits for the interpreter's lock.

    >>> row_for(20), row_for(255)
    (131072, 65792)
    """
    return min(ROW, _STRIPE // total // ALIGNED * ALIGNED)


def row_of_stripe(stripe: int, data: int) -> int:
    """The length of rows that cut a state into stripes of so many bytes, about.

    >>> row_of_stripe(1 << 20, data=4), row_of_stripe(100, data=4)
    (262144, 64)
    """
    return min(LARGEST_ROW, max(ALIGNED, stripe // data // ALIGNED * ALIGNED))


@dataclass(frozen=True)
class Layout:
    """A state of ``size`` bytes, in stripes of ``data`` rows with ``row`` bytes each.

    The last stripe has shorter rows. What is missing to fill them is zeros.

    >>> layout = Layout(data=4, parity=2, row=128, size=1300)
    >>> layout.stripes, layout.row_size(0), layout.row_size(2), layout.rows_size
    (3, 128, 128, 384)
    >>> layout.span(2), layout.stripes_of(500, 600)
    ((1024, 1300), range(0, 2))
    """

    data: int
    parity: int
    row: int
    size: int

    def __post_init__(self) -> None:
        check_shape(self.data, self.parity)
        if self.row % ALIGNED or not ALIGNED <= self.row <= LARGEST_ROW:
            raise PlanError(
                f"Fragments: rows of {self.row} bytes; give a multiple of {ALIGNED} up to "
                f"{LARGEST_ROW}"
            )
        if self.size < 0:
            raise PlanError(f"Fragments: a state cannot have {self.size} bytes")

    @property
    def total(self) -> int:
        """How many fragments there are: n = m + k."""
        return self.data + self.parity

    @property
    def stripe(self) -> int:
        """The bytes of the state in a whole stripe."""
        return self.data * self.row

    @property
    def stripes(self) -> int:
        """How many stripes there are; none of an empty state."""
        return -(-self.size // self.stripe)

    @property
    def rows_size(self) -> int:
        """The bytes of all rows of one fragment."""
        last = self.stripes - 1
        return last * self.row + self.row_size(last) if self.stripes else 0

    def row_size(self, stripe: int) -> int:
        """The bytes of each row of a stripe. Those of one fragment start at ``stripe * row``."""
        start, end = self.span(stripe)
        return row_size(self.data, end - start)

    def span(self, stripe: int) -> tuple[int, int]:
        """The bytes of the state in a stripe."""
        if not 0 <= stripe < self.stripes:
            raise ValueError(f"there are {self.stripes} stripes, and none has the number {stripe}")
        start = stripe * self.stripe
        return start, min(start + self.stripe, self.size)

    def stripes_of(self, start: int, end: int) -> range:
        """The stripes that have these bytes of the state."""
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"bytes {start} to {end} of a state of {self.size}")
        return range(start // self.stripe, -(-end // self.stripe)) if end > start else range(0)

    def rows_of(self, stripe: int, start: int, end: int) -> range:
        """The data rows of a stripe that have some of these bytes of the state."""
        first, last = self.span(stripe)
        start, end = max(start, first) - first, min(end, last) - first
        size = self.row_size(stripe)
        return range(start // size, -(-end // size)) if end > start else range(0)


def row_size(data: int, size: int) -> int:
    """The bytes of each row of a stripe with ``size`` bytes of the state."""
    return -(-size // (data * ALIGNED)) * ALIGNED
