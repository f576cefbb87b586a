"""The benchmark of fragments: what its nodes do, how it judges, and what it shows."""

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pytest
from rich.console import Console

from anabranch.cluster import LocalAgents
from anabranch.errors import CheckpointError, QueryFailed, StoreError
from anabranch.fragments import models, recompute, simulation
from anabranch_bench.cli import bench_fragments
from anabranch_bench.faults import Act, Backup, Outcome, Scenario
from anabranch_bench.fragments import (
    against_models,
    coding,
    live,
    many,
    measure,
    picture,
    recovery,
    reliability,
    rings,
)
from anabranch_bench.fragments.nodes import MB, Nodes, check, jobs, state_of
from anabranch_bench.fragments.recovery import Times
from anabranch_bench.fragments.result import Bench, FragmentsResult, Panel
from anabranch_bench.harness import Bar

NODES = 9


@pytest.fixture
def bench() -> Bench:
    result = FragmentsResult("fragments", seed=3, quick=True, panels=measure.PANELS)
    return Bench(result, Console(file=io.StringIO(), width=140))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with LocalAgents(NODES + 1) as agents:
        yield Nodes(agents)


def by_name(bench: Bench) -> dict[str, Bar]:
    found = {bar.name: bar for bar in bench.result.bars}
    assert len(found) == len(bench.result.bars)
    return found


def test_parts_can_be_chosen_by_the_names_they_have() -> None:
    (only,) = (option for option in bench_fragments.params if option.name == "only")
    assert isinstance(only.type, click.Choice)
    assert tuple(only.type.choices) == measure.CHOICES
    assert set(measure.CHOICES) == measure.ALONE.keys() | measure.AT_NODES.keys()


@pytest.mark.chaos
def test_nodes_save_and_recover_states_and_ranges_of_them(nodes: Nodes) -> None:
    owner, state = nodes.hosts[0], state_of(3 * MB, 1)
    part = nodes.save(owner, "state", state, 4, 2)
    assert len(set(part.holders)) == 6
    assert owner not in part.holders
    assert nodes.shared not in part.holders
    (other, another) = nodes.others(part, owner)
    check(nodes.recover(other, part), state, "all")
    check(nodes.recover(another, part, 100_001, 2_000_000), state.slice(100_001, 1_899_999), "some")
    check(pa.py_buffer(recompute(nodes.retrieve(other, part, part.holders[2:]))), state, "parity")
    hasty = nodes.patient(0.5)
    with nodes.stopped(part.holders[:2]):
        check(hasty.recover(other, part), state, "without two")
    with nodes.stopped(part.holders[:3]), pytest.raises((CheckpointError, StoreError)):
        hasty.recover(other, part)
    check(nodes.recover(other, part), state, "once more")
    nodes.drop([part])
    with pytest.raises(CheckpointError):
        nodes.recover(other, part)


@pytest.mark.chaos
def test_the_shared_store_is_a_node_of_its_own(nodes: Nodes) -> None:
    state = state_of(MB, 2)
    before = nodes.usage(nodes.shared)
    nodes.put_shared(nodes.hosts[0], "state", state)
    check(nodes.get_shared(nodes.hosts[1], "state"), state, "shared")
    after = nodes.usage(nodes.shared)
    assert after.cpu >= before.cpu
    assert after.private > 1 << 20
    nodes.drop_shared(["state"])
    with pytest.raises(CheckpointError):
        nodes.get_shared(nodes.hosts[1], "state")


@pytest.mark.chaos
def test_what_a_node_saves_and_recovers_passes_its_own_link() -> None:
    with LocalAgents(5, "1 Gbit") as agents:
        if not agents.linked:
            pytest.skip("network namespaces cannot be made here")
        nodes = Nodes(agents)
        owner, other = nodes.hosts[:2]
        before = nodes.usage(owner), nodes.usage(other)
        part = nodes.save(owner, "state", state_of(MB, 1), 2, 1)
        nodes.recover(other, part)
        nodes.put_shared(other, "state", state_of(MB, 1))
        after = nodes.usage(owner), nodes.usage(other)
        assert after[0].sent - before[0].sent > 1.5 * MB
        # One of the two fragments that it read may have been its own.
        assert after[1].received - before[1].received > 0.5 * MB
        assert after[1].sent - before[1].sent > MB


@pytest.mark.chaos
def test_jobs_run_at_once_and_their_time_is_that_of_the_longest(nodes: Nodes) -> None:
    met = threading.Barrier(3, timeout=20)
    pause = threading.Event()

    def meet(number: int, host: str) -> None:
        assert host == nodes.hosts[number]
        met.wait()
        if number == 1:
            pause.wait(0.3)

    assert 0.3 <= nodes.at_once(jobs(meet, nodes.hosts[:3])) < 20


def test_wrong_bytes_are_no_result() -> None:
    with pytest.raises(QueryFailed, match="quarter: the bytes that were read are not those"):
        check(state_of(10, 1), state_of(10, 2), "a quarter")


