"""Reading and writing the tables of Linear Road, as Parquet or CSV.

A path is a file or a folder of parts, which are taken in the order of their names. Names that start
with ``_`` or ``.`` are passed over, as Spark does. A CSV file may have a header or not; without one
its columns are in the order of the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.dataset as pa_dataset
import pyarrow.parquet as pq

from anabranch.errors import PlanError
from anabranch_linearroad.rows import ANSWERS, HISTORY, INPUT

_PARQUET, _CSV = ".parquet", ".csv"


def read_input(path: Path | str, start: int = 0, end: int | None = None) -> pa.Table:
    """The input from second ``start`` up to, and without, second ``end``.

    Of Parquet files that :func:`write_input` wrote only the minutes that are asked for are read.
    """
    window = pc.field("Time") >= start
    if end is not None:
        window &= pc.field("Time") < end
    return _read(path, INPUT, window)


def read_columns(path: Path | str, names: Sequence[str]) -> pa.Table:
    """Some columns of the whole input."""
    return _read(path, INPUT, columns=names)


def read_history(path: Path | str) -> pa.Table:
    """The tolls of earlier days."""
    return _read(path, HISTORY)


def read_answers(path: Path | str) -> pa.Table:
    """Answers, in any order and any number of parts; columns that are not there are null."""
    return _read(path, ANSWERS)


def write_input(
    path: Path | str,
    tables: pa.Table | Iterable[pa.Table],
    *,
    minutes: int = 5,
    tick: Callable[[int], None] = lambda second: None,
) -> None:
    """Write input whose rows are in the order of time.

    A path that ends in ``.parquet`` or ``.csv`` becomes that one file, any other a folder of
    Parquet files of so many ``minutes`` each, named by their first second. Every minute is a row
    group of its own, so that a window can be read without the rest. ``tick`` is told the second up
    to which all is written.
    """
    target = Path(path)
    if target.suffix in (_PARQUET, _CSV):
        with _writer(target, INPUT) as writer:
            for second, part in _by_minute(tables):
                writer.write_table(part)
                tick(second + 60)
        return
    target.mkdir(parents=True, exist_ok=True)
    writer, current = None, -1
    try:
        for second, part in _by_minute(tables):
            if writer is None or second // (60 * minutes) != current:
                if writer is not None:
                    writer.close()
                current = second // (60 * minutes)
                writer = _writer(target / f"{current * 60 * minutes:06}{_PARQUET}", INPUT)
            writer.write_table(part)
            tick(second + 60)
    finally:
        if writer is not None:
            writer.close()


def write_history(path: Path | str, table: pa.Table) -> None:
    """Write the tolls of earlier days into a ``.parquet`` or ``.csv`` file."""
    with _writer(Path(path), HISTORY) as writer:
        writer.write_table(shaped(table, HISTORY, path))


def write_answers(path: Path | str, table: pa.Table) -> None:
    """Write answers into a ``.parquet`` or ``.csv`` file."""
    with _writer(Path(path), ANSWERS) as writer:
        writer.write_table(shaped(table, ANSWERS, path))


def _read(
    path: Path | str, schema: pa.Schema, rows: Any = None, columns: Sequence[str] | None = None
) -> pa.Table:
    files = _parts(Path(path))
    suffixes = {_suffix(file) for file in files}
    if suffixes == {_PARQUET}:
        found = pa_dataset.dataset([str(file) for file in files], format="parquet")
        if columns is not None:
            return found.to_table(columns=list(columns), filter=rows)
        names = [name for name in schema.names if name in found.schema.names]
        return shaped(found.to_table(columns=names, filter=rows), schema, path)
    if suffixes == {_CSV}:
        table = pa.concat_tables([shaped(_read_csv(file, schema), schema, file) for file in files])
        table = table if rows is None else table.filter(rows)
        return table if columns is None else table.select(columns)
    raise PlanError(f"{path}: give a .parquet or .csv file, or a folder of files of one kind")


def _parts(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise PlanError(f"{path}: there is no such file or folder")
        return [path]
    return sorted(
        file
        for file in path.iterdir()
        if not file.name.startswith(("_", ".")) and _suffix(file) in (_PARQUET, _CSV)
    )


def _suffix(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def _read_csv(file: Path, schema: pa.Schema) -> pa.Table:
    with pa.input_stream(str(file), compression="detect") as stream:
        head = stream.read(4096).decode("utf-8", "replace").split("\n", 1)[0]
    if not head:
        return schema.empty_table()
    headed = any(cell.strip(' "\r') in schema.names for cell in head.split(","))
    with pa.input_stream(str(file), compression="detect") as stream:
        return pa_csv.read_csv(
            stream,
            pa_csv.ReadOptions(column_names=None if headed else schema.names),
            convert_options=pa_csv.ConvertOptions(
                column_types=schema, null_values=["", "null"], quoted_strings_can_be_null=True
            ),
        )


def shaped(table: pa.Table, schema: pa.Schema, path: Path | str) -> pa.Table:
    """The columns of the schema, in its order and types; only answers may lack some."""
    missing = [name for name in schema.names if name not in table.column_names]
    if missing and (schema is not ANSWERS or "Type" in missing):
        raise PlanError(f"{path}: there is no column {', '.join(missing)}")
    try:
        return pa.table(
            [
                pa.nulls(len(table), field.type)
                if field.name in missing
                else table[field.name].cast(field.type)
                for field in schema
            ],
            schema=schema,
        )
    except pa.ArrowInvalid as error:
        raise PlanError(f"{path}: {error}") from error


def _writer(path: Path, schema: pa.Schema) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == _PARQUET:
        return pq.ParquetWriter(path, schema, compression="zstd")
    if path.suffix == _CSV:
        return pa_csv.CSVWriter(path, schema)
    raise PlanError(f"{path}: name a .parquet or .csv file")


def _by_minute(tables: pa.Table | Iterable[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    """The first second of each minute, and its rows in as few pieces as the tables allow."""
    for table in [tables] if isinstance(tables, pa.Table) else tables:
        whole = shaped(table, INPUT, "input")
        minutes = whole["Time"].to_numpy() // 60
        cuts = [0, *(np.flatnonzero(np.diff(minutes)) + 1), len(minutes)]
        for at, end in pairwise(cuts):
            if end > at:
                yield int(minutes[at]) * 60, whole.slice(at, end - at)
