"""One suite for every node: the one that this machine is, and those behind an agent."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest
from node_tools import Starter

from anabranch.backup.files import Files
from anabranch.errors import (
    CheckpointError,
    CheckpointNotFound,
    DidNotHappen,
    Fenced,
    Refused,
    SchemaChanged,
    StateMissing,
)
from anabranch.fragments.cost import Cost
from anabranch.nodes import Deadline, Node, RemoteNode, Secret, Signer
from anabranch.nodes.captures import CAPTURES
from anabranch.nodes.local import TABLES, LocalNode
from anabranch.nodes.requests import (
    VERBS,
    Address,
    Advance,
    Capture,
    CaptureFile,
    Captures,
    Change,
    Delete,
    Drop,
    Epoch,
    Fetch,
    Host,
    Inspect,
    Instance,
    Make,
    Mend,
    Merge,
    OperatorName,
    Prefix,
    Put,
    Request,
    Stop,
    Store,
    TableName,
    slice_table,
)
from anabranch.nodes.requests import Host as RequestHost
from anabranch.state import schema as types
from anabranch.state.capture import CheckpointSchema
from anabranch.state.checkpoint import read
from anabranch.state.groups import KeyGroups, group_of
from anabranch.state.keys import KeyLayout
from anabranch.state.part import Part
from anabranch.state.table import StateTable, TableLayout
from anabranch.stores.parts import state_rows
from anabranch.stores.peers import AT_PEERS, peer_name
from anabranch.units import Version

A = TypeVar("A")

GROUPS = 8
ALL = KeyGroups.all(GROUPS)
HALF = KeyGroups(((0, 4),))
LAYOUT = TableLayout(
    KeyLayout([pa.field("key", pa.int64())], [], GROUPS), types.schema(n=types.int64)
)
OTHER = TableLayout(LAYOUT.key, types.schema(n=types.int64, more=types.float64))
FIRST, SECOND, THIRD = TableName("op/1-0"), TableName("op/1-1"), TableName("op/2-0")
HOST, QUERY = "127.0.0.1", "0123456789ab"
Rows = dict[int, int]


def hashes(keys: Any) -> Any:
    return np.array(keys, np.int64).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def of_groups(rows: Rows, groups: KeyGroups) -> Rows:
    """Those rows whose keys are in some groups."""
    return {k: n for k, n in rows.items() if int(group_of(hashes([k]), GROUPS)[0]) in groups}


@dataclass
class Case:
    """A node, the folder of its tables, and how its backups are reached."""

    node: Node
    root: Path
    under: Prefix
    peers: dict[str, Address]
    epoch: Epoch

    def ask(self, request: Request[A], seconds: float = 60) -> A:
        return self.node.ask(request, Deadline(seconds))

    def path(self, table: TableName) -> Path:
        return self.root / TABLES / table

    def make(self, table: TableName, version: int, *parts: Part, **changes: Any) -> Cost:
        request = Make(
            epoch=self.epoch, peers=self.peers, table=table, layout=LAYOUT, groups=ALL,
            version=Version(version), parts=parts,
        )  # fmt: skip
        return self.ask(replace(request, **changes))

    def capture(self, table: TableName, version: int, base: int | None = None) -> CaptureFile:
        return self.ask(capture(self.epoch, table, version, base))

    def store(self, file: CaptureFile) -> Part:
        store = Store(epoch=self.epoch, peers=self.peers, file=file, under=self.under)
        return self.ask(store).part

    def advance(
        self, table: TableName, since: int, upto: int, *parts: Part, **changes: Any
    ) -> None:
        request = Advance(
            epoch=self.epoch, peers=self.peers, table=table, layout=LAYOUT, since=Version(since),
            upto=Version(upto), groups=ALL, parts=parts, fence=1,
        )  # fmt: skip
        self.ask(replace(request, **changes))

    def versions(self, *tables: TableName) -> dict[str, tuple[int, ...]]:
        return dict(self.ask(Inspect(layouts=dict.fromkeys(tables, LAYOUT))))

    def batch(
        self, table: TableName, version: int, rows: Rows, *, ends: bool = True, fence: int = 1
    ) -> None:
        """What a task does: it puts rows into a table."""
        opened = StateTable.open(self.path(table), LAYOUT)
        with opened.lock(10):
            opened.begin(Version(version), fence)
            keys = list(rows)
            at = opened.rows(LAYOUT.key.encode([pa.array(keys, pa.int64())], hashes(keys), []))
            opened.set("n", at, np.array(list(rows.values())))
            if ends:
                opened.finish()
        opened.close()

    def checkpoint(self, table: TableName, version: int, rows: Rows, base: int | None) -> Part:
        """A batch with which a checkpoint is taken."""
        self.batch(table, version, rows)
        return self.store(self.capture(table, version, base))

    def rows(self, table: TableName) -> Rows:
        """What is in a table, as the node captures it."""
        (version, *_) = self.versions(table)[table]
        file = self.ask(capture(self.epoch, table, version, fence=1 << 40))
        found = state_rows([read(self.ask(Fetch(file=file)), name=file)])
        self.ask(Drop(epoch=self.epoch, captures=(file,)))
        return dict(zip(found["key"].to_pylist(), found["n"].to_pylist(), strict=True))

    def seen(self) -> list[tuple[str, int, int]]:
        found = [(path, path.lstat()) for path in self.root.rglob("*") if path.name != "lock"]
        return sorted((str(path), at.st_ino, at.st_mtime_ns) for path, at in found)


def capture(
    epoch: Epoch, table: TableName, version: int, base: int | None = None, **changes: Any
) -> Capture:
    request = Capture(
        epoch=epoch, table=table, layout=LAYOUT, operator=OperatorName("op"), instance=Instance(0),
        groups=ALL, version=Version(version), base=None if base is None else Version(base), fence=1,
    )  # fmt: skip
    return replace(request, **changes)


@pytest.fixture(scope="module", params=["local", "in a process of its own", "files", "peers"])
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    start: Starter,
    secret: Secret,
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("served")
    root, files = folder / "state" / HOST / QUERY, Files(str(folder / "store"))
    if request.param in ("local", "in a process of its own"):
        store = files.open()
        apart = None if request.param == "local" else files.where
        yield Case(LocalNode(root, lambda *_: store, apart), root, Prefix("x/"), {}, Epoch(0))
        return
    where = files.where if request.param == "files" else AT_PEERS
    context = {
        "root": str(root), "host": HOST, "secret": secret.to_hex(), "store": where.to_json(),
    }  # fmt: skip
    address = start(
        folder=folder / "agent", log=folder / "agent" / "log",
        node="anabranch.nodes.serving:make", context=context,
    )  # fmt: skip
    under = "x/" if request.param == "files" else peer_name(HOST, "x/")
    with RemoteNode(str(address), Signer(secret)) as node:
        # Nobody listens there: a node does not ask itself for what it has.
        yield Case(node, root, Prefix(under), {HOST: Address(f"{HOST}:1")}, Epoch(0))


@pytest.fixture
def case(served: Case) -> Case:
    """A node without tables, for the driver of an epoch that is later than all before."""
    served.epoch = Epoch(served.epoch + 10)
    served.ask(Drop(epoch=served.epoch, tables=tuple(served.versions())))
    return served


FEW = {key: 10 * key for key in range(20)}
MORE = {key: 1000 + key for key in range(15, 25)}


def test_a_table_is_made_filled_captured_and_made_again(case: Case) -> None:
    assert case.make(FIRST, -1) == Cost()
    assert case.versions(FIRST) == {FIRST: (-1,)}
    part = case.checkpoint(FIRST, 0, FEW, None)
    assert (part.version, part.base, part.groups, part.rows) == (0, None, ALL, len(FEW))
    assert part.name.startswith(case.under)
    assert case.make(SECOND, 0, part).received.bytes == part.bytes
    assert case.rows(SECOND) == FEW
    assert case.make(THIRD, 0, part, groups=HALF).received.bytes > 0
    assert case.versions(THIRD)[THIRD] == (0,)
    assert case.ask(Fetch(file=case.ask(capture(case.epoch, THIRD, 0, groups=HALF)))).size > 0
    halved = case.store(case.ask(capture(case.epoch, THIRD, 0, groups=HALF)))
    assert halved.rows == len(of_groups(FEW, HALF))


def test_a_table_is_made_in_place_of_another(case: Case) -> None:
    case.make(FIRST, -1)
    part = case.checkpoint(FIRST, 0, FEW, None)
    case.batch(FIRST, 1, MORE)
    case.make(FIRST, 0, part)
    assert case.rows(FIRST) == FEW
    case.make(FIRST, 7)
    assert case.versions(FIRST) == {FIRST: (7,)}
    assert case.rows(FIRST) == {}


def changed(case: Case) -> tuple[Part, Part]:
    """A full part of a table, and one of what changed since; there are both tables."""
    case.make(FIRST, -1)
    full = case.checkpoint(FIRST, 0, FEW, None)
    case.make(SECOND, 0, full)
    case.batch(SECOND, 1, MORE)
    return full, case.store(case.capture(SECOND, 1, 0))


def test_a_table_is_advanced_by_changes(case: Case) -> None:
    full, changes = changed(case)
    assert (changes.base, changes.rows) == (0, len(MORE))
    case.make(FIRST, 0, full)
    with pytest.raises(CheckpointError, match=r"advance op/1-0: .* groups 0-7 to version 0; all"):
        case.advance(FIRST, 0, 1, full)
    case.advance(FIRST, 0, 1, changes)
    assert case.rows(FIRST) == FEW | MORE
    later = replace(changes, base=Version(3), version=Version(4))
    with pytest.raises(StateMissing):
        case.advance(FIRST, 3, 4, later, fence=2)


@pytest.mark.timeout(600)
def test_parts_are_merged(case: Case) -> None:
    full, changes = changed(case)
    schema = CheckpointSchema.of(LAYOUT)
    request = Merge(
        epoch=case.epoch, peers=case.peers, schema=schema, parts=(full, changes), groups=ALL,
        version=Version(1), under=case.under,
    )  # fmt: skip
    merged = case.ask(
        request, 500
    ).part  # a process of the lowest priority takes long on a busy machine
    assert (merged.version, merged.base) == (1, None)
    assert merged.name not in (full.name, changes.name)
    for parts in ((merged,), (full, changes)):
        case.make(THIRD, 1, *parts)
        assert case.rows(THIRD) == FEW | MORE


def test_every_group_takes_its_own_way_to_the_version(case: Case) -> None:
    full, changes = changed(case)
    rest = case.store(case.ask(capture(case.epoch, SECOND, 1, groups=ALL - HALF)))
    case.batch(SECOND, 2, {3: 30, 7: 70})
    later = case.store(case.capture(SECOND, 2, 0))
    now = FEW | MORE | {3: 30, 7: 70}
    half = replace(full, groups=HALF), replace(changes, groups=HALF)
    case.make(THIRD, 1, *half, rest, later)
    assert case.rows(THIRD) == FEW | MORE
    case.make(THIRD, 2, later, rest, *half)
    assert case.rows(THIRD) == now
    with pytest.raises(
        CheckpointError,
        match=r"make op/2-0: .* groups 0-3 to version 0, groups 4-7 to version 1; all of .* 1$",
    ):
        case.make(THIRD, 1, half[0], rest)
    assert case.rows(THIRD) == now
    case.make(THIRD, 1, *half, rest)
    with pytest.raises(
        CheckpointError, match=r"groups 4-7 to version 1, groups 0-3 to version 2; .* version 2$"
    ):
        case.advance(THIRD, 1, 2, replace(later, groups=HALF), rest)
    case.advance(THIRD, 1, 2, later, changes, rest)
    assert case.rows(THIRD) == now


def test_an_advance_whose_answer_was_lost_is_not_done_again(case: Case) -> None:
    full, changes = changed(case)
    case.make(FIRST, 0, full)
    case.advance(FIRST, 0, 1, changes, fence=5)
    gone = replace(changes, name=f"{case.under}nothing")
    case.advance(FIRST, 0, 1, gone, fence=5)
    assert case.rows(FIRST) == FEW | MORE
    case.make(FIRST, 0, full)
    with pytest.raises(CheckpointNotFound):
        case.advance(FIRST, 0, 1, gone, fence=5)
    case.advance(FIRST, 0, 1, changes, fence=5)
    case.advance(FIRST, 0, 1, changes, fence=6)
    assert case.rows(FIRST) == FEW | MORE, "it went back, and on again"


def test_parts_that_do_not_lead_to_the_version_change_nothing(case: Case) -> None:
    full, changes = changed(case)
    before = case.seen()
    with pytest.raises(CheckpointError, match=r"make op/1-0: .* groups 0-7 to version 0; .* 1$"):
        case.make(FIRST, 1, full)
    with pytest.raises(CheckpointError, match=r"groups 0-7 to no version; .* at version 1$"):
        case.make(FIRST, 1, changes)
    gone = replace(full, name=f"{case.under}nothing")
    with pytest.raises(CheckpointNotFound):
        case.make(FIRST, 0, gone)
    with pytest.raises(SchemaChanged):
        case.make(FIRST, 0, full, layout=OTHER)
    assert case.seen() == before
    assert case.rows(FIRST) == FEW


def test_what_can_be_used_is_told_and_nothing_is_changed(case: Case) -> None:
    assert case.versions(FIRST) == {}
    for table in (FIRST, SECOND, THIRD):
        case.make(table, -1)
    case.batch(FIRST, 0, FEW)
    case.batch(SECOND, 0, FEW)
    case.batch(SECOND, 1, MORE, ends=False)
    before = case.seen()
    assert case.versions() == {FIRST: (), SECOND: (), THIRD: ()}
    assert case.versions(FIRST, SECOND) == {FIRST: (0, -1), SECOND: (0,), THIRD: ()}
    assert case.ask(Inspect(layouts={FIRST: OTHER}))[FIRST] == (), "of other columns"
    assert case.seen() == before
    (case.path(FIRST) / "table").write_bytes(b"damaged")
    assert case.versions(FIRST, SECOND) == {FIRST: (), SECOND: (0,), THIRD: ()}


def test_tables_are_looked_into_with_the_columns_that_are_told(case: Case) -> None:
    one, two, other = slice_table("op", "3-17"), slice_table("op", "3-18"), slice_table("o", "3-1")
    for table in (one, two, other, FIRST):
        case.make(table, -1)
    case.batch(one, 0, FEW)
    found = case.ask(Inspect(layouts={one: LAYOUT, two: OTHER, FIRST: LAYOUT}))
    assert found == {one: (0, -1), two: (), other: (), FIRST: (-1,)}
    assert case.rows(one) == FEW
    case.ask(Drop(epoch=case.epoch, tables=(one,)))
    assert set(case.versions()) == {two, other, FIRST}


def test_a_table_that_somebody_holds_cannot_be_used(case: Case) -> None:
    for table in (FIRST, SECOND):
        case.make(table, -1)
    opened = StateTable.open(case.path(FIRST), LAYOUT)
    with opened.lock(0):
        found = case.ask(Inspect(layouts={FIRST: LAYOUT, SECOND: LAYOUT}), 5)
        assert found == {FIRST: (), SECOND: (-1,)}
    opened.close()
    assert case.versions(FIRST) == {FIRST: (-1,), SECOND: ()}


def test_a_table_is_captured_at_the_version_that_is_asked_for(case: Case) -> None:
    case.make(FIRST, -1)
    case.batch(FIRST, 0, FEW)
    case.batch(FIRST, 1, MORE)
    for version in (-1, 2, 7):
        with pytest.raises(StateMissing, match=r"op/1-0 is at version 1"):
            case.capture(FIRST, version)
    assert case.rows(FIRST) == FEW | MORE
    case.store(case.capture(FIRST, 0))
    assert case.versions(FIRST) == {FIRST: (0,)}, "it was rolled back"
    assert case.rows(FIRST) == FEW
    with pytest.raises(StateMissing):
        case.capture(SECOND, 0)


def test_what_comes_late_takes_no_batch_back(case: Case) -> None:
    _, changes = changed(case)
    case.batch(FIRST, 1, MORE, fence=2)
    for late in (lambda: case.capture(FIRST, 0), lambda: case.advance(FIRST, 0, 1, changes)):
        with pytest.raises(Fenced, match="came too late"):
            late()
        assert case.versions(FIRST)[FIRST] == (1, 0)


def test_tables_are_dropped(case: Case) -> None:
    for table in (FIRST, SECOND):
        case.make(table, -1)
    for _ in range(2):
        case.ask(Drop(epoch=case.epoch, tables=(THIRD, FIRST)))
        assert case.versions() == {SECOND: ()}


def test_what_a_killed_node_has_half_made_is_known_and_dropped(case: Case) -> None:
    half = case.path(FIRST).parent / ".1-0.restoring"
    half.mkdir(parents=True)
    (half / "table").write_bytes(b"half")
    assert case.versions(FIRST) == {FIRST: ()}
    case.ask(Drop(epoch=case.epoch, tables=(FIRST,)))
    assert case.versions() == {}
    assert not half.exists()


def test_captures_are_fetched_and_dropped(case: Case) -> None:
    case.make(FIRST, -1)
    case.batch(FIRST, 0, FEW)
    file = case.capture(FIRST, 0)
    assert Path(file).parent == case.root / CAPTURES
    assert file in case.ask(Captures())
    data = Path(file).read_bytes()
    assert case.ask(Fetch(file=file)).to_pybytes() == data
    assert Path(file).exists()
    for _ in range(2):
        case.ask(Drop(epoch=case.epoch, captures=(file,)))
        assert not Path(file).exists()
    assert file not in case.ask(Captures())
    with pytest.raises(StateMissing, match="there is no capture"):
        case.ask(Fetch(file=file))
    with pytest.raises(StateMissing, match="there is no capture"):
        case.store(file)
    with pytest.raises(Refused, match="no capture of this query"):
        case.ask(Fetch(file=CaptureFile("/etc/passwd")))


def changes_of(case: Case, file: CaptureFile, part: Part) -> list[Change[Any]]:
    """A request of every kind that changes something."""
    backed: dict[str, Any] = {"epoch": case.epoch, "peers": case.peers}
    table: dict[str, Any] = {"table": FIRST, "layout": LAYOUT, "groups": ALL}
    return [
        Make(**backed, **table, version=Version(-1)),
        Advance(**backed, **table, since=Version(0), upto=Version(1), parts=(part,), fence=1),
        capture(case.epoch, FIRST, 0),
        Drop(epoch=case.epoch, tables=(FIRST,), captures=(file,)),
        Store(**backed, file=file, under=case.under),
        Mend(**backed, part=replace(part, holders=(Host("a"),)), holders=()),
        Merge(
            **backed,
            schema=CheckpointSchema.of(LAYOUT),
            parts=(part,),
            groups=ALL,
            version=Version(0),
            under=case.under,
        ),
    ]


def test_a_driver_of_before_changes_nothing(case: Case) -> None:
    case.make(FIRST, -1)
    part = case.checkpoint(FIRST, 0, FEW, None)
    file = case.capture(FIRST, 0)
    stale = changes_of(case, file, part)
    fenced = {cls for cls in VERBS.values() if issubclass(cls, Change)}
    of_agents = {Put, Delete, Stop}
    assert {type(each) for each in stale} == {
        cls for cls in fenced - of_agents if cls.__module__ == Change.__module__
    }
    before = case.seen()
    for request in stale:
        with pytest.raises(Fenced, match=f"driver {case.epoch} has taken the query over"):
            case.ask(replace(request, epoch=Epoch(case.epoch - 1)))
        assert case.seen() == before, request
    assert case.versions(FIRST) == {FIRST: (0, -1)}, "whoever reads may be anybody"
    assert case.ask(Fetch(file=file)).size > 0
    # A later driver has taken over once it has asked for anything.
    later = Epoch(case.epoch + 1)
    case.ask(Drop(epoch=later))
    for request in stale:
        with pytest.raises(Fenced, match=f"driver {later}"):
            case.ask(request)
    case.epoch = later
    assert case.rows(FIRST) == FEW


def test_many_requests_at_once(case: Case) -> None:
    """Each table is made over and over by several threads, and is whole whenever it is seen."""
    case.make(FIRST, -1)
    part = case.checkpoint(FIRST, 0, FEW, None)
    failed: list[object] = []

    def work(number: int) -> None:
        table = (SECOND, THIRD)[number % 2]
        try:
            for _ in range(5):
                case.make(table, 0, part)
                if case.versions(table).get(table, ()) not in ((0,), ()):
                    failed.append("it is at another version")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert case.rows(SECOND) == case.rows(THIRD) == FEW
    left = {path.name for name in (SECOND, THIRD) for path in case.path(name).parent.iterdir()}
    assert left == {name.rpartition("/")[2] for name in (FIRST, SECOND, THIRD)}, "nothing half made"


def test_an_agent_says_which_node_is_silent(start: Starter, secret: Secret, tmp_path: Path) -> None:
    """Not the agent that was asked, which is well, but the one that it could not reach."""
    root = tmp_path / "state" / HOST / QUERY
    context = {"root": str(root), "host": HOST, "secret": secret.to_hex(),
               "store": AT_PEERS.to_json()}  # fmt: skip
    address = start(
        folder=tmp_path / "agent", log=tmp_path / "log", node="anabranch.nodes.serving:make",
        context=context,
    )  # fmt: skip
    gone, silent = Address(f"{HOST}:1"), "10.0.0.9"
    with RemoteNode(str(address), Signer(secret), host=HOST) as node:
        case = Case(node, root, Prefix(peer_name(HOST, "x/")), {HOST: gone}, Epoch(1))
        case.make(FIRST, -1)
        whole = case.checkpoint(FIRST, 0, FEW, None)
        case.batch(FIRST, 1, MORE)
        file = case.capture(FIRST, 1)
        store = Store(epoch=Epoch(1), file=file, under=Prefix("x/"), holders=(RequestHost(silent),))
        for peers in ({silent: gone}, {}):  # it does not answer, or has no agent just now
            with pytest.raises(DidNotHappen) as not_stored:
                node.ask(replace(store, peers=peers), Deadline(20))
            assert not_stored.value.host == silent
            part = replace(whole, name="x/parts/some", holders=(silent, HOST))
            with pytest.raises(DidNotHappen) as not_made:
                case.make(SECOND, 0, part, peers=peers)
            assert not_made.value.host == silent
            assert (not_made.value.part, not_made.value.without) == (part.name, (HOST,))
        with pytest.raises(CheckpointNotFound) as lost:
            case.make(SECOND, 0, replace(whole, name="x/parts/some", holders=(HOST,)))
        assert lost.value.part == "x/parts/some"
    with (
        RemoteNode(gone, Signer(secret), host="10.0.0.8") as nobody,
        pytest.raises(DidNotHappen) as none,
    ):
        nobody.ask(Fetch(file=file), Deadline(20))
    assert none.value.host == "10.0.0.8"
