"""The rows of Linear Road: what comes in, what is known before, what is answered.

Columns are in the order of the specification and of narrow types. A column that a row of the input
does not use is -1, one that an answer does not use is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import pyarrow as pa

from anabranch.errors import PlanError

SEGMENT = 5280
"""Feet in a segment."""

SEGMENTS = 100
"""Segments of an expressway, in each direction."""

LENGTH = SEGMENT * SEGMENTS
"""Feet in an expressway."""

HOURS3 = 10_800
"""Seconds in a full run."""

REPORT_EVERY = 30
"""Seconds between two reports of a vehicle on a trip."""

ENTRY_LANE, EXIT_LANE = 0, 4
"""The ramps; the lanes between them are for travel."""

DAYS = 69
"""Days of the history: 1 is yesterday."""

UNUSED = -1
"""Stands in the columns of the input that a row does not use."""


class Row(IntEnum):
    """The types of input rows."""

    REPORT = 0
    """A vehicle says where it is and how fast."""
    BALANCE = 2
    """A vehicle asks for its account balance."""
    EXPENDITURE = 3
    """A vehicle asks what it paid on an expressway on an earlier day."""
    TRAVEL_TIME = 4
    """Never answered."""


class Answer(IntEnum):
    """The types of answers."""

    TOLL = 0
    ALERT = 1
    BALANCE = 2
    EXPENDITURE = 3


INPUT = pa.schema(
    [
        ("Type", pa.int8()),
        ("Time", pa.int32()),
        ("VID", pa.int32()),
        ("Spd", pa.int8()),
        ("XWay", pa.int16()),
        ("Lane", pa.int8()),
        ("Dir", pa.int8()),
        ("Seg", pa.int8()),
        ("Pos", pa.int32()),
        ("QID", pa.int32()),
        ("Sinit", pa.int8()),
        ("Send", pa.int8()),
        ("DOW", pa.int8()),
        ("TOD", pa.int16()),
        ("Day", pa.int8()),
    ]
)
"""The one stream of input."""

HISTORY = pa.schema(
    [("VID", pa.int32()), ("Day", pa.int8()), ("XWay", pa.int16()), ("Toll", pa.int32())]
)
"""The tolls of earlier days."""

# Wider than what is ever right: a wrong answer is to be reported, not to fail as it is read.
ANSWERS = pa.schema(
    [
        ("Type", pa.int32()),
        ("VID", pa.int32()),
        ("Time", pa.int32()),
        ("Emit", pa.float64()),
        ("Spd", pa.int32()),
        ("Toll", pa.int32()),
        ("Seg", pa.int32()),
        ("ResultTime", pa.int32()),
        ("QID", pa.int32()),
        ("Bal", pa.int64()),
    ]
)
"""The answers; ``Emit`` is the second in which they left the system."""


def minute(time: int) -> int:
    """The number of the minute that a second is in.

    >>> minute(0), minute(59), minute(60)
    (1, 1, 2)
    """
    return time // 60 + 1


def input_table(rows: Sequence[Mapping[str, int]]) -> pa.Table:
    """A table of input rows, each given by the columns that it uses.

    >>> input_table([{"Type": 2, "Time": 5, "VID": 7, "QID": 1}]).to_pylist()[0]["XWay"]
    -1
    """
    _known(rows, INPUT)
    blank = dict.fromkeys(INPUT.names, UNUSED)
    return pa.Table.from_pylist([{**blank, **row} for row in rows], INPUT)


def history_table(rows: Sequence[Mapping[str, int]] = ()) -> pa.Table:
    """A table of history rows; without any, nobody has paid before.

    >>> history_table([{"VID": 7, "Day": 1, "XWay": 0, "Toll": 30}]).num_rows
    1
    """
    _known(rows, HISTORY)
    return pa.Table.from_pylist([dict(row) for row in rows], HISTORY)


def answer_table(rows: Sequence[Mapping[str, float]] = ()) -> pa.Table:
    """A table of answers, each given by the columns that it uses.

    >>> answer_table([{"Type": 3, "QID": 1, "Time": 5, "Bal": 0}])["VID"].to_pylist()
    [None]
    """
    _known(rows, ANSWERS)
    return pa.Table.from_pylist([dict(row) for row in rows], ANSWERS)


def _known(rows: Sequence[Mapping[str, float]], schema: pa.Schema) -> None:
    for row in rows:
        if unknown := set(row) - set(schema.names):
            raise PlanError(f"no column {', '.join(sorted(unknown))}; there are {schema.names}")
