"""The one decorator that compiles: cached on disk, without the interpreter lock."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile a function over numpy arrays; its Python types are kept for the checker."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))
