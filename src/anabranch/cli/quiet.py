"""Keeps the chatter of a JVM out of a terminal that is drawn on."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_start() -> Iterator[None]:
    """Processes started inside write their standard error to a file that nobody sees.

    If what is inside fails, the text is printed after all: it may say why.
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
