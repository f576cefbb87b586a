"""Routing of packed rows: the same as :class:`~anabranch.spark.shuffle.Router`, in the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from pyspark.sql import DataFrame

from anabranch.spark.columns import map_in_arrow
from anabranch.state.groups import Routing
from anabranch.worker.packing import PACKED, TARGET, Batches, Packing, versioned


class PackedRouter:
    """Sends packed rows to instances. The workers that make the rows call :meth:`divide`."""

    def __init__(self, packing: Packing, routing: Routing, *, ordered: bool) -> None:
        self.routing = routing
        self.packing = packing
        self.ordered = ordered

    @property
    def divide(self) -> Callable[[Batches], Batches]:
        """Pack rows for their instances, in the worker that makes them."""
        return partial(self.packing.divided, self.routing.table())

    def routed(self, packed: DataFrame) -> DataFrame:
        """Partition i holds the rows of instance i."""
        return self.sent(packed)

    def sent(self, packed: DataFrame) -> DataFrame:
        """See :meth:`Router.sent`."""
        return packed.repartitionById(self.routing.instances, TARGET)

    def in_order(self, sent: DataFrame) -> DataFrame:
        """The rows unchanged. They are sorted when they are unpacked."""
        return sent

    def addressed(self, sent: DataFrame, targets: Sequence[int]) -> DataFrame:
        """See :meth:`Router.addressed`."""
        divide = partial(self.packing.divided_again, np.array(targets, np.int32))
        return sent.mapInArrow(divide, versioned(PACKED))

    def as_from(self, frame: DataFrame, instances: Sequence[int]) -> DataFrame:
        """See :meth:`Router.as_from`."""
        # In no order rows may be made again by more instances than they were sent by at first.
        senders = tuple(instances) if self.ordered else ()
        return map_in_arrow(frame, partial(self.packing.as_from, senders), PACKED)
