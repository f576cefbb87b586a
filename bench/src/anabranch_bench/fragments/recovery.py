"""Saving and recovering states by fragments and by a shared store: figure 9a.

All links are equal. A store has one, through which all states go. A lone save through fragments
sends n / m times the state through the link of its owner, and so takes longer than to a store; what
is gained is that many nodes save, and recover, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pyarrow as pa

from anabranch.fragments import models
from anabranch.state.part import Part
from anabranch_bench.fragments.nodes import MB, Nodes, check, jobs, state_of
from anabranch_bench.fragments.result import Bench, Panel

NAME = "recovery"
SAVE, RECOVER, BOTH, SPREAD = "save", "recover", "both", "spread"
PANELS = {
    SAVE: Panel("Save, by instances at once (9a)", "MB of a state", "seconds"),
    RECOVER: Panel("Recover, by instances at once (9a)", "MB of a state", "seconds"),
    BOTH: Panel("Save and recover (9a)", "MB of a state", "seconds"),
    SPREAD: Panel("One state, restored by four nodes", "MB of a state", "seconds"),
}
DATA, PARITY = 10, 10
OURS, STORE = "fragments", "shared store"
BOTH_BAR, FOUR_BAR, SPREAD_BAR, MODEL_BAR = 0.505, 0.544, 0.6, 0.2
_QUARTERS = 4
_PROBE = 8 * MB


@dataclass(frozen=True)
class Times:
    """The seconds of a side for states of one size, by the number of instances at once."""

    save: dict[int, float]
    recover: dict[int, float]


def run(bench: Bench, nodes: Nodes) -> None:
    """Measure all sizes."""
    sizes = (8, 32) if bench.quick else (8, 16, 32, 64, 128)
    counts = (1, 4, 8) if bench.quick else (1, 2, 4, 8)
    rate = link_rate(nodes)
    bench.note(f"recovery: a link passes {rate / MB:.2f} MB/s of backups")
    for size in sizes:
        states = [state_of(size * MB, bench.result.seed + each) for each in range(max(counts))]
        ours, spread = _by_fragments(bench, nodes, states, counts)
        store = _by_store(bench, nodes, states, counts)
        for name, times in ((OURS, ours), (STORE, store)):
            for count in counts:
                curve = f"{name}, {count}"
                bench.timed(SAVE, curve, size, [times.save[count]], count * size * MB)
                bench.timed(RECOVER, curve, size, [times.recover[count]], count * size * MB)
                both = times.save[count] + times.recover[count]
                bench.timed(BOTH, curve, size, [both], count * size * MB)
        bench.timed(SPREAD, OURS, size, [spread], size * MB)
        bench.timed(SPREAD, STORE, size, [store.recover[1]], size * MB)
        if nodes.linked:
            _judge(bench, size, ours, spread, store, rate)


def link_rate(nodes: Nodes) -> float:
    """The bytes of backups that pass through a link in a second, as three transfers took."""
    sender = nodes.hosts[0]
    state = state_of(_PROBE, 0)
    taken = []
    for _ in range(3):
        taken.append(nodes.at_once([lambda: nodes.put_shared(sender, "probe", state)]))
    nodes.drop_shared(["probe"])
    return _PROBE / median(taken)


def _by_fragments(
    bench: Bench, nodes: Nodes, states: Sequence[pa.Buffer], counts: Sequence[int]
) -> tuple[Times, float]:
    times, spread = Times({}, {}), 0.0
    for count in counts:
        size = states[0].size // MB
        bench.say(f"recovery: {count} states of {size} MB in fragments")
        parts: dict[int, Part] = {}
        owners = nodes.hosts[:count]

        def save(each: int, owner: str, into: dict[int, Part] = parts) -> None:
            into[each] = nodes.save(owner, f"state-{each}", states[each], DATA, PARITY)

        times.save[count] = nodes.at_once(jobs(save, owners))
        restoring = _restoring(nodes, parts, owners)
        found: dict[int, pa.Buffer] = {}

        def recover(each: int, host: str, of: dict[int, Part] = parts, into: Any = found) -> None:
            into[each] = nodes.recover(host, of[each])

        times.recover[count] = nodes.at_once(jobs(recover, restoring))
        for each, state in found.items():
            check(state, states[each], f"fragments of state {each}")
        if count == 1:
            spread = _spread(nodes, parts[0], states[0])
        nodes.drop([*parts.values()])
    return times, spread


def _spread(nodes: Nodes, part: Part, state: pa.Buffer) -> float:
    """Four nodes restore a quarter each."""
    step = -(-state.size // _QUARTERS)
    found: dict[int, pa.Buffer] = {}

    def recover(each: int, host: str) -> None:
        end = min((each + 1) * step, state.size)
        found[each] = nodes.recover(host, part, each * step, end)

    took = nodes.at_once(jobs(recover, nodes.others(part, nodes.hosts[0])[:_QUARTERS]))
    for each, quarter in found.items():
        check(quarter, state.slice(each * step, quarter.size), "a quarter")
    return took


def _by_store(
    bench: Bench, nodes: Nodes, states: Sequence[pa.Buffer], counts: Sequence[int]
) -> Times:
    times = Times({}, {})
    for count in counts:
        bench.say(f"recovery: {count} states of {states[0].size // MB} MB in the shared store")
        found: dict[int, pa.Buffer] = {}

        def save(each: int, owner: str) -> None:
            nodes.put_shared(owner, f"state-{each}", states[each])

        def recover(each: int, host: str, into: Any = found) -> None:
            into[each] = nodes.get_shared(host, f"state-{each}")

        times.save[count] = nodes.at_once(jobs(save, nodes.hosts[:count]))
        times.recover[count] = nodes.at_once(jobs(recover, nodes.hosts[-count:]))
        for each, state in found.items():
            check(state, states[each], f"state {each} in the store")
        nodes.drop_shared([f"state-{each}" for each in range(count)])
    return times


def _restoring(nodes: Nodes, parts: dict[int, Part], owners: Sequence[str]) -> list[str]:
    """Another node for each state, that has no fragment of it if possible."""
    taken: list[str] = []
    for each, owner in enumerate(owners):
        free = [host for host in nodes.others(parts[each], owner) if host not in taken]
        rest = [host for host in reversed(nodes.hosts) if host != owner and host not in taken]
        taken.append((free or rest)[0])
    return taken


def _judge(bench: Bench, size: int, ours: Times, spread: float, store: Times, rate: float) -> None:
    both = ours.save[8] + ours.recover[1]
    less = 1 - both / (store.save[8] + store.recover[1])
    bench.at_least(f"{size} MB: 8 save and one recovers, time saved", less, BOTH_BAR)
    less = 1 - ours.recover[4] / store.recover[4]
    bench.at_least(f"{size} MB: four recover at once, time saved", less, FOUR_BAR)
    less = 1 - spread / store.recover[1]
    bench.at_least(f"{size} MB: one over four nodes, time saved", less, SPREAD_BAR)
    for name, seconds, model in (
        ("save", ours.save[1], models.saving(size * MB, DATA, PARITY, up=rate)),
        ("recover", ours.recover[1], models.retrieval(size * MB, DATA, PARITY, up=rate, down=rate)),
    ):
        off = abs(seconds / model - 1)
        bench.at_most(f"{size} MB: one alone, {name}, off the model", off, MODEL_BAR)
