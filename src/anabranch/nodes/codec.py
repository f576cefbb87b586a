"""Requests, answers and errors as JSON, and back.

The type of a value determines its form. Every field of a request is checked before anything is
done; Refused names the wrong one. An error is sent as the name of its class, a message, and the
node or part that it is about. Nothing is ever unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from anabranch import errors
from anabranch.errors import AnabranchError, CheckpointError, QueryFailed, Refused, StoreError
from anabranch.nodes.requests import (
    VERBS,
    Address,
    BackupName,
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
from anabranch.state import layouts
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import MAX_KEY_GROUPS, KeyGroups
from anabranch.state.part import Part
from anabranch.state.table import TableLayout
from anabranch.stores.peers import peer_name
from anabranch.stores.store import check_name
from anabranch.units import NO_VERSION, Version

A = TypeVar("A")

VERB = "verb"
WITHIN = "within"
LONGEST_MESSAGE = 1000  # bytes
LONGEST_SECONDS = 7 * 86_400.0

_GREATEST = (1 << 63) - 1
_OPERATOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")
_WRONG = (
    AnabranchError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError,
    RecursionError, pa.ArrowException,
)  # fmt: skip
"""The errors of reading malformed values."""


def encode(request: Request[Any], seconds: float) -> dict[str, Any]:
    """A request, with the seconds that its caller waits for the answer, as a value for JSON."""
    written = {
        name: form.write(getattr(request, name)) for name, form in _fields(request.verb).items()
    }
    return {VERB: request.verb, WITHIN: min(seconds, LONGEST_SECONDS), **written}


def verb_of(value: Mapping[str, Any]) -> str:
    """The verb of an encoded request. Refused if there is no such verb."""
    verb = value.get(VERB)
    if not isinstance(verb, str) or verb not in VERBS:
        raise Refused(f"this node cannot do {cut(verb)}; it can {sorted(VERBS)}")
    return verb


def decode(value: Mapping[str, Any]) -> tuple[Request[Any], float]:
    """The request that :func:`encode` wrote, and its seconds."""
    verb = verb_of(value)
    forms = _fields(verb) | {WITHIN: _SECONDS}
    if unknown := value.keys() - forms.keys() - {VERB}:
        raise Refused(f"{verb!r} has no field {cut(min(unknown))}")
    read = {name: _read(verb, name, form, value) for name, form in forms.items()}
    seconds = read.pop(WITHIN)
    try:
        return VERBS[verb](**read), seconds
    except ValueError as error:
        raise Refused(f"{verb!r} is wrong: {error}") from error


def encode_answer(request: Request[Any], answer: Any) -> dict[str, Any]:
    """The answer to a request, as a value for JSON."""
    return {"answer": _answer(request.verb).write(answer)}


def decode_answer(request: Request[A], value: Mapping[str, Any]) -> A:
    """The answer that :func:`encode_answer` wrote. ValueError if it is malformed."""
    form = _answer(request.verb)
    try:
        answer: A = form.read(value["answer"])
    except _WRONG as error:
        raise ValueError(
            f"{request.verb!r} was answered with {cut(dict(value))}, not with {form.what}: {error}"
        ) from error
    return answer


def answers_with_bytes(request: Request[Any]) -> bool:
    """Whether the answer is a block of bytes instead of JSON."""
    return _answer_type(type(request)) is pa.Buffer


_ERRORS = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, AnabranchError)
}


def encode_error(error: Exception, doing: str) -> dict[str, Any]:
    """The form of an error that lets the client raise the same error.

    An error of another class becomes QueryFailed, with the failed operation in its message.
    """
    if isinstance(error, AnabranchError):
        name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)
        message = str(error)
    else:
        name = QueryFailed.__name__
        message = f"{doing} failed: {type(error).__name__}: {error}; see the log of the node"
    short = message.encode(errors="replace")[:LONGEST_MESSAGE].decode(errors="ignore")
    return {"error": name, "message": short, **_about(error)}


def _about(error: Exception) -> dict[str, Any]:
    match error:
        case CheckpointError(part=str(part)):
            return {"part": part}
        case StoreError():
            about = {"host": error.host, "part": error.part, "without": list(error.without)}
            return {name: value for name, value in about.items() if value}
        case _:
            return {}


def decode_error(value: dict[str, Any]) -> AnabranchError | None:
    """The error in a server's answer. None if its class is not known here."""
    kind, message = _ERRORS.get(str(value.get("error"))), value.get("message")
    if kind is None or not isinstance(message, str):
        return None
    if not issubclass(kind, CheckpointError | StoreError):
        return kind(message)
    try:
        part = _ERROR_PART.read(value.get("part"))
        if issubclass(kind, CheckpointError):
            return kind(message, part=part)
        host = _ERROR_HOST.read(value.get("host"))
        without = _ERROR_HOSTS.read(value.get("without", []))
        return kind(message, host=host, part=part, without=without)
    except _WRONG:
        return None


