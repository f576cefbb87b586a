"""Requests of somebody with the secret: a wrong field is refused, and nothing is changed."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.nodes import Refused, Secret, Vault
from anabranch.nodes.actions import Actions
from anabranch.nodes.fields import check_table
from anabranch.nodes.workbench import CAPTURES, TABLES, Workbench
from anabranch.state import layouts
from anabranch.state.capture import CheckpointSchema
from anabranch.state.keys import KeyLayout
from anabranch.state.schema import Column, StateSchema, int64
from anabranch.state.table import TableLayout
from anabranch.testing import MemoryStore

LAYOUT = TableLayout(
    KeyLayout((pa.field("k", pa.int64()),), (), 8), StateSchema((Column("n", int64, 0),)), False
)
PART = {
    "name": "parts/000000000001-x.arrow", "instance": 0, "version": 1, "base": None,
    "groups": "0-7", "rows": 1, "bytes": 10, "checksum": "0" * 16,
}  # fmt: skip
SAVED = {"schema": CheckpointSchema.of(LAYOUT).to_json(), "parts": [PART]}
WRITTEN = layouts.to_json(LAYOUT)
TABLE: dict[str, Any] = {"table": "counter@0/0", "layout": WRITTEN}


class Node:
    """The actions of an agent over a folder, in which and beside which lie files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.beside = folder / "beside" / "precious"
        self.beside.mkdir(parents=True)
        (self.beside / "0").mkdir()
        (self.beside / "file").write_text("precious")
        (self.root / CAPTURES).mkdir(parents=True)
        (self.root / CAPTURES / "a.arrow").write_text("a capture")
        (self.root / CAPTURES / "link.arrow").symlink_to(self.beside / "file")
        context = {"root": str(self.root), "secret": Secret.new().to_hex(), "files": None}
        self.actions = Actions(context, Vault(folder / "vault", 100_000)).named()
        self.actions["create"]({**TABLE, "version": 3})
        # Somebody of this user, or a wrong program, has laid links.
        (self.root / TABLES / "linked@0").symlink_to(self.beside)
        (self.root / TABLES / "counter@0" / "7").symlink_to(self.beside)

    def seen(self) -> list[tuple[str, int, int, int]]:
        """Everything that there is, and whether it was touched."""
        found = [(path, path.lstat()) for path in self.folder.rglob("*") if path.name != "lock"]
        return sorted((str(p), at.st_ino, at.st_size, at.st_mtime_ns) for p, at in found)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return Node(tmp_path_factory.mktemp("node"))


REQUESTS: dict[str, dict[str, Any]] = {
    "usable": {**TABLE, "version": 3},
    "create": {**TABLE, "version": 3},
    "restore": {**TABLE, "saved": SAVED, "groups": "0-7"},
    "advance": {**TABLE, "changes": SAVED, "groups": "0-7", "since": 3, "fence": 0},
    "capture": {**TABLE, "operator": "counter", "instance": 0, "groups": "0-7", "version": 3,
                "base": None},
    "offer": {"file": "captures/a.arrow"},
    "store": {"file": "captures/a.arrow", "under": "10.0.0.1/"},
    "shorten": {"saved": SAVED, "under": ""},
    "rename": {"table": "counter@0/0", "to": "counter@1/0"},
    "keep_only": {"tables": ["counter@0/0"]},
}  # fmt: skip

NO_TABLES = [
    "", "counter", "counter@0", "counter@0/", "counter/0", "counter@0/0/", "counter@0/0/0",
    "/counter@0/0", "../counter@0/0", "counter@0/..", "counter@0/../..", "a@0/0\n", "a@0/0\0",
    "..@0/0", "a/../b@0/0", "a b@0/0", "a@-1/0", "a@0/-1", "a@x/0", "@0/0", "ä@0/0", "a@\u0663/0",
    ".", "..", "/", "/etc", "linked@0/0", "counter@0/7", None, 1, ["counter@0/0"], {},
    "a@" + "9" * 30 + "/0",
]  # fmt: skip
NO_NUMBERS = [-2, 1.0, 1.5, "1", None, True, [], {}, 1 << 63, 10**40]
NO_GROUPS = ["x", "0-8", "7-3", "-1", "0-70000", "0-7,", None, 1, ["0-7"]]
NO_LAYOUTS = [None, 1, "x", [], {}, {**WRITTEN, "defaults": []}, {**WRITTEN, "columns": {}}]
NO_LAYOUTS += [
    {**WRITTEN, "columns": {**WRITTEN["columns"], **wrong}}
    for wrong in ({"arrow": "AAAA"}, {"keys": 99}, {"fingerprint": "x"}, {"key_groups": -1})
]
NO_NAMES = ["", "/etc/passwd", "../x", "a/../b", ".x", None, 1, "a\0"]
NO_PARTS = (
    [{**PART, "name": bad} for bad in NO_NAMES]
    + [{**PART, "groups": bad} for bad in NO_GROUPS]
    + [{**PART, field: bad} for field in ("instance", "rows", "bytes") for bad in NO_NUMBERS]
    + [{**PART, "version": bad} for bad in NO_NUMBERS]
    + [{**PART, "base": bad} for bad in NO_NUMBERS if bad is not None]
    + [{**PART, "checksum": bad} for bad in ("", "x", None, "0" * 15)]
    + [{**PART, "more": 1}, {}, None, 1]
)
NO_SAVED = [None, 1, [], {}, {"schema": None, "parts": []}, {**SAVED, "parts": None}]
NO_SAVED += [{**SAVED, "schema": {}}, *({**SAVED, "parts": [PART, bad]} for bad in NO_PARTS)]
NO_FILES = ["", ".", "..", "/etc/passwd", "captures", "captures/", "captures/../../beside/file",
            "captures/..", "captures/link.arrow", "captures/x/y", "a.arrow", "captures/a.arrow\0",
            None, 1, []]  # fmt: skip
