"""The results of the program, computed in plain Python from its input, without the library.

The query sends updates batch by batch, so the model is run batch by batch. Which files were in
which batch is read from Spark's own log of offsets.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.program import DELAY, TTL, WINDOW

SECOND = 1_000_000
Row = tuple[Any, ...]


def batches(checkpoint: Path) -> list[list[Path]]:
    """The files of each batch, in order."""
    logged: dict[int, list[tuple[int, Path]]] = {}
    for log in (checkpoint / "spark" / "sources" / "0").iterdir():
        if log.name.startswith(".") or not log.name.removesuffix(".compact").isdigit():
            continue
        for line in log.read_text().splitlines()[1:]:
            entry = json.loads(line)
            path = Path(entry["path"].removeprefix("file://"))
            logged.setdefault(int(entry["batchId"]), []).append((entry["timestamp"], path))
    found, reached = [], -1
    offsets = [log for log in (checkpoint / "spark" / "offsets").iterdir() if log.name.isdigit()]
    offsets.sort(key=lambda log: int(log.name))
    for number, log in enumerate(offsets):
        assert int(log.name) == number, f"Spark's log has no batch {number}"
        upto = int(json.loads(log.read_text().splitlines()[-1])["logOffset"])
        files = {entry for each in range(reached + 1, upto + 1) for entry in logged[each]}
        found.append([path for _, path in sorted(files)])
        reached = upto
    return found


@dataclass
class Model:
    """The state of all operators, and what they have sent out."""

    ordered: bool
    users: dict[str, list[Any]] = field(default_factory=dict)
    cities: dict[int, list[Any]] = field(default_factory=dict)
    sizes: dict[int, list[Any]] = field(default_factory=dict)
    expires: dict[str, int] = field(default_factory=dict)
    windows: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    newest: dict[int, set[str]] = field(default_factory=dict)
    """Which users a city's last one can be: those in the last batch that had any."""
    sent: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    """The rows of each output, with the number of their batch."""
    _seen: int | None = None
    _passed: int | None = None

    @classmethod
    def over(cls, given: list[list[Path]], *, ordered: bool) -> Model:
        """Run all batches."""
        model = cls(ordered)
        for number, files in enumerate(given):
            rows = [row for file in files for row in _rows(file)]
            model._users(number, rows)
            model._once(number, rows)
        return model

    def _users(self, number: int, rows: list[Row]) -> None:
        changed = {}
        for _, user, city, fare, cents, _ in rows:
            state = self.users.setdefault(user, [0, 0.0 if self.ordered else 0, city, fare])
            state[0] += 1
            state[1] += fare if self.ordered else cents
            state[2] = city if self.ordered else max(state[2], city)
            state[3] = max(state[3], fare)
            changed[user] = state
        self.sent["users"] += [(number, user, *state) for user, state in changed.items()]
        self._cities(number, [(user, *state) for user, state in changed.items()])

    def _cities(self, number: int, updates: list[Row]) -> None:
        changed: dict[int, set[str]] = defaultdict(set)
        for user, n, _, city, most in updates:
            if n % 3 == 0:
                continue
            state = self.cities.setdefault(city, [0, most, 0])
            state[0] += 1
            state[1] = max(state[1], most)
            state[2] = max(state[2], n)
            changed[city].add(user)
        self.newest |= changed
        sizes = {}
        for city in changed:
            updates_of, top, _ = self.cities[city]
            state = self.sizes.setdefault(updates_of, [0, top])
            state[0] += 1
            state[1] = max(state[1], top)
            sizes[updates_of] = state
        self.sent["sizes"] += [(number, size, *state) for size, state in sizes.items()]

    def _once(self, number: int, rows: list[Row]) -> None:
        passed = []
        for at, user, _, _, cents, ride in rows:
            assert self._seen is None or at >= self._seen - DELAY * SECOND, "no row is to be late"
            if at > self.expires.get(ride, -1):
                self.expires[ride] = at + TTL * SECOND
                passed.append((ride, at, user, cents))
        self.sent["once"] += [(number, *row) for row in passed]
        self._windows(number, passed)
        if self._seen is not None:
            old = [r for r, end in self.expires.items() if end < self._seen - DELAY * SECOND]
            for ride in old:
                del self.expires[ride]
        self._seen = max([row[0] for row in rows], default=self._seen)

    def _windows(self, number: int, passed: list[Row]) -> None:
        size = WINDOW * SECOND
        for _, at, user, cents in passed:
            state = self.windows.setdefault((user, at // size * size), [0, 0])
            state[0] += 1
            state[1] += cents
        if self._passed is not None:
            now = self._passed - DELAY * SECOND
            for user, start in [key for key in self.windows if key[1] + size <= now]:
                state = self.windows.pop((user, start))
                self.sent["windows"].append((number, user, start, start + size, *state))
        self._passed = max([row[1] for row in passed], default=self._passed)


def check(work: Path, source: Path, *, ordered: bool) -> None:
    """Compare outputs, batch by batch, and the final state of a run with the model."""
    given = batches(work / "checkpoint")
    taken = sorted(path.name for files in given for path in files)
    assert taken == sorted(path.name for path in source.iterdir()), "not every file is in a batch"
    model = Model.over(given, ordered=ordered)
    for name in ("users", "sizes", "once", "windows"):
        _same(f"output of {name}", _written(work / "out" / name), model.sent[name])
    state = {name: _state(work, name) for name in ("users", "sizes", "once", "windows", "cities")}
    columns = {
        "users": (
            "user",
            "n_count",
            "spent_sum",
            "city_value",
            "most_value",
        ),
        "sizes": ("updates", "n_count", "highest_value"),
        "once": ("ride", "_expires"),
        "windows": ("user", "window_start", "n_count", "cents_sum"),
    }
    wanted: dict[str, list[Row]] = {
        "users": [(key, *value) for key, value in model.users.items()],
        "sizes": [(key, *value) for key, value in model.sizes.items()],
        "once": list(model.expires.items()),
        "windows": [(*key, *value) for key, value in model.windows.items()],
    }
    for name, chosen in columns.items():
        _same(f"state of {name}", _tuples(state[name], chosen), wanted[name])
    cities = [(city, *value[: 2 if ordered else 3]) for city, value in model.cities.items()]
    names = ["city", "updates_count", "top_value", *([] if ordered else ["last_value"])]
    _same("state of cities", _tuples(state["cities"], names), cities)
    if ordered:
        for city, user in _tuples(state["cities"], ("city", "last_value")):
            assert user in model.newest[city], (
                f"state of cities: {user!r} is not the last of {city}"
            )


def _same(what: str, found: list[Row], wanted: list[Row]) -> None:
    found, wanted = sorted(found), sorted(wanted)
    if found == wanted:
        return
    extra, missing = set(found) - set(wanted), set(wanted) - set(found)
    raise AssertionError(
        f"{what}: {len(found)} rows instead of {len(wanted)}; "
        f"extra {sorted(extra)[:5]}, missing {sorted(missing)[:5]}"
    )


def _rows(file: Path) -> list[Row]:
    return _tuples(pq.read_table(file), ("at", "user", "city", "fare", "cents", "ride"))


def _written(folder: Path) -> list[Row]:
    rows: list[Row] = []
    for file in sorted(folder.glob("part-*.parquet")):
        table = pq.read_table(file)
        # Names are part-<query>-<version>-<partition>.
        batch = int(file.name.split("-")[2])
        rows += [(batch, *row) for row in _tuples(table, table.column_names)]
    return rows


def _state(work: Path, name: str) -> Any:
    return pq.read_table(work / "state" / f"{name}.parquet")


def _tuples(table: Any, names: Any) -> list[Row]:
    columns = []
    for name in names:
        column = table[name]
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        columns.append(column.to_pylist())
    return list(zip(*columns, strict=True))
