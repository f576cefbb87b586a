"""What the query has written, compared with what DuckDB computes from the same input files.

``python -m anabranch_bench.soak.compare < order.json`` prints the differences as JSON. An epoch is
a stretch of event time after which everything is over. What lasts longer, such as totals, is
carried from epoch to epoch in Parquet files, computed by DuckDB from the input alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anabranch.errors import QueryFailed
from anabranch_bench.soak import traffic
from anabranch_bench.soak.program import OUTPUTS
from anabranch_bench.soak.traffic import ACCOUNT, ORDER, PAYMENT, PING, READING

_SECONDS = 900.0
_SHOWN = 5

_PASSED = f"""
CREATE TABLE passed AS
WITH pings AS (
    SELECT id, us, amount, note, filename, file_row_number,
           us - lag(us) OVER (PARTITION BY id ORDER BY us) > {traffic.TTL} AS fresh
    FROM input WHERE kind = {PING}
), islands AS (
    SELECT *, count(*) FILTER (fresh) OVER (PARTITION BY id ORDER BY us
        RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS island
    FROM pings
)
SELECT id, us, amount, note FROM islands
QUALIFY row_number() OVER (PARTITION BY id, island ORDER BY filename, file_row_number) = 1
"""
"""The first row of each id: by construction those of one id are within seconds, or far apart."""

_SCORE = f"""
    (((start // 60000000 - {traffic.START // (60 * traffic.SECOND)}) * {2**20} + total) * 8
        + start // 10000000 % 6) * {2**20} + device
"""

_EXPECTED = {
    "counts": "SELECT device, start, n, total, most FROM windows",
    "top": """
        SELECT * FROM rankings SEMI JOIN
        (SELECT region, slot FROM (FROM rankings EXCEPT FROM rankings_before)) USING (region, slot)
    """,
    # A marker passes at once, in the epoch that it ends.
    "once": f"""
        SELECT id, us, amount, note FROM passed WHERE NOT starts_with(id, 'marker')
        UNION ALL SELECT id, us, amount, note FROM later WHERE kind = {PING}
    """,
    "trips": "SELECT note, count(*), sum(amount), min(us), max(us) FROM passed GROUP BY note",
    "paid": f"""
        SELECT l.id, l.us, l.amount, l.note, r.us, r.amount
        FROM (FROM input WHERE kind = {ORDER}) l LEFT JOIN (FROM input WHERE kind = {PAYMENT}) r
        ON l.id = r.id AND r.us BETWEEN l.us - {traffic.BEFORE} AND l.us + {traffic.AFTER}
    """,
    "totals": f"""
        SELECT * FROM totals SEMI JOIN
        (SELECT device FROM input WHERE kind = {ACCOUNT}) USING (device)
    """,
}
_WRITTEN = {
    "counts": "SELECT device, epoch_us(window_start), n, total, most FROM written",
    "top": """
        SELECT region, slot, device, score, rank FROM written
        QUALIFY rank() OVER (PARTITION BY region, slot ORDER BY version DESC) <= 1
    """,
    "once": 'SELECT id, epoch_us("at"), amount, note FROM written',
    "trips": "SELECT note, n, amount, first, last FROM written",
    "paid": "SELECT id, epoch_us(ordered), amount, note, epoch_us(settled), paid FROM written",
    "totals": """
        SELECT device, n, total FROM written
        QUALIFY rank() OVER (PARTITION BY device ORDER BY n DESC) = 1
    """,
}
_STATE_EXPECTED = {
    "counts": f"SELECT DISTINCT device, us // {traffic.WINDOW} FROM later WHERE kind = {READING}",
    "top": "SELECT region, slot, device, score, rank FROM rankings",
    "once": f"""
        SELECT id, us + {traffic.TTL} FROM passed WHERE us + {traffic.TTL} >= $boundary
        UNION ALL SELECT id, us + {traffic.TTL} FROM later WHERE kind = {PING}
    """,
    "trips": f"SELECT note, count(*), sum(amount) FROM later WHERE kind = {PING} GROUP BY note",
    # Rows that may still find a partner, and for each key one that says how many there are.
    "paid": f"""
        SELECT id, 0, us, amount, note, NULL FROM later WHERE kind = {ORDER}
        UNION ALL SELECT id, 1, us, amount, NULL, NULL FROM later WHERE kind = {PAYMENT}
        UNION ALL SELECT id, -1, NULL, NULL, NULL,
            [count(*) FILTER (kind = {ORDER}), count(*) FILTER (kind = {PAYMENT})]
        FROM later WHERE kind IN ({ORDER}, {PAYMENT}) GROUP BY id
    """,
    "totals": "SELECT device, n, total FROM totals",
}
_STATE = {
    "counts": f"SELECT device, window_start // {traffic.WINDOW} FROM state",
    "top": "SELECT region, slot, device, score, rank FROM state",
    "once": "SELECT id, epoch_us(_expires) FROM state",
    "trips": "SELECT note, n, amount FROM state",
    "paid": """
        SELECT id, _side,
            CASE _side WHEN 0 THEN epoch_us(ordered) WHEN 1 THEN epoch_us(settled) END,
            CASE _side WHEN 0 THEN amount WHEN 1 THEN paid END, CASE _side WHEN 0 THEN note END,
            CASE WHEN _side < 0 THEN _counts END
        FROM state
    """,
    "totals": "SELECT device, n_count, total_sum FROM state",
}


@dataclass(frozen=True)
class Order:
    """What to compare."""

    work: str
    since: int
    """Where the epoch begins, in microseconds of event time."""
    until: int
    """Where it ends."""
    after: int
    """Versions up to this one were compared before."""
    version: int
    """Everything up to this version belongs to the epoch."""
    files: tuple[str, ...]
    """The input of the epoch, and of the markers after it."""
    state: str
    """The folder with the state at the end."""


def compare(order: Order) -> dict[str, Any]:
    """Have it done by another process; the number of rows and the differences of each output."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(asdict(order)),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        raise QueryFailed(f"the comparison could not be made: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Comparison:
    """One epoch in a database of its own, which is in memory and small."""

    def __init__(self, order: Order) -> None:
        import duckdb

        self._order, self._work = order, Path(order.work)
        self._carried = self._work / "expected"
        self._carried.mkdir(exist_ok=True)
        self._db = duckdb.connect()
        self._db.execute("SET threads = 1; SET memory_limit = '2GB'; SET TimeZone = 'UTC'")
        self._read()

    def make(self) -> dict[str, Any]:
        """Compare all outputs and all state, and carry on what lasts."""
        found = {}
        for name in OUTPUTS:
            files, again = self._written_files(name)
            self._view(
                "written",
                files,
                "*, CAST(split_part(parse_filename(filename), '-', 3) AS INT) AS version",
            )
            self._db.execute(f"CREATE OR REPLACE TEMP TABLE actual AS {_WRITTEN[name]}")
            self._db.execute(f"CREATE OR REPLACE TEMP TABLE wanted AS {_EXPECTED[name]}")
            found[name] = self._difference() | {"again": again}
            if name == "totals":
                found[name]["repeated"] = self._count(
                    "SELECT count(*) - count(DISTINCT (device, n)) FROM written"
                )
        for name, query in _STATE.items():
            path = Path(self._order.state) / f"{name}.parquet"
            self._view("state", [str(path)], "*")
            self._db.execute(f"CREATE OR REPLACE TEMP TABLE actual AS {query}")
            wanted = _STATE_EXPECTED[name].replace("$boundary", str(self._order.until))
            self._db.execute(f"CREATE OR REPLACE TEMP TABLE wanted AS {wanted}")
            found[f"state of {name}"] = self._difference()
        self._carry()
        return found

    def _read(self) -> None:
        order = self._order
        self._view("files", list(order.files), '*, epoch_us("at") AS us', "file_row_number = true")
        self._db.execute(
            f"CREATE TABLE input AS FROM files WHERE us >= {order.since} AND us < {order.until}"
        )
        self._db.execute(f"CREATE TABLE later AS FROM files WHERE us >= {order.until}")
        self._db.execute(_PASSED)
        self._db.execute(
            f"""CREATE TABLE windows AS
            SELECT device, us // {traffic.WINDOW} * {traffic.WINDOW} AS start, count(*) AS n,
                   sum(amount)::BIGINT AS total, max(amount) AS most
            FROM input WHERE kind = {READING} GROUP BY ALL"""
        )
        empty = "SELECT 0 AS region, 0 AS slot, 0 AS device, 0::BIGINT AS score, 0::BIGINT AS rank"
        self._carried_over("rankings", f"{empty} WHERE false")
        self._db.execute(
            f"""CREATE TABLE rankings AS
            SELECT region, slot, device, score,
                   row_number() OVER (PARTITION BY region, slot ORDER BY score DESC) AS rank
            FROM (
                SELECT region, slot, device, score FROM rankings_before
                UNION ALL
                SELECT device % {traffic.REGIONS}, (start // 60000000
                       - {traffic.START // (60 * traffic.SECOND)}) % {traffic.SLOTS}, device,
                       {_SCORE}
                FROM windows
            ) QUALIFY rank <= 3"""
        )
        empty = "SELECT 0 AS device, 0::BIGINT AS n, 0::BIGINT AS total WHERE false"
        self._carried_over("totals", empty)
        self._db.execute(
            f"""CREATE TABLE totals AS
            SELECT device, sum(n)::BIGINT AS n, sum(total)::BIGINT AS total FROM (
                FROM totals_before
                UNION ALL SELECT device, 1, amount FROM input WHERE kind = {ACCOUNT}
            ) GROUP BY device"""
        )

    def _carried_over(self, name: str, empty: str) -> None:
        path = self._carried / f"{name}-{self._order.since}.parquet"
        source = f"SELECT * FROM read_parquet('{path}')" if path.exists() else empty
        self._db.execute(f"CREATE TABLE {name}_before AS {source}")

    def _carry(self) -> None:
        for name in ("rankings", "totals"):
            path = self._carried / f"{name}-{self._order.until}.parquet"
            self._db.execute(f"COPY {name} TO '{path}' (FORMAT parquet)")
            (self._carried / f"{name}-{self._order.since}.parquet").unlink(missing_ok=True)

    def _written_files(self, name: str) -> tuple[list[str], int]:
        """The files of the epoch, and how many there are of versions compared before."""
        files, again = [], 0
        for path in sorted((self._work / "out" / name).glob("part-*.parquet")):
            version = int(path.name.split("-")[2])
            again += version <= self._order.after
            if self._order.after < version <= self._order.version:
                files.append(str(path))
        return files, again

    def _view(self, name: str, files: list[str], columns: str, *options: str) -> None:
        if not files:
            raise QueryFailed(f"there are no files of {name!r} to compare")
        given = ", ".join([json.dumps(files).replace('"', "'"), "filename = true", *options])
        self._db.execute(
            f"CREATE OR REPLACE TEMP VIEW {name} AS SELECT {columns} FROM read_parquet({given})"
        )

    def _difference(self) -> dict[str, Any]:
        missing = self._rows("FROM wanted EXCEPT ALL FROM actual")
        extra = self._rows("FROM actual EXCEPT ALL FROM wanted")
        found: dict[str, Any] = {
            "rows": self._count("SELECT count(*) FROM wanted"),
            "missing": len(missing),
            "extra": len(extra),
        }
        if missing or extra:
            found |= {"missing_rows": missing[:_SHOWN], "extra_rows": extra[:_SHOWN]}
        return found

    def _rows(self, query: str) -> list[str]:
        return [str(row) for row in self._db.execute(query).fetchall()]

    def _count(self, query: str) -> int:
        return int(self._db.execute(query).fetchall()[0][0])


def equal(found: dict[str, Any]) -> bool:
    """Whether a comparison found no difference."""
    bad = ("missing", "extra", "again", "repeated")
    return not any(each.get(kind) for each in found.values() for kind in bad)


def main() -> None:
    """Compare what standard input says."""
    order = json.load(sys.stdin)
    order["files"] = tuple(order["files"])
    print(json.dumps(Comparison(Order(**order)).make()))


if __name__ == "__main__":
    main()
