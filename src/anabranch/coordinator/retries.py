"""Trying a store again after it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from anabranch.errors import StoreError

T = TypeVar("T")

_PAUSES = (0.1, 1.0, 5.0)


def again(operation: Callable[[], T], hurry: threading.Event) -> T:
    """Run an operation that may be repeated, a few times with growing pauses if the store fails.

    There are no pauses and no repeats once ``hurry`` is set.
    """
    for pause in _PAUSES:
        try:
            return operation()
        except StoreError:
            if hurry.wait(pause):
                raise
    return operation()
