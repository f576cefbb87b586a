"""Restore: making a table from captures, atomically, and advancing it by later captures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import CheckpointError, SchemaChanged, StateError
from anabranch.state.capture import Capture, CheckpointSchema, to_values
from anabranch.state.chains import Chain, follow, leading_to
from anabranch.state.groups import KeyGroups
from anabranch.state.keys import KeyBatch
from anabranch.state.partition import key_batches, newest_rows
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

Array = npt.NDArray[Any]

_RESTORING = ".restoring"


def restore(folder: Path, layout: TableLayout, captures: Sequence[Capture]) -> None:
    """Make a table in a new folder that has the state of a chain of captures.

    See :func:`restore_in_pieces`. The table is at the version of the chain.
    """
    restore_in_pieces(folder, layout, check(layout, captures).version, [captures])


def restore_in_pieces(
    folder: Path,
    layout: TableLayout,
    version: Version,
    pieces: Iterable[Sequence[Capture]],
    *,
    replacing: bool = False,
) -> None:
    """Make a table in a new folder from chains of captures, each of other key groups.

    One chain is in memory at a time. The table is at the version, as all chains must be, has no
    changes since, and cannot be rolled back. The folder appears when the table is complete, in the
    place of an earlier one if that is to be replaced. Until then, and if the process is killed,
    there is only ``.<name>.restoring`` beside it, which the next attempt replaces.
    """
    if folder.exists() and not replacing:
        raise StateError(f"cannot restore into {folder}: it already exists")
    coming = iter(pieces)
    captures = next(coming, None)  # what cannot be read at all changes nothing
    if captures is not None:
        _check_version(layout, captures, version)
    fresh = half_made(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    table = StateTable.create(fresh, layout, version=Version(version - 1))
    try:
        with table.lock(timeout=0):
            table.begin(version, 0)
            while captures is not None:
                _check_version(layout, captures, version)
                _append(table, captures)
                del captures  # before the next piece is in memory
                captures = next(coming, None)
            table.reindex()
            table.mark_clean()
            table.finish()
            # The version before was never there, only an empty table in its place.
            table.forget_previous()
    except BaseException:
        table.destroy()
        raise
    table.close()
    if replacing:
        shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _check_version(layout: TableLayout, captures: Sequence[Capture], version: Version) -> None:
    chain = check(layout, captures)
    if chain.version != version:
        raise CheckpointError(
            f"groups {chain.groups}: the captures lead to version {chain.version}, and the table "
            f"is to be at {version}"
        )


def check(layout: TableLayout, captures: Sequence[Capture]) -> Chain:
    """Check a chain of captures. CheckpointError or SchemaChanged if it cannot make a table."""
    chain = follow(captures)
    if chain.base is not None:
        raise CheckpointError(
            f"groups {chain.groups}: there are only the changes since version {chain.base}"
        )
    _check_columns(layout, captures)
    return chain


def half_made(folder: Path) -> Path:
    """The folder of a table that is being restored."""
    return folder.with_name(f".{folder.name}{_RESTORING}")


def name_of(folder: Path) -> str:
    """The name of the table in a folder, complete or not."""
    name = folder.name
    half = name.startswith(".") and name.endswith(_RESTORING)
    return name[1 : -len(_RESTORING)] if half else name


def advance(
    table: StateTable, captures: Sequence[Capture], groups: KeyGroups, version: Version, fence: int
) -> None:
    """Bring the groups of a table to a version by incremental captures.

    See :func:`advance_in_pieces`. :class:`~anabranch.errors.CheckpointError`, and nothing is
    changed, if the captures do not bring all of the groups from the one version to the other.
    """
    steps = leading_to(captures, groups, version, since=table.version)
    advance_in_pieces(table, [[capture.select(of) for capture, of in steps]], version, fence)


def advance_in_pieces(
    table: StateTable, pieces: Iterable[Sequence[Capture]], version: Version, fence: int
) -> None:
    """Bring a table to a version by incremental captures, those of some key groups at a time.

    Each piece leads its groups from the version of the table to that one. The caller holds the
    lock of the table, which has no changes since its version. It advances in one step, and can be
    rolled back to its version before. If a piece cannot be used, nothing is changed.
    """
    since = table.version
    if version == since:
        return
    coming = iter(pieces)
    captures = next(coming, None)
    table.begin(version, fence, since=since)
    try:
        while captures is not None:
            _check_columns(table.layout, captures)
            _change(table, captures)
            del captures  # before the next piece is in memory
            captures = next(coming, None)
        table.mark_clean()
    except BaseException:
        table.rollback()
        raise
    table.finish()


def _check_columns(layout: TableLayout, captures: Sequence[Capture]) -> None:
    expected = CheckpointSchema.of(layout)
    for capture in captures:
        if capture.schema.fingerprint() != expected.fingerprint():
            raise SchemaChanged(f"{capture!r} has the columns {capture.schema}, not {expected}")


def _append(table: StateTable, captures: Sequence[Capture]) -> None:
    for capture in newest_rows(captures, keep_deleted=False):
        _load(table, capture, table.append)


def _change(table: StateTable, captures: Sequence[Capture]) -> None:
    for capture in newest_rows(captures, keep_deleted=True):
        gone = capture.deleted()
        _delete(table, replace(capture, rows=capture.rows.filter(pa.array(gone))))
        _load(table, replace(capture, rows=capture.rows.filter(pa.array(~gone))), table.rows)


def _delete(table: StateTable, capture: Capture) -> None:
    for keys in key_batches(capture, table.layout.key):
        rows = table.find(keys)
        # A key may have come and gone since the version before.
        table.delete(rows[rows >= 0])


def _load(table: StateTable, capture: Capture, enter: Callable[[KeyBatch], Array]) -> None:
    schema = capture.schema
    values_from = schema.key_count + len(schema.bookkeeping)
    batches = capture.rows.to_batches()
    for keys, batch in zip(key_batches(capture, table.layout.key), batches, strict=True):
        rows = enter(keys)
        for column, values in zip(table.layout.values, batch.columns[values_from:], strict=True):
            table.set(column.name, rows, to_values(column.type, values))
        if schema.timers:
            timers = batch.column(values_from - 1)
            timed = np.flatnonzero(timers.is_valid().to_numpy(zero_copy_only=False))
            table.clear_timer(np.delete(rows, timed))
            table.set_timer(rows[timed], timers.drop_null().to_numpy())
