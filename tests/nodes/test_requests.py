"""Requests of somebody with the secret: a wrong field is refused, and nothing is changed."""

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.errors import (
    AnabranchError,
    CheckpointCorrupt,
    CheckpointNotFound,
    DidNotHappen,
    MayHaveHappened,
    Refused,
    StateMissing,
)
from anabranch.nodes import Deadline, Fence, Secret, Vault, codec, requests
from anabranch.nodes.captures import CAPTURES
from anabranch.nodes.codec import decode, decode_answer, encode, encode_answer
from anabranch.nodes.local import TABLES, LocalNode
from anabranch.nodes.requests import (
    Address,
    BackupName,
    Block,
    CaptureFile,
    Checksum,
    Epoch,
    Host,
    Instance,
    OperatorName,
    Prefix,
    Request,
    TableName,
    check_table,
)
from anabranch.nodes.serving import make
from anabranch.state import layouts
from anabranch.state import schema as types
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.state.keys import KeyLayout
from anabranch.state.part import Part
from anabranch.state.schema import Column, StateSchema, int64
from anabranch.state.table import TableLayout
from anabranch.stores.peers import AT_PEERS
from anabranch.testing import MemoryStore
from anabranch.units import Version

LAYOUT = TableLayout(
    KeyLayout((pa.field("k", pa.int64()),), (), 8), StateSchema((Column("n", int64, 0),)), False
)
PART = {
    "name": "parts/000000000001-x.arrow", "operator": "words", "holders": [], "needed": 1,
    "parity": 0, "instance": 0, "version": 1, "base": None, "groups": "0-7",
    "rows": 1, "bytes": 10, "checksum": "0" * 16, "owner": "",
}  # fmt: skip
SCHEMA = CheckpointSchema.of(LAYOUT).to_json()
WRITTEN = layouts.to_json(LAYOUT)
TABLE: dict[str, Any] = {"epoch": 1, "table": "counter/0-0", "layout": WRITTEN}
HELD = {**PART, "holders": ["10.0.0.1", "a host"]}
BACKED: dict[str, Any] = {"epoch": 1, "peers": {"10.0.0.1": "10.0.0.1:4000"}}
BLOCK = {"name": "a/b", "bytes": 1, "checksum": "0" * 16}
REQUESTS: dict[str, dict[str, Any]] = {
    "make": {**TABLE, **BACKED, "version": 3, "groups": "0-7", "parts": [PART]},
    "advance": {**TABLE, **BACKED, "since": 3, "upto": 5, "groups": "0-7", "parts": [PART],
                "fence": 0},
    "capture": {**TABLE, "operator": "counter", "instance": 0, "groups": "0-7", "version": 3,
                "base": None, "fence": 0},
    "inspect": {"layouts": {"counter/0-0": WRITTEN}},
    "drop": {"epoch": 1, "tables": ["counter/0-0"], "captures": ["captures/a.arrow"]},
    "captures": {},
    "fetch": {"file": "captures/a.arrow"},
    "store": {**BACKED, "file": "captures/a.arrow", "under": "10.0.0.1/", "holders": [],
              "needed": 1, "row": None, "parity": 0},
    "mend": {**BACKED, "part": {**HELD, "needed": 2}, "holders": ["10.0.0.1"]},
    "merge": {**BACKED, "schema": SCHEMA, "parts": [HELD], "groups": "0-7", "version": 1,
              "under": "", "holders": ["10.0.0.1"], "needed": 1, "row": 128, "parity": 1},
    "put": {"epoch": 1, "blocks": [BLOCK]},
    "get": {"name": "a/b", "offset": 0, "length": 1},
    "list": {"prefix": "a"},
    "size": {"name": "a/b"},
    "delete": {"epoch": 1, "names": ["a/b"]},
    "ping": {},
    "stop": {"epoch": 1},
}  # fmt: skip
OF_TABLES = frozenset(REQUESTS) - {"put", "get", "list", "size", "delete", "ping", "stop"}

