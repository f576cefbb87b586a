"""A driver takes a query over: the nodes of the ring are told, and refuse the one before.

A node also learns of a driver from the first change that it makes there. Without the news a deposed
one could go on at the others, and delete what the new one is about to restore.
"""

from __future__ import annotations

import logging

from anabranch.errors import AnabranchError, Fenced, StoreError
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import Delete
from anabranch.nodes.standing.client import ASKED, Access, Ring
from anabranch.nodes.standing.store import is_in_ring
from anabranch.stores.address import StoreAddress

_log = logging.getLogger("anabranch")


def take_over(ring: Ring) -> int:
    """Tell all nodes that answer of the driver of this epoch. How many of them know it now.

    Deposed if one has seen a later driver. DidNotHappen if no node of the ring answers.
    """

    def tell(ring: Ring, address: str) -> None:
        # A change of nothing: the fence of the node notes the epoch, and waits for older changes.
        ring.node(address).ask(Delete(epoch=ring.epoch, names=()), Deadline(ASKED))

    nodes = {view.me: view.me.address for view in ring.everyone()}
    answers = ring.at_all(nodes, tell, seconds=ASKED)
    for node, answer in answers.items():
        if isinstance(answer, Fenced):
            raise answer
        if isinstance(answer, AnabranchError):
            _log.warning(
                "%s was not told that driver %d has taken the query over: %s",
                node.host,
                ring.epoch,
                answer,
            )
    return sum(answer is None for answer in answers.values())


def announce(address: StoreAddress) -> None:
    """Take over at the address that :func:`~anabranch.nodes.standing.store.with_key` has made.

    Nothing happens if it is not in a ring. A ring that does not answer is not waited for: reads
    wait for it, and each change tells its node.
    """
    if not is_in_ring(address):
        return
    given = address.arguments
    access = Access.from_json(given["access"])
    with Ring(access, epoch=given["epoch"], silence=given["silence"]) as ring:
        try:
            take_over(ring)
        except StoreError as error:
            _log.warning("The ring was not told of driver %d: %s", ring.epoch, error)
