"""Trying a store again after it failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from anabranch.errors import StoreError

T = TypeVar("T")

_PAUSES = (0.1, 1.0, 5.0)


def again(operation: Callable[[], T]) -> T:
    """Run an operation that may be repeated, a few times with growing pauses if the store fails."""
    for pause in _PAUSES:
        try:
            return operation()
        except StoreError:
            time.sleep(pause)
    return operation()
