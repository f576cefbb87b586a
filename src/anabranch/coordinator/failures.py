"""Telling apart why a batch failed: what can be tried again, what needs state, what is a bug."""

from __future__ import annotations

import re

from anabranch.errors import AnabranchError, QueryFailed, StateError, StateMissing

_OURS = re.compile(r"anabranch\.errors\.(\w+): (.*)")
_LOST_WORKER = (
    "Python worker exited unexpectedly",
    "Python worker failed to connect back",
    "Python worker keyed by",
    "java.io.EOFException",
    "Connection reset",
    "Broken pipe",
    "ExecutorLostFailure",
    "FetchFailed",
    "part of cancelled job tags",
    "has failed the maximum allowable number of times",
)
_TRY_AGAIN = {"StateLocked", "Fenced", "Misplaced"}


def lost_worker(error: BaseException) -> bool:
    """Whether the batch failed for want of a process, so that it is worth another try."""
    text = str(error)
    ours = _OURS.search(text)
    if ours is not None:
        return ours[1] in _TRY_AGAIN
    return any(sign in text for sign in _LOST_WORKER) and "Traceback" not in text


def translated(error: BaseException) -> AnabranchError:
    """The error of a job in the user's words: our own errors as they were raised in the task."""
    if isinstance(error, AnabranchError):
        return error
    text = str(error)
    ours = _OURS.search(text)
    if ours is not None and ours[1] == StateMissing.__name__:
        return StateMissing(ours[2])
    if ours is not None:
        return StateError(f"{ours[1]}: {ours[2]}")
    return QueryFailed(_last_of_traceback(text))


def _last_of_traceback(text: str) -> str:
    """A Python error inside a Spark error is buried in stack traces; the user's part is the end."""
    start = text.find("Traceback (most recent call last)")
    if start < 0:
        return text.splitlines()[0] if text else "the batch failed without a message"
    stop = text.find("\n\tat org.apache", start)
    return text[start : stop if stop > 0 else None].strip()
