"""Room for bytes from elsewhere: a full disk is an error, and does not end the process."""

import errno
import os
import sys

import pytest

from anabranch.errors import DidNotHappen
from anabranch.stores import room as rooms
from anabranch.stores.room import room


def test_much_room_is_in_a_file_and_can_be_written() -> None:
    size = rooms._IN_MEMORY + 5000
    view = memoryview(room(size))
    assert len(view) == size
    view[-4:] = b"last"
    assert bytes(view[:4]) == bytes(4)
    assert len(room(0)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for blocks")
def test_the_disk_has_given_its_blocks_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Written through a map, a file without blocks ends the process if the disk is full."""
    given: list[int] = []
    original = os.posix_fallocate

    def allocate(descriptor: int, offset: int, size: int) -> None:
        original(descriptor, offset, size)
        given.append(os.fstat(descriptor).st_blocks * 512)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    size = rooms._IN_MEMORY + 1
    room(size)
    assert given[0] >= size

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DidNotHappen, match=r"no room for \d+ bytes in .*No space left"):
        room(size)
