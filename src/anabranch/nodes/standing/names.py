"""The names of fragments at nodes, and of the nodes in their labels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from anabranch.fragments.code import LARGEST
from anabranch.ring import Contact, NodeId

_ENDING = re.compile(r"([0-9a-f]{32})~(\d{1,3})-(\d{1,3})-(\d{1,3})")
_EPOCH_AT = 64
_AT = "at="


@dataclass(frozen=True, order=True)
class FragmentName:
    """The name of one fragment of a state.

    Who lists names sees from them alone which states are complete.

    >>> name = FragmentName("words/parts/1", 0x123, index=5, data=4, total=6)
    >>> str(name)
    'words/parts/1~00000000000000000000000000000123~5-4-6'
    >>> FragmentName.parse(str(name)) == name, FragmentName.parse("words/parts/1")
    (True, None)
    """

    state: str
    generation: int
    """Greater for what is stored later under the same name; see :func:`generation_of`."""
    index: int
    data: int
    total: int

    def __str__(self) -> str:
        ending = f"{self.generation:032x}~{self.index}-{self.data}-{self.total}"
        return f"{self.state}~{ending}"

    @classmethod
    def parse(cls, text: str) -> FragmentName | None:
        """The name that was printed. None if it is no name of a fragment."""
        state, *ending = text.rsplit("~", 2)
        found = _ENDING.fullmatch("~".join(ending))
        if found is None or not state:
            return None
        generation = int(found[1], 16)
        index, data, total = map(int, found.groups()[1:])
        if not (0 < data <= total <= LARGEST and index < total):
            return None
        return cls(state, generation, index, data, total)


def generation_of(epoch: int, count: int) -> int:
    """The generation of what the driver of an epoch stores. ``count`` has up to 64 bits.

    All of an earlier driver are smaller, whatever the clocks say: what a deposed one stores at
    nodes that have not heard of the next one is never read in place of the next one's.

    >>> generation_of(4, 1 << 60) < generation_of(5, 0), epoch_of(generation_of(5, 0))
    (True, 5)
    """
    return epoch << _EPOCH_AT | count


def epoch_of(generation: int) -> int:
    """The epoch of the driver that stored something."""
    return generation >> _EPOCH_AT


def prefix_of(state: str) -> str:
    """What the names of all fragments of a state begin with."""
    return f"{state}~"


def under_owner(host: str) -> str:
    """The folder in the names of states that a host owns.

    >>> under_owner("10.0.0.3"), owner_of("words/at=10.0.0.3/parts/1", "words")
    ('at=10.0.0.3/', '10.0.0.3')
    """
    return f"{_AT}{quote(host, safe='')}/"


def owner_of(state: str, default: str) -> str:
    """The owner that the name of a state tells of: its fragments are near that place.

    >>> owner_of("parts/1", "words")
    'words'
    """
    for segment in state.split("/")[:-1]:
        if segment.startswith(_AT):
            return unquote(segment.removeprefix(_AT))
    return default


def write_holder(contact: Contact) -> str:
    """A node in a label: its place on the ring, where it is found again, and its host."""
    return f"{contact.id} {contact.host}"


def read_holder(text: str) -> tuple[NodeId, str] | None:
    """What :func:`write_holder` wrote. None if the label was not written for a ring.

    >>> read_holder("10.0.0.1")
    """
    id, _, host = text.partition(" ")
    try:
        return NodeId.parse(id), host
    except ValueError:
        return None
