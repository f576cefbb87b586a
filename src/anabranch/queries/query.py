"""A query before its start: the plan, and :meth:`Query.start`."""

from __future__ import annotations

from pathlib import Path

from anabranch.backup.policy import Backup
from anabranch.checkpointing.policy import Checkpointing, Periodic
from anabranch.coordinator.assembly import Settings
from anabranch.errors import PlanError
from anabranch.movement.policy import FromCheckpoint, Movement
from anabranch.nodes.tls import Tls
from anabranch.placement.even import Even
from anabranch.placement.policy import Placement
from anabranch.plan.graph import Output, Plan
from anabranch.queries.running_query import RunningQuery
from anabranch.spark import session
from anabranch.spark.bind import bind
from anabranch.units import Duration, microseconds


def query(*queries: Query) -> Query:
    """Combine several sinks into one query, which commits all of them together."""
    if not queries:
        raise PlanError("query() needs at least one stream that ends in a sink")
    return Query(tuple(output for each in queries for output in each.outputs))


class Query:
    """One or more sinks and all steps before them. Nothing runs before :meth:`start`."""

    def __init__(self, outputs: tuple[Output, ...]) -> None:
        self.outputs = outputs

    def explain(self) -> str:
        """The plan as a tree of text, sinks first."""
        return Plan(self.outputs).tree()

    def start(
        self,
        folder: str | Path,
        *,
        checkpointing: Checkpointing | None = None,
        backup: Backup | None = None,
        placement: Placement | None = None,
        movement: Movement | None = None,
        instances: int | None = None,
        every: Duration | None = None,
        available_now: bool = False,
        state_folder: str | Path | None = None,
        tls: Tls | None = None,
        name: str | None = None,
    ) -> RunningQuery:
        """Check the plan and start it, or resume the query where it was stopped or killed.

        ``folder`` is the checkpoint folder: a path, or the URI of an object store. It has the
        progress of the query and, unless ``backup`` names another store, its checkpoints.

        ``checkpointing`` says when state is saved (default: changed rows, every 5 seconds).
        ``instances`` is the number of tasks of each operator (default: Spark's parallelism); it
        may change from one start to the next. ``every`` starts batches at fixed intervals instead
        of as soon as the previous batch ends. ``available_now`` stops the query after the rows
        that are available at the start.

        On a cluster ``backup`` may be :class:`~anabranch.Upstream` or
        :class:`~anabranch.Fragments`. ``placement`` says how many nodes are kept idle, ``movement``
        how lost state is recovered, and over how many instances. ``tls`` encrypts the traffic
        between nodes.

        ``state_folder`` is the folder of live state. The default is in shared memory; give a
        folder on a disk for state that is larger than memory.
        """
        plan = Plan(self.outputs)
        if every is not None and available_now:
            raise PlanError("start: every= and available_now=True exclude each other")
        sources = plan.sources()
        spark = sources[0].frame.sparkSession
        session.check(spark)
        trigger: dict[str, str | bool] | None = None
        if every is not None:
            trigger = {
                "processingTime": f"{microseconds(every, what='every') // 1000} milliseconds"
            }
        if available_now:
            trigger = {"availableNow": True}
        settings = Settings(
            folder=folder,
            checkpointing=checkpointing if checkpointing is not None else Periodic(),
            backup=backup,
            placement=placement if placement is not None else Even(),
            movement=movement if movement is not None else FromCheckpoint(),
            instances=instances,
            trigger=trigger,
            state_folder=state_folder,
            tls=tls,
            name=name,
        )
        return RunningQuery.start(plan, bind(plan, spark), spark, settings)
