"""Where the tests of state keep their tables."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if there is one, as state usually is."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="anabranch-test-") as name:
        yield Path(name)
