"""What a Python worker has loaded: all that batches need, and nothing that only the driver runs."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import anabranch as ab
from anabranch import operators
from anabranch.testing.feeds import Feed

DRIVER = {"cli", "cluster", "queries", "coordinator", "protocols", "plan", "spark"}


class Loaded(ab.Operator):
    """Sends out the modules of ours that its process has loaded."""

    state = ab.schema(n=ab.int64)

    def process(self, rows: ab.Rows, state: ab.State, context: ab.Context) -> ab.Rows:
        modules = [name for name in sys.modules if name.startswith("anabranch.")]
        return rows.append_column("modules", pa.array([",".join(modules)] * len(rows), pa.string()))


def packages(modules: list[str]) -> set[str]:
    return {name.split(".")[1] for name in modules}


@pytest.mark.parametrize("module", ["anabranch", "anabranch.worker.task", "anabranch.nodes.agent"])
def test_a_module_of_an_executor_does_not_import_the_drivers(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=120, check=True
    )
    modules = [name for name in json.loads(found.stdout) if name.startswith("anabranch.")]
    assert packages(modules) & DRIVER == set()
    assert module == "anabranch" or module in modules


def test_a_worker_of_a_query_has_the_operators_and_nothing_of_the_driver(tmp_path: Path) -> None:
    # In a session of its own: workers that have run other programs have loaded more.
    program = [sys.executable, __file__, str(tmp_path)]
    found = subprocess.run(program, capture_output=True, text=True, timeout=240, check=True)
    modules = found.stdout.splitlines()[-1].split(",")
    assert packages(modules) & DRIVER == set()
    every = Path(operators.__file__).parent.glob("[!_]*.py")
    assert {f"anabranch.operators.{path.stem}" for path in every} <= set(modules)


def print_modules_of_a_worker(folder: Path) -> None:
    spark = ab.session("local[2]", **{"spark.ui.enabled": False, "spark.log.level": "ERROR"})
    feed = Feed(folder / "input", pa.schema([("k", pa.int64())]))
    feed.add([{"k": 1}])
    loaded = ab.stream(feed.frame(spark)).key_by("k").process(Loaded(), name="loaded")
    query = loaded.to_memory("loaded").start(folder / "checkpoints")
    query.process_all_available()
    (row,) = query.memory_table("loaded").to_pylist()
    query.stop()
    spark.stop()
    print(row["modules"])


if __name__ == "__main__":
    print_modules_of_a_worker(Path(sys.argv[1]))
