"""Storing the fragments of a state at nodes of the ring: each at another host, all at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from anabranch.errors import DidNotHappen, PlanError, StoreError
from anabranch.fragments import Fragment, Holder, spread
from anabranch.nodes.remote import NodeStore
from anabranch.nodes.standing.client import Neighbourhood, Ring
from anabranch.nodes.standing.names import FragmentName, write_holder
from anabranch.nodes.standing.survey import Piece, delete, new_generation, survey
from anabranch.ring import Contact

_log = logging.getLogger("anabranch")

GRACE = 2.0
"""Once enough fragments are stored, the others are waited for so many seconds."""

Write = Callable[[int, NodeStore], None]
"""Stores the fragment with this index at a node."""


@dataclass(frozen=True)
class Shape:
    """Into how many fragments a state is coded here."""

    data: int
    parity: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.data + self.parity

    def within(self, nodes: int) -> Shape:
        """With fewer nodes there are fewer fragments of data, and then fewer of parity.

        >>> Shape(4, 2).within(6), Shape(4, 2).within(5), Shape(4, 2).within(2)
        (Shape(data=4, parity=2), Shape(data=3, parity=2), Shape(data=1, parity=1))
        """
        if nodes >= self.total:
            return self
        data = max(1, nodes - self.parity)
        return Shape(data, max(1, nodes - data))


def candidates(near: Neighbourhood, owner: str) -> dict[str, tuple[Contact, Holder]]:
    """The nodes that can hold fragments of an owner's states, by host; never its own.

    DidNotHappen if there are fewer than two, as then no loss would be survived.
    """
    found = {
        each.contact.host: (each.contact, _holder(each.contact, each.load))
        for each in near.members
        if each.contact.host != owner
    }
    if len(found) < 2:
        raise DidNotHappen(
            f"the ring has {len(found)} nodes beside {owner}, and fragments need at least two on "
            "different hosts; start more with 'anabranch node --ring FILE'"
        )
    return found


class Placing:
    """The holders of the fragments of one state, of which some are replaced while they are stored.

    Several threads store fragments.
    """

    def __init__(
        self,
        nodes: dict[str, tuple[Contact, Holder]],
        shape: Shape,
        holding: Collection[str] = (),
    ) -> None:
        """``holding``: hosts that have fragments of the state already."""
        self._nodes = nodes
        self._parity = shape.parity
        self._lock = threading.Lock()
        self._spare = [holder for _, holder in nodes.values() if holder.host not in holding]
        self._holding = [holder for _, holder in nodes.values() if holder.host in holding]

    def first(self, count: int) -> list[Contact]:
        """The first choice, fewer than asked for if there are no more hosts."""
        chosen = spread(self._spare, count, self._parity, self._holding)
        return [self._take(holder) for holder in chosen]

    def another(self) -> Contact | None:
        """One in place of another that has failed, if any is left."""
        with self._lock:
            chosen = spread(self._spare, 1, self._parity, self._holding)
            return self._take(chosen[0]) if chosen else None

    def _take(self, holder: Holder) -> Contact:
        self._spare.remove(holder)
        self._holding.append(holder)
        return self._nodes[holder.host][0]


class Saving:
    """Stores fragments in threads, each at its holder or at another one in its place."""

    def __init__(self, ring: Ring, placing: Placing, title: str, threads: int) -> None:
        self._ring = ring
        self._placing = placing
        self._title = title
        self._pool = ThreadPoolExecutor(threads, "anabranch-save")

    def store(
        self, holders: dict[int, Contact], write: Write, enough: int, over: Callable[[], None]
    ) -> dict[int, Contact | StoreError]:
        """Where each fragment is now, or why it is nowhere.

        Those that take longer, when ``enough`` are stored, follow later, and are not in the result.
        ``over`` is called at the end of the last one.
        """
        doing = {
            index: self._pool.submit(self._one, index, holder, write)
            for index, holder in holders.items()
        }
        left = set(doing.values())
        end = _Countdown(len(left), over)
        for future in left:
            future.add_done_callback(end)
        self._pool.shutdown(wait=False)
        while left and sum(_is_stored(each) for each in doing.values()) < enough:
            _, left = wait(left, return_when="FIRST_COMPLETED")
        _, late = wait(left, timeout=GRACE)
        done = {index: each.result() for index, each in doing.items() if each not in late}
        if late:
            _log.info(
                "%s: %d of %d fragments are stored, which is enough; the others follow.",
                self._title,
                sum(isinstance(each, Contact) for each in done.values()),
                len(holders),
            )
        return done

    def _one(self, index: int, holder: Contact, write: Write) -> Contact | StoreError:
        while True:
            try:
                write(index, self._ring.store(holder.address))
                return holder
            except StoreError as error:
                self._ring.forget()
                other = self._placing.another()
                if other is None:
                    return error
                _log.info(
                    "%s: %s did not store fragment %d; storing it at %s: %s",
                    self._title,
                    holder.host,
                    index,
                    other.host,
                    error,
                )
                holder = other


class _Countdown:
    def __init__(self, count: int, over: Callable[[], None]) -> None:
        self._count, self._over = count, over
        self._lock = threading.Lock()
        if not count:
            over()

    def __call__(self, _: object) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._over()


def withdraw(
    ring: Ring,
    name: str,
    generation: int,
    shape: Shape,
    stored: Mapping[int, Contact | StoreError],
) -> None:
    """Delete the fragments of a state of which too few were stored: nobody else would.

    Where nodes are full, each attempt would leave less room for the next one.
    """
    delete(
        ring,
        [
            Piece(node, FragmentName(name, generation, index, shape.data, shape.total))
            for index, node in stored.items()
            if isinstance(node, Contact)
        ],
    )


def _is_stored(future: Future[Contact | StoreError]) -> bool:
    return future.done() and isinstance(future.result(), Contact)


def _holder(contact: Contact, load: int) -> Holder:
    return Holder(contact.host, contact.id.label, load)


def save(fragments: Sequence[Fragment], ring: Ring, threads: int = 8) -> list[bool]:
    """Store fragments of a state at nodes of a ring, each at another host. Which are stored.

    These are nodes next to the place of the state's owner on the ring, the least full first. If
    one fails or is full, another takes its place. The state replaces an earlier one of its name,
    once enough of its fragments are stored to compute it.
    """
    if not fragments:
        return []
    label = fragments[0].label
    owner = label.owner or ring.access.query
    name, layout = label.name, label.layout
    before = survey(ring, owner, name)
    placing = Placing(candidates(before.near, owner), Shape(layout.data, layout.parity))
    holders = placing.first(layout.total)
    by_index = dict(zip((each.label.index for each in fragments), holders, strict=False))
    noted = tuple(write_holder(each) for each in holders)
    if len(noted) < layout.total:
        raise PlanError(
            f"{name} has {layout.total} fragments, and the ring has {len(noted)} other hosts next "
            f"to {owner}: make fewer fragments, or start more nodes"
        )
    generation = new_generation(before)
    of = {each.label.index: each for each in fragments}

    def write(index: int, store: NodeStore) -> None:
        fragment = of[index]
        labelled = Fragment(replace(fragment.label, holders=noted), fragment.rows)
        found = FragmentName(name, generation, index, layout.data, layout.total)
        store.put(str(found), labelled.to_bytes())

    saving = Saving(ring, placing, name, threads)
    stored = saving.store(by_index, write, len(fragments), lambda: None)
    done = [isinstance(stored.get(each.label.index), Contact) for each in fragments]
    if sum(done) >= layout.data:
        delete(ring, before.pieces)
    return done
