"""A node that is busy for long while another one is idle."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

PROGRAM = """
import sys
import time
from pathlib import Path
import pyarrow as pa
import anabranch as ab
from anabranch.cluster import LocalCluster
from anabranch.testing.feeds import Feed

class Slow(ab.Operator):
    state = ab.schema(n=ab.int64)

    def output(self, schema, keys):
        return pa.schema([("k", pa.int64()), ("n", pa.int64())])

    def process(self, rows, state, context):
        if context.version == 1 and context.instance == 0:
            time.sleep(42)
        at = state.rows(rows)
        state.add("n", at, 1)
        return ab.Rows(pa.record_batch({"k": rows.arrow("k"), "n": pa.array(state["n"][at])}))

work = Path(sys.argv[1])
feed = Feed(work / "input", pa.schema([("k", pa.int64())]))
feed.add(*[[{"k": k} for k in range(40)] for _ in range(3)])
conf = {"spark.ui.enabled": False, "spark.log.level": "ERROR"}
with LocalCluster(nodes=2, cores=1, memory="600m") as cluster:
    spark = cluster.session(**conf)
    stream = ab.stream(feed.frame(spark)).key_by("k").process(Slow(), name="slow", instances=2)
    query = stream.to_memory("out").start(work / "ck", placement=ab.Even(pool=1))
    query.process_all_available()
    print("nodes", sorted(len(has) for has in query.nodes.values()))
    print("attempts", [p.attempts for p in query.recent_progress])
    print("longest", max(p.seconds for p in query.recent_progress) > 30)
    print("counts", {r["n"] for r in query.state_table("slow").to_pylist()})
    query.stop()
"""


def test_a_task_waits_for_its_node(tmp_path: Path) -> None:
    """Two instances on one core, one of them busy for longer than Spark would wait by itself."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "nodes [0, 2]" in done.stdout, "one node was to have both instances, and one none"
    assert "attempts [1, 1, 1]" in done.stdout
    assert "longest True" in done.stdout
    assert "counts {3}" in done.stdout
