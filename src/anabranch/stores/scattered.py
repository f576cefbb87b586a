"""Parts in fragments: scattered over their holders, and made again where they were lost.

Every holder has one fragment, under the name of the part. Its label says which it is.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from anabranch.errors import CheckpointError, StoreError
from anabranch.fragments import Encoder, Label
from anabranch.state import part_file
from anabranch.state.part import Part, peer_name
from anabranch.state.part_file import BufferSource
from anabranch.stores.gathering import Gathered, Held, Holders, Wanted, threads
from anabranch.stores.meter import Meter, Metered, Stopwatch
from anabranch.stores.store import BackupStore

_log = logging.getLogger(__name__)


def scatter(
    store: BackupStore, part: Part, data: pa.Buffer, owner: str = "", row: int | None = None
) -> Part:
    """Code a part into fragments, and store one at each of its holders, at all at once.

    ``owner`` is the node that has the state, and is noted in the fragments. ``row`` bytes of each
    fragment are coded at a time.
    It counts if one more is stored than are needed, and is then at these holders. Otherwise the
    error of a holder is raised, and some may have fragments.
    """
    count = len(part.holders)
    encoder, watch = Encoder(part.needed, count - part.needed, row=row), Stopwatch()
    with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
        paths = [Path(folder) / str(index) for index in range(count)]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in paths]
            for stripe in watch.over(encoder.stripes([data])):
                for file, piece in zip(files, stripe.rows, strict=True):
                    file.write(piece)
            for index, file in enumerate(files):
                file.write(_label(encoder, part, index, owner).to_bytes())
        if (meter := meter_of(store)) is not None:
            meter.encoded((part.needed, count - part.needed), data.size, watch.seconds)
        stored = _put_all(store, part, dict(zip(part.holders, paths, strict=True)))
    return replace(part, holders=stored)


def _label(encoder: Encoder, part: Part, index: int, owner: str) -> Label:
    return encoder.label(
        index, name=part.name, version=part.version, owner=owner, holders=part.holders
    )


def _put_all(store: BackupStore, part: Part, files: dict[str, Path]) -> tuple[str, ...]:
    """Store fragments at their holders. The holders that have theirs now."""

    def put(host: str, path: Path) -> None:
        with pa.memory_map(str(path)) as mapped:
            store.put(peer_name(host, part.name), mapped.read_buffer())

    with ThreadPoolExecutor(len(files), "anabranch-scatter") as pool:
        puts = {host: pool.submit(put, host, path) for host, path in files.items()}
    errors = {host: done.exception() for host, done in puts.items()}
    stored = tuple(host for host, error in errors.items() if error is None)
    for error in errors.values():
        enough = len(stored) > part.needed
        if error is not None and not (enough and isinstance(error, StoreError)):
            raise error
    return stored


def held(store: BackupStore, part: Part) -> Wanted:
    """A part that is in fragments, to be gathered from its holders."""
    fragments = tuple(Held(host, store, peer_name(host, part.name)) for host in part.holders)
    return Wanted(part.name, part.needed, fragments, part.bytes or None)


def meter_of(store: BackupStore) -> Meter | None:
    """What is told of the coding of parts in a store, if anything."""
    return store.meter if isinstance(store, Metered) else None


@contextmanager
def gathered(store: BackupStore, part: Part) -> Iterator[Gathered]:
    """A part that is in fragments, to be read."""
    pool = threads()
    try:
        yield Gathered(held(store, part), Holders(pool, meter=meter_of(store)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a silent holder is not waited for


def mended(store: BackupStore, part: Part, holders: Sequence[str], near: str = "") -> Part:
    """Make lost fragments of a part again at other holders. The part at all that have one now.

    If ``near`` is the owner, they are made of the file that it keeps, if that is undamaged.
    If one holder is enough to give it, each has a copy, and others get one.
    """
    if part.needed == 1:
        return _copied(store, part, holders)
    with gathered(store, part) as found:
        lost = dict(zip(holders, found.missing, strict=False))
        whole = _own(store, part) if lost and part.owner and part.owner == near else None
        stored = _remade(store, part, found, lost, whole) if lost else ()
        return replace(part, holders=(*found.holders, *stored))


def _own(store: BackupStore, part: Part) -> pa.Buffer | None:
    """The file that the owner keeps, if it has every byte that was written."""
    name = peer_name(part.owner, part.own_name)
    try:
        data = store.get(name)
        part_file.read(BufferSource(data), name=name, expected=part.checksum)
    except (CheckpointError, StoreError) as error:
        _log.info("Reading %s from others: %s", part.name, error)
        return None
    return data


def _remade(
    store: BackupStore,
    part: Part,
    found: Gathered,
    lost: Mapping[str, int],
    whole: pa.Buffer | None,
) -> tuple[str, ...]:
    """Make fragments again, by host. The hosts that have theirs now."""
    with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
        paths = {host: Path(folder) / str(index) for host, index in lost.items()}
        found.remake({lost[host]: path for host, path in paths.items()}, whole)
        return _put_all(store, replace(part, needed=0), paths)


def _copied(store: BackupStore, part: Part, holders: Sequence[str]) -> Part:
    found: dict[str, pa.Buffer] = {}
    errors: list[CheckpointError | StoreError] = []
    for host, copy in zip(part.holders, part.copies, strict=True):
        try:
            source = BufferSource(store.get(copy))
            part_file.read(source, name=copy, expected=part.checksum)
        except (CheckpointError, StoreError) as error:
            errors.append(error)
        else:
            found[host] = source.data
    if not found:
        raise errors[0]
    data = next(iter(found.values()))
    for host in holders:
        store.put(peer_name(host, part.name), data)
    return replace(part, holders=(*found, *holders))
