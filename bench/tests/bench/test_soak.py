"""The parts of the soak that could be wrong without anybody noticing."""

import os
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from anabranch_bench.soak import growth, traffic
from anabranch_bench.soak.compare import Comparison, Order, equal
from anabranch_bench.soak.faults import AGENT, DAEMON
from anabranch_bench.soak.samples import ROLES, measure_folder, processes
from anabranch_bench.soak.traffic import ACCOUNT, ORDER, PAYMENT, PING, READING, SECOND, Traffic

RATE = 400
TIME = pa.timestamp("us", tz="UTC")


def made(seed: int = 1) -> tuple[list[pa.Table], int]:
    """The files of an epoch with its markers, and where it ends."""
    source = Traffic(seed, RATE)
    files = [source.make(2.0) for _ in range(20)]
    boundary = source.close()
    return [*files, source.markers(0), source.markers(1)], boundary


def times(table: pa.Table) -> np.ndarray:
    return np.asarray(table["at"].cast(pa.int64()))


def test_traffic_is_the_same_for_the_same_seed() -> None:
    assert all(file.equals(other) for file, other in zip(made()[0], made()[0], strict=True))
    assert not made(1)[0][0].equals(made(2)[0][0])


def test_no_row_is_ever_late_and_nothing_reaches_over_an_end() -> None:
    source = Traffic(3, RATE)
    latest, since = 0, traffic.START
    for _ in range(3):
        for _ in range(15):
            at = times(source.make(2.0))
            assert at.min() >= max(since, latest - traffic.DELAY)
            latest = max(latest, at.max())
        boundary = source.close()
        assert latest + max(traffic.SILENCE, traffic.AFTER, traffic.WINDOW) <= boundary
        # With the marker's time, the watermark is where the epoch ends.
        assert times(source.markers(0)).max() - traffic.DELAY == boundary
        since, latest = boundary, boundary + traffic.DELAY


def test_rows_of_one_id_are_close_together_or_far_apart() -> None:
    """What the comparison takes for granted about deduplication."""
    source = Traffic(1, 10_000)
    rows = pa.concat_tables([source.make(2.0) for _ in range(60)])
    pings = rows.filter(pc.field("kind") == PING)
    pings = pings.set_column(0, "at", pings["at"].cast(pa.int64()))
    pings = pings.sort_by([("id", "ascending"), ("at", "ascending")])
    ids = pings["id"].to_numpy()
    gaps = np.diff(pings["at"].to_numpy())[ids[1:] == ids[:-1]]
    assert (gaps > traffic.TTL).any()
    assert ((gaps < 10 * SECOND) | (gaps > traffic.TTL)).all()


