from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from anabranch.backup import Files
from anabranch.cli import main
from anabranch.cli import state as state_module
from anabranch.state.capture import Capture, CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.stores import Manifest, Manifests, OperatorManifest, back_up
from anabranch.stores.manifests import QUERY
from anabranch.stores.peers import AT_PEERS
from anabranch.stores.sealed import seal
from anabranch.units import Version

GROUPS = 4
SCHEMA = CheckpointSchema(
    keys=(pa.field("word", pa.string()),),
    sub=(),
    values=(pa.field("n", pa.int64(), nullable=False),),
    timers=False,
    key_groups=GROUPS,
)


def captured(version: int, base: int | None, counts: dict[str | None, int | None]) -> Capture:
    """The counts of words; None as a count deletes the word. Words are in the group they name."""
    order = sorted(counts, key=lambda word: _group(word))
    columns = [
        pa.array(order, pa.string()),
        pa.array([hash(word) % 2**64 for word in order], pa.uint64()),
        pa.array([_group(word) for word in order], pa.uint16()),
        pa.array([counts[word] is None for word in order], pa.bool_()),
        pa.array([counts[word] for word in order], pa.int64()),
    ]
    rows = pa.Table.from_arrays(columns, schema=SCHEMA.arrow())
    since = None if base is None else Version(base)
    return Capture("counter", 0, Version(version), since, KeyGroups.all(GROUPS), SCHEMA, rows)


def _group(word: str | None) -> int:
    return len(word or "") % GROUPS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Version 3 in full, and version 7 as what changed since."""
    store = Files(str(tmp_path)).open()
    first = back_up(store, captured(3, None, {"river": 2, "delta": 1, None: 5, "weir": 4}))
    second = back_up(store, captured(7, 3, {"river": 9, "delta": None, "ox": 1}))
    before = OperatorManifest(SCHEMA, (first,))
    Manifests(store).put(Manifest(Version(3), {"counter": before}))
    Manifests(store).put(
        Manifest(Version(7), {"counter": before.extended([second], {}), "other": _empty(store)})
    )
    return tmp_path


def _empty(store: object) -> OperatorManifest:
    capture = captured(7, None, {})
    return OperatorManifest(SCHEMA, (back_up(store, capture),))  # type: ignore[arg-type]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["state", *map(str, arguments)], env={"COLUMNS": "120"})


def test_list_names_versions_operators_columns_and_files(folder: Path) -> None:
    result = run("list", folder)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["3", "counter", "word", "n", "1", "full"] in [line[:6] for line in lines]
    assert any(line[:2] == ["7", "counter"] and "changes" in line for line in lines)
    assert any(line[:2] == ["7", "other"] for line in lines)


def test_files_at_nodes_are_listed_and_reading_them_says_what_is_needed(folder: Path) -> None:
    store = Files(str(folder)).open()
    store.put(QUERY, seal("query", {"backup": AT_PEERS.to_json()}))
    manifests = Manifests(store)
    before = manifests.get(Version(7))
    scattered = {
        name: replace(
            of, parts=tuple(replace(p, holders=("n1", "n2", "n3"), needed=2) for p in of.parts)
        )
        for name, of in before.operators.items()
    }
    manifests.put(replace(before, operators=scattered))
    listed = run("list", folder)
    assert listed.exit_code == 0, listed.output
    needs = "3 nodes, any 2 of 3 for each file (n1, n2, n3)"
    assert f"The files of version 7 of counter are at {needs}." in listed.output
    assert "version 3 of" not in listed.output
    for command in (("show",), ("export", "--to", folder / "x.parquet")):
        refused = run(command[0], folder, "--operator", "counter", *command[1:])
        assert refused.exit_code != 0
        told = " ".join(refused.output.split())
        assert needs in told
        assert "query.state(operator)" in told


def test_show_gives_the_newest_version_unless_told(folder: Path) -> None:
    newest = run("show", folder, "--operator", "counter")
    assert newest.exit_code == 0, newest.output
    words = {line.split()[0]: line.split()[-1] for line in newest.output.splitlines()[1:-1]}
    assert words["river"] == "9"
    assert words["ox"] == "1"
    assert "delta" not in words
    assert "4 of 4 rows of counter at version 7" in newest.output
    older = run("show", folder, "--version", 3)
    assert "delta" in older.output
    assert "at version 3" in older.output


def test_show_stops_at_the_limit_and_says_so(folder: Path) -> None:
    result = run("show", folder, "--version", 3, "--limit", 2)
    assert len(result.output.splitlines()) == 4
    assert "2 of 4 rows" in result.output


@pytest.mark.parametrize("at_once", [1, 10**9])
def test_export_writes_all_rows_in_one_portion_or_many(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(state_module, "_AT_ONCE", at_once)
    target = tmp_path / "new" / "words.parquet"
    result = run("export", folder, "--operator", "counter", "--to", target)
    assert result.exit_code == 0, result.output
    rows = pq.read_table(target).to_pylist()
    assert {row["word"]: row["n"] for row in rows} == {"river": 9, None: 5, "weir": 4, "ox": 1}
    assert all(row["key_group"] == _group(row["word"]) for row in rows)
    assert [path.name for path in target.parent.iterdir()] == ["words.parquet"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show"], "name one with --operator; version 7 has counter, other"),
        (["show", "--operator", "nobody"], "no operator 'nobody'"),
        (["show", "--version", "5"], "no checkpoint of version 5; there are [3, 7]"),
        (["export", "--operator", "counter", "--to", "words.csv"], "name a .parquet file"),
    ],
)
def test_what_is_not_there_is_one_clear_line(folder: Path, arguments: list[str], says: str) -> None:
    command, *options = arguments
    result = run(command, folder, *options)
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert says in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("command", ["list", "show"])
def test_a_folder_without_checkpoints_is_said_to_be_one(tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path / "nothing")
    assert result.exit_code == 1
    assert result.output.startswith("error: there is no checkpoint in ")


def test_a_damaged_file_is_named(folder: Path) -> None:
    (part,) = (folder / "parts").glob("*03-counter-*")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    result = run("show", folder, "--version", 3)
    assert result.exit_code == 1
    assert part.name in result.output
