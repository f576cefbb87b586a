"""The label of a fragment: what it is a part of, and the checksums of everything in it.

A fragment is its row of each stripe, one after the other, and then its label::

    8 bytes each   xxh3_64 of its row of each stripe, little endian
    8 bytes each   xxh3_64 of the checksums of the data rows of each stripe
    JSON           name, version, owner, m, k, index, sizes, checksum of the state, holders
    8 bytes        length of the label, little endian
    4 bytes        length of the JSON
    16 bytes       mark and format number
    8 bytes        xxh3_64 of the label before

It comes last, because the size of a state, its checksums and the nodes that accepted its fragments
are known when all rows were sent. What was cut off has no label, and never looks complete.

A row is verified by its own checksum before the decoder sees it, and the data of a stripe by the
stripe's checksum after that. The checksum of the state is over those of the stripes, so it is equal
in labels of one state and one coding of it only.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from anabranch.errors import CheckpointCorrupt, PlanError
from anabranch.fragments.code import Row
from anabranch.fragments.layout import Layout
from anabranch.units import Version

Buffer = bytes | bytearray | memoryview
"""Bytes in memory. Any other contiguous buffer will do as well."""

Read = Callable[[int, int], Any]
"""Gives the bytes of a fragment from an offset on, and so many of them."""

_MARK = b"anabranch frag 1"
_END = struct.Struct("<QI16sQ")
_GUESS = 16 << 10
"""So much of the end is read first: the whole label of most fragments."""


class StateId(NamedTuple):
    """What the labels of all fragments of one state have in common."""

    name: str
    version: Version
    owner: str
    layout: Layout
    checksum: int

    def __str__(self) -> str:
        of = f"{self.name} at version {self.version} ({self.checksum:016x})"
        return f"{of}, {self.layout.data} + {self.layout.parity}"


@dataclass(frozen=True)
class Label:
    """What a fragment is a part of, and its checksums."""

    name: str
    version: Version
    owner: str
    """The id of the owner: the key by which the fragments are found."""
    layout: Layout
    index: int
    """Which of the n fragments this is; the first m are the data itself."""
    rows: Sequence[int] = field(repr=False)
    """The checksum of the row of each stripe."""
    stripes: Sequence[int] = field(repr=False)
    """The checksum of the data of each stripe."""
    holders: tuple[str, ...] = ()
    """Where the n fragments were stored, by index; empty if that was not noted."""

    def __post_init__(self) -> None:
        layout = self.layout
        if not 0 <= self.index < layout.total:
            raise PlanError(f"there is no fragment {self.index} of {layout.total}")
        if self.holders and len(self.holders) != layout.total:
            raise PlanError(f"{len(self.holders)} holders of {layout.total} fragments")
        if not len(self.rows) == len(self.stripes) == layout.stripes:
            raise PlanError(
                f"{len(self.rows)} and {len(self.stripes)} checksums of {layout.stripes} stripes"
            )

    @property
    def state(self) -> StateId:
        """Fragments of the same state, coded in the same way, have the same one."""
        checksum = checksum_of_state(self.stripes)
        return StateId(self.name, self.version, self.owner, self.layout, checksum)

    @property
    def title(self) -> str:
        """The fragment in messages."""
        return f"fragment {self.index} of {self.name} at version {self.version}"

    def to_bytes(self) -> bytes:
        """What follows the rows of the fragment."""
        tables = _packed(self.rows) + _packed(self.stripes)
        body = json.dumps(
            {
                "name": self.name,
                "version": self.version,
                "owner": self.owner,
                "data": self.layout.data,
                "parity": self.layout.parity,
                "index": self.index,
                "size": self.layout.size,
                "row": self.layout.row,
                "checksum": f"{self.state.checksum:016x}",
                "holders": list(self.holders),
            }
        ).encode()
        size = len(tables) + len(body) + _END.size
        data = bytearray(tables + body + _END.pack(size, len(body), _MARK, 0))
        struct.pack_into("<Q", data, size - 8, xxhash.xxh3_64_intdigest(memoryview(data)[:-8]))
        return bytes(data)

    @classmethod
    def read(cls, read: Read, size: int, *, name: str) -> Label:
        """The label of the fragment with ``size`` bytes that are read by ``read``.

        ``name`` is that of the fragment, for messages. CheckpointCorrupt if the label is not as it
        was written, or the fragment does not have the bytes that it tells of.
        """
        if size < _END.size:
            raise CheckpointCorrupt(f"{name}: truncated; {size} bytes are too few for a fragment")
        data = _bytes(read, size, min(size, _GUESS), name)
        length, body, mark, digest = _END.unpack(data[-_END.size :])
        if mark != _MARK:
            raise CheckpointCorrupt(
                f"{name}: truncated, or no fragment; it ends in {mark!r} instead of {_MARK!r}"
            )
        if not _END.size + body <= length <= size:
            raise CheckpointCorrupt(f"{name}: has {size} bytes, and its label would have {length}")
        data = data[-length:] if length <= len(data) else _bytes(read, size, length, name)
        found = xxhash.xxh3_64_intdigest(data[:-8])
        if found != digest:
            raise CheckpointCorrupt(
                f"{name}: the checksum of the label is {found:016x} instead of {digest:016x}, "
                "so its bytes changed"
            )
        at = len(data) - _END.size - body
        try:
            label = cls._parse(json.loads(data[at : at + body].tobytes()), data[:at])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointCorrupt(
                f"{name}: the checksum of the label is right, but it cannot be read: {error!r}"
            ) from error
        if label.layout.rows_size + len(data) != size:
            raise CheckpointCorrupt(
                f"{name}: should have {label.layout.rows_size + len(data)} bytes and has {size}"
            )
        return label

    @classmethod
    def _parse(cls, body: dict[str, Any], tables: memoryview) -> Label:
        layout = Layout(*(_number(body[key]) for key in ("data", "parity", "row", "size")))
        if len(tables) != 16 * layout.stripes:
            raise ValueError(f"{len(tables)} bytes of checksums for {layout.stripes} stripes")
        numbers = struct.unpack(f"<{2 * layout.stripes}Q", tables)
        label = cls(
            name=_text(body["name"]),
            version=Version(_number(body["version"])),
            owner=_text(body["owner"]),
            layout=layout,
            index=_number(body["index"]),
            rows=array("Q", numbers[: layout.stripes]),
            stripes=array("Q", numbers[layout.stripes :]),
            holders=tuple(map(_text, _list(body["holders"]))),
        )
        if body["checksum"] != f"{label.state.checksum:016x}":
            raise ValueError(f"the checksum of the state is not {body['checksum']}")
        return label


def checksum_of_row(row: Row) -> int:
    """Of the bytes of a row."""
    return int(xxhash.xxh3_64_intdigest(row.data))


def checksum_of_stripe(rows: Iterable[int]) -> int:
    """Of the checksums of its data rows."""
    return int(xxhash.xxh3_64_intdigest(_packed(rows)))


def checksum_of_state(stripes: Iterable[int]) -> int:
    """Of the checksums of its stripes."""
    return int(xxhash.xxh3_64_intdigest(_packed(stripes)))


def _packed(numbers: Iterable[int]) -> bytes:
    packed = array("Q", numbers)
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        packed.byteswap()
    return packed.tobytes()


def _bytes(read: Read, size: int, count: int, name: str) -> memoryview:
    data = memoryview(read(size - count, count)).cast("B")
    if len(data) != count:
        raise CheckpointCorrupt(f"{name}: truncated; {len(data)} of {count} bytes can be read")
    return data


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not a text")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{value!r} is not a list")
    return value
