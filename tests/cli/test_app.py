from importlib.metadata import version

import click
from click.testing import CliRunner

from anabranch.cli import main
from anabranch.errors import StateFull


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"anabranch {version('anabranch')}\n"


def test_every_command_has_a_help_text() -> None:
    for path in ([], ["demo"], ["state"], ["state", "list"], ["bench"], ["bench", "state"]):
        result = CliRunner().invoke(main, [*path, "--help"])
        assert result.exit_code == 0
        assert len(result.output.splitlines()[2].strip()) > 20


def test_an_error_of_ours_is_one_line_and_status_1() -> None:
    @main.command("fail-for-a-test")
    def fail() -> None:
        raise StateFull("no room in /dev/shm:\n  free some")

    try:
        result = CliRunner().invoke(main, ["fail-for-a-test"])
    finally:
        del main.commands["fail-for-a-test"]
    assert result.exit_code == 1
    assert result.output == "error: no room in /dev/shm: free some\n"


def test_a_bug_is_not_dressed_up_as_an_error_of_ours() -> None:
    @main.command("bug-for-a-test")
    def bug() -> None:
        raise ZeroDivisionError

    try:
        result = CliRunner().invoke(main, ["bug-for-a-test"])
    finally:
        del main.commands["bug-for-a-test"]
    assert isinstance(result.exception, ZeroDivisionError)


def test_benchmarks_can_be_chosen_by_the_names_they_have() -> None:
    from anabranch.bench.state import BENCHMARKS
    from anabranch.cli.bench import bench_state

    (only,) = (option for option in bench_state.params if option.name == "only")
    assert isinstance(only.type, click.Choice)
    assert list(only.type.choices) == list(BENCHMARKS)
