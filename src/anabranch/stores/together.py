"""Several changes of a store at the same time, and what has happened if some of them fail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from anabranch.errors import DidNotHappen, MayHaveHappened, StoreError

_MOST = 32
"""So many changes are under way at once."""


def at_once(names: Collection[str], change: Callable[[str], None]) -> list[StoreError]:
    """Make a change for each of these names, at the same time. The errors of the store."""

    def failure(name: str) -> StoreError | None:
        try:
            change(name)
        except StoreError as error:
            return error
        return None

    with ThreadPoolExecutor(max(1, min(_MOST, len(names))), "anabranch-store") as pool:
        return [error for error in pool.map(failure, names) if error is not None]


def check_all_stored(failed: Sequence[StoreError], of: int) -> None:
    """Raise the error of a change of several parts, some of which may have been stored."""
    if not failed:
        return
    # One of which it is not known what happened says more than those that changed nothing.
    error = next((each for each in failed if not isinstance(each, DidNotHappen)), failed[0])
    if isinstance(error, DidNotHappen) and len(failed) < of:
        raise MayHaveHappened(
            f"others have stored what was for them: {error}", host=error.host
        ) from error
    raise error
