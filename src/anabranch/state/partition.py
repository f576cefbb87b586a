"""Partitioning captured state over instances, and merging it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import CheckpointError
from anabranch.kernels.newest import first_of_each
from anabranch.state.capture import Capture
from anabranch.state.chains import follow, needed
from anabranch.state.groups import KeyGroups
from anabranch.state.keys import KeyBatch, KeyLayout

Array = npt.NDArray[Any]


def partition(
    captures: Sequence[Capture], routing: Mapping[int, KeyGroups]
) -> dict[int, list[Capture]]:
    """The captures that each instance needs to have the state of its groups, oldest first.

    Every group must be in the captures.
    """
    parts: dict[int, list[Capture]] = {}
    for instance, groups in routing.items():
        parts[instance] = [
            replace(capture.select(groups & of), instance=instance)
            for capture, of in needed(captures)
            if groups & of
        ]
        found = follow(parts[instance]).groups if parts[instance] else KeyGroups()
        if found != groups:
            raise CheckpointError(
                f"instance {instance} needs groups {groups}, but the captures lack {groups - found}"
            )
    return parts


def merge(captures: Sequence[Capture]) -> Capture:
    """One capture that is equivalent to all of these.

    It combines the captures of several instances, and a chain of incremental captures. The result
    is full if the chain starts with full captures. It belongs to the instance of the first capture.
    """
    chain = follow(captures)
    first = captures[0]
    for other in captures:
        if other.operator != first.operator or other.schema != first.schema:
            raise CheckpointError(f"{other!r} and {first!r} are not of the same operator")
    found = newest_rows(captures, keep_deleted=chain.base is not None)
    rows = pa.concat_tables([capture.rows for capture in found])
    return Capture(
        first.operator, first.instance, chain.version, chain.base, chain.groups, first.schema, rows
    )


def newest_rows(captures: Sequence[Capture], *, keep_deleted: bool) -> list[Capture]:
    """The captures, newest first, with only the rows that no newer row replaces."""
    found = [capture.select(groups) for capture, groups in reversed(needed(captures))]
    masks = [np.ones(capture.rows.num_rows, np.bool_) for capture in found]
    if any(capture.base is not None and capture.rows.num_rows for capture in found):
        layout = found[0].schema.key_layout()
        keys = _joined([batch for capture in found for batch in key_batches(capture, layout)])
        keep = first_of_each(keys.hashes, keys.words, keys.starts, keys.lens, keys.data)
        masks = np.split(keep, np.cumsum([len(mask) for mask in masks])[:-1])
    if not keep_deleted:
        masks = [mask & ~capture.deleted() for mask, capture in zip(masks, found, strict=True)]
    return [
        c if mask.all() else replace(c, rows=c.rows.filter(pa.array(mask)))
        for mask, c in zip(masks, found, strict=True)
    ]


def key_batches(capture: Capture, layout: KeyLayout) -> list[KeyBatch]:
    """The keys of a capture as a table takes them, one batch for each of Arrow's."""
    keys = len(capture.schema.keys)
    batches = []
    for batch in capture.rows.to_batches():
        columns = batch.columns
        sub = [column.to_numpy() for column in columns[keys : capture.schema.key_count]]
        hashes, groups = columns[capture.schema.key_count : capture.schema.key_count + 2]
        encoded = layout.encode(columns[:keys], hashes.to_numpy(), sub)
        # The hash of the user's key alone is not kept, and the hash of the whole key is right here.
        batches.append(replace(encoded, hashes=hashes.to_numpy(), groups=groups.to_numpy()))
    return batches


def _joined(batches: Sequence[KeyBatch]) -> KeyBatch:
    starts, data, size = [], [], 0
    for batch in batches:
        # The batches of a sliced capture share their bytes: take of each only what it names.
        first = int(batch.starts.min(initial=len(batch.data)))
        end = int((batch.starts + batch.lens).max(initial=first))
        starts.append(batch.starts + (size - first))
        data.append(batch.data[first:end])
        size += end - first
    return KeyBatch(
        hashes=np.concatenate([batch.hashes for batch in batches]),
        groups=np.concatenate([batch.groups for batch in batches]),
        words=np.concatenate([batch.words for batch in batches]),
        starts=np.concatenate(starts),
        lens=np.concatenate([batch.lens for batch in batches]),
        data=np.concatenate(data),
    )
