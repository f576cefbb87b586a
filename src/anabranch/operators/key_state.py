"""The state of one key as a plain object, for functions that work key by key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from anabranch.errors import PlanError
from anabranch.state.schema import StateSchema

Time = int | datetime | np.datetime64
"""A moment: microseconds since the epoch, or a datetime (without a time zone: UTC)."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class KeyState:
    """The state columns of one key as attributes: ``state.times += 1``.

    When the key is new or was deleted, numbers start at their default, strings and bytes at None.
    Timestamp columns are in microseconds since 1970. The values of the attributes are stored when
    the function returns.
    """

    __slots__ = ("_deleted", "_timer", "_timer_set", "_values", "batch_time", "watermark")

    batch_time: int
    """When the batch was planned, in microseconds since the epoch: use it instead of now()."""
    watermark: int | None
    """Microseconds since the epoch; no earlier row is expected. None until there is one."""

    def __init__(self, values: dict[str, Any], watermark: int | None, batch_time: int) -> None:
        put = object.__setattr__
        put(self, "_values", values)
        put(self, "_deleted", False)
        put(self, "_timer", None)
        put(self, "_timer_set", False)
        put(self, "watermark", watermark)
        put(self, "batch_time", batch_time)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(_unknown(name, self._values)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise AttributeError(_unknown(name, self._values))
        self._values[name] = value

    def __repr__(self) -> str:
        return "KeyState(" + ", ".join(f"{k}={v!r}" for k, v in self._values.items()) + ")"

    def delete(self) -> None:
        """Remove the key and its timer when the function returns."""
        object.__setattr__(self, "_deleted", True)

    def set_timer(self, at: Time) -> None:
        """Set the timer that calls ``on_timer`` at this time. It replaces an earlier timer."""
        object.__setattr__(self, "_timer", _microseconds(at))
        object.__setattr__(self, "_timer_set", True)

    def clear_timer(self) -> None:
        """Remove the timer."""
        object.__setattr__(self, "_timer", None)
        object.__setattr__(self, "_timer_set", True)


def check_names(columns: StateSchema) -> None:
    """Raise :class:`PlanError` if a column would hide a method of :class:`KeyState`."""
    for column in columns:
        if hasattr(KeyState, column.name):
            raise PlanError(
                f"state column {column.name!r}: the per-key state has a method or attribute of "
                "this name; give the column another name"
            )


def _unknown(name: str, values: dict[str, Any]) -> str:
    return f"no state column {name!r}; there are {list(values)}"


def _microseconds(at: Time) -> int:
    if isinstance(at, datetime):
        moment = at if at.tzinfo else at.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1)
    if isinstance(at, np.datetime64):
        return int(at.astype("datetime64[us]").view(np.int64))
    return int(at)