NO_TABLES = [
    "", "counter", "counter@0", "counter@0/", "counter/0", "counter/1-", "counter/1-2/3",
    "counter/1-2-3", "counter/-1-2", "counter@1-2/3", "counter/0-1-2", "counter/../1-2",
    "counter/1-2\n", "../1-2", "/1-2",  "counter/0-0/", "counter/0-0/0",
    "/counter/0-0", "../counter/0-0", "counter@0/..", "counter@0/../..", "a/0-0\n", "a/0-0\0",
    "../0-0", "a/../b/0-0", "a b/0-0", "a/-1-0", "a/0--1", "a/x-0", "ä/0-0", "a/\u0663-0",
    ".", "..", "/", "/etc", "a/" + "9" * 30 + "-0", "counter@0/0",
    "linked/1-2", "linked/0-0", "counter/0-7",
    None, 1, ["counter/0-0"], {},
]  # fmt: skip
NO_NUMBERS = [-2, 1.0, 1.5, "1", None, True, [], {}, 1 << 63, 10**40]
NO_GROUPS = ["x", "0-8", "7-3", "-1", "0-70000", "0-7,", None, 0, 1, ["0-7"], []]
NO_LAYOUTS = [None, 1, "x", [], {}, {**WRITTEN, "defaults": []}, {**WRITTEN, "columns": {}}]
NO_LAYOUTS += [
    {**WRITTEN, "columns": {**WRITTEN["columns"], **wrong}}
    for wrong in ({"arrow": "AAAA"}, {"keys": 99}, {"fingerprint": "x"}, {"key_groups": -1})
]
NO_SCHEMAS = [None, 1, [], {}, {**SCHEMA, "arrow": "AAAA"}, {**SCHEMA, "fingerprint": "x"}]
NO_NAMES = ["", "/etc/passwd", "../x", "a/../b", ".x", None, 1, "a\0"]
NO_CHECKSUMS = ["", "x", None, 1, "0" * 15, "0" * 17, "G" * 16]
NO_PARTS = (
    [{**PART, "name": bad} for bad in NO_NAMES]
    + [{**PART, "groups": bad} for bad in NO_GROUPS]
    + [
        {**PART, field: bad}
        for field in ("instance", "rows", "bytes", "needed", "parity")
        for bad in NO_NUMBERS
    ]
    + [{**PART, "version": bad} for bad in NO_NUMBERS]
    + [{**PART, "base": bad} for bad in NO_NUMBERS if bad is not None]
    + [{**PART, "checksum": bad} for bad in NO_CHECKSUMS]
    + [{key: value for key, value in PART.items() if key != gone} for gone in PART]
    + [{**PART, "holders": bad} for bad in (None, 1, "x", *([bad] for bad in ("", ".x", None, 1)))]
    + [{**PART, "owner": bad} for bad in (None, 1, ".x", [])]
    + [{**PART, "more": 1}, {}, None, 1]
)
NO_LISTS = [None, 1, "x", {}]
NO_FILES = ["", ".", "..", "/etc/passwd", "captures", "captures/", "captures/../../beside/file",
            "captures/..", "captures/link.arrow", "captures/x/y", "a.arrow", "captures/a.arrow\0",
            None, 1, []]  # fmt: skip
NO_PREFIXES = ["x", "/", "/x/", "../", "a/../", ".x/", "a b/", "a//", None, 1]
NO_PEERS = [None, 1, [], {"a": None}, {"a": 1}, {"a": "x"}, {"a": "x:1/y"}, {"a": "x:y"},
            {"a": "file:///etc/passwd"}]  # fmt: skip
