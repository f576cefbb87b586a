"""What all tests share: one Spark session, and the place of state."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from pyspark.sql import SparkSession

# The machine that runs the tests may be busy: a slow example is no failure.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("default")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    import anabranch as ab

    session = ab.session(
        "local[2]",
        **{
            "spark.ui.enabled": False,
            "spark.log.level": "ERROR",
            "spark.sql.shuffle.partitions": 2,
            # Tests are over before an optimising compiler is worth its while.
            "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            # As on a cluster: pinned partitions go to their host, not to where rows come from.
            "spark.shuffle.reduceLocality.enabled": False,
            "spark.sql.session.timeZone": "America/New_York",
        },
    )
    yield session
    session.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
