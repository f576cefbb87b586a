"""Writing captures to a store as parts, and reading state back as rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.errors import CheckpointNotFound, DidNotHappen
from anabranch.state import part_file
from anabranch.state.capture import Capture, CaptureInfo, CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.state.part_file import BufferSource
from anabranch.state.partition import merge
from anabranch.stores.manifests import Manifest, part_name
from anabranch.stores.meter import CodingStore
from anabranch.stores.retrieval import retrieve
from anabranch.stores.scattered import scatter
from anabranch.stores.store import BackupStore


@dataclass(frozen=True)
class Destination:
    """Where a part is stored, and under which name.

    With ``holders`` the store is one of peers, and each of these gets a copy, or a fragment if more
    than one of them are ``needed`` to give the part.
    """

    under: str = ""
    """What its name begins with."""
    holders: tuple[str, ...] = ()
    needed: int = 1
    mark: str = ""
    """What makes the name unique, where the same rows may be stored again."""
    owner: str = ""
    """The node that has the state."""
    row: int | None = None
    """How many bytes of each fragment are coded at a time, if not what suits most states."""
    keep: Callable[[str, Path], bool] | None = None
    """Keeps the file of the part at the owner, under a name, and says whether it did. It may take
    the file away."""
    parity: int = 0
    """With it and without holders, the store itself codes the part, so that any ``needed`` of
    ``needed + parity`` fragments give it."""


NOWHERE_ELSE = Destination()
"""The store itself, which outlives all nodes."""


def back_up(store: BackupStore, capture: Capture, to: Destination = NOWHERE_ELSE) -> Part:
    """Write a capture to a store. This is the slow part of a checkpoint, off the critical path.

    A :class:`~anabranch.errors.StoreError` is raised if a copy fails; of the fragments some may. It
    can then be repeated: the same rows get the same name, and other rows another one.
    """
    return back_up_in_pieces(store, capture, [capture.rows], capture.rows.nbytes, to)


def back_up_in_pieces(
    store: BackupStore, of: CaptureInfo, pieces: Iterable[pa.Table], size: int, to: Destination
) -> Part:
    """Write a capture whose rows come in pieces, with about ``size`` bytes in all, to a store.

    Each piece has all rows of some groups, which come after those of the pieces before. One is in
    memory at a time.
    """
    with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
        path = Path(folder) / "part.arrow"
        try:
            with part_file.writing(path, of, size) as file:
                for rows in pieces:
                    file.add(rows)
            with pa.memory_map(str(path)) as mapped:
                data = mapped.read_buffer()
            if to.keep is None:
                path.unlink()  # mapped bytes need no name, and no kill leaves them behind
        except OSError as error:
            raise DidNotHappen(f"cannot write a capture to {path}: {error}") from error
        digest = part_file.checksum(BufferSource(data))
        full = of.base is None
        part = Part(
            to.under + part_name(of.operator, of.instance, of.version, full, digest + to.mark),
            of.operator,
            of.version,
            of.base,
            of.groups,
            to.holders,
            to.needed if to.holders else 1,
            bytes=data.size,
            rows=file.rows,
            checksum=digest,
            instance=of.instance,
        )
        if part.needed > 1:
            part = scatter(store, part, data, to.owner, to.row)
        else:
            _coded(store, to).put_all(dict.fromkeys(part.copies, data))
        if to.keep is not None and part.holders and to.owner not in part.holders:
            kept = to.keep(part.own_name, path)
            part = replace(part, owner=to.owner if kept else "")
        return part


def _coded(store: BackupStore, to: Destination) -> BackupStore:
    if to.holders or not to.parity or not isinstance(store, CodingStore):
        return store
    return store.coded(to.needed, to.parity, to.row)


def state_schema(schema: CheckpointSchema) -> pa.Schema:
    """The columns of :func:`read_state`: keys, sub-keys, ``key_group``, values.

    A column whose name occurs before gets the prefix ``state_``.
    """
    fields = list(schema.arrow())[: schema.key_count]
    for value in [pa.field("key_group", pa.int32(), False), *schema.values]:
        name = value.name
        while name in [field.name for field in fields]:
            name = f"state_{name}"
        fields.append(value.with_name(name))
    return pa.schema(fields)


def read_state(
    store: BackupStore, manifest: Manifest, operator: str, groups: KeyGroups | None = None
) -> pa.Table:
    """The rows of an operator's state at the version of a manifest, or those of some groups.

    The columns are those of :func:`state_schema`. The rows are in no order.
    """
    if operator not in manifest.operators:
        raise CheckpointNotFound(
            f"version {manifest.version} has no operator {operator!r}; "
            f"there are {sorted(manifest.operators)}"
        )
    found = manifest.operators[operator]
    captures = retrieve(store, found, groups=groups, version=manifest.version)
    return state_rows(captures) if captures else state_schema(found.schema).empty_table()


def state_rows(captures: Sequence[Capture]) -> pa.Table:
    """The rows of state in captures, with the columns of :func:`state_schema`."""
    merged = merge(captures)
    rows, keys = merged.rows, merged.schema.key_count
    columns = [
        *rows.columns[:keys],
        pc.cast(rows.column(keys + 1), pa.int32()),
        *rows.columns[keys + len(merged.schema.bookkeeping) :],
    ]
    return pa.Table.from_arrays(columns, schema=state_schema(merged.schema))