def define(
    hint: Any,
    what: str,
    read: Callable[[Any], Any],
    write: Callable[[Any], Any] = lambda value: value,
) -> None:
    """Say how values of a type are written, for requests that are defined elsewhere.

    ``read`` raises ValueError or TypeError if what it is given is not ``what``.
    """
    if hint in _FORMS:
        raise TypeError(f"the form of {hint} is defined already")
    _FORMS[hint] = _Form(what, read, write)


def cut(value: object) -> str:
    """A received value, shortened for a log."""
    return f"{value!r:.100}"


@dataclass(frozen=True)
class _Form:
    """How values of a type are written: ``read`` fails if what it is given is not ``what``."""

    what: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value


def _read(verb: str, name: str, form: _Form, value: Mapping[str, Any]) -> Any:
    if name not in value:
        raise Refused(f"{verb!r} needs {name!r} as {form.what}, and has none")
    try:
        return form.read(value[name])
    except _WRONG as error:
        raise Refused(
            f"{verb!r} needs {name!r} as {form.what}, not {cut(value[name])}: "
            f"{type(error).__name__}: {error!s:.200}"
        ) from error


@cache
def _fields(verb: str) -> dict[str, _Form]:
    return _forms(VERBS[verb])


@cache
def _answer(verb: str) -> _Form:
    return _form(_answer_type(VERBS[verb]))


def _forms(cls: Any) -> dict[str, _Form]:
    """The forms of the fields of a dataclass."""
    hints = get_type_hints(cls)
    return {each.name: _form(hints[each.name]) for each in fields(cls)}


def _answer_type(cls: type[Request[Any]]) -> Any:
    """The ``A`` of a request that is a ``Request[A]``."""
    for base in cls.__orig_bases__:  # type: ignore[attr-defined]
        origin = get_origin(base)
        if isinstance(origin, type) and issubclass(origin, Request):
            return get_args(base)[0]
    raise TypeError(f"{cls.__name__} does not say what it is answered with")


