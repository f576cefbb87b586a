"""Places on the ring: 128-bit ids on a circle, and which of them is closest to a key.

The first 16 bits are a label of zone and rack, so nodes of a rack are neighbours. The rest is a
hash of the host, so a node that returns gets its place again. The key of a state is its owner's id.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

BITS = 128
DIGITS = 32
"""An id has 32 digits of 4 bits; a routing table has a column for each value of a digit."""
COLUMNS = 16
CIRCLE = 1 << BITS
_ZONE_BITS, _LABEL_BITS = 4, 16
_DIGIT_BITS = 4


class NodeId(int):
    """A place on the ring.

    >>> id = NodeId.of("worker-7", zone="eu-1", rack="r12")
    >>> print(id)
    a4a2:56dfff89dd60223480a4c52ad78d
    >>> NodeId.parse(str(id)) == id
    True
    """

    __slots__ = ()

    @classmethod
    def of(cls, host: str, zone: str = "", rack: str = "") -> NodeId:
        """The id of a host. Hosts of the same zone and rack have the same label."""
        low = int.from_bytes(_hash("host", host, size=(BITS - _LABEL_BITS) // 8))
        return cls(label(zone, rack) << (BITS - _LABEL_BITS) | low)

    @classmethod
    def parse(cls, text: str) -> NodeId:
        """Read an id as it is printed.

        >>> NodeId.parse("12")
        Traceback (most recent call last):
        ValueError: '12' is no id of a node: it must have 32 hexadecimal digits
        """
        digits = text.replace(":", "")
        if len(digits) != DIGITS or not set(digits) <= set("0123456789abcdef"):
            raise ValueError(f"{text!r} is no id of a node: it must have 32 hexadecimal digits")
        return cls(int(digits, 16))

    @property
    def label(self) -> int:
        """Zone and rack. Two racks may have the same label; this is rare."""
        return self >> (BITS - _LABEL_BITS)

    def __str__(self) -> str:
        digits = f"{int(self):032x}"
        return f"{digits[:4]}:{digits[4:]}"

    def __repr__(self) -> str:
        return f"NodeId({str(self)!r})"


def label(zone: str, rack: str) -> int:
    """The first 16 bits of the ids of a rack: 4 for the zone, 12 for the rack.

    >>> label("eu-1", "r1") >> 12 == label("eu-1", "r2") >> 12
    True
    """
    high = int.from_bytes(_hash("zone", zone, size=2)) >> (16 - _ZONE_BITS)
    low = int.from_bytes(_hash("rack", zone, rack, size=2)) >> _ZONE_BITS
    return high << (_LABEL_BITS - _ZONE_BITS) | low


def clockwise(start: int, end: int) -> int:
    """How far it is from one place to another in the direction of larger ids.

    >>> clockwise(3, 1) == CIRCLE - 2
    True
    """
    return (end - start) % CIRCLE


def distance(a: int, b: int) -> int:
    """How far apart two places are, by the shorter way.

    >>> distance(1, CIRCLE - 1)
    2
    """
    way = (a - b) % CIRCLE
    return min(way, CIRCLE - way)


def closest(key: int, ids: Iterable[NodeId]) -> NodeId:
    """The id that is closest to a key. Of two that are equally close it is the smaller one."""
    return min(ids, key=lambda id: (distance(key, id), id))


def shared_digits(a: int, b: int) -> int:
    """How many leading digits two ids have in common.

    >>> shared_digits(0xAB << 120, 0xAC << 120)
    1
    """
    return (BITS - (a ^ b).bit_length()) // _DIGIT_BITS


def digit(id: int, row: int) -> int:
    """The digit of an id at a position, from the left.

    >>> digit(0xAB << 120, 1) == 0xB
    True
    """
    return id >> (BITS - _DIGIT_BITS * (row + 1)) & (COLUMNS - 1)


def _hash(*parts: str, size: int) -> bytes:
    text = "\0".join(parts).encode()
    return blake2b(text, digest_size=size, person=b"anabranch ring").digest()
