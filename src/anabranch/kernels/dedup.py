"""Which rows are the first of their key, one pass over a batch in order."""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]


@kernel
def first_seen(seen: Array, at: Array) -> Array:
    """True where ``seen[at]`` was not set yet; sets it."""
    passed = np.zeros(at.shape[0], np.bool_)
    for i in range(at.shape[0]):
        if not seen[at[i]]:
            seen[at[i]] = True
            passed[i] = True
    return passed


@kernel
def first_within(expires: Array, at: Array, times: Array, ttl: int) -> Array:
    """True where the time is after ``expires[at]``, which then becomes that time plus ttl."""
    passed = np.zeros(at.shape[0], np.bool_)
    for i in range(at.shape[0]):
        if times[i] > expires[at[i]]:
            expires[at[i]] = times[i] + ttl
            passed[i] = True
    return passed