NO_BLOCKS: list[Any] = [
    *({**BLOCK, "name": bad} for bad in NO_NAMES), *({**BLOCK, "bytes": bad} for bad in NO_NUMBERS),
    *({**BLOCK, "checksum": bad} for bad in NO_CHECKSUMS), {**BLOCK, "more": 1}, {}, None, "a/b",
]  # fmt: skip
WRONG: dict[str, list[Any]] = {
    "blocks": [*NO_LISTS, *([bad] for bad in NO_BLOCKS)],
    "names": [*NO_LISTS, *(["a/b", bad] for bad in NO_NAMES)],
    "epoch": [-1, *NO_NUMBERS], "peers": NO_PEERS, "table": NO_TABLES,
    "layout": NO_LAYOUTS, "version": NO_NUMBERS, "since": [6, *NO_NUMBERS],
    "upto": [2, *NO_NUMBERS], "fence": [-1, *NO_NUMBERS],
    "parts": [*NO_LISTS, *([PART, bad] for bad in NO_PARTS)], "schema": NO_SCHEMAS,
    "groups": NO_GROUPS, "operator": ["", "..", "a/b", "a b", None, 1], "file": NO_FILES,
    "instance": [-1, *NO_NUMBERS], "base": [bad for bad in NO_NUMBERS if bad is not None],
    "under": NO_PREFIXES, "name": NO_NAMES, "bytes": [-1, *NO_NUMBERS], "checksum": NO_CHECKSUMS,
    "prefix": [None, 1, [], {}], "within": [-1, "1", None, True, [], 1e300, 1 << 60],
    "tables": [*NO_LISTS, *(["counter/0-0", bad] for bad in NO_TABLES)],
    "captures": [*NO_LISTS, *(["captures/a.arrow", bad] for bad in NO_FILES)],
    "layouts": [*([bad] for bad in NO_LISTS), None, 1, "x",
                *({bad: WRITTEN} for bad in NO_TABLES[:-7]),
                *({"counter/0-0": bad} for bad in NO_LAYOUTS)],
    "holders": [*NO_LISTS, *([bad] for bad in ("", ".x", None, 1, []))],
    "needed": [-1, 0, 2, *NO_NUMBERS],
    "parity": [-1, 255, *NO_NUMBERS],
    "row": [-64, 0, 100, 1 << 40, *(bad for bad in NO_NUMBERS if bad is not None)],
    "part": [PART, *NO_PARTS],
    "offset": [-1, *NO_NUMBERS], "length": [-1, *(bad for bad in NO_NUMBERS if bad is not None)],
}  # fmt: skip
CASES = [
    pytest.param(verb, field, id=f"{verb}-{field}")
    for verb, given_ in REQUESTS.items()
    for field in ("within", *given_)
]


