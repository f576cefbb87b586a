"""The definitions once more, each as a search over all rows: right at any size, usable at none."""

from fractions import Fraction
from functools import cache
from math import floor
from typing import Any

Rows = list[dict[str, int]]
Place = tuple[int, int, int]


class World:
    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.reports = [row for row in rows if row["Type"] == 0]

    def answers(self) -> set[tuple[Any, ...]]:
        found: set[tuple[Any, ...]] = set()
        for q in self.reports:
            if self.enters(q) and q["Lane"] != 4:
                m = q["Time"] // 60 + 1
                found.add((0, q["VID"], q["Time"], self.lav(key(q), m), self.toll(q)))
                near = self.in_range(q)
                if near:
                    found.add((1, q["VID"], q["Time"], near[0]))
        for q in self.rows:
            if q["Type"] == 2:
                found.add((2, q["QID"], q["Time"], self.balance(q["VID"], q["Time"])))
        return found

    def balance(self, vid: int, time: int) -> int:
        charges = [
            self.toll(self.entry(before))
            for q in self.reports
            if q["VID"] == vid and q["Time"] <= time
            if (before := self.prev(q)) is not None and before["Seg"] != q["Seg"]
        ]
        return sum(charges)

    def prev(self, q: dict[str, int]) -> dict[str, int] | None:
        return self.at(q["VID"], q["Time"] - 30)

    @cache  # noqa: B019
    def at(self, vid: int, time: int) -> dict[str, int] | None:
        found = [r for r in self.reports if (r["VID"], r["Time"]) == (vid, time)]
        return found[0] if found else None

    def enters(self, q: dict[str, int]) -> bool:
        before = self.prev(q)
        return before is None or before["Seg"] != q["Seg"]

    def entry(self, q: dict[str, int]) -> dict[str, int]:
        """The report with which a vehicle entered the segment that it is in."""
        while not self.enters(q):
            before = self.prev(q)
            assert before is not None
            q = before
        return q

    @cache  # noqa: B019
    def within(self, k: Place, m: int) -> Rows:
        return [r for r in self.reports if key(r) == k and r["Time"] // 60 + 1 == m]

    @cache  # noqa: B019
    def nov(self, k: Place, m: int) -> int:
        return len({r["VID"] for r in self.within(k, m)})

    @cache  # noqa: B019
    def avg(self, k: Place, m: int) -> Fraction | None:
        here = self.within(k, m)
        means = []
        for v in {r["VID"] for r in here}:
            speeds = [r["Spd"] for r in here if r["VID"] == v]
            means.append(Fraction(sum(speeds), len(speeds)))
        return sum(means, Fraction(0)) / len(means) if means else None

    @cache  # noqa: B019
    def lav(self, k: Place, m: int) -> int:
        known = [a for i in range(1, 6) if (a := self.avg(k, m - i)) is not None]
        return floor(sum(known, Fraction(0)) / len(known)) if known else -1

    def stopped(self, r: dict[str, int]) -> bool:
        spot = tuple(r[name] for name in ("XWay", "Dir", "Lane", "Pos"))
        for _ in range(3):
            before = self.prev(r)
            if before is None or spot != tuple(before[n] for n in ("XWay", "Dir", "Lane", "Pos")):
                return False
            r = before
        return True

    @cache  # noqa: B019
    def acc(self, k: Place, m: int) -> bool:
        for r2 in self.within(k, m):
            for r1 in self.reports:
                same = all(r1[n] == r2[n] for n in ("XWay", "Dir", "Lane", "Pos"))
                if (
                    r1["VID"] != r2["VID"]
                    and same
                    and r2["Lane"] in (1, 2, 3)
                    and 0 <= r2["Time"] - r1["Time"] < 30
                    and self.stopped(r1)
                    and self.stopped(r2)
                ):
                    return True
        return False

    def in_range(self, q: dict[str, int]) -> list[int]:
        s, m = q["Seg"], q["Time"] // 60 + 1
        ahead = [s + i if q["Dir"] == 0 else s - i for i in range(5)]
        return [a for a in ahead if 0 <= a <= 99 and self.acc((q["XWay"], q["Dir"], a), m - 1)]

    def toll(self, q: dict[str, int]) -> int:
        k, m = key(q), q["Time"] // 60 + 1
        if self.lav(k, m) < 40 and self.nov(k, m - 1) > 50 and not self.in_range(q):
            return 2 * (self.nov(k, m - 1) - 50) ** 2
        return 0


def key(r: dict[str, int]) -> Place:
    return r["XWay"], r["Dir"], r["Seg"]
