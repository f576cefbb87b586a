import json
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from anabranch_bench.plan import (
    Checkpoints,
    Engine,
    Outcome,
    Phase,
    Run,
    Side,
    Totals,
    Workload,
)

phases = st.builds(
    Phase,
    name=st.text(),
    batches=st.integers(1, 9),
    rows=st.integers(1, 99),
    keys=st.integers(1, 99),
    fill_from=st.none() | st.integers(0, 50),
    measured=st.booleans(),
)
runs = st.builds(
    Run,
    name=st.text(),
    workload=st.sampled_from(Workload),
    input=st.text(),
    phases=st.lists(phases, min_size=1, max_size=5).map(tuple),
    checkpoints=st.sampled_from(Checkpoints),
    verify=st.booleans(),
)


@given(st.sampled_from(Engine), st.lists(runs, max_size=3).map(tuple))
def test_a_side_comes_back_from_json_as_it_was(engine: Engine, given_runs: tuple[Run, ...]) -> None:
    side = Side(engine, given_runs)
    assert Side.from_json(side.to_json()) == side


@given(runs)
def test_the_slices_of_a_run_cover_its_batches_in_order(run: Run) -> None:
    covered = [b for _, at in run.slices() for b in range(run.batches)[at]]
    assert covered == list(range(run.batches))
    assert all(at.stop - at.start == phase.batches for phase, at in run.slices())


def test_an_outcome_comes_back_from_json_as_it_was() -> None:
    for outcome in (Outcome((0.5, 1.0)), Outcome((2.0,), Totals(1, 2, 3))):
        assert Outcome.from_json(json.loads(json.dumps(asdict(outcome)))) == outcome
