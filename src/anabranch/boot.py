"""The boot id of this machine, which changes with every reboot."""

from __future__ import annotations

import uuid
from functools import cache
from pathlib import Path

_LINUX = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """32 hexadecimal digits that stay the same until the machine is rebooted.

    On a system without Linux's boot id they identify only the machine. They then stay the same
    over a reboot, so a crash of the machine is not detected.
    """
    return _read()


def same_boot(noted: str) -> bool:
    """Whether something with this boot id was written since the last boot."""
    return noted == boot_id()


@cache
def _read() -> str:
    try:
        return uuid.UUID(_LINUX.read_text().strip()).hex
    except (OSError, ValueError):
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{uuid.getnode():012x}").hex
