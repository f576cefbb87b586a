"""Why a batch failed, told from the text that Spark gives."""

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException

from anabranch import errors
from anabranch.coordinator.failures import lost_worker, reshaped, session_gone, translated
from anabranch.errors import (
    AnabranchError,
    DidNotHappen,
    PlanError,
    QueryFailed,
    StateFull,
    StateMissing,
)

_EVERY = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AnabranchError)
]
_WHERE = 'Traceback (most recent call last):\n  File "worker.py", line 11, in f\n    raise it\n'


def from_a_task(text: str, after: str = "") -> PySparkException:
    return PySparkException(
        f"An exception was thrown from the Python worker:\n{_WHERE}{text}{after}"
    )


@pytest.mark.parametrize("kind", _EVERY, ids=lambda kind: str(kind.__name__))
@pytest.mark.parametrize(
    "after",
    [
        "",
        "\n SQLSTATE: 39000 SQLSTATE: XXKST\n=== Streaming Query ===",
        "\n\n\tat org.apache.spark.api.python.PythonRunner(PythonRunner.scala:1)",
        "\n\nDriver stacktrace:\n\tat org.apache",
    ],
)
def test_errors_of_a_task_keep_their_class_and_message(
    kind: type[AnabranchError], after: str
) -> None:
    found = translated(
        from_a_task(f"anabranch.errors.{kind.__name__}: one\n  two: x\nthree", after)
    )
    assert type(found) is kind
    assert str(found) == "one\n  two: x\nthree"


def test_the_last_error_counts_and_not_its_causes() -> None:
    chained = (
        "anabranch.errors.StateMissing: gone\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        f"{_WHERE}anabranch.errors.DidNotHappen: no room"
    )
    found = translated(from_a_task(chained))
    assert type(found) is DidNotHappen
    assert str(found) == "no room"


def test_errors_of_users_keep_their_names() -> None:
    assert str(translated(KeyError("speed"))) == "KeyError: 'speed'"
    assert "ValueError: no" in str(translated(from_a_task("ValueError: no")))
    assert type(translated(from_a_task("anabranch.errors.Unknown: x"))) is QueryFailed


def test_what_is_worth_another_try() -> None:
    assert lost_worker(from_a_task("anabranch.errors.Misplaced: elsewhere"))
    assert lost_worker(from_a_task("anabranch.errors.CutOff: half of it"))
    assert lost_worker(PySparkException("Python worker exited unexpectedly (crashed)"))
    assert not lost_worker(from_a_task("anabranch.errors.StateFull: no room"))
    assert not lost_worker(from_a_task("ValueError: Connection reset"))
    assert not lost_worker(PlanError("wrong"))
    assert reshaped(from_a_task("anabranch.errors.Reshaped: merged"))
    assert not reshaped(from_a_task("anabranch.errors.Misplaced: elsewhere"))


def test_a_function_may_raise_its_own_error_for_that_of_a_job() -> None:
    def raised(text: str) -> Exception:
        try:
            try:
                raise from_a_task(text)
            except PySparkException as error:
                raise RuntimeError("the table was not written") from error
        except RuntimeError as error:
            return error

    assert lost_worker(raised("anabranch.errors.Fenced: a newer one"))
    assert reshaped(raised("anabranch.errors.Reshaped: merged"))
    assert type(translated(raised("anabranch.errors.StateMissing: gone"))) is StateMissing
    assert str(translated(raised("anabranch.errors.StateFull: no room"))) == (
        "RuntimeError: the table was not written"
    )


def test_a_session_that_is_gone() -> None:
    assert session_gone(Py4JNetworkError("Answer from Java side is empty"))
    assert session_gone(ConnectionRefusedError(111, "Connection refused"))
    assert not session_gone(StateFull("no room"))
    assert session_gone(Py4JError("org does not exist in the JVM"))
    assert "Spark's session is gone" in str(translated(ConnectionRefusedError(111, "x")))
