"""What the tests of nodes share."""

import os
import select
import time
from collections.abc import Callable

from anabranch.errors import DidNotHappen
from anabranch.nodes import AgentAddress

LIMIT = 200 << 20
Starter = Callable[..., AgentAddress]


def is_gone(pid: int, timeout: float = 20) -> bool:
    """Whether a process ends in this time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(1000 * timeout))
    finally:
        os.close(descriptor)


def wait_until(condition: Callable[[], object], timeout: float = 20) -> None:
    """Return when the condition holds; a node that does not answer is asked again."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            if condition():
                return
        except DidNotHappen:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)
