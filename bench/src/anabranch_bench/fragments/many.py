"""Many applications, and more nodes: figures 9b and 9c, and what it takes of nodes: figure 13."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import mean, median

import pyarrow as pa

from anabranch.state.part import Part
from anabranch_bench.fragments.nodes import MB, Nodes, Usage, check, jobs, state_of
from anabranch_bench.fragments.recovery import DATA, OURS, PARITY, STORE
from anabranch_bench.fragments.result import Bench, Panel
from anabranch_bench.harness import Grid

NAME = "many"
APPLICATIONS, PER_FRAGMENT, BYTES = "applications", "per fragment", "bytes"
PANELS = {
    APPLICATIONS: Panel("One state of each application lost (9b)", "applications", "seconds"),
    PER_FRAGMENT: Panel("A fragment, by nodes (9c)", "nodes", "seconds"),
    BYTES: Panel("Bytes of a node (13)", "node, by what it sent", "MB"),
}
_STATES = 8
_FEW = (4, 2)
"""m and k where there are only a few nodes."""


def run(bench: Bench, nodes: Nodes) -> None:
    """Measure all of it."""
    _many_applications(bench, nodes)
    _more_nodes(bench, nodes)
    _usage(bench, nodes)


def _many_applications(bench: Bench, nodes: Nodes) -> None:
    size = (2 if bench.quick else 8) * MB
    for count in (1, 4, 16) if bench.quick else (1, 2, 4, 8, 16, 32):
        bench.say(f"many: {count} applications of {_STATES} states of {size / MB:.0f} MB")
        states = [state_of(size, bench.result.seed + each) for each in range(count)]
        with ThreadPoolExecutor(_STATES) as pool:
            parts = list(pool.map(partial(_save, nodes, states), range(count * _STATES)))
        shared = [f"state-{each}" for each in range(count)]
        for name, state in zip(shared, states, strict=True):
            nodes.put_shared(nodes.shared, name, state)
        hosts = [_node(nodes, each * _STATES + 1) for each in range(count)]
        for side, take in (
            (OURS, partial(_recover, nodes, parts[::_STATES])),
            (STORE, partial(_recover_shared, nodes, shared)),
        ):
            found: dict[int, pa.Buffer] = {}
            took = nodes.at_once(jobs(partial(take, found), hosts))
            bench.timed(APPLICATIONS, side, count, [took], count * size)
            for each, state in enumerate(states):
                check(found[each], state, f"{side}: the state of application {each}")
        nodes.drop(parts)
        nodes.drop_shared(shared)


def _save(nodes: Nodes, states: Sequence[pa.Buffer], number: int) -> Part:
    state = states[number // _STATES]
    return nodes.save(_node(nodes, number), f"state-{number}", state, DATA, PARITY)


def _recover(
    nodes: Nodes, parts: Sequence[Part], found: dict[int, pa.Buffer], each: int, host: str
) -> None:
    found[each] = nodes.recover(host, parts[each])


def _recover_shared(
    nodes: Nodes, names: Sequence[str], found: dict[int, pa.Buffer], each: int, host: str
) -> None:
    found[each] = nodes.get_shared(host, names[each])


def _more_nodes(bench: Bench, nodes: Nodes) -> None:
    size = 8 * MB
    state = state_of(size, bench.result.seed)
    data, parity = _FEW
    for count in (8, 16, 24, 31):
        bench.say(f"many: a fragment of {size / data / MB:.0f} MB among {count} nodes")
        among = nodes.of(count)
        owner = among.hosts[0]
        part = among.save(owner, "state", state, data, parity)
        host = among.others(part, owner)[0]
        taken = [
            among.at_once([partial(among.retrieve, host, part, [holder])])
            for holder in part.holders
        ]
        bench.timed(PER_FRAGMENT, f"{data} + {parity}", count, taken, size // data)
        among.drop([part])


def _usage(bench: Bench, nodes: Nodes) -> None:
    """What the agents use while eight nodes save a state, and recover one each."""
    size = (8 if bench.quick else 64) * MB
    bench.say(f"many: what agents use for 8 states of {size / MB:.0f} MB")
    states = [state_of(size, bench.result.seed + each) for each in range(8)]
    parts: dict[int, Part] = {}

    def save(each: int, owner: str) -> None:
        parts[each] = nodes.save(owner, f"state-{each}", states[each], DATA, PARITY)

    def recover(each: int, host: str) -> None:
        check(nodes.recover(host, parts[each]), states[each], f"state {each}")

    def share(each: int, host: str) -> None:
        nodes.put_shared(host, f"state-{each}", states[each])

    def take(each: int, host: str) -> None:
        check(nodes.get_shared(host, f"state-{each}"), states[each], f"state {each} in the store")

    rows = []
    for name, work, side in (
        ("save", save, OURS),
        ("recover", recover, OURS),
        ("save", share, STORE),
        ("recover", take, STORE),
    ):
        hosts = nodes.hosts if side == OURS else (nodes.shared,)
        before = {host: nodes.usage(host) for host in hosts}
        workers = nodes.hosts[:8] if name == "save" else nodes.hosts[-8:]
        nodes.at_once(jobs(work, workers))
        used = [_since(before[host], nodes.usage(host)) for host in hosts]
        rows.append((f"{side}, {name}", *_figures(used)))
        if side == OURS and nodes.linked:
            sent = sorted(used, key=lambda each: each.sent)
            for number, each in enumerate(sent, 1):
                bench.point(BYTES, f"{name}: sent", number, each.sent / MB)
                bench.point(BYTES, f"{name}: received", number, each.received / MB)
    nodes.drop([*parts.values()])
    nodes.drop_shared([f"state-{each}" for each in range(8)])
    heads = ("agents", "CPU s, mean", "most", "private MB, median", "most", "MB sent, mean", "most")
    bench.result.more.append(
        Grid(f"What agents use for 8 states of {size / MB:.0f} MB (13)", heads, rows)
    )


def _since(before: Usage, after: Usage) -> Usage:
    return Usage(
        after.cpu - before.cpu,
        after.private,
        after.sent - before.sent,
        after.received - before.received,
    )


def _figures(used: list[Usage]) -> tuple[str, ...]:
    cpu = [each.cpu for each in used]
    private = [each.private / MB for each in used]
    sent = [each.sent / MB for each in used]
    return (
        f"{mean(cpu):.2f}",
        f"{max(cpu):.2f}",
        f"{median(private):.0f}",
        f"{max(private):.0f}",
        f"{mean(sent):.1f}",
        f"{max(sent):.1f}",
    )


def _node(nodes: Nodes, number: int) -> str:
    return nodes.hosts[number % len(nodes.hosts)]
