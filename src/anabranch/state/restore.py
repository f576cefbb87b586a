"""Restore: making a table from captures, atomically, and advancing it by later captures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
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

    The table is at the version of the chain, has no changes since, and cannot be rolled back. The
    folder appears when the table is complete. Until then, and if the process is killed, there is
    only ``.<name>.restoring`` beside it, which the next attempt replaces.
    """
    chain = check(layout, captures)
    if folder.exists():
        raise StateError(f"cannot restore into {folder}: it already exists")
    fresh = half_made(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    table = StateTable.create(fresh, layout, version=Version(chain.version - 1))
    try:
        with table.lock(timeout=0):
            table.begin(chain.version, 0)
            for capture in newest_rows(captures, keep_deleted=False):
                _load(table, capture, table.append)
            table.reindex()
            table.mark_clean()
            table.finish()
            # The version before was never there, only an empty table in its place.
            table.forget_previous()
    except BaseException:
        table.destroy()
        raise
    table.close()
    fresh.rename(folder)


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

    The caller holds its lock. The table has no changes since that version. It advances in one step,
    and can be rolled back to its version before.
    :class:`~anabranch.errors.CheckpointError`, and nothing is changed, if the captures do not bring
    all of the groups from the one version to the other.
    """
    since = table.version
    steps = leading_to(captures, groups, version, since=since)
    _check_columns(table.layout, captures)
    if version == since:
        return
    table.begin(version, fence, since=since)
    chosen = [capture.select(of) for capture, of in steps]
    for capture in newest_rows(chosen, keep_deleted=True):
        _delete(table, replace(capture, rows=capture.rows.filter(pa.array(capture.deleted()))))
        kept = replace(capture, rows=capture.rows.filter(pa.array(~capture.deleted())))
        _load(table, kept, table.rows)
    table.mark_clean()
    table.finish()


def _check_columns(layout: TableLayout, captures: Sequence[Capture]) -> None:
    expected = CheckpointSchema.of(layout)
    for capture in captures:
        if capture.schema.fingerprint() != expected.fingerprint():
            raise SchemaChanged(f"{capture!r} has the columns {capture.schema}, not {expected}")


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
