"""Lost fragments of a state, from its stripes as they come."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from anabranch.fragments.code import Row, code_of
from anabranch.fragments.decoder import Decoder
from anabranch.fragments.label import Label, checksum_of_row


class Remaking:
    """Makes some fragments again, all of them in one pass over the state."""

    def __init__(self, decoder: Decoder, lost: Sequence[int]) -> None:
        layout = decoder.layout
        self._any = next(iter(decoder.labels.values()))
        self._lost = tuple(lost)
        self._parity = tuple(index for index in lost if index >= layout.data)
        self._code = code_of(layout.data, layout.parity)
        self._products = self._code.products(range(layout.data), self._parity)
        self._digests = {index: array("Q") for index in lost}

    def rows(self, stripe: int, data: Row) -> list[memoryview]:
        """The row of each of them, from all data of the next stripe.

        Those of data are parts of it.
        """
        layout = self._any.layout
        size = layout.row_size(stripe)
        rows = [data[at : at + size] for at in range(0, layout.data * size, size)]
        made = {index: np.empty(size, np.uint8) for index in self._parity}
        if made:
            self._code.compute(self._products, rows, list(made.values()))
        found = [made[index] if index in made else rows[index] for index in self._lost]
        for index, row in zip(self._lost, found, strict=True):
            self._digests[index].append(checksum_of_row(row))
        return [row.data for row in found]

    def labels(self) -> list[Label]:
        """What follows the rows of each, once those of all stripes were made."""
        return [replace(self._any, index=i, rows=self._digests[i]) for i in self._lost]
