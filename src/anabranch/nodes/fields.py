"""The fields of a request, each checked before anything is done: Refused says which is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from anabranch.backup.manifests import OperatorManifest, Part
from anabranch.backup.store import check_name
from anabranch.errors import AnabranchError
from anabranch.nodes.tickets import Refused
from anabranch.state import layouts
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import MAX_KEY_GROUPS, KeyGroups
from anabranch.state.table import TableLayout
from anabranch.units import NO_VERSION, Version

Request = dict[str, Any]

_GREATEST = (1 << 63) - 1
_OPERATOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*@[0-9]{1,18}/[0-9]{1,9}")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")


def text(request: Request, field: str) -> str:
    """A field that is text."""
    value = request.get(field)
    if not isinstance(value, str):
        raise Refused(f"the request needs {field!r} as text")
    return value


def number(request: Request, field: str, least: int = 0, greatest: int = _GREATEST) -> int:
    """A field that is a whole number."""
    value = request.get(field)
    if type(value) is not int or not least <= value <= greatest:
        raise Refused(
            f"the request needs {field!r} as a whole number from {least} to {greatest}, "
            f"not {cut(value)}"
        )
    return value


def name(request: Request, field: str = "name") -> str:
    """A field that is the name of a backup."""
    try:
        return check_name(text(request, field))
    except ValueError as error:
        raise Refused(str(error)) from error


def prefix(request: Request, field: str) -> str:
    """A field that can stand before the name of a backup: nothing, or folders."""
    value = text(request, field)
    if value:
        with _refused(field):
            check_name(f"{value}x")
        if not value.endswith("/"):
            raise Refused(f"{field!r} is {cut(value)}: it must be empty, or end with '/'")
    return value


def checksum(request: Request, field: str = "checksum") -> str:
    """A field that is a checksum."""
    value = text(request, field)
    if not _CHECKSUM.fullmatch(value):
        raise Refused(f"{field!r} is {cut(value)}, not a checksum of 16 hexadecimal digits")
    return value


def operator(request: Request) -> str:
    """The field ``operator``."""
    value = text(request, "operator")
    if not _OPERATOR.fullmatch(value):
        raise Refused(f"{cut(value)} is no name of an operator")
    return value


def instance(request: Request) -> int:
    """The field ``instance``."""
    return number(request, "instance", greatest=MAX_KEY_GROUPS)


def check_table(value: object) -> str:
    """The name of a table, ``operator@epoch/instance``."""
    if not isinstance(value, str) or not _TABLE.fullmatch(value):
        raise Refused(f"{cut(value)} is no name of a table, which is operator@epoch/instance")
    return value


def table(request: Request, field: str = "table") -> str:
    """A field that is the name of a table."""
    return check_table(request.get(field))


def tables(request: Request) -> list[str]:
    """The field ``tables``, the names of some."""
    value = request.get("tables")
    if not isinstance(value, list):
        raise Refused("the request needs 'tables' as a list of names")
    return [check_table(each) for each in value]


def version(request: Request, field: str = "version") -> Version:
    """A field that is a version."""
    return Version(number(request, field, least=NO_VERSION))


def version_or_none(request: Request, field: str) -> Version | None:
    """A field that is a version or null."""
    return None if request.get(field) is None else version(request, field)


def groups(request: Request, among: int) -> KeyGroups:
    """The field ``groups``: some of the so many key groups of an operator."""
    with _refused("groups"):
        value = KeyGroups.parse(text(request, "groups"))
    if not value <= KeyGroups.all(among):
        raise Refused(f"'groups' has {value}, and the operator has {among} key groups")
    return value


def layout(request: Request) -> TableLayout:
    """The field ``layout``."""
    with _refused("layout"):
        return layouts.from_json(request["layout"])


def saved(request: Request, field: str = "saved") -> OperatorManifest:
    """A field that is an operator's part of a manifest."""
    with _refused(field):
        value = request[field]
        schema = CheckpointSchema.from_json(value["schema"])
        parts = tuple(_part(part, schema) for part in value["parts"])
        return OperatorManifest(schema, parts)


def _part(value: Request, schema: CheckpointSchema) -> Part:
    name(value)
    instance(value)
    version(value)
    version_or_none(value, "base")
    groups(value, schema.key_groups)
    number(value, "rows")
    number(value, "bytes")
    checksum(value)
    return Part.from_json(value)


def peers(request: Request) -> Mapping[str, str]:
    """The field ``peers``: the addresses of nodes, by host; there may be none."""
    value = request.get("peers", {})
    if not isinstance(value, dict):
        raise Refused("the request needs 'peers' as addresses by host")
    for host, address in value.items():
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise Refused(f"'peers' has {cut(address)} as the address of {cut(host)}")
    return value


def cut(value: object) -> str:
    """What someone else sent, short enough for a log."""
    return f"{value!r:.100}"


@contextmanager
def _refused(field: str) -> Iterator[None]:
    try:
        yield
    except Refused:
        raise
    except (
        AnabranchError, ValueError, TypeError, KeyError, IndexError, AttributeError,
        OverflowError, RecursionError, pa.ArrowException,
    ) as error:  # fmt: skip
        raise Refused(
            f"the request has a wrong {field!r}: {type(error).__name__}: {error!s:.200}"
        ) from error
