"""Telling apart why a batch failed: what can be tried again, what needs state, what is a bug."""

from __future__ import annotations

import re
from collections.abc import Iterator

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from anabranch import errors
from anabranch.errors import (
    AnabranchError,
    CutOff,
    Fenced,
    Misplaced,
    QueryFailed,
    Reshaped,
    SinkFailed,
    StateLocked,
    StateMissing,
)

_OURS = re.compile(
    r"anabranch\.errors\.(\w+): (.*?)"
    r"(?=\n+\tat |\n+Driver stacktrace:|\n+Caused by: |\n+During handling of the above"
    r"|\n+The above exception was|\s+SQLSTATE: |\s*\Z)",
    re.DOTALL,
)
_LOST_WORKER = (
    "Python worker exited unexpectedly",
    "Python worker failed to connect back",
    "Python worker keyed by",
    "java.io.EOFException",
    "Connection reset",
    "Broken pipe",
    "ExecutorLostFailure",
    "FetchFailed",
    "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND",
    "part of cancelled job tags",
    "has failed the maximum allowable number of times",
)
_PLANNED = (
    "CONCURRENT_STREAM_LOG_UPDATE",
    "Concurrent update to the log",
    "Multiple streaming queries are concurrently using",
)
_STOPPED = ("SparkContext was shut down", "stopped SparkContext", "SparkContext is stopped")
_TRY_AGAIN = {StateLocked, Fenced, Misplaced, Reshaped, CutOff, SinkFailed}


def lost_worker(error: BaseException) -> bool:
    """Whether the batch failed for want of a process, so that it is worth another try.

    A user's function may raise an error of its own for that of a job, so causes count too.
    """
    return any(_worth_another_try(each) for each in _with_causes(error))


def reshaped(error: BaseException) -> bool:
    """Whether a task could not know which instance it was to run."""
    return any(isinstance(_ours(each), Reshaped) for each in _with_causes(error))


def another_planned(error: BaseException) -> bool:
    """Whether Spark's query ended because what it was to write into its logs was there already."""
    return any(sign in str(error) for sign in _PLANNED)


def session_gone(error: BaseException) -> bool:
    """Whether nothing can be asked of Spark any more: its JVM is gone, or its session stopped."""
    if not isinstance(error, Py4JJavaError):
        # Where the JVM has answered with an error of its own, that is in a Py4JJavaError.
        return isinstance(error, Py4JError | ConnectionError)
    return any(sign in str(error) for sign in _STOPPED)


def translated(error: BaseException) -> AnabranchError:
    """The error of a job in the user's words: our own errors as they were raised in the task."""
    ours = _ours(error)
    if ours is not None:
        return ours
    for cause in _with_causes(error):
        # A user's function may have raised an error of its own for it; state is lost all the same.
        if isinstance(lost := _ours(cause), StateMissing):
            return lost
    if session_gone(error):
        return QueryFailed(
            f"Spark's session is gone ({type(error).__name__}: {_last_of_traceback(str(error))}); "
            "start the query again in a new one"
        )
    text = str(error)
    if not isinstance(error, Py4JError | PySparkException):
        return QueryFailed(f"{type(error).__name__}: {text}")
    return QueryFailed(_last_of_traceback(text))


def _worth_another_try(error: BaseException) -> bool:
    ours = _ours(error)
    if ours is not None:
        return type(ours) in _TRY_AGAIN
    text = str(error)
    return any(sign in text for sign in _LOST_WORKER) and "Traceback" not in text


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised for."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _ours(error: BaseException) -> AnabranchError | None:
    """An error of ours, or the one that a task ended with. The last counts, not its causes."""
    if isinstance(error, AnabranchError):
        return error
    for name, message in reversed(_OURS.findall(str(error))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, AnabranchError):
            return kind(message)
    return None


def _last_of_traceback(text: str) -> str:
    """A Python error inside a Spark error is buried in stack traces; the user's part is the end."""
    start = text.find("Traceback (most recent call last)")
    if start < 0:
        return text.splitlines()[0] if text else "the batch failed without a message"
    stop = text.find("\n\tat org.apache", start)
    return text[start : stop if stop > 0 else None].strip()
