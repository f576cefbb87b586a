"""The samples of a soak as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anabranch_bench import plot
from anabranch_bench.soak.samples import SPARED, Sample

_ROLES = ("driver", "driver jvm", "executor", "python worker", "agent")
_MIB = 2**20
_PANELS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "Private memory, MiB, all of a kind": (_MIB, tuple(f"{role} private" for role in _ROLES)),
    "Resident memory, MiB, shared included": (_MIB, tuple(f"{role} rss" for role in _ROLES)),
    "Threads": (1, tuple(f"{role} threads" for role in _ROLES)),
    "Open files": (1, tuple(f"{role} open files" for role in _ROLES)),
    "Private memory of the largest of a kind, MiB": (
        _MIB, tuple(f"{role} largest" for role in _ROLES)),
    "Processes": (1, tuple(f"{role} processes" for role in (*_ROLES, "merge"))),
    "Shared memory of nodes, MiB": (
        _MIB, ("state bytes", "shuffle bytes", "logs of nodes bytes")),
    "Shared memory of nodes, files": (1, ("state files", "shuffle files", "logs of nodes files")),
    "Shared memory mapped, MiB, all of a kind": (
        _MIB, ("executor shared", "python worker shared", "agent shared")),
    "Shared memory that no file has, MiB": (_MIB, ("unlinked bytes",)),
    "Oldest processes of a spared node, private, MiB": (
        _MIB, tuple(f"spared {role} private" for role in SPARED.values())),
    "Checkpoint folder, MiB": (_MIB, ("checkpoint, ours bytes", "checkpoint/spark bytes")),
    "Checkpoint folder, files": (1, ("checkpoint files", "checkpoint, ours files",
        "checkpoint/manifests files", "checkpoint/events files", "checkpoint/commits files",
        "checkpoint/spark files")),
    "Rows of state": (1, ("query state_rows",)),
    "Driver's heap after a collection, MiB": (_MIB, ("query heap",)),
    "Seconds a batch": (1, ("query batch_seconds",)),
    "Input and output, files": (1, ("input files", "out files")),
    "Driver's own folders, files": (1, ("driver's local files", "driver's state files")),
}  # fmt: skip


def draw(
    samples: Sequence[Sample], compared: Sequence[float], restarts: Sequence[float], path: Path
) -> None:
    """Draw all panels over minutes; lines where results were compared and the driver started."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(plot.STYLE):
        figure, axes = pyplot.subplots(6, 3, figsize=(17, 22), squeeze=False)
        for axis, (title, (unit, names)) in zip(axes.flat, _PANELS.items(), strict=True):
            for name in names:
                _line(axis, samples, name, unit)
            for at in compared:
                axis.axvline(at / 60, color="#3a7d44", linewidth=0.8, alpha=0.6)
            for at in restarts:
                axis.axvline(at / 60, color="#b5493c", linewidth=0.8, linestyle=":", alpha=0.7)
            axis.set(title=title, xlabel="minutes")
            axis.set_ylim(bottom=0)
            if len(names) > 1:
                axis.legend(fontsize=7, loc="upper left")
        figure.suptitle(
            "Soak. Green: results compared. Red, dotted: the driver was started.", fontsize=9
        )
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _line(axis: Any, samples: Sequence[Sample], name: str, unit: float) -> None:
    found = [(sample["at"] / 60, sample[name] / unit) for sample in samples if name in sample]
    if found:
        at, values = np.array(found).T
        axis.plot(at, values, linewidth=0.9, label=name.rpartition(" ")[0] or name)