def _form(hint: Any) -> _Form:
    """The form of a type."""
    if hint is None:
        hint = NoneType
    if hint in _FORMS:
        return _FORMS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and NoneType in arguments:
        (other,) = (each for each in arguments if each is not NoneType)
        return _optional(_form(other))
    if origin is tuple and arguments[1:] == (...,):
        return _list(_form(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_form(arguments[0]), _form(arguments[1]))
    if is_dataclass(hint):
        return _record(hint)
    raise TypeError(f"there is no way to write {hint} as JSON")


def _optional(of: _Form) -> _Form:
    return _Form(
        f"{of.what}, or null",
        lambda value: None if value is None else of.read(value),
        lambda value: None if value is None else of.write(value),
    )


def _list(of: _Form) -> _Form:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError("no list")
        return tuple(of.read(each) for each in value)

    return _Form(f"a list of {of.what}", read, lambda value: [of.write(each) for each in value])


def _mapping(keys: _Form, values: _Form) -> _Form:
    return _Form(
        f"{values.what} by {keys.what}",
        lambda value: {keys.read(k): values.read(v) for k, v in value.items()},
        lambda value: {keys.write(k): values.write(v) for k, v in value.items()},
    )


def _record(cls: Any) -> _Form:
    forms = _forms(cls)

    def read(value: Any) -> Any:
        if value.keys() != forms.keys():
            raise ValueError(f"its fields are {sorted(value)}, not {sorted(forms)}")
        return cls(**{name: form.read(value[name]) for name, form in forms.items()})

    def write(value: Any) -> dict[str, Any]:
        return {name: form.write(getattr(value, name)) for name, form in forms.items()}

    return _Form(f"a {cls.__name__}", read, write)


def _number(least: int = 0, greatest: int = _GREATEST) -> _Form:
    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= greatest:
            raise ValueError("out of range, or no whole number")
        return value

    return _Form(f"a whole number from {least} to {greatest}", read)


def _text(what: str = "text", fits: Callable[[str], object] = lambda value: True) -> _Form:
    def read(value: Any) -> str:
        if not isinstance(value, str) or not fits(value):
            raise ValueError("it does not look like that")
        return value

    return _Form(what, read)


def _is_host(value: str) -> bool:
    return bool(check_name(peer_name(value, "x")))


def _is_prefix(value: str) -> bool:
    if value:
        check_name(f"{value}x")
    return not value or value.endswith("/")


def _groups(value: Any) -> KeyGroups:
    if not isinstance(value, str):
        raise TypeError("no text")
    return KeyGroups.parse(value)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= LONGEST_SECONDS:
        raise ValueError("out of range, or no number")
    return float(value)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("neither true nor false")
    return value


def _nothing(value: Any) -> None:
    if value is not None:
        raise ValueError("something")


_SECONDS = _Form(f"a number of seconds up to {LONGEST_SECONDS:g}", _seconds)
_FORMS: dict[Any, _Form] = {
    NoneType: _Form("null", _nothing),
    bool: _Form("true or false", _truth),
    int: _number(),
    float: _SECONDS,
    str: _text(),
    Epoch: _number(),
    Version: _number(least=NO_VERSION),
    Instance: _number(greatest=MAX_KEY_GROUPS),
    TableName: _Form("the name of a table", check_table),
    Host: _text("the name of a node", _is_host),
    OperatorName: _text("the name of an operator", _OPERATOR.fullmatch),
    CaptureFile: _text("the path of a file", lambda value: value and "\0" not in value),
    BackupName: _text("the name of a backup", check_name),
    Prefix: _text("a prefix of names, empty or with '/' at its end", _is_prefix),
    Checksum: _text("a checksum of 16 hexadecimal digits", _CHECKSUM.fullmatch),
    Address: _text("an address host:port", _ADDRESS.fullmatch),
    KeyGroups: _Form("key groups such as '0-42,64-127'", _groups, str),
    TableLayout: _Form("the layout of a table", layouts.from_json, layouts.to_json),
    CheckpointSchema: _Form(
        "the columns of a checkpoint", CheckpointSchema.from_json, CheckpointSchema.to_json
    ),
}


def _part_form() -> _Form:
    """A part has plain types, as it is written to manifests too; here it is checked."""
    forms = {
        "name": _FORMS[BackupName],
        "operator": _FORMS[OperatorName],
        "instance": _FORMS[Instance],
        "version": _FORMS[Version],
        "base": _optional(_FORMS[Version]),
        "groups": _FORMS[KeyGroups],
        "holders": _list(_FORMS[Host]),
        "needed": _number(least=1),
        "parity": _number(),
        "rows": _number(),
        "bytes": _number(),
        "checksum": _FORMS[Checksum],
        "owner": _text("the name of a node, or nothing", lambda host: not host or _is_host(host)),
    }

    def read(value: Any) -> Part:
        for name, form in forms.items():
            form.read(value[name])
        return Part.from_json(value)

    return _Form("a part", read, Part.to_json)


_FORMS[Part] = _part_form()
_ERROR_PART = _optional(_FORMS[BackupName])
_ERROR_HOST = _optional(_FORMS[Host])
_ERROR_HOSTS = _list(_FORMS[Host])
