"""Elastic, fault-tolerant, vectorised keyed state for PySpark Structured Streaming.

Everything public is here: ``import anabranch as ab``. A name is imported from its module when it is
first used. Python workers and agents import this package too, and so do not load the modules that
only the driver runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.backup.files import Files as Files
    from anabranch.backup.fragments import Fragments as Fragments
    from anabranch.backup.upstream import Upstream as Upstream
    from anabranch.checkpointing import Never as Never
    from anabranch.checkpointing import Periodic as Periodic
    from anabranch.coordinator.events import Event as Event
    from anabranch.coordinator.progress import Change as Change
    from anabranch.coordinator.progress import FragmentsProgress as FragmentsProgress
    from anabranch.coordinator.progress import InstanceProgress as InstanceProgress
    from anabranch.coordinator.progress import Latency as Latency
    from anabranch.coordinator.progress import OperatorProgress as OperatorProgress
    from anabranch.coordinator.progress import Progress as Progress
    from anabranch.errors import AnabranchError as AnabranchError
    from anabranch.errors import CheckpointCorrupt as CheckpointCorrupt
    from anabranch.errors import CheckpointError as CheckpointError
    from anabranch.errors import CheckpointNotFound as CheckpointNotFound
    from anabranch.errors import Deposed as Deposed
    from anabranch.errors import DidNotHappen as DidNotHappen
    from anabranch.errors import Fenced as Fenced
    from anabranch.errors import MayHaveHappened as MayHaveHappened
    from anabranch.errors import Misplaced as Misplaced
    from anabranch.errors import PlanError as PlanError
    from anabranch.errors import QueryFailed as QueryFailed
    from anabranch.errors import SchemaChanged as SchemaChanged
    from anabranch.errors import SinkFailed as SinkFailed
    from anabranch.errors import StateError as StateError
    from anabranch.errors import StateFull as StateFull
    from anabranch.errors import StateLocked as StateLocked
    from anabranch.errors import StateMissing as StateMissing
    from anabranch.errors import StoreError as StoreError
    from anabranch.fragments.adapt import Adapt as Adapt
    from anabranch.fragments.adapt import Prefer as Prefer
    from anabranch.fragments.fragment import encode as encode
    from anabranch.fragments.fragment import recompute as recompute
    from anabranch.movement.policy import FromCheckpoint as FromCheckpoint
    from anabranch.movement.policy import FromInput as FromInput
    from anabranch.nodes.standing.client import Ring as Ring
    from anabranch.nodes.standing.retrieving import retrieve as retrieve
    from anabranch.nodes.standing.saving import save as save
    from anabranch.nodes.tls import Tls as Tls
    from anabranch.operators.aggregates import approx_count_distinct as approx_count_distinct
    from anabranch.operators.aggregates import count as count
    from anabranch.operators.aggregates import first as first
    from anabranch.operators.aggregates import last as last
    from anabranch.operators.aggregates import max as max
    from anabranch.operators.aggregates import mean as mean
    from anabranch.operators.aggregates import min as min
    from anabranch.operators.aggregates import sum as sum
    from anabranch.operators.aggregates import variance as variance
    from anabranch.operators.context import Context as Context
    from anabranch.operators.operator import Operator as Operator
    from anabranch.operators.rows import Rows as Rows
    from anabranch.operators.windows import count_window as count_window
    from anabranch.operators.windows import session_window as session_window
    from anabranch.operators.windows import sliding as sliding
    from anabranch.operators.windows import tumbling as tumbling
    from anabranch.placement.even import Even as Even
    from anabranch.queries.query import Query as Query
    from anabranch.queries.query import query as query
    from anabranch.queries.running_query import RunningQuery as RunningQuery
    from anabranch.queries.stream import KeyedStream as KeyedStream
    from anabranch.queries.stream import Stream as Stream
    from anabranch.queries.stream import WindowedStream as WindowedStream
    from anabranch.queries.stream import stream as stream
    from anabranch.spark.session import session as session
    from anabranch.state.schema import Column as Column
    from anabranch.state.schema import StateSchema as StateSchema
    from anabranch.state.schema import binary as binary
    from anabranch.state.schema import bool_ as bool_
    from anabranch.state.schema import float32 as float32
    from anabranch.state.schema import float64 as float64
    from anabranch.state.schema import int8 as int8
    from anabranch.state.schema import int16 as int16
    from anabranch.state.schema import int32 as int32
    from anabranch.state.schema import int64 as int64
    from anabranch.state.schema import schema as schema
    from anabranch.state.schema import string as string
    from anabranch.state.schema import timestamp as timestamp
    from anabranch.state.schema import uint8 as uint8
    from anabranch.state.schema import uint16 as uint16
    from anabranch.state.schema import uint32 as uint32
    from anabranch.state.schema import uint64 as uint64
    from anabranch.state.schema import vector as vector
    from anabranch.state.view import State as State

__version__ = "0.1.0"

_MODULES = {
    "backup.files": "Files",
    "backup.fragments": "Fragments",
    "backup.upstream": "Upstream",
    "checkpointing": "Never Periodic",
    "coordinator.events": "Event",
    "coordinator.progress": (
        "Change FragmentsProgress InstanceProgress Latency OperatorProgress Progress"
    ),
    "errors": (
        "AnabranchError CheckpointCorrupt CheckpointError CheckpointNotFound Deposed "
        "DidNotHappen Fenced MayHaveHappened Misplaced PlanError QueryFailed SchemaChanged "
        "SinkFailed StateError StateFull StateLocked StateMissing StoreError"
    ),
    "fragments.adapt": "Adapt Prefer",
    "fragments.fragment": "encode recompute",
    "movement.policy": "FromCheckpoint FromInput",
    "nodes.standing.client": "Ring",
    "nodes.standing.retrieving": "retrieve",
    "nodes.standing.saving": "save",
    "nodes.tls": "Tls",
    "operators.aggregates": "approx_count_distinct count first last max mean min sum variance",
    "operators.context": "Context",
    "operators.operator": "Operator",
    "operators.rows": "Rows",
    "operators.windows": "count_window session_window sliding tumbling",
    "placement.even": "Even",
    "queries.query": "Query query",
    "queries.running_query": "RunningQuery",
    "queries.stream": "KeyedStream Stream WindowedStream stream",
    "spark.session": "session",
    "state.schema": (
        "Column StateSchema binary bool_ float32 float64 int16 int32 int64 int8 schema string "
        "timestamp uint16 uint32 uint64 uint8 vector"
    ),
    "state.view": "State",
}
"""The same for the interpreter: the public names, by the module that each is imported from."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
