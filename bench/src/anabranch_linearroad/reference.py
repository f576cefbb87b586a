"""The answers of Linear Road, slowly and plainly, straight from its definitions.

The rows are read twice. First every minute of every segment gets its number of vehicles, its
average speed and whether it shows an accident; then every report is looked at with that knowledge.
Only whole minutes that are over are ever used, so nothing depends on the order within a second.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from fractions import Fraction
from itertools import groupby
from typing import NamedTuple

import pyarrow as pa

from anabranch_linearroad.expected import CHARGES, REQUESTS, Expected
from anabranch_linearroad.rows import ANSWERS, Answer, Row, minute


class Key(NamedTuple):
    """A segment, in one direction."""

    xway: int
    dir: int
    seg: int


class Report(NamedTuple):
    """A row of type 0."""

    time: int
    vid: int
    spd: int
    xway: int
    lane: int
    dir: int
    seg: int
    pos: int


class Notice(NamedTuple):
    """What a vehicle is told that enters a segment in some minute."""

    lav: int
    toll: int
    accident: int | None


class Minutes:
    """What is known of each segment in each minute."""

    def __init__(self) -> None:
        self.vehicles: dict[tuple[Key, int], int] = {}
        self.average: dict[tuple[Key, int], Fraction] = {}
        self.accidents: set[tuple[Key, int]] = set()
        self._notices: dict[tuple[Key, int], Notice] = {}

    def nov(self, key: Key, m: int) -> int:
        """How many vehicles reported from the segment in that minute."""
        return self.vehicles.get((key, m), 0)

    def lav(self, key: Key, m: int) -> int:
        """The latest average velocity: of the five minutes before, those that had vehicles."""
        minutes = [before for before in range(m - 5, m) if (key, before) in self.average]
        if not minutes:
            return -1
        return math.floor(sum(self.average[key, before] for before in minutes) / len(minutes))

    def accident(self, key: Key, m: int) -> int | None:
        """The nearest segment, this one or one of four ahead, that had an accident in a minute."""
        step = 1 if key.dir == 0 else -1
        for seg in range(key.seg, key.seg + 5 * step, step):
            if 0 <= seg <= 99 and (Key(key.xway, key.dir, seg), m) in self.accidents:
                return seg
        return None

    def toll(self, key: Key, m: int) -> int:
        """What a vehicle that enters the segment in minute ``m`` is told to pay."""
        vehicles = self.nov(key, m - 1)
        if self.lav(key, m) < 40 and vehicles > 50 and self.accident(key, m - 1) is None:
            return 2 * (vehicles - 50) ** 2
        return 0

    def notice(self, key: Key, m: int) -> Notice:
        """All that a vehicle is told; the same for all that enter in that minute."""
        if (key, m) not in self._notices:
            self._notices[key, m] = Notice(
                self.lav(key, m), self.toll(key, m), self.accident(key, m - 1)
            )
        return self._notices[key, m]


def reference(rows: pa.Table, history: pa.Table) -> Expected:
    """All answers to an input whose rows are in the order of time.

    Takes some minutes for an expressway and three hours. ``ResultTime`` is the time of the request;
    :func:`~anabranch_linearroad.check` accepts other right balances as well.

    >>> from anabranch_linearroad.rows import history_table, input_table
    >>> enters = {"Type": 0, "Time": 0, "VID": 7, "Spd": 30, "XWay": 0, "Lane": 0, "Dir": 0}
    >>> rows = input_table([enters | {"Seg": 1, "Pos": 5300}])
    >>> reference(rows, history_table()).answers.select(["VID", "Spd", "Toll"]).to_pylist()
    [{'VID': 7, 'Spd': -1, 'Toll': 0}]
    """
    minutes = observe(rows)
    answers = _Columns(ANSWERS)
    charges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    last: dict[int, Report] = {}
    told: dict[int, int] = {}
    for report in _reports(rows):
        vid = report.vid
        previous = last.get(vid)
        last[vid] = report
        if previous is not None and previous.time != report.time - 30:
            previous = None
        if previous is not None and previous.seg == report.seg:
            continue
        if previous is not None:
            charges[vid].append((report.time, told[vid]))
        notice = minutes.notice(Key(report.xway, report.dir, report.seg), minute(report.time))
        told[vid] = notice.toll
        if report.lane != 4:
            to = {"VID": vid, "Time": report.time}
            answers.add(Type=Answer.TOLL, **to, Spd=notice.lav, Toll=notice.toll)
            if notice.accident is not None:
                answers.add(Type=Answer.ALERT, **to, Seg=notice.accident)
    requests = _Columns(REQUESTS)
    for qid, vid, time in _balance_requests(rows):
        paid = sum(toll for at, toll in charges.get(vid, ()) if at <= time)
        answers.add(Type=Answer.BALANCE, QID=qid, Time=time, ResultTime=time, Bal=paid)
        requests.add(QID=qid, VID=vid, Time=time)
    for answer in _expenditures(rows, history):
        answers.add(Type=Answer.EXPENDITURE, **answer)
    paid_at = _Columns(CHARGES)
    for vid in sorted(charges):
        for time, toll in charges[vid]:
            paid_at.add(VID=vid, Time=time, Toll=toll)
    return Expected(answers.table(), paid_at.table(), requests.table())


def observe(rows: pa.Table) -> Minutes:
    """The first reading: the statistics and the accidents of all minutes."""
    minutes = Minutes()
    still: dict[int, tuple[Report, int]] = {}
    stopped: dict[tuple[int, int, int, int], list[Report]] = defaultdict(list)
    for m, reports in groupby(_reports(rows), lambda report: minute(report.time)):
        speeds: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for report in reports:
            key = Key(report.xway, report.dir, report.seg)
            speeds[key][report.vid].append(report.spd)
            if _times_seen(report, still) >= 4 and report.lane in (1, 2, 3):
                there = stopped[_place(report)]
                for other in there:
                    if other.vid != report.vid and 0 <= report.time - other.time < 30:
                        minutes.accidents.add((key, m))
                there.append(report)
        for key, vehicles in speeds.items():
            minutes.vehicles[key, m] = len(vehicles)
            minutes.average[key, m] = _mean_of_means(vehicles.values())
    return minutes


def _mean_of_means(groups: Collection[list[int]]) -> Fraction:
    """The mean of the means of some groups, exactly."""
    sums: dict[int, int] = defaultdict(int)
    for group in groups:
        sums[len(group)] += sum(group)
    # Groups of equal size are added up before they are divided: fractions are slow.
    return sum((Fraction(total, n) for n, total in sums.items()), Fraction(0)) / len(groups)


def _place(report: Report) -> tuple[int, int, int, int]:
    return report.xway, report.dir, report.lane, report.pos


def _times_seen(report: Report, still: dict[int, tuple[Report, int]]) -> int:
    """How many reports on end, this one included, have come from the same place."""
    times = 1
    if report.vid in still:
        previous, seen = still[report.vid]
        if previous.time == report.time - 30 and _place(previous) == _place(report):
            times = seen + 1
    still[report.vid] = (report, times)
    return times


def _rows(rows: pa.Table, kind: Row, *names: str) -> Iterator[tuple[int, ...]]:
    """The rows of one type, one after the other, as tuples of these columns."""
    for batch in rows.select(["Type", *names]).to_batches(max_chunksize=100_000):
        columns = (batch.column(name).to_numpy().tolist() for name in names)
        for row, *values in zip(batch.column("Type").to_numpy().tolist(), *columns, strict=True):
            if row == kind:
                yield tuple(values)


def _reports(rows: pa.Table) -> Iterator[Report]:
    names = ("Time", "VID", "Spd", "XWay", "Lane", "Dir", "Seg", "Pos")
    return map(Report._make, _rows(rows, Row.REPORT, *names))


def _balance_requests(rows: pa.Table) -> Iterator[tuple[int, ...]]:
    return _rows(rows, Row.BALANCE, "QID", "VID", "Time")


def _expenditures(rows: pa.Table, history: pa.Table) -> Iterator[dict[str, int]]:
    requests = list(_rows(rows, Row.EXPENDITURE, "QID", "Time", "VID", "Day", "XWay"))
    spent = {(vid, day, xway): 0 for _, _, vid, day, xway in requests}
    names = ("VID", "Day", "XWay", "Toll")
    for batch in history.select(names).to_batches(max_chunksize=100_000):
        columns = (batch.column(name).to_numpy().tolist() for name in names)
        for vid, day, xway, toll in zip(*columns, strict=True):
            if (vid, day, xway) in spent:
                spent[vid, day, xway] += toll
    for qid, time, vid, day, xway in requests:
        yield {"QID": qid, "Time": time, "Bal": spent[vid, day, xway]}


class _Columns:
    """Rows that become a table; what is at hand is put into Arrow now and then, to save memory."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._columns: dict[str, list[int | None]] = {name: [] for name in schema.names}
        self._rows = 0
        self._tables = [schema.empty_table()]

    def add(self, **row: int) -> None:
        for name, column in self._columns.items():
            column.append(row.get(name))
        self._rows += 1
        if self._rows % 100_000 == 0:
            self._flush()

    def table(self) -> pa.Table:
        self._flush()
        return pa.concat_tables(self._tables)

    def _flush(self) -> None:
        self._tables.append(pa.table(self._columns, schema=self._schema))
        for column in self._columns.values():
            column.clear()
