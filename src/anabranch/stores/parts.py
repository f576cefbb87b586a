"""Writing captures to a store as parts, and reading them back."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    DidNotHappen,
    MayHaveHappened,
    StoreError,
)
from anabranch.state import checkpoint
from anabranch.state.capture import Capture, CheckpointSchema
from anabranch.state.chains import leading_to
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.state.partition import merge
from anabranch.stores.manifests import Manifest, OperatorManifest, part_name
from anabranch.stores.peers import peer_name
from anabranch.stores.store import BackupStore
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
    """Write a capture to a store. This is the slow part of a checkpoint, off the critical path.

    ``data`` is the file of the capture, if it was written already; otherwise it is written to a
    temporary file. ``under`` is the prefix of its name. With ``holders`` the store is one of peers,
    and the part is written to each of these, or a :class:`~anabranch.errors.StoreError` is raised.
    It can then be repeated: the same rows get the same name, and other rows another one. A
    ``mark`` in the name makes the name unique all the same.
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
    _put_all(store, part.copies, data)
    return part


def _put_all(store: BackupStore, copies: Sequence[str], data: pa.Buffer) -> None:
    for number, copy in enumerate(copies):
        try:
            store.put(copy, data)
        except DidNotHappen as error:
            if number == 0:
                raise
            raise MayHaveHappened(
                f"{copy} was not stored, but {', '.join(copies[:number])} was: {error}",
                host=error.host,
            ) from error


def _saved(capture: Capture, path: Path) -> pa.Buffer:
    """The file of a capture, mapped into memory."""
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
    near: str = "",
) -> list[Capture]:
    """The captures with an operator's state, or that of some groups, oldest first.

    They bring the groups to ``version``, by default that of the newest part. With ``since`` they
    are the changes from that version on. Each capture has only the groups that need it. Only needed
    files are read, and all of them are verified before any is returned.
    :class:`~anabranch.errors.CheckpointError` names the groups that do not reach the version.
    ``schema`` is the expected schema; :class:`~anabranch.errors.SchemaChanged` if the checkpoint
    was written with other columns. Of a part with several holders one copy is read, if possible
    that of the host ``near``.
    """
    every = KeyGroups.all(operator.schema.key_groups)
    wanted = every if groups is None else groups & every
    if version is None:
        version = max((part.version for part in operator.parts), default=NO_VERSION)
    return [
        _read(store, part, schema or operator.schema, of, near)
        for part, of in leading_to(operator.parts, wanted, version, since=since)
    ]


def _read(
    store: BackupStore, part: Part, schema: CheckpointSchema, groups: KeyGroups, near: str
) -> Capture:
    damaged: list[CheckpointError] = []
    silent: list[StoreError] = []
    without: list[str] = []
    holders = dict(zip(part.copies, part.holders or ("",), strict=True))
    for copy in sorted(part.copies, key=lambda copy: copy != peer_name(near, part.name)):
        try:
            return _read_copy(store, copy, part, schema, groups)
        except CheckpointError as error:
            damaged.append(error)
            without.append(holders[copy])
        except StoreError as error:
            silent.append(error)
    if not silent:
        damaged[0].part = part.name
        raise damaged[0]
    # One that did not answer may have it: nothing is lost as long as there is such a one.
    if damaged:
        silent[0].part, silent[0].without = part.name, tuple(without)
    raise silent[0]


def _read_copy(
    store: BackupStore, copy: str, part: Part, schema: CheckpointSchema, groups: KeyGroups
) -> Capture:
    data = store.get(copy)
    capture = checkpoint.read(data, name=copy, schema=schema, groups=groups)
    if checkpoint.checksum(data) != part.checksum:
        raise CheckpointCorrupt(
            f"{copy}: an undamaged checkpoint file, but not the one in the manifest: its checksum "
            f"is {checkpoint.checksum(data)}, not {part.checksum}"
        )
    return capture


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
