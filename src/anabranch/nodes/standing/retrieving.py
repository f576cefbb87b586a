"""Reading whole fragments of a state from nodes of the ring."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice

from anabranch.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, StoreError
from anabranch.fragments import Fragment
from anabranch.fragments.code import row_of
from anabranch.fragments.label import checksum_of_row
from anabranch.nodes.standing.client import Ring
from anabranch.nodes.standing.names import owner_of
from anabranch.nodes.standing.survey import Piece, survey, widen
from anabranch.stores.store import check_name


def retrieve(name: str, ring: Ring, threads: int = 8, *, owner: str = "") -> list[Fragment]:
    """As many fragments of a state as give it again, from the nodes of a ring that have them.

    ``owner`` is what the fragments were given when they were made. A fragment with a wrong checksum
    counts as missing. CheckpointNotFound if too few are left.
    """
    place = owner or owner_of(check_name(name), ring.access.query)
    found = survey(ring, place, name)
    if not found.complete:
        widen(ring, found)
    pieces = found.newest()
    if pieces is None:
        raise CheckpointNotFound(
            f"{name}: {len(found.pieces)} of its fragments are at the nodes near {place}, which is "
            "too few",
            part=name,
        )
    by_index = {piece.name.index: piece for piece in pieces}
    got: dict[int, Fragment] = {}
    errors: list[str] = []
    left = iter(by_index.values())
    pool = ThreadPoolExecutor(threads, "anabranch-retrieve")
    try:
        doing = _ask(pool, ring, left, pieces[0].name.data)
        while doing and len(got) < pieces[0].name.data:
            done, _ = wait(doing, return_when=FIRST_COMPLETED)
            for future in done:
                index = doing.pop(future)
                try:
                    got[index] = future.result()
                except (StoreError, CheckpointError) as error:
                    errors.append(str(error))
                    doing |= _ask(pool, ring, left, 1)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if len(got) < pieces[0].name.data:
        raise CheckpointNotFound(
            f"{name}: {len(got)} of its fragments can be read, and {pieces[0].name.data} are "
            f"needed: {'; '.join(errors)}",
            part=name,
        )
    return [got[index] for index in sorted(got)]


def _ask(
    pool: ThreadPoolExecutor, ring: Ring, left: Iterator[Piece], count: int
) -> dict[Future[Fragment], int]:
    return {pool.submit(_read, ring, piece): piece.name.index for piece in islice(left, count)}


def _read(ring: Ring, piece: Piece) -> Fragment:
    """A fragment, all rows of which are as they were written."""
    data = ring.store(piece.node.address).get(str(piece.name))
    fragment = Fragment.parse(data, name=f"{piece.name} at {piece.node.host}")
    for stripe, (row, checksum) in enumerate(zip(fragment.rows, fragment.label.rows, strict=True)):
        if checksum_of_row(row_of(row)) != checksum:
            raise CheckpointCorrupt(
                f"{piece.name} at {piece.node.host}: stripe {stripe} is not as it was written"
            )
    return fragment