@pytest.mark.chaos
@pytest.mark.parametrize("part", [recovery, against_models, many])
def test_every_part_at_nodes_finds_all_of_its_figures(
    nodes: Nodes, bench: Bench, monkeypatch: pytest.MonkeyPatch, part: Any
) -> None:
    """With small states, and few nodes."""
    for module in (recovery, against_models, many):
        monkeypatch.setattr(module, "MB", 10_000)
        monkeypatch.setattr(module, "DATA", 4)
        monkeypatch.setattr(module, "PARITY", 2)
    monkeypatch.setattr(nodes, "of", lambda count: nodes)
    part.run(bench, nodes)
    assert bench.result.curves.keys() >= part.PANELS.keys() - {many.BYTES}
    assert bench.result.bars == [], "without links nothing is judged"
    assert bench.result.measures


def test_times_are_judged_against_the_store_and_the_model(bench: Bench) -> None:
    rate = 12.5e6
    alone = models.saving(8 * MB, recovery.DATA, recovery.PARITY, up=rate)
    ours = Times({1: alone, 4: 1.3, 8: 1.4}, {1: 0.64, 4: 1.4, 8: 1.0})
    store = Times({1: 0.6, 4: 2.4, 8: 5.0}, {1: 0.7, 4: 2.8, 8: 5.0})
    recovery._judge(bench, 8, ours, 0.35, store, rate)
    found = by_name(bench)
    assert found["8 MB: 8 save and one recovers, time saved"].value == pytest.approx(1 - 2.04 / 5.7)
    assert found["8 MB: 8 save and one recovers, time saved"].holds
    assert not found["8 MB: four recover at once, time saved"].holds
    assert not found["8 MB: one over four nodes, time saved"].holds
    assert found["8 MB: one alone, save, off the model"].value == pytest.approx(0)
    assert found["8 MB: one alone, recover, off the model"].holds


@pytest.mark.chaos
def test_trials_agree_with_equation_3_unless_the_code_is_worse(
    nodes: Nodes, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reliability, "TRIED", ((4, 2),))
    monkeypatch.setattr(reliability, "TRIED_LOSSES", (0.3,))
    monkeypatch.setattr(reliability, "_SILENCE", 0.3)
    reliability._try(bench, nodes)
    (bar,) = bench.result.bars
    assert bar.holds
    monkeypatch.setattr(Nodes, "recover", lambda self, host, part: _raise())
    reliability._try(bench, nodes)
    assert not bench.result.bars[-1].holds


def _raise() -> pa.Buffer:
    raise CheckpointError("lost")


def test_coding_is_measured_in_all_figures(bench: Bench) -> None:
    coding.run(bench, size=1_000_000)
    assert bench.result.curves.keys() == coding.PANELS.keys()
    assert len(bench.result.bars) == 2


def test_rings_are_judged_at_their_full_size(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(plan: simulation.Plan) -> simulation.Report:
        report = simulation.simulate(replace(plan, nodes=60, applications=10, searches=20))
        return replace(report, nodes=plan.nodes)

    monkeypatch.setattr(rings, "simulate", small)
    bench.result.quick = False
    rings.run(bench)
    assert bench.result.curves.keys() == rings.PANELS.keys()
    found = by_name(bench)
    assert found["ring: a fragment takes longer, 500 to 5,000 nodes"].holds
    assert "ring: 5,000 nodes, fragments of any" in found
    assert "ring: 500 nodes, fragments of any" not in found


@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_throughput_is_compared_with_that_of_upstream(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    seen = []

    def carry_out(scenario: Scenario) -> Outcome:
        assert Scenario.from_json(scenario.to_json()) == scenario
        seen.append(scenario)
        each = slower if scenario.backup is Backup.FRAGMENTS else 1.0
        commits = [(each * number, number) for number in range(40)]
        return Outcome(40 * each, 40 * each, commits, events=[{"kind": "checkpoint", "seconds": 1}])

    monkeypatch.setattr(live, "carry_out", carry_out)
    live.run(bench)
    assert {scenario.backup for scenario in seen} == set(Backup)
    assert all(scenario.act is Act.NOTHING for scenario in seen)
    (bar,) = bench.result.bars
    assert bar.value == pytest.approx(1 - 1 / slower)
    assert bar.holds == (slower == 1.0)


def test_curves_become_tables_and_a_picture(tmp_path: Path) -> None:
    panels = {
        "one": Panel("One", "MB", "seconds"),
        "two": Panel("Two", "MB", "seconds", logarithmic=True),
        "none": Panel("None", "MB", "seconds"),
    }
    result = FragmentsResult("fragments", seed=1, quick=True, panels=panels)
    bench = Bench(result, Console(file=io.StringIO(), width=140))
    assert bench.timed("one", "ours", 8, [3.0, 1.0, 2.0], 100) == 2.0
    bench.point("one", "ours, model", 16, 4.5)
    bench.point("two", "ours", 8, 1.0)
    one, two = result.grids()
    assert one.heads == ("MB", "ours", "ours, model")
    assert list(one.rows) == [("8", "2", ""), ("16", "", "4.5")]
    assert two.title == "Two: seconds"
    result.write_json(tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())
    assert [table["title"] for table in read["tables"]] == ["One: seconds", "Two: seconds"]
    assert read["measures"][0]["median_seconds"] == 2.0
    measure.show(result, bench.console)
    assert "4.5" in bench.console.file.getvalue()  # type: ignore[attr-defined]
    picture.draw(result, tmp_path / "new" / "r.png")
    assert (tmp_path / "new" / "r.png").read_bytes().startswith(b"\x89PNG")
