"""Small types for versions and times, which print and parse."""

import re
from datetime import timedelta
from typing import NewType

from anabranch.errors import PlanError

Version = NewType("Version", int)
"""The micro-batch id; -1 is the version of a state that has seen no batch."""

NO_VERSION = Version(-1)

_UNITS = {
    "us": 1,
    "microsecond": 1,
    "ms": 1_000,
    "millisecond": 1_000,
    "s": 1_000_000,
    "sec": 1_000_000,
    "second": 1_000_000,
    "min": 60_000_000,
    "minute": 60_000_000,
    "h": 3_600_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")

_SIZES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")

Size = str | int
"""A number of bytes: ``"64 GiB"``, ``"500 MB"``, or the number itself."""

_BITS = {"bit": 1, "kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
_BIT_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*(?:/\s*s)?\s*")

Duration = str | float | timedelta
"""A length of time: ``"30 seconds"``, a :class:`~datetime.timedelta`, or a number of seconds."""


def microseconds(duration: Duration, *, what: str = "duration") -> int:
    """Turn a duration into whole microseconds.

    >>> microseconds("30 seconds")
    30000000
    >>> microseconds("1 hour 30 minutes") == microseconds(5400)
    True
    """
    if isinstance(duration, timedelta):
        return round(duration.total_seconds() * 1_000_000)
    if isinstance(duration, bool):
        raise PlanError(f"{what}: {duration!r} is not a length of time")
    if isinstance(duration, int | float):
        return round(duration * 1_000_000)
    total, at = 0.0, 0
    text = duration.lower().removeprefix("interval ")
    while at < len(text):
        part = _PART.match(text, at)
        unit = part and (_UNITS.get(part[2]) or _UNITS.get(part[2].removesuffix("s")))
        if not part or not unit:
            raise PlanError(
                f"{what}: cannot read {duration!r} as a length of time; "
                "write it like '30 seconds', '5 minutes' or '1 hour 30 minutes'"
            )
        total += float(part[1]) * unit
        at = part.end()
    if not text.strip():
        raise PlanError(f"{what}: the length of time is empty")
    return round(total)


def byte_count(size: Size, *, what: str = "size") -> int:
    """Turn a size into a number of bytes.

    >>> byte_count("64 GiB") == 64 << 30
    True
    >>> byte_count("1.5 kB")
    1500
    """
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    else:
        match = _SIZE.fullmatch(size.lower()) if isinstance(size, str) else None
        unit = _SIZES.get(match[2]) if match else None
        if match is None or unit is None:
            raise PlanError(
                f"{what}: cannot read {size!r} as a size; write it like '64 GiB' or '500 MB', or "
                "give the number of bytes"
            )
        count = round(float(match[1]) * unit)
    if count < 0:
        raise PlanError(f"{what}: {size!r} is negative")
    return count


def bits_per_second(rate: str, *, what: str = "rate") -> int:
    """Turn the rate of a link into bits per second.

    >>> bits_per_second("100 Mbit")
    100000000
    >>> bits_per_second("2.5 Gbit/s")
    2500000000
    """
    match = _BIT_RATE.fullmatch(rate.lower()) if isinstance(rate, str) else None
    unit = _BITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise PlanError(
            f"{what}: cannot read {rate!r} as bits per second; write it like '100 Mbit' or '1 Gbit'"
        )
    return round(float(match[1]) * unit)
