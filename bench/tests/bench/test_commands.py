"""The benchmarks on the library's command line."""

import click
import pytest
from click.testing import CliRunner

from anabranch.cli import main
from anabranch_bench.cli import bench_state
from anabranch_bench.state import BENCHMARKS


@pytest.mark.parametrize("command", [["bench"], ["bench", "state"], ["report"]])
def test_every_command_is_found_and_has_a_help_text(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--help"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()[2].strip()) > 20


def test_benchmarks_can_be_chosen_by_the_names_they_have() -> None:
    (only,) = (option for option in bench_state.params if option.name == "only")
    assert isinstance(only.type, click.Choice)
    assert list(only.type.choices) == list(BENCHMARKS)
