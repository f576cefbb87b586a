"""Small blocks of bytes for one node, sent together.

A request and a flush to disk cost as much for one small block as for fifty. Blocks that come while
others are on their way therefore wait for these, and then go in one request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from anabranch.errors import DidNotHappen, MayHaveHappened, StoreError
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import MOST_BLOCKS, Block, Epoch

Blocks = Sequence[tuple[Block, memoryview]]

SMALL = 1 << 20
"""More bytes than this go alone: nothing small waits for them."""


@dataclass(eq=False)
class _Waiting:
    blocks: Blocks
    epoch: Epoch
    deadline: Deadline
    sent: bool = False
    done: bool = False
    error: StoreError | None = field(default=None)


class Together:
    """Passes blocks to ``send``, which returns when all of them are stored, or none is."""

    def __init__(self, send: Callable[[Blocks, Epoch, Deadline], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._sending = False

    def put(self, blocks: Blocks, epoch: Epoch, deadline: Deadline) -> None:
        """Send blocks, and wait until they are stored. The error is that of their request."""
        mine = _Waiting(blocks, epoch, deadline)
        with self._changed:
            self._waiting.append(mine)
        while not mine.done:
            some = self._next(mine)
            if some:
                self._send_all(some)
        if mine.error is not None:
            raise type(mine.error)(str(mine.error), host=mine.error.host)

    def _next(self, mine: _Waiting) -> list[_Waiting]:
        """What the caller is to send; nothing if its blocks are done. Waits until it is so."""
        with self._changed:
            while not mine.done and self._sending:
                if not self._changed.wait(mine.deadline.left()):
                    self._give_up(mine)
            if mine.done:
                return []
            found: list[_Waiting] = []
            names: set[str] = set()
            blocks = size = 0
            for each in self._waiting:
                blocks += len(each.blocks)
                size += sum(len(view) for _, view in each.blocks)
                names.update(block.name for block, _ in each.blocks)
                if each.epoch != self._waiting[0].epoch or (
                    # A name that comes twice is replaced by the next request.
                    found and (blocks > MOST_BLOCKS or size > SMALL or len(names) < blocks)
                ):
                    break
                found.append(each)
            del self._waiting[: len(found)]
            for each in found:
                each.sent = True
            self._sending = True
            return found

    def _give_up(self, mine: _Waiting) -> None:
        if mine in self._waiting:
            self._waiting.remove(mine)
        mine.done = True
        kind = MayHaveHappened if mine.sent else DidNotHappen
        mine.error = kind(f"put {mine.blocks[0][0].name}: given up, as {mine.deadline.why}")

    def _send_all(self, some: list[_Waiting]) -> None:
        error: StoreError | None = None
        try:
            latest = max((each.deadline for each in some), key=lambda deadline: deadline.left())
            blocks = [block for each in some for block in each.blocks]
            self._send(blocks, some[0].epoch, latest)
        except StoreError as failed:
            error = failed
        except BaseException as failed:
            error = MayHaveHappened(f"sending {len(some)} blocks failed: {failed}")
            raise
        finally:
            with self._changed:
                for each in some:
                    each.done, each.error = True, error
                self._sending = False
                self._changed.notify_all()
