"""Removing all traces of a cluster: processes, control groups, networks, folders.

:func:`main`, with ``FOLDER keep|remove GROUP NETWORK`` as arguments, the last two possibly empty,
does it for a cluster whose own process has ended.
"""

import shutil
import sys
from pathlib import Path

from anabranch.cluster import links, quotas
from anabranch.cluster.processes import end, of_folder
from anabranch.cluster.waiting import until

LOST = ("state", "scratch")
"""The folders in a node's folder that vanish with the node; logs stay."""


_REMOVAL = 15.0


def sweep(folder: Path, *, keep_logs: bool, group: Path | None, network: int | None) -> None:
    """Kill every process of the cluster in this folder, and remove what they have written."""
    end(lambda: of_folder(folder, group))
    if network is not None:
        links.remove(network)
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
    # A process that ends by itself may write there until then.
    if not until(lambda: _try_to_remove(folder), _REMOVAL):
        shutil.rmtree(folder)


def _try_to_remove(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def main() -> None:
    """Sweep what the command line names."""
    sweep(
        Path(sys.argv[1]),
        keep_logs=sys.argv[2] == "keep",
        group=Path(sys.argv[3]) if sys.argv[3] else None,
        network=int(sys.argv[4]) if sys.argv[4] else None,
    )