def right_results(order: Order) -> dict[str, pa.Table]:
    """Outputs and state of one epoch, by plain loops over its rows."""
    windows: dict[Any, list[int]] = defaultdict(list)
    totals: dict[int, list[int]] = defaultdict(list)
    trips: dict[str, list[tuple[int, int]]] = defaultdict(list)
    passed: dict[tuple[str, int], tuple[int, int, str]] = {}
    orders, payments, last = [], defaultdict(list), {}
    for file in order.files:
        for row in pq.read_table(file).to_pylist():
            at = round(row["at"].timestamp() * SECOND)
            kind, key, device, amount = row["kind"], row["id"], row["device"], row["amount"]
            if kind == READING:
                windows[device, at // traffic.WINDOW * traffic.WINDOW].append(amount)
            elif kind == ACCOUNT:
                totals[device].append(amount)
            elif kind == ORDER:
                orders.append((key, at, amount, row["note"]))
            elif kind == PAYMENT:
                payments[key].append((at, amount))
            elif key not in last or at > last[key] + traffic.TTL:
                last[key] = at
                passed[key, at] = (at, amount, row["note"])
                trips[row["note"]].append((at, amount))
    return _tables(order.until, windows, totals, trips, passed, orders, payments)


def _tables(until, windows, totals, trips, passed, orders, payments) -> dict[str, pa.Table]:
    over = {key: of for key, of in windows.items() if key[1] < until}
    rankings = defaultdict(list)
    for (device, start), amounts in over.items():
        minute = (start - traffic.START) // (60 * SECOND)
        tenth = start // (10 * SECOND) % 6
        score = ((minute * 2**20 + sum(amounts)) * 8 + tenth) * 2**20 + device
        rankings[device % traffic.REGIONS, minute % traffic.SLOTS].append((score, device))
    ranked = [
        (*key, device, score, rank)
        for key, of in rankings.items()
        for rank, (score, device) in enumerate(sorted(of, reverse=True)[:3], 1)
    ]
    paid = []
    for key, at, amount, note in orders:
        pairs = [p for p in payments[key] if at - traffic.BEFORE <= p[0] <= at + traffic.AFTER]
        paid += [(key, at, amount, note, *pair) for pair in pairs or [(None, None)] if at < until]
    ended = {n: of for n, of in trips.items() if of[0][0] < until}
    return {
        "counts": _table(
            {"device": pa.int32(), "window_start": TIME, "n": pa.int64(), "total": pa.int64(),
             "most": pa.int64()},
            [(*key, len(of), sum(of), max(of)) for key, of in over.items()],
        ),
        "top": _table(
            {"region": pa.int32(), "slot": pa.int32(), "device": pa.int32(), "score": pa.int64(),
             "rank": pa.int32()},
            ranked,
        ),
        "once": _table(
            {"id": pa.string(), "at": TIME, "amount": pa.int64(), "note": pa.string()},
            [(key[0], *row) for key, row in passed.items()],
        ),
        "trips": _table(
            {"note": pa.string(), "n": pa.int64(), "amount": pa.int64(), "first": pa.int64(),
             "last": pa.int64()},
            [(note, len(of), sum(a for _, a in of), min(of)[0], max(of)[0])
             for note, of in ended.items()],
        ),
        "paid": _table(
            {"id": pa.string(), "ordered": TIME, "amount": pa.int64(), "note": pa.string(),
             "settled": TIME, "paid": pa.int64()},
            paid,
        ),
        "totals": _table(
            {"device": pa.int32(), "n": pa.int64(), "total": pa.int64()},
            [(device, n, sum(of[:n])) for device, of in totals.items()
             for n in range(1, len(of) + 1)],
        ),
        "state of counts": _table(
            {"device": pa.int32(), "window_start": pa.int64()},
            [key for key in windows if key not in over],
        ),
        "state of top": _table(
            {"region": pa.int32(), "slot": pa.int32(), "device": pa.int32(), "score": pa.int64(),
             "rank": pa.int64()},
            ranked,
        ),
        "state of once": _table(
            {"id": pa.string(), "_expires": TIME},
            [(key, at + traffic.TTL) for key, at in passed if at + traffic.TTL >= until],
        ),
        "state of trips": _table(
            {"note": pa.string(), "n": pa.int64(), "amount": pa.int64()},
            [(note, len(of), 0) for note, of in trips.items() if note not in ended],
        ),
        "state of totals": _table(
            {"device": pa.int32(), "n_count": pa.int64(), "total_sum": pa.int64()},
            [(device, len(of), sum(of)) for device, of in totals.items()],
        ),
    }  # fmt: skip


def _table(schema: dict[str, pa.DataType], rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(of, kind) for of, kind in zip(columns, schema.values(), strict=True)]
    return pa.table(arrays, names=list(schema))


@pytest.fixture
def epoch(tmp_path: Path) -> Order:
    """An epoch whose outputs and state are right."""
    tables, boundary = made()
    (tmp_path / "input").mkdir()
    (tmp_path / "dump").mkdir()
    files = [str(tmp_path / "input" / f"{n:07d}.parquet") for n in range(len(tables))]
    for file, table in zip(files, tables, strict=True):
        pq.write_table(table, file)
    order = Order(
        str(tmp_path), traffic.START, boundary, 3, 7, tuple(files), str(tmp_path / "dump")
    )
    for name, table in right_results(order).items():
        pq.write_table(table, path_of(order, name))
    return order


def path_of(order: Order, name: str, version: int = 5) -> Path:
    if name.startswith("state of "):
        return Path(order.state) / f"{name.removeprefix('state of ')}.parquet"
    folder = Path(order.work) / "out" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"part-query-{version:010d}-00000.parquet"


def test_right_results_are_equal(epoch: Order) -> None:
    found = Comparison(epoch).make()
    assert equal(found), found
    assert all(each["rows"] > 0 for each in found.values()), "there was something to compare"
    assert len(found) == 11


@pytest.mark.parametrize(
    "name",
    ["counts", "top", "once", "trips", "paid", "totals", "state of top", "state of once",
     "state of totals", "state of counts", "state of trips"],
)  # fmt: skip
def test_a_row_less_or_one_more_is_found(epoch: Order, name: str) -> None:
    path = path_of(epoch, name)
    table = pq.read_table(path)
    # Of totals only the last row of an account is compared, and that none is there twice.
    pq.write_table(table.slice(0, len(table) - 1), path)
    assert not equal({name: Comparison(epoch).make()[name]})
    pq.write_table(pa.concat_tables([table, table.slice(len(table) - 1)]), path)
    assert not equal({name: Comparison(epoch).make()[name]})


def test_results_of_before_that_come_again_are_found(epoch: Order) -> None:
    path = path_of(epoch, "once", version=3)
    pq.write_table(pq.read_table(path_of(epoch, "once")).slice(0, 1), path)
    assert Comparison(epoch).make()["once"]["again"] == 1


def sampled(values: np.ndarray, name: str = "state bytes") -> list[dict[str, float]]:
    return [
        {"at": 5.0 * n, "run": 1, "query version": n, name: value} for n, value in enumerate(values)
    ]


def test_a_saw_tooth_is_flat_and_a_leak_is_not() -> None:
    at = np.arange(0, 7200, 5)
    tooth = 4e8 + 2e8 * (at % 300) / 300
    warming = np.where(at < 600, at * 1e6, 0)
    (flat,) = growth.judge(sampled(tooth + warming))
    assert flat.flat
    (leak,) = growth.judge(sampled(tooth + at * 3e4))
    assert not leak.flat
    assert leak.gained == pytest.approx(3e4 * 6600, rel=0.1)
    # A query that does not run says nothing.
    down = [sample | {"state bytes": 1e9} for sample in sampled(tooth)[700:]]
    for sample in down:
        del sample["query version"]
    assert growth.judge(sampled(tooth)[:700] + down)[0].flat


def test_the_driver_is_judged_in_its_longest_life() -> None:
    at = np.arange(0, 7200, 5)
    began = np.where(at < 1500, 0, np.where(at < 6000, 1500, 6000))
    samples = [
        {
            "at": float(t),
            "run": float(b),
            "query version": 1.0,
            "driver processes": 1.0,
            "driver private": 1e8 + 5e4 * (t - b),
        }
        for t, b in zip(at, began, strict=True)
    ]
    (found,) = growth.judge(samples)
    assert not found.flat, "every start would hide it"
    assert found.gained == pytest.approx(5e4 * (4500 - 300), rel=0.05)


def test_too_few_samples_say_nothing() -> None:
    (found,) = growth.judge(sampled(np.arange(200.0)))
    assert found.gained is None


def test_folders_and_processes_are_measured(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(os.urandom(10_000))
    with (tmp_path / "a" / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    files, size = measure_folder(tmp_path)
    assert files == 2
    assert 10_000 <= size < 100_000, "holes take no room"
    assert measure_folder(tmp_path / "not there") == (0, 0)
    found = processes(tmp_path)
    assert found["soak rss"] > 1e7
    assert found["soak threads"] >= 1
    assert found["agent processes"] == 0


def test_processes_are_known_by_modules_that_exist() -> None:
    ours = [text for text in ROLES if text.startswith("anabranch")]
    assert {"driver", "agent", "python worker"} <= {ROLES[text] for text in ours}
    for module in (*ours, AGENT, DAEMON):
        assert find_spec(module) is not None, module
