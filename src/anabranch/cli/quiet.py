"""Keeps the messages of a JVM out of a terminal with a live view."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_start() -> Iterator[None]:
    """Redirect the standard error of processes that start in the block to a temporary file.

    If the block fails, the file is printed, as it may have the reason.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            hidden.seek(0)
            os.write(2, hidden.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
