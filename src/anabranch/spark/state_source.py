"""State as a DataFrame: ``spark.read.format("anabranch.state")``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from anabranch.errors import CheckpointNotFound, PlanError
from anabranch.nodes.standing.client import SILENCE
from anabranch.nodes.standing.store import with_key
from anabranch.spark.types import spark_rows, spark_schema
from anabranch.state.groups import KeyGroups, assign
from anabranch.stores import (
    Manifest,
    StoreAddress,
    files_of,
    open_checkpoints,
    open_manifests,
    read_state,
    state_schema,
)
from anabranch.units import Version


class StateSource(DataSource):
    """Reads the state of one operator from the checkpoints of a query.

    The path is the query's checkpoint folder, wherever its checkpoint files are. Options:
    ``operator``, which may be omitted if there is only one, and ``version``, by default the newest
    checkpoint. Columns: the key, ``key_group``, the columns of the state. Unsigned numbers have the
    next wider type that Spark has. A time that means never is null.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "anabranch.state"

    def schema(self) -> StructType:
        """The columns of the operator's state."""
        manifest, operator = self._found()
        return spark_schema(state_schema(manifest.operators[operator].schema))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader with one partition per instance that took the checkpoint."""
        open_checkpoints(self._uri())  # that nobody can read them is said before a job starts
        manifest, operator = self._found()
        # Executors need no copy of a ring's file.
        store = with_key(files_of(self._uri()), epoch=0, silence=SILENCE)
        pieces = _pieces(manifest, operator)
        return _Reader(self._uri(), store, manifest.version, operator, pieces)

    def _uri(self) -> str:
        path = self.options.get("path")
        if not path:
            raise PlanError(
                'anabranch.state: give the checkpoint folder: .load("checkpoints/words")'
            )
        return path

    def _found(self) -> tuple[Manifest, str]:
        manifests = open_manifests(self._uri())
        asked = self.options.get("version")
        if asked is not None and not asked.isdigit():
            raise PlanError(f"anabranch.state: version={asked!r} is not the number of a batch")
        manifest = manifests.latest() if asked is None else manifests.get(Version(int(asked)))
        if manifest is None:
            raise CheckpointNotFound(f"there are no checkpoints in {self._uri()}")
        operators = sorted(manifest.operators)
        operator = self.options.get("operator", operators[0] if len(operators) == 1 else None)
        if operator is None or operator not in manifest.operators:
            raise PlanError(
                f"anabranch.state: operator={operator!r}; version {manifest.version} in "
                f"{self._uri()} has {operators}"
            )
        return manifest, operator


def _pieces(manifest: Manifest, operator: str) -> tuple[KeyGroups, ...]:
    found = manifest.operators[operator]
    instances = len({part.instance for part in found.parts})
    return assign(found.schema.key_groups, max(1, instances))


@dataclass
class _Piece(InputPartition):
    groups: KeyGroups


@dataclass
class _Reader(DataSourceReader):
    uri: str
    store: StoreAddress
    version: Version
    operator: str
    pieces: tuple[KeyGroups, ...]

    def partitions(self) -> list[InputPartition]:
        return [_Piece(groups) for groups in self.pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Piece)
        manifest = open_manifests(self.uri).get(self.version)
        rows = read_state(self.store.open(), manifest, self.operator, partition.groups)
        yield from spark_rows(rows).to_batches()
