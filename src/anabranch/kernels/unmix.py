"""The way back from the hash of a state key to that of the user's key."""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]


@kernel
def unmix(hashes: Array, sub: Array, out: Array) -> None:
    """Undo :func:`anabranch.kernels.encode.mix`: splitmix64's finaliser can be inverted."""
    for i in range(hashes.shape[0]):
        z = hashes[i]
        z = (z ^ (z >> np.uint64(31)) ^ (z >> np.uint64(62))) * np.uint64(0x319642B2D24D8EC3)
        z = (z ^ (z >> np.uint64(27)) ^ (z >> np.uint64(54))) * np.uint64(0x96DE1B173F119089)
        z = z ^ (z >> np.uint64(30)) ^ (z >> np.uint64(60))
        s = np.uint64(sub[i]) + np.uint64(0x9E3779B97F4A7C15)
        s = (s ^ (s >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        s = (s ^ (s >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out[i] = z ^ s ^ (s >> np.uint64(31))
