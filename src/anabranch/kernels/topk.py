"""The greatest entries of many groups at once."""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]


@kernel
def greatest(groups: Array, codes: Array, room: Array, k: int) -> tuple[Array, Array]:
    """The k entries with the greatest codes of each group, the greatest first.

    ``room[g]`` is how many entries group g has, at most k. Of entries with equal codes the earlier
    one goes first. Returns the positions of the kept entries, group after group, and where the
    entries of each group start in them.
    """
    starts = np.zeros(room.shape[0] + 1, np.int64)
    for group in range(room.shape[0]):
        starts[group + 1] = starts[group] + room[group]
    kept = np.empty(starts[-1], np.int64)
    filled = np.zeros(room.shape[0], np.int64)
    for i in range(groups.shape[0]):
        group = groups[i]
        start = starts[group]
        end = start + filled[group]
        if filled[group] < k:
            filled[group] += 1
        elif codes[i] > codes[kept[end - 1]]:
            end -= 1
        else:
            continue
        while end > start and codes[kept[end - 1]] < codes[i]:
            kept[end] = kept[end - 1]
            end -= 1
        kept[end] = i
    return kept, starts
