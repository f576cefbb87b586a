"""Comparing answers with the right ones, whatever their order.

Each type of answer is put into the order of what identifies it, and then compared column by column.
Of a balance it is looked up what the vehicle had been charged at the time that the answer claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from anabranch_linearroad.expected import Expected
from anabranch_linearroad.rows import Answer
from anabranch_linearroad.verdict import LIMITS, Fault, Verdict

Array = npt.NDArray[Any]

_OLDEST_BALANCE = 60
_NULL = np.iinfo(np.int64).min
_CONTENT = {
    Answer.TOLL: ("Spd", "Toll"),
    Answer.ALERT: ("Seg",),
    Answer.BALANCE: ("Time", "ResultTime", "Bal"),
    Answer.EXPENDITURE: ("Time", "Bal"),
}
_IDENTITY = {
    Answer.TOLL: ("VID", "Time"),
    Answer.ALERT: ("VID", "Time"),
    Answer.BALANCE: ("QID",),
    Answer.EXPENDITURE: ("QID",),
}


def check(answers: pa.Table, expected: Expected, *, examples: int = 3) -> Verdict:
    """Judge answers by what :func:`~anabranch_linearroad.reference` expects.

    >>> from anabranch_linearroad import history_table, input_table, reference
    >>> expected = reference(
    ...     input_table([{"Type": 2, "Time": 90, "VID": 7, "QID": 1}]), history_table()
    ... )
    >>> print(check(expected.answers, expected))
    passed: 1 answers expected, 1 received
      1 without Emit, not checked for time
    """
    faults = _Faults(examples)
    untimed, slowest = 0, {}
    for kind in Answer:
        pair = _Pair(kind, _of(answers, kind), _of(expected.answers, kind))
        faults.add("missing", pair.right, pair.missing, pair.name_right)
        faults.add("extra", pair.given, pair.extra, pair.name_given)
        faults.add("duplicate", pair.given, pair.duplicate, pair.name_given)
        if kind == Answer.BALANCE:
            wrong, say = _wrong_balances(pair, expected)
        else:
            wrong, say = _wrong_contents(pair)
        faults.add("wrong", pair.given, wrong, say)
        delay = pair.delays()
        faults.add("late", pair.given, delay > LIMITS[kind], pair.say_delay)
        untimed += int(np.isnan(pair.given["Emit"]).sum())
        if not np.isnan(delay).all():
            slowest[kind] = float(np.nanmax(delay))
    strange = answers.filter(
        pc.invert(pc.fill_null(pc.is_in(answers["Type"], pa.array(list(map(int, Answer)))), False))
    )
    types = strange["Type"].to_pylist()
    faults.add("extra", {}, np.ones(len(types), bool), lambda at: f"type {types[at]}")
    return Verdict(
        len(expected.answers), len(answers), **faults.found(), untimed=untimed, slowest=slowest
    )


class _Pair:
    """The answers of one type, as given and as they should be, and which belongs to which."""

    def __init__(self, kind: Answer, given: dict[str, Array], right: dict[str, Array]) -> None:
        self.kind = kind
        self.given, theirs = _sorted(given, kind)
        self.right, ours = _sorted(right, kind)
        at = np.minimum(np.searchsorted(ours, theirs), max(len(ours) - 1, 0))
        self.known = ours[at] == theirs if len(ours) else np.zeros(len(theirs), bool)
        self.at = np.where(self.known, at, 0)
        """Where the right answer to each given one is, if it is known."""
        self.missing = np.bincount(at[self.known], minlength=len(ours)) == 0
        self.extra = ~self.known
        self.duplicate = self.known & (theirs == np.concatenate([[_NULL], theirs])[:-1])

    def delays(self) -> Array:
        """Seconds from what was asked to its answer; not a number where nobody can tell."""
        asked = _take(self.right["Time"], self.at)
        return np.where(self.known, self.given["Emit"] - asked, np.nan)

    def say_delay(self, at: int) -> str:
        """An answer, and how long it took."""
        return f"{self.name_given(at)}: after {self.delays()[at]:g} s"

    def name_given(self, at: int) -> str:
        """What identifies a given answer."""
        return _name(self.given, self.kind, at)

    def name_right(self, at: int) -> str:
        """What identifies an answer that is expected."""
        return _name(self.right, self.kind, at)


class _Faults:
    """Counts faults and keeps the first few of each."""

    def __init__(self, examples: int) -> None:
        self._most = examples
        self._counts: dict[str, int] = {}
        self._examples: dict[str, list[str]] = {}

    def add(
        self, name: str, columns: dict[str, Array], bad: Array, say: Callable[[int], str]
    ) -> None:
        """Take note of the rows that are bad, the earliest as examples."""
        at = np.flatnonzero(bad)
        self._counts[name] = self._counts.get(name, 0) + len(at)
        examples = self._examples.setdefault(name, [])
        if "Time" in columns:
            at = at[np.argsort(columns["Time"][at], kind="stable")]
        examples += [say(int(row)) for row in at[: self._most - len(examples)]]

    def found(self) -> dict[str, Any]:
        """Everything, as fields of a verdict."""
        return {name: Fault(n, tuple(self._examples[name])) for name, n in self._counts.items()}


def _wrong_contents(pair: _Pair) -> tuple[Array, Callable[[int], str]]:
    names = _CONTENT[pair.kind]
    wrong = np.zeros(len(pair.known), bool)
    for name in names:
        wrong |= pair.given[name] != _take(pair.right[name], pair.at)

    def say(at: int) -> str:
        right = _values(pair.right, names, int(pair.at[at]))
        return f"{pair.name_given(at)}: {_values(pair.given, names, at)}; right is {right}"

    return wrong & pair.known, say


def _wrong_balances(pair: _Pair, expected: Expected) -> tuple[Array, Callable[[int], str]]:
    """A balance is right if it was at its ResultTime, and that is not too long ago."""
    vids = _vehicles(expected.requests, pair.right["QID"])
    asked, vid = _take(pair.right["Time"], pair.at), _take(vids, pair.at)
    claimed = pair.given["ResultTime"]
    timely = (claimed >= asked - _OLDEST_BALANCE) & (claimed <= asked)
    balances = _balances(expected.charges, vid, np.where(timely, claimed, asked))
    wrong = ~timely | (pair.given["Time"] != asked) | (pair.given["Bal"] != balances)

    def say(at: int) -> str:
        given = _values(pair.given, _CONTENT[pair.kind], at)
        when = f"at {claimed[at]}" if timely[at] else f"with ResultTime {asked[at]}"
        return (
            f"{pair.name_given(at)}: {given}; right is Time {asked[at]}, Bal {balances[at]} {when}"
        )

    return wrong & pair.known, say


def _vehicles(requests: pa.Table, qids: Array) -> Array:
    asked = requests["QID"].to_numpy()
    order = np.argsort(asked)
    vids: Array = requests["VID"].to_numpy()[order][np.searchsorted(asked[order], qids)]
    return vids


def _balances(charges: pa.Table, vids: Array, times: Array) -> Array:
    """What each vehicle had been charged by a time."""
    key = _combined(charges["VID"].to_numpy(), charges["Time"].to_numpy())
    total = np.concatenate([[0], np.cumsum(charges["Toll"].to_numpy(), dtype=np.int64)])
    until = np.searchsorted(key, _combined(vids, times), side="right")
    since = np.searchsorted(key, _combined(vids, np.zeros_like(vids)), side="left")
    balances: Array = total[until] - total[since]
    return balances


def _of(answers: pa.Table, kind: Answer) -> dict[str, Array]:
    """The columns that matter for a type; a null stands out as no number that is ever right."""
    rows = answers.filter(pc.field("Type") == int(kind))
    columns = {
        name: pc.fill_null(rows[name].cast(pa.int64()), _NULL).to_numpy()
        for name in dict.fromkeys((*_IDENTITY[kind], *_CONTENT[kind], "Time"))
    }
    columns["Emit"] = pc.fill_null(rows["Emit"].cast(pa.float64()), np.nan).to_numpy()
    return columns


def _sorted(columns: dict[str, Array], kind: Answer) -> tuple[dict[str, Array], Array]:
    """The columns in the order of what identifies the answers, and that."""
    identity = _identity(columns, kind)
    order = np.argsort(identity, kind="stable")
    return {name: column[order] for name, column in columns.items()}, identity[order]


def _identity(columns: dict[str, Array], kind: Answer) -> Array:
    names = _IDENTITY[kind]
    if len(names) == 1:
        return columns[names[0]]
    first, second = (columns[name] for name in names)
    return np.where((first == _NULL) | (second == _NULL), _NULL, _combined(first, second))


def _combined(first: Array, second: Array) -> Array:
    return first.astype(np.int64) * (1 << 32) + second


def _take(column: Array, at: Array) -> Array:
    """Like column[at], where a column without rows gives zeros."""
    return column[at] if len(column) else np.zeros(len(at), column.dtype)


def _name(columns: dict[str, Array], kind: Answer, at: int) -> str:
    return f"type {kind}, {_values(columns, _IDENTITY[kind], at)}"


def _values(columns: dict[str, Array], names: Iterable[str], at: int) -> str:
    return ", ".join(
        f"{name} {'null' if columns[name][at] == _NULL else columns[name][at]}" for name in names
    )