class Agent:
    """What an agent does with requests, over a folder in which and beside which lie files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "state" / "10.0.0.1" / "0123456789ab"
        self.beside = folder / "beside" / "precious"
        self.beside.mkdir(parents=True)
        (self.beside / "0-0").mkdir()
        (self.beside / "file").write_text("precious")
        (self.root / CAPTURES).mkdir(parents=True)
        (self.root / CAPTURES / "a.arrow").write_text("a capture")
        (self.root / CAPTURES / "link.arrow").symlink_to(self.beside / "file")
        context = {"root": str(self.root), "secret": Secret.new().to_hex(), "host": "10.0.0.1",
                   "store": AT_PEERS.to_json()}  # fmt: skip
        vault = Vault(folder / "vault", 100_000)
        self.node = make(context, vault, Fence(folder / "epoch"))
        self.ask("make", parts=[])
        # Somebody of this user, or a wrong program, has laid links.
        (self.root / TABLES / "linked").symlink_to(self.beside)
        (self.root / TABLES / "counter" / "0-7").symlink_to(self.beside)

    def ask(self, verb: str, **changes: Any) -> Any:
        return self.carry_out(self.value(verb, **changes))

    def carry_out(self, value: dict[str, Any]) -> Any:
        request, seconds = decode(value)
        return self.node.ask(request, Deadline(seconds)) if request.verb in OF_TABLES else None

    def value(self, verb: str, **changes: Any) -> dict[str, Any]:
        value = {"verb": verb, "within": 60, **REQUESTS[verb], **changes}
        if "file" in value:
            value["file"] = self._file(value["file"])
        if isinstance(value.get("captures"), list):
            value["captures"] = [self._file(file) for file in value["captures"]]
        return json.loads(json.dumps(value))  # type: ignore[no-any-return]

    def _file(self, file: Any) -> Any:
        relative = isinstance(file, str) and file and not file.startswith("/")
        return f"{self.root}/{file}" if relative else file

    def seen(self) -> list[tuple[str, int, int, int]]:
        """Everything that there is, and whether it was touched."""
        found = [(path, path.lstat()) for path in self.folder.rglob("*") if path.name != "lock"]
        return sorted((str(p), at.st_ino, at.st_size, at.st_mtime_ns) for p, at in found)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Agent:
    return Agent(tmp_path_factory.mktemp("agent"))


def library() -> dict[str, type[Request[Any]]]:
    """The verbs of the library, without those of the tests."""
    return {
        verb: cls for verb, cls in requests.VERBS.items() if cls.__module__ == Request.__module__
    }


def test_every_field_of_every_request_is_tested() -> None:
    assert {verb: {field.name for field in fields(cls)} for verb, cls in library().items()} == {
        verb: set(given_) for verb, given_ in REQUESTS.items()
    }


@pytest.mark.parametrize(("verb", "field"), CASES)
def test_a_wrong_field_is_refused_and_changes_nothing(agent: Agent, verb: str, field: str) -> None:
    before = agent.seen()
    without = agent.value(verb)
    del without[field]
    with pytest.raises(Refused, match=f"'{verb}' needs '{field}' as .*, and has none"):
        agent.carry_out(without)
    for bad in WRONG[field]:
        with pytest.raises(Refused):
            agent.ask(verb, **{field: bad})
        assert agent.seen() == before, (verb, field, bad)


@pytest.mark.parametrize("verb", REQUESTS)
def test_a_field_too_many_is_refused(agent: Agent, verb: str) -> None:
    before = agent.seen()
    for more in ("more", "op", "table2", ""):
        with pytest.raises(Refused, match=f"'{verb}' has no field"):
            agent.ask(verb, **{more: 1})
    assert agent.seen() == before


@pytest.mark.parametrize("field", ["groups", "parts"])
def test_groups_that_the_operator_does_not_have_are_refused(agent: Agent, field: str) -> None:
    bad = "0-8" if field == "groups" else [{**PART, "groups": "8"}]
    for verb, given_ in REQUESTS.items():
        if field in given_:
            with pytest.raises(Refused, match=rf"'{field}' has .* the operator has 8 key groups"):
                agent.ask(verb, **{field: bad})


def test_right_requests_are_taken(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    assert agent.ask("inspect") == {"counter/0-0": (3,)}
    file = agent.ask("capture")
    assert Path(file).parent == agent.root / CAPTURES
    assert agent.ask("fetch", file=file).to_pybytes() == Path(file).read_bytes()
    agent.ask("drop", tables=[], captures=[file])
    assert not Path(file).exists()
    agent.ask("make", table="counter/1-0", parts=[])
    agent.ask("drop", tables=["counter/1-0"], captures=[])
    assert (agent.root / TABLES / "counter" / "0-0").is_dir()
    assert not (agent.root / TABLES / "counter" / "1-0").exists()
    assert agent.ask("inspect") == {"counter/0-0": (3,)}, "links are not followed"
    assert (agent.beside / "file").read_text() == "precious"
    assert (agent.beside / "0-0").is_dir()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="a0@/.-_ \0\n~%", max_size=12) | st.text(max_size=12))
def test_any_name_of_a_table_is_one_folder_in_its_place_or_refused(
    tmp_path: Path, name: str
) -> None:
    node = LocalNode(tmp_path, lambda request, deadline: MemoryStore())
    try:
        path = node.path(TableName(name))
    except Refused:
        return
    folder = tmp_path / TABLES
    assert Path(os.path.normpath(path)) == path
    assert path.parent.parent == folder
    assert check_table(name) == str(path.relative_to(folder))


# Any request is what it was once it has been JSON.

LAYOUTS = [
    LAYOUT,
    TableLayout(
        KeyLayout([pa.field("a", pa.string()), pa.field("b", pa.decimal128(20, 3))], ["start"], 8),
        types.schema(n=types.int64, text=types.string, some=types.vector(types.float64, 3)),
        True,
    ),
]
names = st.from_regex(
    r"[A-Za-z0-9_%=+~-][A-Za-z0-9_%=+~.-]{0,9}(/[a-z0-9]{1,5}){0,2}", fullmatch=True
)
numbers = st.integers(0, (1 << 63) - 1)
versions = st.integers(-1, (1 << 63) - 1).map(Version)
groups = st.sets(st.integers(0, 7)).map(KeyGroups.of)
checksums = st.text("0123456789abcdef", min_size=16, max_size=16)
parts = st.builds(
    Part,
    names,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}", fullmatch=True),
    versions,
    st.none() | versions,
    groups,
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
            lambda host: host[0] != "."
        ),
        max_size=3,
    ).map(tuple),
    st.integers(1, 1 << 16),
    numbers,
    numbers,
    checksums,
    st.integers(0, 1 << 16),
    numbers,
)
STRATEGIES: dict[Any, st.SearchStrategy[Any]] = {
    int: numbers,
    str: st.text(),
    float: st.floats(0, 600_000),
    Epoch: numbers,
    Version: versions,
    Instance: st.integers(0, 1 << 16),
    TableName: st.from_regex(
        r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}/[0-9]{1,18}-[0-9]{1,18}",
        fullmatch=True,
    ),
    Host: st.from_regex(r"[A-Za-z0-9:-][A-Za-z0-9.:-]{0,15}", fullmatch=True),
    OperatorName: st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}", fullmatch=True),
    CaptureFile: st.text(st.characters(exclude_characters="\0"), min_size=1),
    BackupName: names,
    Prefix: st.just("") | names.map(lambda name: f"{name}/"),
    Checksum: checksums,
    Address: st.from_regex(r"(\[[0-9a-f:]{2,9}\]|[A-Za-z0-9_.-]{1,9}):[0-9]{1,5}", fullmatch=True),
    KeyGroups: groups,
    TableLayout: st.sampled_from(LAYOUTS),
    CheckpointSchema: st.sampled_from([CheckpointSchema.of(layout) for layout in LAYOUTS]),
    Part: parts,
    NoneType: st.none(),
}


def strategy(hint: Any, **known: Any) -> st.SearchStrategy[Any]:
    if hint in STRATEGIES:
        return STRATEGIES[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return st.one_of([strategy(each) for each in arguments])
    if origin is tuple:
        return st.lists(strategy(arguments[0]), max_size=4).map(tuple)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(strategy(arguments[0]), strategy(arguments[1]), max_size=3)
    hints = get_type_hints(hint)
    every = {f.name: strategy(hints[f.name]) for f in fields(hint)}
    return st.builds(hint, **every | {name: st.just(value) for name, value in known.items()})


@cache
def requests_of(verb: str) -> st.SearchStrategy[Any]:
    cls = library()[verb]
    if verb == "advance":
        two = st.tuples(versions, versions).map(sorted)
        return two.flatmap(lambda two: strategy(cls, since=two[0], upto=two[1]))
    if verb == "mend":
        coded = parts.map(lambda part: replace(part, holders=(*part.holders, "a")))
        return st.builds(cls, epoch=numbers, peers=strategy(get_type_hints(cls)["peers"]),
                         part=coded, holders=strategy(get_type_hints(cls)["holders"]))  # fmt: skip
    if verb == "put":
        some = st.lists(strategy(Block), min_size=1, max_size=4, unique_by=lambda each: each.name)
        return st.builds(cls, epoch=numbers, blocks=some.map(tuple))
    if verb in ("store", "merge"):
        three = (Host("a"),) * 3
        return st.one_of(
            strategy(cls, needed=1, row=None, parity=0),
            strategy(cls, needed=2, row=64, holders=three, parity=1),
            strategy(cls, needed=4, row=64, holders=(), parity=2),
        )
    return strategy(cls)


def answer_type(verb: str) -> Any:
    (base,) = [b for b in library()[verb].__orig_bases__ if get_args(b)]  # type: ignore[attr-defined]
    found = get_args(base)[0]
    return NoneType if found is None else found


@pytest.mark.parametrize("verb", REQUESTS)
@settings(max_examples=60)
@given(data=st.data(), seconds=st.floats(0, 1e5))
def test_a_request_is_the_same_after_it_was_json(
    verb: str, data: st.DataObject, seconds: float
) -> None:
    request = data.draw(requests_of(verb))
    written = json.loads(json.dumps(encode(request, seconds)))
    found, left = decode(written)
    assert type(found) is type(request)
    assert left == seconds
    assert encode(found, left) == written
    for field in fields(request):
        value = getattr(request, field.name)
        if not isinstance(value, TableLayout) and field.name not in ("layouts", "operators"):
            assert getattr(found, field.name) == value


@pytest.mark.parametrize("verb", [v for v in REQUESTS if answer_type(v) is not pa.Buffer])
@settings(max_examples=40)
@given(data=st.data())
def test_an_answer_is_the_same_after_it_was_json(verb: str, data: st.DataObject) -> None:
    request, answer = data.draw(requests_of(verb)), data.draw(strategy(answer_type(verb)))
    written = json.loads(json.dumps(encode_answer(request, answer)))
    assert decode_answer(request, written) == answer


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("verb", REQUESTS)
@settings(max_examples=100)
@given(data=st.data(), value=anything)
def test_any_value_of_a_field_is_read_or_refused(
    verb: str, data: st.DataObject, value: Any
) -> None:
    written = {"verb": verb, "within": 1, **REQUESTS[verb]}
    written[data.draw(st.sampled_from(sorted(written)))] = value
    try:
        decode(json.loads(json.dumps(written)))
    except Refused:
        return


def test_answers_that_are_none_are_not_taken() -> None:
    for verb, wrong in (("make", "x"), ("make", None), ("inspect", []), ("store", {}), ("stop", 1)):
        request, _ = decode({"verb": verb, "within": 1, **REQUESTS[verb]})
        with pytest.raises(ValueError, match="was answered with"):
            decode_answer(request, {"answer": wrong})
        with pytest.raises(ValueError, match="was answered with"):
            decode_answer(request, {})


def test_requests_are_frozen_and_say_what_they_do() -> None:
    for verb, cls in library().items():
        assert cls.__dataclass_params__.frozen, verb  # type: ignore[attr-defined]
        assert inspect.getdoc(cls), verb
        assert cls.verb == verb == cls.__name__.lower()
    with pytest.raises(TypeError, match="already is a request with the verb 'make'"):
        type("Make", (Request,), {})


ERRORS: list[AnabranchError] = [
    CheckpointCorrupt("x: bad checksum", part="q/parts/x"),
    CheckpointNotFound("there is none"),
    DidNotHappen("silent", host="10.0.0.9"),
    MayHaveHappened("silent", host="10.0.0.9", part="q/parts/x", without=("a", "b")),
    StateMissing("no table"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_is_the_same_after_it_was_json(error: AnabranchError) -> None:
    value = json.loads(json.dumps(codec.encode_error(error, "make")))
    found = codec.decode_error(value)
    assert (type(found), str(found)) == (type(error), str(error))
    assert vars(found) == vars(error)


@pytest.mark.parametrize(
    "wrong", [{"host": 7}, {"host": "../x"}, {"part": "/etc"}, {"without": "ab"}, {"message": 3}]
)
def test_an_error_that_is_none_is_not_taken(wrong: dict[str, Any]) -> None:
    value = codec.encode_error(DidNotHappen("silent", host="a", part="p", without=("b",)), "make")
    assert codec.decode_error(value) is not None
    assert codec.decode_error(value | wrong) is None
