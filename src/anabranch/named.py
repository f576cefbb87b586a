"""Functions by name, which another process can be told in JSON."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from anabranch.errors import PlanError


def named(what: str, path: str) -> Callable[..., Any]:
    """The function at ``module:attribute``. ``what`` names its purpose in the error message.

    >>> named("opener", "posixpath:join")("a", "b")
    'a/b'
    """
    module, _, attribute = path.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"{what}={path!r}: there is no such function ({error}); give one as module:attribute "
            "that every process of the query can import"
        ) from error
    return found
