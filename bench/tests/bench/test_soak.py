"""The parts of the soak that could be wrong without anybody noticing."""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from anabranch.cluster.processes import MARK
from anabranch.cluster.waiting import until
from anabranch_bench.soak import growth, traffic
from anabranch_bench.soak.compare import Comparison, Order, equal
from anabranch_bench.soak.faults import AGENT, DAEMON, Faults
from anabranch_bench.soak.run import spares_driver, spares_node
from anabranch_bench.soak.samples import ROLES, measure_folder, oldest, processes, unlinked
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
        "state of paid": _table(
            {"id": pa.string(), "_side": pa.int64(), "_counts": pa.list_(pa.int64(), 2),
             "ordered": TIME, "amount": pa.int64(), "note": pa.string(), "settled": TIME,
             "paid": pa.int64()},
            _buffered(until, orders, payments),
        ),
        "state of totals": _table(
            {"device": pa.int32(), "n_count": pa.int64(), "total_sum": pa.int64()},
            [(device, len(of), sum(of)) for device, of in totals.items()],
        ),
    }  # fmt: skip


def _buffered(until, orders, payments) -> list[tuple[Any, ...]]:
    """The rows of a join that may still find partners, as they are in its state."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    rows: list[tuple[Any, ...]] = []
    for key, at, amount, note in orders:
        if at >= until:
            rows.append((key, 0, [0, 0], at, amount, note, 0, 0))
            counts[key][0] += 1
    for key, of in payments.items():
        for at, amount in of:
            if at >= until:
                rows.append((key, 1, [0, 0], 0, 0, None, at, amount))
                counts[key][1] += 1
    return [*rows, *((key, -1, count, 0, 0, None, 0, 0) for key, count in counts.items())]


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
    assert len(found) == 12


@pytest.mark.parametrize(
    "name",
    ["counts", "top", "once", "trips", "paid", "totals", "state of top", "state of once",
     "state of totals", "state of counts", "state of trips", "state of paid"],
)  # fmt: skip
def test_a_row_less_or_one_more_is_found(epoch: Order, name: str) -> None:
    path = path_of(epoch, name)
    table = pq.read_table(path)
    # Of totals only the last row of an account is compared, and that none is there twice.
    pq.write_table(table.slice(0, len(table) - 1), path)
    assert not equal({name: Comparison(epoch).make()[name]})
    pq.write_table(pa.concat_tables([table, table.slice(len(table) - 1)]), path)
    assert not equal({name: Comparison(epoch).make()[name]})


def test_a_wrong_count_in_the_state_of_the_join_is_found(epoch: Order) -> None:
    path = path_of(epoch, "state of paid")
    rows = pq.read_table(path).to_pylist()
    header = next(row for row in rows if row["_side"] == -1)
    header["_counts"] = [count + 1 for count in header["_counts"]]
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(path)), path)
    found = Comparison(epoch).make()["state of paid"]
    assert (found["missing"], found["extra"]) == (1, 1)


def test_results_of_before_that_come_again_are_found(epoch: Order) -> None:
    path = path_of(epoch, "once", version=3)
    pq.write_table(pq.read_table(path_of(epoch, "once")).slice(0, 1), path)
    assert Comparison(epoch).make()["once"]["again"] == 1


def sampled(values: np.ndarray, name: str = "state bytes") -> list[dict[str, float]]:
    return [
        {"at": 5.0 * n, "run": 1, "query version": n, name: value} for n, value in enumerate(values)
    ]


def judged(samples: list[dict[str, float]], name: str = "state bytes") -> growth.Growth:
    (found,) = (each for each in growth.judge(samples) if each.series == name)
    return found


def test_a_saw_tooth_is_flat_and_a_leak_is_not() -> None:
    at = np.arange(0, 7200, 5)
    tooth = 4e8 + 2e8 * (at % 300) / 300
    warming = np.where(at < 600, at * 1e6, 0)
    flat = judged(sampled(tooth + warming))
    assert flat.flat
    assert flat.problem(120) is None
    leak = judged(sampled(tooth + at * 3e4))
    assert not leak.flat
    assert leak.gained == pytest.approx(3e4 * 6600, rel=0.1)
    assert "state bytes gained" in (leak.problem(120) or "")
    # A query that does not run says nothing.
    down = [sample | {"state bytes": 1e9} for sample in sampled(tooth)[700:]]
    for sample in down:
        del sample["query version"]
    assert judged(sampled(tooth)[:700] + down).flat


@pytest.mark.parametrize(
    "name",
    ["logs of nodes bytes", "unlinked bytes", "shuffle bytes", "checkpoint, ours files"],
)
def test_a_leak_in_a_folder_is_found(name: str) -> None:
    at = np.arange(0, 7200, 5)
    assert judged(sampled(5e7 + at * 0.0, name), name).flat
    assert not judged(sampled(5e7 + at * 2e4, name), name).flat


@pytest.mark.parametrize("name", ["python worker shared", "agent shared", "executor shared"])
def test_tables_that_stay_mapped_are_found(name: str) -> None:
    """Once deleted they are in no folder, and are no private memory."""
    at = np.arange(0, 7200, 5)
    processes = {f"{name.removesuffix(' shared')} processes": 2.0}
    samples = [each | processes for each in sampled(4e8 + at * 5e4, name)]
    found = judged(samples, name)
    assert not found.flat
    assert found.gained == pytest.approx(5e4 * 6600 / 2, rel=0.05), "of one process"


def of_driver(at: np.ndarray, began: np.ndarray) -> list[dict[str, float]]:
    """Samples of a driver that leaks, and was started at some of the times."""
    return [
        {
            "at": float(t),
            "run": float(b),
            "query version": 1.0,
            "driver processes": 1.0,
            "driver private": 1e8 + 5e4 * (t - b),
        }
        for t, b in zip(at, began, strict=True)
    ]


def test_the_driver_is_judged_in_its_longest_life() -> None:
    at = np.arange(0, 7200, 5)
    began = np.where(at < 1500, 0, np.where(at < 6000, 1500, 6000))
    found = judged(of_driver(at, began), "driver private")
    assert not found.flat, "every start would hide it"
    assert found.gained == pytest.approx(5e4 * (4500 - 300), rel=0.05)


@pytest.mark.parametrize("role", ["executor", "agent", "daemon"])
def test_processes_of_a_spared_node_are_judged_in_their_longest_life(role: str) -> None:
    name = f"spared {role} private"
    leaking = [
        {"at": float(t), "run": 1.0, "query version": 1.0, f"spared {role} born": float(t >= 5000),
         name: 1e8 + 1e5 * ((t - 5000) % 2000)}
        for t in range(4700, 6900, 5)
    ]  # fmt: skip
    young = [
        {"at": 5.0 * n, "run": 1.0, "query version": 1.0, "executor processes": 3.0,
         "executor private": 3e8}
        for n in range(940)
    ]  # fmt: skip
    found = judged(young + leaking, name)
    assert not found.flat
    assert found.gained == pytest.approx(1e5 * (1900 - 300), rel=0.06)


def test_too_few_samples_say_nothing_and_are_a_problem_in_a_long_run() -> None:
    found = judged(sampled(np.arange(200.0)))
    assert found.gained is None
    assert found.flat is None
    assert found.problem(59) is None
    assert "state bytes could not be judged" in (found.problem(60) or "")


def test_a_run_of_an_hour_in_which_nothing_was_judged_has_a_problem_for_every_series() -> None:
    problems = [found.problem(60) for found in growth.judge([])]
    assert len(problems) == len(growth.JUDGED)
    assert all(name in str(of) for name, of in zip(growth.JUDGED, problems, strict=True))


def test_a_driver_that_never_lives_long_is_a_problem() -> None:
    at = np.arange(0, 7200, 5)
    found = judged(of_driver(at, at // 1200 * 1200), "driver private")
    assert "could not be judged" in (found.problem(120) or "")


@pytest.mark.parametrize("minutes", [60.0, 120.0])
def test_lives_are_long_enough_to_be_judged_in_an_hour(minutes: float) -> None:
    """By when driver and node are spared, and the minutes at their beginning."""
    at = np.arange(0, minutes * 60, 5)
    driver = np.where([spares_driver(t / at[-1]) for t in at], -1.0, at // 60)
    node = [t for t in at if spares_node(t / at[-1])]
    assert judged(of_driver(at, driver), "driver private").gained is not None
    calm = [
        {"at": t, "run": 1.0, "query version": 1.0, "spared agent born": 7.0,
         "spared agent private": 1e8}
        for t in node
    ]  # fmt: skip
    assert judged(calm, "spared agent private").gained is not None
    assert all(spares_driver(t / at[-1]) for t in node), "executors end with the driver"


class Standing:
    """A cluster in which nothing happens; who was killed is noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: tuple[str, ...] = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
        self.killed: list[str] = []

    def kill(self, host: str) -> None:
        self.killed.append(host)

    kill_executor = kill


