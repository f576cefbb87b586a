"""Removing all traces of a cluster: processes, control groups, folders.

:func:`main`, with ``FOLDER keep|remove [GROUP]`` as arguments, does it for a cluster whose own
process has ended.
"""

import shutil
import sys
from pathlib import Path

from anabranch.cluster import quotas
from anabranch.cluster.processes import end, of_folder

LOST = ("state", "scratch")
"""The folders in a node's folder that vanish with the node; logs stay."""


def sweep(folder: Path, *, keep_logs: bool, group: Path | None) -> None:
    """Kill every process of the cluster in this folder, and remove what they have written."""
    end(lambda: of_folder(folder, group))
    if group is not None:
        quotas.remove(group)
    if keep_logs:
        for node in folder.iterdir():
            lose(node)
    else:
        _remove(folder)


def lose(node: Path, *, keep_state: bool = False) -> None:
    """Remove the state of a node from its folder, as when a machine is lost."""
    for name in LOST:
        if not (keep_state and name == "state"):
            _remove(node / name)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def main() -> None:
    """Sweep what the command line names."""
    sweep(
        Path(sys.argv[1]),
        keep_logs=sys.argv[2] == "keep",
        group=Path(sys.argv[3]) if len(sys.argv) > 3 else None,
    )
