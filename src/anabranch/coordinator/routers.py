"""How rows reach an operator: as rows of Spark, or packed by the workers that make them."""

from __future__ import annotations

from anabranch.spark.bind import Bound
from anabranch.spark.packed_shuffle import PackedRouter
from anabranch.spark.shuffle import Router
from anabranch.state.groups import Routing
from anabranch.worker.packing import Packing


def router_of(bound: Bound, routing: Routing) -> Router | PackedRouter:
    """What sends rows to the instances of an operator."""
    if bound.packed:
        return PackedRouter(packing_of(bound), routing, ordered=bound.ordered)
    return Router(bound.hash, routing, ordered=bound.ordered)


def packing_of(bound: Bound) -> Packing:
    """How rows for an operator are packed."""
    return Packing(bound.input, bound.keys)
