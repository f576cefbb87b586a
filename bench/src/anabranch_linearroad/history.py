"""The tolls of earlier days, made up to go with some traffic."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch_linearroad.rows import DAYS, HISTORY, Row

_TIMES = (0.3, 0.4, 0.15, 0.1, 0.05)  # shares of what is asked for that has 0, 1, 2.. rows


def make_history(
    rows: pa.Table | Iterable[pa.Table], seed: int, *, per_vehicle: float = 1.0
) -> pa.Table:
    """A history for the vehicles of some input.

    What requests ask for has no, one or several rows; ``per_vehicle`` rows on average are on top,
    of any vehicle, day and expressway.

    >>> from anabranch_linearroad.rows import input_table
    >>> asked = input_table([{"Type": 3, "Time": 0, "VID": 9, "XWay": 0, "QID": 1, "Day": 4}])
    >>> make_history(asked, seed=5).column_names
    ['VID', 'Day', 'XWay', 'Toll']
    """
    rng = np.random.default_rng([seed, 3])
    asked, vehicles, expressways = _seen([rows] if isinstance(rows, pa.Table) else rows)
    again = np.repeat(np.arange(len(asked)), rng.choice(len(_TIMES), len(asked), p=_TIMES))
    extra = int(per_vehicle * vehicles)
    drawn = {
        "VID": rng.integers(0, max(vehicles, 1), extra),
        "Day": rng.integers(1, DAYS + 1, extra),
        "XWay": rng.integers(0, max(expressways, 1), extra),
    }
    columns = {
        name: np.concatenate([asked[name].to_numpy()[again], more]) for name, more in drawn.items()
    }
    order = rng.permutation(len(again) + extra)
    columns = {name: column[order] for name, column in columns.items()}
    columns["Toll"] = rng.integers(1, 5000, len(order))
    return pa.table(
        [pa.array(columns[field.name], field.type) for field in HISTORY], schema=HISTORY
    )


def _seen(tables: Iterable[pa.Table]) -> tuple[pa.Table, int, int]:
    """The requests for daily expenditure, and the counts of vehicles and expressways."""
    asked, vehicles, expressways = [], 0, 0
    for table in tables:
        requests = table.filter(pc.field("Type") == int(Row.EXPENDITURE))
        asked.append(requests.select(["VID", "Day", "XWay"]))
        if len(table):
            vehicles = max(vehicles, pc.max(table["VID"]).as_py() + 1)
            expressways = max(expressways, pc.max(table["XWay"]).as_py() + 1)
    empty = HISTORY.empty_table().select(["VID", "Day", "XWay"])
    return pa.concat_tables([empty, *asked]), vehicles, expressways
