"""Little worlds: rows written by hand, and what the reference says of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from driving import answers

from anabranch_linearroad import (
    ANSWERS,
    Answer,
    Expected,
    Row,
    check,
    history_table,
    input_table,
    reference,
)
from anabranch_linearroad.files import shaped

Rows = list[dict[str, int]]
_vids = count(10_000)
ASKER = 9


def report(
    time: int,
    vid: int,
    seg: int,
    *,
    spd: int = 30,
    lane: int = 1,
    dir: int = 0,
    xway: int = 0,
    feet: int = 100,
) -> dict[str, int]:
    return {
        "Type": Row.REPORT,
        "Time": time,
        "VID": vid,
        "Spd": spd,
        "XWay": xway,
        "Lane": lane,
        "Dir": dir,
        "Seg": seg,
        "Pos": seg * 5280 + feet,
    }


def drive(vid: int, start: int, segs: Sequence[int], *, lane: int = 1, **more: int) -> Rows:
    """A trip: one report every 30 seconds, the first from the entry ramp."""
    return [
        report(start + 30 * i, vid, seg, lane=lane if i else 0, **more)
        for i, seg in enumerate(segs)
    ]


def stand(vid: int, start: int, times: int, seg: int, *, lane: int = 2, **more: int) -> Rows:
    """A car that says the same place so many times, and is not heard of again."""
    return [report(start + 30 * i, vid, seg, lane=lane, **more) for i in range(times)]


def crowd(n: int, minute: int, seg: int, *, spd: int = 20, **more: int) -> Rows:
    """Cars that are each seen once, in one segment and minute."""
    return [
        report((minute - 1) * 60 + i % 60, next(_vids), seg, spd=spd, lane=0, **more)
        for i in range(n)
    ]


def balance(time: int, vid: int, qid: int = 1) -> dict[str, int]:
    return {"Type": Row.BALANCE, "Time": time, "VID": vid, "QID": qid}


def expenditure(time: int, vid: int, day: int, xway: int, qid: int = 1) -> dict[str, int]:
    return {
        "Type": Row.EXPENDITURE,
        "Time": time,
        "VID": vid,
        "QID": qid,
        "Day": day,
        "XWay": xway,
    }


def in_time(rows: Iterable[dict[str, int]]) -> Any:
    return input_table(sorted(rows, key=lambda row: row["Time"]))


@dataclass(frozen=True)
class Told:
    """Answers by what identifies them."""

    expected: Expected

    def _rows(self, kind: Answer) -> list[dict[str, Any]]:
        return [row for row in self.expected.answers.to_pylist() if row["Type"] == kind]

    @property
    def notices(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The average speed and the toll of each notification."""
        rows = self._rows(Answer.TOLL)
        return {(row["VID"], row["Time"]): (row["Spd"], row["Toll"]) for row in rows}

    @property
    def alerts(self) -> dict[tuple[int, int], int]:
        return {(row["VID"], row["Time"]): row["Seg"] for row in self._rows(Answer.ALERT)}

    @property
    def balances(self) -> dict[int, int]:
        return {row["QID"]: row["Bal"] for row in self._rows(Answer.BALANCE)}

    @property
    def spent(self) -> dict[int, int]:
        return {row["QID"]: row["Bal"] for row in self._rows(Answer.EXPENDITURE)}

    def asked(self, time: int) -> tuple[int, int]:
        """What the one who asks was told at a time."""
        return self.notices[ASKER, time]

    @property
    def charged(self) -> list[tuple[int, int, int]]:
        rows = self.expected.charges.to_pylist()
        return [(row["VID"], row["Time"], row["Toll"]) for row in rows]


def tell(*rows: dict[str, int] | Rows, history: Sequence[dict[str, int]] = ()) -> Told:
    """What the reference answers to rows, which are put into the order of time first.

    The operators of the query are to answer the same.
    """
    flat = [row for part in rows for row in (part if isinstance(part, list) else [part])]
    given, paid = in_time(flat), history_table(history)
    expected = reference(given, paid)
    verdict = check(shaped(answers(given, paid, seed=len(flat)), ANSWERS, "answers"), expected)
    assert verdict.passed, verdict
    return Told(expected)
