"""Which start of the system this is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anabranch import boot


def test_is_the_same_in_every_process() -> None:
    code = "from anabranch.boot import boot_id; print(boot_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == boot.boot_id()
    assert len(boot.boot_id()) == 32
    assert boot.same_boot(boot.boot_id())
    assert not boot.same_boot("0" * 32)


@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_system_without_a_boot_id_has_a_stable_one(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "boot_id"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(boot, "_LINUX", file)
    boot._read.cache_clear()
    try:
        first = boot.boot_id()
        boot._read.cache_clear()
        assert boot.boot_id() == first
        assert len(first) == 32
    finally:
        boot._read.cache_clear()
