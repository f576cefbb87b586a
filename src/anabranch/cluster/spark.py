"""The command lines and environments of Spark's own master and workers."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

from anabranch.cluster.processes import MARK
from anabranch.errors import ClusterFailed, PlanError
from anabranch.nodes.folders import BACKUPS

LEAST_MEMORY = 450
"""What Spark wants an executor to have, in MiB."""

# Settings of the driver's Spark, or of a cluster elsewhere, would change what is started here.
_FOREIGN = ("SPARK_", "PYSPARK_", "_PYSPARK_")
_MEMORY = re.compile(r"(\d+)([mg])", re.IGNORECASE)
# These processes only keep lists: a small heap, and no time spent on making them fast.
_FRUGAL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
LOG_BYTES = 4 << 20
"""The most that an executor's log has; what was before is in one more file of this size."""
_LOGS = " ".join(
    f"-Dspark.executor.logs.rolling.{name}={value}"
    for name, value in {"strategy": "size", "maxSize": LOG_BYTES, "maxRetainedFiles": 1}.items()
)
_LOG_SETTINGS = """\
rootLogger.level = warn
rootLogger.appenderRef.stdout.ref = console
logger.deploy.name = org.apache.spark.deploy
logger.deploy.level = info
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
"""
_DAEMON = {
    "SPARK_LAUNCHER_OPTS": _FRUGAL,
    "SPARK_DAEMON_MEMORY": "256m",
    "SPARK_DAEMON_JAVA_OPTS": f"{_FRUGAL} -Dspark.master.rest.enabled=false",
    # Workers write down what executors say, so these are settings of theirs.
    "SPARK_WORKER_OPTS": _LOGS,
}


def home() -> Path:
    """The folder of the Spark that sessions of this program use."""
    named = os.environ.get("SPARK_HOME")
    spec = importlib.util.find_spec("pyspark")
    folder = named or (spec and spec.origin and str(Path(spec.origin).parent))
    if not folder or not (Path(folder) / "bin" / "spark-class").exists():
        raise ClusterFailed(
            f"there is no Spark in {folder!r} (no bin/spark-class); "
            "install pyspark, or set SPARK_HOME to a complete Spark"
        )
    return Path(folder)


def check_memory(memory: str) -> str:
    """The memory of a node, if Spark can start an executor with it."""
    size = _MEMORY.fullmatch(memory)
    mebibytes = int(size[1]) * (1024 if size[2].lower() == "g" else 1) if size else 0
    if mebibytes < LEAST_MEMORY:
        raise PlanError(
            f"a node cannot have memory={memory!r}: write it like '512m' or '1g', and at least "
            f"{LEAST_MEMORY}m"
        )
    return memory


def master_command(host: str) -> list[str]:
    """Starts a master on ports that the system chooses."""
    return _spark_class("master.Master", "--host", host, "--port", "0")


def worker_command(master: str, host: str, work: Path, *, cores: int, memory: str) -> list[str]:
    """Starts a worker on an address of its own."""
    resources = ["--cores", str(cores), "--memory", memory]
    return _spark_class(
        "worker.Worker", "--host", host, *resources, "--work-dir", str(work), master
    )


def environment(host: str, folder: Path) -> dict[str, str]:
    """What a process sees that runs on this address with this folder; its children inherit it."""
    scratch = str(folder / "scratch")
    java = f"-Djava.io.tmpdir={scratch} -XX:-UsePerfData"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return kept | {
        MARK: str(folder / "state"),
        BACKUPS: str(folder / "state" / "backups"),
        "SPARK_HOME": str(home()),
        "SPARK_CONF_DIR": str(folder / "conf"),
        "SPARK_LOCAL_IP": host,
        "SPARK_LOCAL_DIRS": scratch,
        "PYSPARK_PYTHON": sys.executable,
        "TMPDIR": scratch,
        "JAVA_TOOL_OPTIONS": " ".join([*filter(None, [kept.get("JAVA_TOOL_OPTIONS")]), java]),
        **_DAEMON,
    }


def make_folders(folder: Path) -> None:
    """Everything that :func:`environment` names."""
    for name in ("state", "scratch", "conf"):
        (folder / name).mkdir(parents=True, exist_ok=True)


def limit_logs(folder: Path) -> None:
    """Let the processes of a node write down what went wrong, and what its worker does.

    By default an executor writes a dozen lines for every task, whatever the level of its session.
    """
    (folder / "conf" / "log4j2.properties").write_text(_LOG_SETTINGS)


def _spark_class(name: str, *arguments: str) -> list[str]:
    return [
        str(home() / "bin" / "spark-class"),
        f"org.apache.spark.deploy.{name}",
        *("--webui-port", "0"),
        *arguments,
    ]
