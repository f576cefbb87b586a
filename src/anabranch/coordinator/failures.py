"""Classifying why a batch failed: worth another attempt, missing state, or an error of the user."""

from __future__ import annotations

import re
from collections.abc import Iterator

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from anabranch import errors
from anabranch.errors import (
    AnabranchError,
    CutOff,
    DidNotHappen,
    Fenced,
    MayHaveHappened,
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
_OUTAGE = (
    "java.io.IOException",
    "java.net.",
    "java.nio.channels.",
    "java.util.concurrent.TimeoutException",
    "SdkClientException",
    "SdkException",
    "RetriableException",
    "org.apache.kafka.common.errors.TimeoutException",
)
_STOPPED = ("SparkContext was shut down", "stopped SparkContext", "SparkContext is stopped")
_TRY_AGAIN = {
    StateLocked,
    Fenced,
    Misplaced,
    Reshaped,
    CutOff,
    SinkFailed,
    DidNotHappen,
    MayHaveHappened,
}


def lost_worker(error: BaseException) -> bool:
    """Whether the batch failed because a process was lost, so that another attempt may succeed.

    A user's function may wrap the error of a Spark job in its own, so causes count too.
    """
    return any(_worth_another_try(each) for each in _with_causes(error))


def reshaped(error: BaseException) -> bool:
    """Whether the batch failed because the partitions of an operator were changed."""
    return any(isinstance(_library_error(each), Reshaped) for each in _with_causes(error))


def another_planned(error: BaseException) -> bool:
    """Whether Spark's query ended because another driver had written the same entry of its log."""
    return any(sign in str(error) for sign in _PLANNED)


def outage(error: BaseException) -> bool:
    """Whether Spark's query ended because a source, or the store of its logs, did not answer."""
    if session_gone(error) or _library_error(error) is not None:
        return False
    # Only the stack trace of the error of Spark's query has the names of its causes.
    text = f"{error} {getattr(error, '_stackTrace', '')}"
    return any(sign in text for sign in _OUTAGE) and "Traceback" not in text


def session_gone(error: BaseException) -> bool:
    """Whether Spark has ended: its JVM is gone, or its session was stopped."""
    if not isinstance(error, Py4JJavaError):
        # Where the JVM has answered with an error of its own, that is in a Py4JJavaError.
        return isinstance(error, Py4JError | ConnectionError)
    return any(sign in str(error) for sign in _STOPPED)


def translated(error: BaseException) -> AnabranchError:
    """The error of a Spark job as users see it: an error of ours as the task raised it."""
    ours = _library_error(error)
    if ours is not None:
        return ours
    for cause in _with_causes(error):
        # A user's function may have raised an error of its own for it; state is lost all the same.
        if isinstance(lost := _library_error(cause), StateMissing):
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
    ours = _library_error(error)
    if ours is not None:
        return type(ours) in _TRY_AGAIN
    text = str(error)
    return any(sign in text for sign in _LOST_WORKER) and "Traceback" not in text


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its chain of causes."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _library_error(error: BaseException) -> AnabranchError | None:
    """An error of the library, or the one that a task ended with. Its causes do not count."""
    if isinstance(error, AnabranchError):
        return error
    for name, message in reversed(_OURS.findall(str(error))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, AnabranchError):
            return kind(message)
    return None


def _last_of_traceback(text: str) -> str:
    """The Python error inside a Spark error: the end of the traceback."""
    start = text.find("Traceback (most recent call last)")
    if start < 0:
        return text.splitlines()[0] if text else "the batch failed without a message"
    stop = text.find("\n\tat org.apache", start)
    return text[start : stop if stop > 0 else None].strip()
