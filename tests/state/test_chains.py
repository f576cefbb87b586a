"""Captures of which each key group takes its own way to a version, against the state itself."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import GROUPS, SCHEMA, Changes, Key, Value, captured, content, group, histories

from anabranch.errors import CheckpointError
from anabranch.state import schema as types
from anabranch.state.capture import Capture, capture
from anabranch.state.chains import leading_to
from anabranch.state.groups import KeyGroups
from anabranch.state.partition import merge
from anabranch.state.restore import advance, restore
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
ALL = KeyGroups.all(GROUPS)
LAYOUT = TableLayout(
    SCHEMA.key_layout(), types.schema(count=types.int64, note=types.string), timers=True
)
SOME_GROUPS = st.frozensets(st.integers(0, GROUPS - 1), min_size=1).map(KeyGroups.of)


def state_at(history: Sequence[Changes], version: int, groups: KeyGroups) -> dict[Key, Value]:
    state: dict[Key, Value] = {}
    for changes in history[: version + 1]:
        for key, value in changes.items():
            if value is not None:
                state[key] = value
            else:
                del state[key]
    return {key: value for key, value in state.items() if group(key) in groups}


def taken(history: Sequence[Changes], version: int, base: int | None, of: KeyGroups) -> Capture:
    """What a table would give; of what changed since ``base``, the deleted rows too."""
    rows: dict[Key, Value | None] = {**state_at(history, version, of)}
    if base is not None:
        changed = {key for changes in history[base + 1 : version + 1] for key in changes}
        rows = {key: rows.get(key) for key in changed}
    return captured(rows, version, base, of)


@st.composite
def captures_of(draw: st.DrawFn, history: Sequence[Changes]) -> list[Capture]:
    """Captures by whichever slices, of any groups, full or since any base; in any order."""
    found = []
    for _ in range(draw(st.integers(1, 8))):
        version = draw(st.integers(0, len(history) - 1))
        base = draw(st.none() | st.integers(0, version - 1)) if version else None
        found.append(taken(history, version, base, draw(SOME_GROUPS)))
    return found


def ends(
    captures: Sequence[Capture], groups: KeyGroups, version: int, since: int | None = None
) -> dict[int, int | None]:
    """How far each group comes, group by group."""
    at = dict.fromkeys(groups, since)
    for each in sorted(captures, key=lambda c: (c.version, c.base is None)):
        for one in each.groups & groups if each.version <= version else ():
            before = at[one]
            if each.base is None:
                at[one] = each.version if since is None else before
            elif before is not None and each.base <= before < each.version:
                at[one] = each.version
    return at


def table_content(table: StateTable) -> Mapping[Key, Value | None]:
    table.validate()
    return content(capture(table, "counter", 0, groups=ALL, base=None))


@settings(max_examples=150)
@given(st.data(), histories())
def test_every_group_comes_to_the_version_on_its_own_way_or_is_named(
    data: st.DataObject, history: list[Changes]
) -> None:
    captures = data.draw(captures_of(history))
    groups, version = data.draw(SOME_GROUPS), Version(data.draw(st.integers(0, len(history) - 1)))
    at = ends(captures, groups, version)
    short = KeyGroups.of([one for one, end in at.items() if end != version])
    if short:
        with pytest.raises(CheckpointError, match=rf"all of groups {groups} .* version {version}"):
            leading_to(captures, groups, version)
        groups -= short
    if not groups:
        return
    steps = leading_to(captures, groups, version)
    chosen = [each.select(of) for each, of in steps]
    merged = merge(chosen)
    assert (merged.version, merged.base, merged.groups) == (version, None, groups)
    assert content(merged) == state_at(history, version, groups)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        restore(Path(folder) / "table", LAYOUT, chosen)
        table = StateTable.open(Path(folder) / "table", LAYOUT)
        assert table.version == version
        assert table_content(table) == state_at(history, version, groups)
        table.close()


@settings(max_examples=150)
@given(st.data(), histories())
def test_a_table_is_advanced_with_every_group_on_its_own_way(
    data: st.DataObject, history: list[Changes]
) -> None:
    since = data.draw(st.integers(0, len(history) - 1))
    upto = Version(data.draw(st.integers(since, len(history) - 1)))
    captures, groups = data.draw(captures_of(history)), data.draw(SOME_GROUPS)
    at = ends(captures, groups, upto, since)
    short = KeyGroups.of([one for one, end in at.items() if end != upto])
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        restore(Path(folder) / "table", LAYOUT, [taken(history, since, None, groups)])
        table = StateTable.open(Path(folder) / "table", LAYOUT)
        with table.lock(0):
            if short:
                with pytest.raises(CheckpointError, match=rf"groups {groups} .* version {upto}$"):
                    advance(table, captures, groups, upto, 1)
                assert (table.version, table.unfinished) == (since, None)
                # What is short comes from somewhere else after all.
                captures.append(taken(history, upto, since, short))
            advance(table, captures, groups, upto, 1)
            assert (table.version, table.unfinished) == (upto, None)
            assert table_content(table) == state_at(history, upto, groups)
            assert [len(rows) for rows in table.dirty()] == [0, 0]
            if upto > since:
                table.rollback()
                assert table.version == since
                assert table_content(table) == state_at(history, since, groups)
        table.close()


def test_groups_that_fall_short_are_named_with_the_versions_they_come_to() -> None:
    links = [
        captured({}, 3, None, KeyGroups.parse("0-4")),
        captured({}, 5, 3, KeyGroups.parse("0-1")),
        captured({}, 5, 4, KeyGroups.parse("2")),
        captured({}, 7, 5, KeyGroups.parse("0-7")),
    ]
    with pytest.raises(
        CheckpointError,
        match=r"groups 2-4 to version 3, groups 0-1 to version 5, groups 5-7 to no version; "
        r"all of groups 0-7 are wanted at version 5",
    ):
        leading_to(links, ALL, Version(5))
    assert [of for _, of in leading_to(links, KeyGroups.parse("0-1"), Version(7))] == 3 * [
        KeyGroups.parse("0-1")
    ]


def test_a_full_capture_spares_what_was_before() -> None:
    half = KeyGroups.parse("0-3")
    full, more, again = (
        captured({}, 3, None, ALL), captured({}, 5, 3, ALL), captured({}, 5, None, half),
    )  # fmt: skip
    assert leading_to([again, more, full], ALL, Version(5)) == [
        (full, ALL - half),
        (more, ALL - half),
        (again, half),
    ]
    assert leading_to([again, more, full], half, Version(5)) == [(again, half)]
