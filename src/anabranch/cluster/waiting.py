"""Waiting for a condition, with a timeout."""

import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

_PAUSE = 0.05


def until(ask: Callable[[], Answer], seconds: float) -> Answer:
    """Evaluate a condition until it is true or the time is over, and return its last value."""
    deadline = time.monotonic() + seconds
    while True:
        answer = ask()
        if answer or time.monotonic() >= deadline:
            return answer
        time.sleep(_PAUSE)
