"""Fragments in memory: a state is coded, and computed again from any m of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from anabranch.fragments.encoder import Encoder
from anabranch.fragments.label import Label
from anabranch.fragments.reading import Reader


@dataclass(frozen=True, eq=False)
class Fragment:
    """One of the n fragments of a state, in memory."""

    label: Label
    rows: tuple[memoryview, ...] = field(repr=False)
    """Its row of each stripe. Those of data may be parts of the state itself."""

    def parts(self) -> Iterator[memoryview]:
        """All of its bytes, in order. Nothing is copied."""
        yield from self.rows
        yield memoryview(self.label.to_bytes())

    def to_bytes(self) -> bytes:
        """All of its bytes."""
        return b"".join(self.parts())

    def read(self, offset: int, size: int) -> memoryview:
        """A row, or a part of one."""
        stripe, start = divmod(offset, self.label.layout.row)
        return self.rows[stripe][start : start + size]

    @classmethod
    def parse(cls, data: Any, *, name: str) -> Fragment:
        """A fragment from all of its bytes, which are not copied and must not change.

        ``name`` is for messages. CheckpointCorrupt if the label is not as it was written. Rows are
        verified when they are used.
        """
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        label = Label.read(lambda offset, size: view[offset : offset + size], len(view), name=name)
        row = label.layout.row
        ends = [(s * row, s * row + label.layout.row_size(s)) for s in range(label.layout.stripes)]
        return cls(label, tuple(view[start:end] for start, end in ends))


def encode(
    data: int,
    parity: int,
    state: Any,
    *,
    name: str = "state",
    version: int = 0,
    owner: str = "",
    holders: tuple[str, ...] = (),
    row: int | None = None,
) -> list[Fragment]:
    """Code a state into ``data + parity`` fragments, of which any ``data`` give it again.

    ``state`` is a buffer, or an iterable of buffers. They must not change while the fragments are
    in use, because the fragments with the data refer to them. An
    :class:`~anabranch.fragments.encoder.Encoder` codes a state that does not fit into memory.

    >>> fragments = encode(2, 2, b"an arm of a river that joins it again")
    >>> bytes(recompute(fragments[2:]))
    b'an arm of a river that joins it again'
    """
    encoder = Encoder(data, parity, row=row)
    rows: list[list[memoryview]] = [[] for _ in range(data + parity)]
    for stripe in encoder.stripes(_buffers(state)):
        for column, new in zip(rows, stripe.rows, strict=True):
            column.append(new)
    return [
        Fragment(
            encoder.label(index, name=name, version=version, owner=owner, holders=holders),
            tuple(column),
        )
        for index, column in enumerate(rows)
    ]


def recompute(fragments: Sequence[Fragment], start: int = 0, end: int | None = None) -> memoryview:
    """The state from any m of its fragments, or its bytes from ``start`` to ``end``.

    CheckpointNotFound if there are fewer. CheckpointCorrupt if too many rows of a stripe are
    corrupt, or the fragments are not all of one state and version.
    """
    reader = Reader(fragments)
    if not 0 <= start <= (end := reader.layout.size if end is None else end) <= reader.layout.size:
        raise ValueError(f"bytes {start} to {end} of a state of {reader.layout.size}")
    state = np.empty(end - start, np.uint8)
    reader.into(state, start)
    return state.data


def _buffers(state: Any) -> Iterable[Any]:
    try:
        return [memoryview(state)]
    except TypeError:
        return cast(Iterable[Any], state)
