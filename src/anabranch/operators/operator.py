"""The protocol that every stateful operator implements, the built-in ones included."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from anabranch.operators.context import Context
from anabranch.operators.rows import Rows
from anabranch.state.schema import StateSchema
from anabranch.state.view import State


class Operator:
    """A stateful step over a keyed stream. Subclass it, declare ``state``, write ``process``.

    An operator must be deterministic: the same rows in the same order against the same state give
    the same output and the same state. It must keep nothing in ``self`` from one batch to the next;
    keep it in the state. Use ``context.batch_time`` instead of the clock.

    >>> import anabranch as ab
    >>> class Speeding(ab.Operator):
    ...     state = ab.schema(times=ab.int32)
    ...
    ...     def process(self, rows, state, context):
    ...         rows = rows.filter(rows["speed"] > 120)
    ...         at = state.rows(rows)
    ...         state.add("times", at, 1)
    ...         return rows.append_column("times", state["times"][at])
    """

    state: StateSchema
    """The columns kept for each key."""

    sub_keys: tuple[str, ...] = ()
    """Names of int64 columns that, with the key, identify a state row: several rows per key."""

    timers: bool = False
    """Whether rows of the state can have a timer; see :meth:`finish` and ``state.due``."""

    ordered: bool = True
    """Whether the result depends on the order of rows. Leave it unless you are sure: rows then
    come in the order of the source, and a replayed batch gives the same result to the bit."""

    whole_batch: bool = False
    """Whether all rows of a batch must come in one call of :meth:`process`, whatever their
    number; otherwise a large batch comes in several."""

    event_time: str | None = None
    """The timestamp column whose maximum drives the watermark, if the operator uses one."""

    watermark_delay: int = 0
    """How far the watermark stays behind the latest ``event_time`` seen, in microseconds."""

    late: bool = False
    """Whether ``context.late`` is used; its late rows have the columns of the input."""

    @property
    def event_times(self) -> tuple[str, ...]:
        """The timestamp column of each input whose maximum drives the watermark, if any."""
        return () if self.event_time is None else (self.event_time,)

    @property
    def delays(self) -> tuple[int, ...]:
        """How far the watermark stays behind each of :attr:`event_times`, in microseconds."""
        return (self.watermark_delay,) * len(self.event_times)

    def of(self, *columns: Sequence[str]) -> Operator:
        """The operator for inputs with these columns besides the key, one group for each input.

        Called before :meth:`bind` if there are several inputs.
        """
        return self

    def bind(self, schema: pa.Schema, keys: Sequence[str]) -> Operator:
        """The operator for rows of this schema. Raises :class:`PlanError` if there is none.

        Called once, before anything starts. The default returns the operator unchanged.
        """
        return self

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema | None:
        """The output columns. None, the default: those of ``process`` on no rows."""
        return None

    def process(self, rows: Rows, state: State, context: Context) -> Rows | None:
        """Add some rows of the batch to the state, and return the rows to emit, if any.

        Called any number of times per batch and slice, with some of the rows each time. The result
        must not depend on how the rows are divided; otherwise see :attr:`whole_batch`.
        """
        raise TypeError(f"{type(self).__name__} has no process method")

    def finish(self, state: State, context: Context) -> Rows | None:
        """Called once at the end of every batch for every slice, also without rows.

        Close windows here against ``context.watermark``, and act on due timers.
        """
        return None