NO_PREFIXES = ["x", "/", "/x/", "../", "a/../", ".x/", "a b/", "a//", None, 1]
NO_PEERS = [None, 1, [], {"a": None}, {"a": 1}, {"a": "x"}, {"a": "x:1/y"}, {"a": "x:y"},
            {"a": "file:///etc/passwd"}]  # fmt: skip
WRONG: dict[str, list[Any]] = {
    "table": NO_TABLES, "to": NO_TABLES, "layout": NO_LAYOUTS, "version": NO_NUMBERS,
    "since": NO_NUMBERS, "fence": [-1, *NO_NUMBERS], "saved": NO_SAVED, "changes": NO_SAVED,
    "groups": NO_GROUPS, "operator": ["", "..", "a/b", "a b", None, 1], "file": NO_FILES,
    "instance": [-1, *NO_NUMBERS], "base": [bad for bad in NO_NUMBERS if bad is not None],
    "under": NO_PREFIXES,
    "tables": [None, 1, "counter@0/0", {}, *(["counter@0/0", bad] for bad in NO_TABLES[:-7]
                                             if bad not in ("linked@0/0", "counter@0/7"))],
}  # fmt: skip
CASES = [
    pytest.param(op, field, id=f"{op}-{field}")
    for op, fields in REQUESTS.items()
    for field in fields
]


def request_for(node: Node, op: str, **changes: Any) -> dict[str, Any]:
    request = {"op": op, "peers": {}, **REQUESTS[op], **changes}
    file = request.get("file")
    if isinstance(file, str) and file and not file.startswith("/"):
        request["file"] = f"{node.root}/{file}"
    return json.loads(json.dumps(request))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("op", "field"), CASES)
def test_a_wrong_field_is_refused_and_changes_nothing(node: Node, op: str, field: str) -> None:
    before = node.seen()
    without = request_for(node, op)
    del without[field]
    if field != "base":
        with pytest.raises(Refused):
            node.actions[op](without)
    for bad in WRONG[field]:
        with pytest.raises(Refused):
            node.actions[op](request_for(node, op, **{field: bad}))
        assert node.seen() == before, (op, field, bad)


@pytest.mark.parametrize("op", [op for op in REQUESTS if op not in ("offer",)])
def test_wrong_peers_are_refused(node: Node, op: str) -> None:
    before = node.seen()
    for bad in NO_PEERS:
        with pytest.raises(Refused):
            node.actions[op](request_for(node, op, peers=bad))
    assert node.seen() == before


def test_right_requests_are_taken(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.actions["usable"](request_for(node, "usable")) == {"usable": True}
    file = node.actions["capture"](request_for(node, "capture"))["file"]
    assert Path(file).parent == node.root / CAPTURES
    offered = node.actions["offer"](request_for(node, "offer", file=file))
    assert offered["name"].startswith(f"{CAPTURES}/")
    assert not Path(file).exists()
    node.actions["rename"](request_for(node, "rename"))
    assert (node.root / TABLES / "counter@1" / "0").is_dir()
    node.actions["create"](request_for(node, "create"))
    node.actions["keep_only"](request_for(node, "keep_only"))
    assert (node.root / TABLES / "counter@0" / "0").is_dir()
    assert not (node.root / TABLES / "counter@1").exists()
    assert (node.beside / "file").read_text() == "precious", "links are not followed"
    assert (node.beside / "0").is_dir()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="a0@/.-_ \0\n~%", max_size=12) | st.text(max_size=12))
def test_any_name_of_a_table_is_one_folder_in_its_place_or_refused(
    tmp_path: Path, name: str
) -> None:
    bench = Workbench(tmp_path, MemoryStore())
    try:
        path = bench.path(name)
    except Refused:
        return
    folder = tmp_path / TABLES
    assert Path(os.path.normpath(path)) == path
    assert path.parent.parent == folder
    assert check_table(name) == str(path.relative_to(folder))