@pytest.mark.parametrize("kind", ["executor", "node", "two nodes", "worker", "agent"])
def test_nothing_is_done_to_a_spared_node(tmp_path: Path, kind: str) -> None:
    cluster, said = Standing(tmp_path), list[str]()
    spares = [True]
    faults = Faults(
        cast(Any, cluster), cast(Any, None), random.Random(1), (0.0, 0.0), lambda: False,
        lambda: spares[0], said.append,
    )  # fmt: skip
    faults.close()
    faults.spare()
    spared = faults.spared
    assert spared in cluster.nodes
    for _ in range(30):
        faults.spare()
        faults.do(kind)
    assert faults.spared == spared
    assert said, "kills of processes that are not there are told as well"
    assert not any(f"on {spared}" in text for text in said if "spared" not in text)
    assert spared not in cluster.killed
    spares[0] = False
    faults.spare()
    for _ in range(30):
        faults.do("executor")
    assert spared in cluster.killed


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


MAPPED = """
import mmap, sys, time
from pathlib import Path
file = Path(sys.argv[1])
with file.open("w+b") as opened:
    opened.truncate(128 << 20)
    mapped = mmap.mmap(opened.fileno(), 128 << 20)
mapped[:] = bytes(128 << 20)
file.unlink()
print("mapped", flush=True)
time.sleep(600)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_table_that_is_deleted_and_still_mapped_is_measured(shared: Path) -> None:
    node = shared / "127.0.0.2"
    node.mkdir()
    environment = os.environ | {MARK: str(node / "state")}
    before = unlinked(shared)
    command = [sys.executable, "-S", "-c", MAPPED, str(node / "table"), "anabranch.nodes.agent"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"mapped\n"
            assert measure_folder(shared) == (0, 0), "no folder shows it"
            after, found = unlinked(shared), processes(shared)
            spared = oldest(node)
        finally:
            process.kill()
    assert after["unlinked bytes"] - before["unlinked bytes"] > 64 << 20
    assert found["agent shared"] >= 128 << 20
    assert found["agent private"] < 128 << 20
    assert spared["spared agent shared"] >= 128 << 20
    assert spared["spared agent born"] > 0


def test_of_a_spared_node_the_oldest_process_counts(shared: Path) -> None:
    environment = os.environ | {MARK: str(shared / "state")}
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)", "anabranch.nodes.agent"]
    with subprocess.Popen(sleep, env=environment) as old:
        try:
            await_role(shared)
            alone = oldest(shared)["spared agent born"]
            time.sleep(0.05)  # the system counts in ticks of a hundredth of a second
            with subprocess.Popen(sleep, env=environment) as young:
                try:
                    await_role(shared, 2)
                    assert oldest(shared)["spared agent born"] == alone
                finally:
                    young.kill()
        finally:
            old.kill()


def await_role(node: Path, count: int = 1) -> None:
    """Until so many agents are there: a process that was just forked is not known as one."""
    assert until(lambda: processes(node)["agent processes"] >= count, 20)


def test_processes_are_known_by_modules_that_exist() -> None:
    ours = [text for text in ROLES if text.startswith("anabranch")]
    assert {"driver", "agent", "python worker"} <= {ROLES[text] for text in ours}
    for module in (*ours, AGENT, DAEMON):
        assert find_spec(module) is not None, module
