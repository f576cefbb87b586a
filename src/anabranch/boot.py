"""Which start of this machine's system this is: what was only in memory is gone after the next."""

from __future__ import annotations

import uuid
from functools import cache
from pathlib import Path

_LINUX = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """32 hexadecimal digits that are the same until the machine is started anew.

    On a system without Linux's boot id it is made from the machine alone. It then stays the same
    over a restart, so that a crash of the machine is not noticed by it.
    """
    return _read()


def same_boot(noted: str) -> bool:
    """Whether something that was noted with this boot id was written since the last start."""
    return noted == boot_id()


@cache
def _read() -> str:
    try:
        return uuid.UUID(_LINUX.read_text().strip()).hex
    except (OSError, ValueError):
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{uuid.getnode():012x}").hex
