"""What vehicles have paid: the operator that keeps their accounts and writes all answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import anabranch as ab
from anabranch_linearroad import kernels
from anabranch_linearroad.ledger import Ledger
from anabranch_linearroad.rows import Answer, Row

Array = npt.NDArray[Any]

ANSWERED = pa.schema(
    [
        ("Type", pa.int8()),
        ("VID", pa.int32()),
        ("Time", pa.int32()),
        ("Spd", pa.int32()),
        ("Toll", pa.int32()),
        ("Seg", pa.int32()),
        ("ResultTime", pa.int32()),
        ("QID", pa.int32()),
        ("Bal", pa.int64()),
        ("Slice", pa.int32()),
    ]
)
"""Answers as in the specification, without ``Emit``, which nobody knows before they are committed;
``Slice`` is when the row came in that is answered."""


class Accounts(ab.Operator):
    """Charges vehicles, answers requests, and turns everything into answers.

    A balance is that of the second before the request: all charges up to then have come, wherever
    the batch ends.
    """

    state = ab.schema(book=ab.vector(ab.int64, 3))
    ordered = False
    whole_batch = True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
        """See :data:`ANSWERED`."""
        return ANSWERED

    def process(self, rows: ab.Rows, state: ab.State, context: ab.Context) -> ab.Rows:
        """Take all rows of a batch."""
        kind, toll = rows["Type"], rows["Toll"]
        reports = kind == Row.REPORT
        told = np.flatnonzero(reports & (toll >= 0))
        asked = np.flatnonzero(kind == Row.BALANCE)
        balances = self._settle(rows, np.flatnonzero(reports & (rows["Charge"] > 0)), asked, state)
        alerted = told[rows["Seg"][told] >= 0]
        spent = np.flatnonzero(kind == Row.EXPENDITURE)
        time = rows["Time"]
        parts = [
            _part(rows, told, Answer.TOLL, "VID", "Time", "Spd", "Toll"),
            _part(rows, alerted, Answer.ALERT, "VID", "Time", "Seg"),
            _part(rows, asked, Answer.BALANCE, "Time", "QID")
            | {"ResultTime": np.maximum(time[asked] - 1, 0), "Bal": balances},
            _part(rows, spent, Answer.EXPENDITURE, "Time", "QID")
            | {"Bal": self._ledger.spent(*(rows[name][spent] for name in ("VID", "Day", "XWay")))},
        ]
        return ab.Rows(_stacked(parts))

    def _settle(self, rows: ab.Rows, charged: Array, asked: Array, state: ab.State) -> Array:
        keys = rows.select("VID")
        debtors = state.rows(keys.take(charged))
        state.table.touch(debtors)
        events = np.concatenate([charged, asked])
        time = rows["Time"][events].astype(np.int64)
        amount = np.concatenate([rows["Charge"][charged], np.full(len(asked), -1)]).astype(np.int64)
        balance = np.zeros(len(events), np.int64)
        if len(events):
            # Few times, and as small numbers they are sorted in a pass or two.
            order = np.argsort((time - time.min()).astype(np.uint16), kind="stable")
            at = np.concatenate([debtors, state.find(keys.take(asked))])
            kernels.settle(state.table.column("book"), order, at, time, amount, balance)
        return balance[len(charged) :]


def _part(rows: ab.Rows, at: Array, kind: Answer, *names: str) -> dict[str, Array]:
    """Answers of one type to some rows, with these columns of theirs."""
    columns = {name: rows[name][at] for name in (*names, "Slice")}
    return {"Type": np.full(len(at), int(kind), np.int8), **columns}


def _stacked(parts: Sequence[dict[str, Array]]) -> pa.RecordBatch:
    """Answers one after the other; what a type has not is null."""
    counts = [len(part["Type"]) for part in parts]
    columns = []
    for field in ANSWERED:
        kind = field.type.to_pandas_dtype()
        values = [
            part.get(field.name, np.zeros(n, kind)) for part, n in zip(parts, counts, strict=True)
        ]
        missing = np.repeat([field.name not in part for part in parts], counts)
        mask = missing if missing.any() else None
        columns.append(pa.array(np.concatenate(values), field.type, mask=mask))
    return pa.record_batch(columns, schema=ANSWERED)
