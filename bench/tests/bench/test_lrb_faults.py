"""Linear Road on a cluster that is disturbed while it runs."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from anabranch_bench.cli import bench
from anabranch_linearroad import Traffic, make_history, read_input, write_history, write_input


@pytest.mark.cluster
def test_answers_are_right_whatever_is_killed_and_scaled(tmp_path: Path) -> None:
    source, history, found = tmp_path / "input", tmp_path / "history.parquet", tmp_path / "found"
    write_input(source, Traffic(3, seconds=180).minutes())
    write_history(history, make_history(read_input(source), 3))
    options = ["--nodes", "3", "--faults", "--check", "--pace", "2", "--to", "3"]
    files = ["--input", str(source), "--history", str(history), "--json", str(found)]
    result = CliRunner().invoke(bench, ["lrb", *options, *files], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    said = json.loads(found.read_text())
    assert [run["complete"] for run in said["runs"]] == [True]
    bars = {bar["name"]: bar["value"] for bar in said["bars"]}
    assert bars["node killed and operators scaled"] == 4
    assert bars["answers missing, extra or wrong"] == 0, said["runs"][0]["verdict"]
