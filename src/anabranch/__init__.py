"""Elastic, fault-tolerant, vectorised keyed state for PySpark Structured Streaming.

Everything public is here: ``import anabranch as ab``.
"""

from anabranch.backup import Files as Files
from anabranch.backup.upstream import Upstream as Upstream
from anabranch.checkpointing import Never as Never
from anabranch.checkpointing import Periodic as Periodic
from anabranch.coordinator.events import Event as Event
from anabranch.coordinator.progress import InstanceProgress as InstanceProgress
from anabranch.coordinator.progress import Latency as Latency
from anabranch.coordinator.progress import OperatorProgress as OperatorProgress
from anabranch.coordinator.progress import Progress as Progress
from anabranch.errors import AnabranchError as AnabranchError
from anabranch.errors import CheckpointCorrupt as CheckpointCorrupt
from anabranch.errors import CheckpointError as CheckpointError
from anabranch.errors import CheckpointNotFound as CheckpointNotFound
from anabranch.errors import DidNotHappen as DidNotHappen
from anabranch.errors import Fenced as Fenced
from anabranch.errors import MayHaveHappened as MayHaveHappened
from anabranch.errors import Misplaced as Misplaced
from anabranch.errors import PlanError as PlanError
from anabranch.errors import QueryFailed as QueryFailed
from anabranch.errors import SchemaChanged as SchemaChanged
from anabranch.errors import StateError as StateError
from anabranch.errors import StateFull as StateFull
from anabranch.errors import StateLocked as StateLocked
from anabranch.errors import StateMissing as StateMissing
from anabranch.errors import StoreError as StoreError
from anabranch.movement.policy import FromCheckpoint as FromCheckpoint
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
from anabranch.query.query import Query as Query
from anabranch.query.query import query as query
from anabranch.query.running import RunningQuery as RunningQuery
from anabranch.query.stream import KeyedStream as KeyedStream
from anabranch.query.stream import Stream as Stream
from anabranch.query.stream import WindowedStream as WindowedStream
from anabranch.query.stream import stream as stream
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
