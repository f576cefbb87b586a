"""From state rows to the other state rows of the same keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.kernels.unmix import unmix
from anabranch.operators.rows import Rows
from anabranch.state.view import State

Array = npt.NDArray[Any]


def owners(state: State, at: Array, keys: Sequence[str]) -> tuple[Rows, list[Array]]:
    """The user's keys of some state rows, and their sub-keys.

    The keys are rows that can be given to ``state.find`` with another sub-key.
    """
    columns = state.keys(at)
    # Writable copies: kernels take read-only arrays for another type and compile for it anew.
    sub = [np.array(column) for column in columns[len(keys) :]]
    hashes = np.asarray(state.table.hashes(at), dtype=np.uint64)
    for values in reversed(sub):
        before = np.empty_like(hashes)
        unmix(hashes, values, before)
        hashes = before
    return Rows(pa.RecordBatch.from_arrays(columns[: len(keys)], list(keys)), hashes), sub
