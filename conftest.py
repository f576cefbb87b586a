"""What the tests of the library and of the benchmarks share: one Spark session."""

from collections.abc import Iterator

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
    """A session on this machine, for all tests of a process."""
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
