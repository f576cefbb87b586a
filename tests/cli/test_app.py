from importlib.metadata import EntryPoint, EntryPoints, version

import pytest
from click.testing import CliRunner

from anabranch.cli import app, main
from anabranch.errors import StateFull


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"anabranch {version('anabranch')}\n"


def test_every_command_has_a_help_text() -> None:
    for path in ([], ["demo"], ["state"], ["state", "list"]):
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


def install(monkeypatch: pytest.MonkeyPatch, *added: EntryPoint) -> None:
    """Have these commands of other packages, and no others."""
    points = EntryPoints(added)
    monkeypatch.setattr(app, "entry_points", points.select)


def test_commands_of_other_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EntryPoint("sweep", "anabranch.cli.clean:clean", "anabranch.commands"))
    assert "  sweep " in CliRunner().invoke(main, ["--help"]).output
    assert "--dry-run" in CliRunner().invoke(main, ["sweep", "--help"]).output


@pytest.mark.parametrize("command", [["bench", "state"], ["bench", "--help"], ["report"]])
def test_without_the_benchmarks_it_is_said_where_they_are(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    install(monkeypatch)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert result.output == (
        "error: the benchmarks are in another package: pip install anabranch-bench\n"
    )
    listed = CliRunner().invoke(main, ["--help"])
    assert listed.exit_code == 0
    assert "demo" in listed.output
    assert "bench" not in listed.output
