"""Waiting for something to become true, with an end."""

import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

_PAUSE = 0.05


def until(ask: Callable[[], Answer], seconds: float) -> Answer:
    """Ask until the answer is true or the time is over, and return the last answer."""
    deadline = time.monotonic() + seconds
    while True:
        answer = ask()
        if answer or time.monotonic() >= deadline:
            return answer
        time.sleep(_PAUSE)
