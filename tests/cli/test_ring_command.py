import json
from pathlib import Path

from click.testing import CliRunner

from anabranch.cli import main

SMALL = ["--applications", "20", "--data", "3", "--parity", "2", "--searches", "50"]


def test_the_simulation_is_shown_as_a_table() -> None:
    result = CliRunner().invoke(
        main, ["ring", "simulate", "--nodes", "50", "--nodes", "80", *SMALL]
    )
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines() if line]
    assert lines[0] == ["50", "nodes", "80", "nodes"]
    assert ["nodes", "killed", "2", "4"] in lines
    assert ["at", "most", "fragments", "50", "nodes", "80", "nodes"] in lines
    assert lines[-1][-4:] == ["100.0", "%", "100.0", "%"]


def test_the_simulation_is_printed_as_json() -> None:
    arguments = ["ring", "simulate", "--nodes", "50", *SMALL, "--kill", "0", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)
    assert report["nodes"] == 50
    assert report["repair"] is None
    assert report["spread"]["mean"] == 20 * 5 / 50
    assert CliRunner().invoke(main, arguments).stdout == result.stdout


def test_without_a_kill_there_are_no_empty_rows() -> None:
    result = CliRunner().invoke(main, ["ring", "simulate", "--nodes", "50", *SMALL, "--kill", "0"])
    assert "mean hops" in result.output
    assert "killed" not in result.output


def test_what_cannot_be_is_refused() -> None:
    result = CliRunner().invoke(main, ["ring", "simulate", "--nodes", "5"])
    assert result.exit_code == 1
    assert result.output.startswith("error: 30 fragments need as many other nodes; there are 5")


def test_the_model_shows_what_would_be_chosen_and_why() -> None:
    arguments = ["--size", "128 MB", "--nodes", "20", "--prefer", "storage", "--store", "5 MB"]
    result = CliRunner().invoke(main, ["ring", "model", *arguments])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines() if line]
    assert lines[0] == ["m", "+", "k", "retrieval", "recovery", "saving", "overhead", "lost"]
    (chosen,) = [line for line in lines if line[-1] == "chosen"]
    assert f"{' '.join(chosen[:3])} stores least within the limits" in result.output
    assert "Files is not better" in result.output
    # Equation 2 over equal links, whatever m and k are.
    rows = [line for line in lines if line[1:2] == ["+"] and line[4:5] == ["s"]]
    assert {row[3] for row in rows} == {"10.2"}


def test_the_model_is_printed_as_json_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "model.png"
    arguments = ["-m", "4", "-m", "8", "-k", "2", "--recompute", "2 GB", "--plot", str(picture)]
    result = CliRunner().invoke(main, ["ring", "model", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    shapes = {(one["data"], one["parity"]) for one in found["options"]}
    assert shapes == {(4, 2), (8, 2), (found["choice"]["data"], found["choice"]["parity"])}
    expected = found["choice"]["expected"]
    assert found["fastest_store"] == 128e6 / expected["recovery"]
    assert picture.stat().st_size > 10_000


def test_an_m_and_k_for_which_there_are_no_nodes_is_refused() -> None:
    result = CliRunner().invoke(main, ["ring", "model", "--nodes", "5", "-m", "8"])
    assert result.exit_code == 1
    assert result.output.startswith("error: none of the m and k fits on 5 nodes")
