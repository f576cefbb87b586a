"""What every input of Linear Road must keep to, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch_linearroad.rows import (
    DAYS,
    ENTRY_LANE,
    EXIT_LANE,
    HOURS3,
    INPUT,
    LENGTH,
    REPORT_EVERY,
    SEGMENT,
    UNUSED,
    Row,
)

Array = npt.NDArray[Any]

_USED = {
    Row.REPORT: {"Spd", "XWay", "Lane", "Dir", "Seg", "Pos"},
    Row.BALANCE: {"QID"},
    Row.EXPENDITURE: {"XWay", "QID", "Day"},
    Row.TRAVEL_TIME: {"XWay", "QID", "Sinit", "Send", "DOW", "TOD"},
}
_ALWAYS = {"Type", "Time", "VID"}
_PAUSE = 60  # seconds; between two trips there are more


def guarantees(rows: pa.Table, *, whole: bool = True) -> list[str]:
    """What an input does not keep to, one sentence for each kind; nothing if all is well.

    With ``whole=False`` the rows may be a window of a run, in which trips are cut off.

    >>> from anabranch_linearroad.rows import input_table
    >>> guarantees(input_table([{"Type": 2, "Time": 5, "VID": 7}]))
    ['a request has no QID: 1 rows, the first Type 2, Time 5, VID 7']
    """
    columns = {name: rows[name].to_numpy() for name in INPUT.names}
    found: list[str] = []

    def must_not(say: str, bad: Array, where: Callable[[Array], Array] = lambda at: at) -> None:
        if bad.any():
            first = where(np.flatnonzero(bad))[0]
            row = ", ".join(f"{name} {columns[name][first]}" for name in ("Type", "Time", "VID"))
            found.append(f"{say}: {bad.sum()} rows, the first {row}")

    _fields(columns, must_not)
    _trips(columns, must_not, whole)
    return found


def _fields(columns: dict[str, Array], must_not: Callable[..., None]) -> None:
    kind, time, qid = columns["Type"], columns["Time"], columns["QID"]
    report, request = kind == Row.REPORT, np.isin(kind, list(_USED)[1:])
    must_not("Type is unknown", ~(report | request))
    must_not("Time is not in 0..10799", (time < 0) | (time >= HOURS3))
    must_not("Time goes back", np.concatenate([[False], np.diff(time) < 0]))
    must_not("there is no VID", columns["VID"] < 0)
    for row, used in _USED.items():
        for name in set(columns) - _ALWAYS - used:
            must_not(f"{name} is used", (kind == row) & (columns[name] != UNUSED))
    for name, most in {"Spd": 100, "Lane": 4, "Dir": 1, "Pos": LENGTH - 1}.items():
        must_not(f"{name} is not in 0..{most}", report & _outside(columns[name], 0, most))
    must_not("Seg is not that of Pos", report & (columns["Seg"] != columns["Pos"] // SEGMENT))
    must_not("there is no XWay", (report | (kind == Row.EXPENDITURE)) & (columns["XWay"] < 0))
    must_not(
        f"Day is not in 1..{DAYS}", (kind == Row.EXPENDITURE) & _outside(columns["Day"], 1, DAYS)
    )
    must_not("a request has no QID", request & (qid < 0))
    _, first = np.unique(qid, return_index=True)
    again = request & (qid >= 0)
    again[first] = False
    must_not("the QID has been used", again)


def _trips(columns: dict[str, Array], must_not: Callable[..., None], whole: bool) -> None:
    reports = np.flatnonzero(columns["Type"] == Row.REPORT)
    order = reports[np.lexsort((columns["Time"][reports], columns["VID"][reports]))]
    vid, time, lane, road, pos, seg = (
        columns[name][order].astype(np.int64)
        for name in ("VID", "Time", "Lane", "XWay", "Pos", "Seg")
    )
    road = road * 2 + columns["Dir"][order]
    same = vid[1:] == vid[:-1]
    gap = np.diff(time)
    goes_on = same & (gap == REPORT_EVERY)
    starts = ~np.concatenate([[False], goes_on])[: len(order)]
    forward = np.diff(pos) * (1 - 2 * columns["Dir"][order][1:])

    def later(at: Array) -> Array:
        rows: Array = order[at + 1]
        return rows

    must_not("a vehicle reports twice in a second", same & (gap == 0), later)
    must_not(
        "reports are neither 30 s nor more than 60 s apart",
        same & (gap > 0) & (gap != REPORT_EVERY) & (gap <= _PAUSE),
        later,
    )
    must_not("XWay or Dir changes on a trip", goes_on & (np.diff(road) != 0), later)
    must_not("a segment is skipped", goes_on & (np.abs(np.diff(seg)) > 1), later)
    must_not("a vehicle goes backwards", goes_on & (forward < 0), later)
    must_not("a trip goes on after lane 4", goes_on & (lane[:-1] == EXIT_LANE), later)
    if whole:
        must_not(
            "a trip does not start in lane 0", starts & (lane != ENTRY_LANE), lambda at: order[at]
        )


def _outside(column: Array, low: int, high: int) -> Array:
    return (column < low) | (column > high)
