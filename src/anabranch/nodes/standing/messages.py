"""The messages of the ring as JSON, and back: a closed set of types, of bounded size.

What a message says is checked before the ring sees any of it. A contact is a list, as a message
names up to a leaf set of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from anabranch.nodes.codec import cut
from anabranch.ring import (
    Contact,
    Found,
    Join,
    KeepAlive,
    Kind,
    Leaving,
    Lookup,
    Message,
    NodeId,
    Welcome,
)
from anabranch.ring.ids import DIGITS

MOST_CONTACTS = 2048
"""A message names fewer nodes than that: a leaf set, and some rows of a routing table."""
LONGEST_HOST = 255
MOST_LOAD = 1 << 20
_GREATEST = (1 << 63) - 1
_TYPE = "type"
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%a-z]{1,60}\]|[A-Za-z0-9_.-]{1,255}):[0-9]{1,5}")


def write(message: Message) -> dict[str, Any]:
    """The value for JSON of a message.

    >>> message = Lookup(7, "10.0.0.1:7070")
    >>> read(write(message)) == message
    True
    """
    fields = _FIELDS[type(message)]
    written = {name: form.write(getattr(message, name)) for name, form in fields.items()}
    return {_TYPE: type(message).__name__, **written}


def read(value: Any) -> Message:
    """The message that :func:`write` wrote. ValueError if it is malformed."""
    kind = value.get(_TYPE) if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(f"{cut(value)} is no message of a ring")
    cls = _TYPES[kind]
    fields = _FIELDS[cls]
    if value.keys() != fields.keys() | {_TYPE}:
        raise ValueError(f"the fields of {cls.__name__} are {sorted(fields)}, not {sorted(value)}")
    found = {name: form.read(value[name]) for name, form in fields.items()}
    message: Message = cls(**found)
    return message


def write_contact(contact: Contact) -> list[Any]:
    """The value for JSON of a contact."""
    return [f"{int(contact.id):032x}", contact.host, contact.address, contact.incarnation]


def read_contact(value: Any) -> Contact:
    """The contact that :func:`write_contact` wrote. ValueError if it is malformed."""
    if not isinstance(value, list) or len(value) != 4:
        raise ValueError(f"{cut(value)} is no contact")
    id, host, address, incarnation = value
    if not isinstance(host, str) or not 0 < len(host) <= LONGEST_HOST:
        raise ValueError(f"{cut(host)} is no host")
    return Contact(read_id(id), host, _address(address), _number(_GREATEST)(incarnation))


def read_id(value: Any) -> NodeId:
    """The place that 32 hexadecimal digits say. ValueError if they are none."""
    if not isinstance(value, str) or len(value) != DIGITS:
        raise ValueError(f"{cut(value)} is no id of a node")
    return NodeId.parse(value)


class _Form:
    """How a field is written and read."""

    def __init__(
        self, read: Callable[[Any], Any], write: Callable[[Any], Any] = lambda value: value
    ) -> None:
        self.read, self.write = read, write


def _number(most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{cut(value)} is not a whole number from 0 to {most}")
        return value

    return read


def _address(value: Any) -> str:
    if not isinstance(value, str) or not _ADDRESS.fullmatch(value):
        raise ValueError(f"{cut(value)} is no address host:port")
    return value


def _contacts(value: Any) -> tuple[Contact, ...]:
    if not isinstance(value, list) or len(value) > MOST_CONTACTS:
        raise ValueError(f"{cut(value)} is no list of at most {MOST_CONTACTS} contacts")
    return tuple(map(read_contact, value))


_NUMBER = _Form(_number(_GREATEST))
_HOPS = _Form(_number(1 << 16))
_ROW = _Form(_number(DIGITS))
_KEY = _Form(lambda value: int(read_id(value)), lambda key: f"{key:032x}")
_WHERE = _Form(_address)
_CONTACT = _Form(read_contact, write_contact)
_CONTACTS = _Form(_contacts, lambda contacts: [write_contact(each) for each in contacts])
_FIELDS: Mapping[type[Message], Mapping[str, _Form]] = {
    KeepAlive: {
        "sender": _CONTACT,
        "beat": _NUMBER,
        "leaves": _CONTACTS,
        "kind": _Form(Kind, lambda kind: kind.value),
        "row": _Form(lambda value: None if value is None else _ROW.read(value)),
        "others": _CONTACTS,
        "load": _Form(_number(MOST_LOAD)),
    },
    Join: {"newcomer": _CONTACT, "row": _ROW, "others": _CONTACTS, "hops": _HOPS},
    Welcome: {"sender": _CONTACT, "beat": _NUMBER, "leaves": _CONTACTS, "others": _CONTACTS},
    Lookup: {"key": _KEY, "asker": _WHERE, "hops": _HOPS},
    Found: {"key": _KEY, "root": _CONTACT, "leaves": _CONTACTS, "hops": _HOPS},
    Leaving: {"sender": _CONTACT, "beat": _NUMBER, "leaves": _CONTACTS},
}
_TYPES: Mapping[Any, Any] = {cls.__name__: cls for cls in _FIELDS}
