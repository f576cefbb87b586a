"""The page of all results."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from anabranch.cli.app import main
from anabranch_bench.harness import Bar, Grid, Measure, Result, Timing


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name, value in (("state", 6.0), ("scaling", 0.3)):
        result = Result(name, seed=3, quick=True)
        result.measures.append(Measure("keyed", "a <few> keys", "ours", Timing(2_000, (0.5, 0.5))))
        result.bars.append(Bar(f"{name}: speed", value, 5, at_least=True))
        result.write_json(tmp_path / f"{name}.json")
    (tmp_path / "state.png").write_bytes(b"\x89PNG")
    return tmp_path


def test_tables_of_a_benchmark_are_shown(results: Path) -> None:
    path = results / "scaling.json"
    grid = Grid("A <table>", ("what", "s"), [("all of it", "0.25")]).to_json()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tables": [grid]}))
    path.rename(results / "evening.json")
    CliRunner().invoke(main, ["report", "--results", str(results)], catch_exceptions=False)
    page = (results / "report.html").read_text()
    assert "evening (bench scaling)" in page
    assert "A &lt;table&gt;" in page
    assert "<td>all of it</td><td class='number'>0.25</td>" in page


def test_all_results_are_on_one_page(results: Path) -> None:
    outcome = CliRunner().invoke(main, ["report", "--results", str(results)])
    assert outcome.exit_code == 0, outcome.output
    page = (results / "report.html").read_text()
    for part in ("state: speed", "scaling: speed", "does not hold", "a &lt;few&gt; keys", "4,000"):
        assert part in page
    assert page.count("data:image/png;base64,") == 1
    assert page.count("does not hold") == 1


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "not JSON"), (json.dumps({"bars": []}), "no benchmark, measures")]
)
def test_what_is_no_result_is_named(results: Path, text: str, reason: str) -> None:
    (results / "other.json").write_text(text)
    outcome = CliRunner().invoke(main, ["report", "--results", str(results)])
    assert outcome.exit_code == 1
    assert "other.json" in outcome.output
    assert reason in outcome.output


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(main, ["report", "--results", str(tmp_path)])
    assert outcome.exit_code == 1
    assert "no results" in outcome.output
