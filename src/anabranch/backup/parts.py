"""Captures into a store and out of it again."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.backup.manifests import Manifest, OperatorManifest, part_name
from anabranch.backup.peers import peer_name
from anabranch.backup.store import BackupStore
from anabranch.errors import (
    AnabranchError,
    CheckpointCorrupt,
    CheckpointNotFound,
    DidNotHappen,
    StoreError,
)
from anabranch.state import checkpoint
from anabranch.state.capture import Capture, CheckpointSchema
from anabranch.state.chains import leading_to
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.state.partition import merge
from anabranch.units import NO_VERSION, Version


def back_up(
    store: BackupStore,
    capture: Capture,
    data: pa.Buffer | None = None,
    *,
    under: str = "",
    holders: Sequence[str] = (),
    mark: str = "",
) -> Part:
    """Write a capture into a store. The slow part of a checkpoint: not for the critical path.

    ``data`` is the file of the capture, if it was written already; otherwise it is written to a
    temporary file. ``under`` is put before its name. With ``holders`` it is written to each of
    these nodes, whose store is a :class:`~anabranch.backup.peers.PeerStore`. All can be repeated
    after any :class:`~anabranch.errors.StoreError`: the same rows get the same name, and other
    rows another one, unless a ``mark`` is put into it.
    """
    if data is None:
        with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
            data = _saved(capture, Path(folder) / "part.arrow")
    digest = checkpoint.checksum(data)
    name = under + part_name(
        capture.operator, capture.instance, capture.version, capture.base is None, digest + mark
    )
    part = Part(
        name,
        capture.operator,
        capture.version,
        capture.base,
        capture.groups,
        tuple(holders),
        bytes=data.size,
        rows=capture.rows.num_rows,
        checksum=digest,
        instance=capture.instance,
    )
    for each in copies(part):
        store.put(each, data)
    return part


def copies(part: Part) -> list[str]:
    """The names of all copies of a part in its store."""
    return [peer_name(host, part.name) for host in part.holders] or [part.name]


def _copy(store: BackupStore, part: Part) -> pa.Buffer:
    """The bytes of a part, from the first holder that has them."""
    failures: list[AnabranchError] = []
    for name in copies(part):
        try:
            return store.get(name)
        except (CheckpointNotFound, StoreError) as error:
            failures.append(error)
    # One that does not answer may have it all the same.
    raise next((e for e in failures if isinstance(e, StoreError)), failures[0])


def _saved(capture: Capture, path: Path) -> pa.Buffer:
    """The file of a capture, which is in memory only as far as it is being read."""
    try:
        checkpoint.save(capture, path)
        with pa.memory_map(str(path)) as mapped:
            return mapped.read_buffer()
    except OSError as error:
        raise DidNotHappen(f"cannot write a capture to {path}: {error}") from error


def retrieve(
    store: BackupStore,
    operator: OperatorManifest,
    *,
    schema: CheckpointSchema | None = None,
    groups: KeyGroups | None = None,
    version: Version | None = None,
    since: Version | None = None,
) -> list[Capture]:
    """The captures that hold an operator's state, or that of some groups, oldest first.

    It is the state at ``version``, or at that of the newest part; with ``since``, the changes that
    bring it there from that version. Each capture has only the groups that it is needed for. Only
    needed files are read, and all of them are verified before any is returned.
    :class:`~anabranch.errors.CheckpointError` says which groups do not come to the version.
    ``schema`` is what the reader expects; :class:`~anabranch.errors.SchemaChanged` if the
    checkpoint was written with other columns.
    """
    every = KeyGroups.all(operator.schema.key_groups)
    wanted = every if groups is None else groups & every
    if version is None:
        version = max((part.version for part in operator.parts), default=NO_VERSION)
    return [
        _read(store, part, schema or operator.schema, of)
        for part, of in leading_to(operator.parts, wanted, version, since=since)
    ]


def _read(store: BackupStore, part: Part, schema: CheckpointSchema, groups: KeyGroups) -> Capture:
    data = _copy(store, part)
    capture = checkpoint.read(data, name=part.name, schema=schema, groups=groups)
    if checkpoint.checksum(data) != part.checksum:
        raise CheckpointCorrupt(
            f"{part.name}: a sound checkpoint, but not the one in the manifest: its checksum is "
            f"{checkpoint.checksum(data)}, not {part.checksum}"
        )
    return capture


def state_schema(schema: CheckpointSchema) -> pa.Schema:
    """The columns of :func:`read_state`: keys, sub-keys, ``key_group``, values.

    A column with the name of one before it is called ``state_`` and its name.
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

    The columns are those of :func:`state_schema`. Rows come in no order.
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
    """The rows of the state that captures hold, in the columns of :func:`state_schema`."""
    merged = merge(captures)
    rows, keys = merged.rows, merged.schema.key_count
    columns = [
        *rows.columns[:keys],
        pc.cast(rows.column(keys + 1), pa.int32()),
        *rows.columns[keys + len(merged.schema.bookkeeping) :],
    ]
    return pa.Table.from_arrays(columns, schema=state_schema(merged.schema))
