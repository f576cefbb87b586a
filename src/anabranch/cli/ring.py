"""``anabranch ring``: the ring of nodes that hold fragments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from anabranch.cli.model import Modelled, draw, show
from anabranch.errors import CheckpointNotFound
from anabranch.fragments import Adapt, Measured, Prefer, simulation
from anabranch.fragments.models import Rates, Sample, lost_rows
from anabranch.fragments.simulation import Plan, Repair, Report
from anabranch.nodes.standing.client import Ring
from anabranch.nodes.standing.names import owner_of
from anabranch.nodes.standing.requests import View
from anabranch.nodes.standing.survey import Piece, survey, widen
from anabranch.ring import Settings
from anabranch.units import byte_count, microseconds


@click.group()
def ring() -> None:
    """Look into the ring of nodes that hold the fragments of each other's state."""


@ring.command()
@click.option(
    "--nodes", default=(5000,), multiple=True, show_default=True, help="Can be given repeatedly."
)
@click.option("--racks", default=1, show_default=True, help="Racks that the nodes are in.")
@click.option("--applications", default=1000, show_default=True, help="Each has one state.")
@click.option("--data", default=10, show_default=True, help="Data fragments of a state.")
@click.option("--parity", default=20, show_default=True, help="Parity fragments of a state.")
@click.option("--leaves", default=32, show_default=True, help="Size of the leaf sets.")
@click.option("--period", default="30 s", show_default=True, help="Time between keep-alives.")
@click.option("--searches", default=5000, show_default=True, help="Searches for an owner.")
@click.option("--kill", default=0.05, show_default=True, help="Share of the nodes to kill; or 0.")
@click.option("--state", default="128 MB", show_default=True, help="Size of a state.")
@click.option("--link", default="12.5 MB", show_default=True, help="Per second, to every node.")
@click.option("--latency", default="500 us", show_default=True, help="Of a message.")
@click.option("--seed", default=0, show_default=True, help="Repeats a simulation.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")
def simulate(
    nodes: tuple[int, ...],
    racks: int,
    applications: int,
    data: int,
    parity: int,
    leaves: int,
    period: str,
    searches: int,
    kill: float,
    state: str,
    link: str,
    latency: str,
    seed: int,
    as_json: bool,
) -> None:
    """Simulate a ring of many nodes: hops of searches, spread of fragments, repair.

    The time of a retrieval is that of a search, a round trip to the holders, and the state over the
    link of the node that restores it. After a kill, messages are counted until every leaf set is
    right again, and bytes that make lost fragments again.
    """
    plans = [
        Plan(
            count,
            racks,
            applications,
            data,
            parity,
            searches,
            kill,
            byte_count(state, what="state"),
            byte_count(link, what="link"),
            microseconds(latency, what="latency") / 1e6,
            Settings(leaves=leaves, period=microseconds(period, what="period") / 1e6),
            seed,
        )
        for count in nodes
    ]
    reports = []
    for plan in plans:
        with Console(stderr=True).status(f"simulating {plan.nodes} nodes"):
            reports.append(simulation.simulate(plan))
    if as_json:
        click.echo(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        _show(reports)


_file = click.option("--ring", "file", required=True, help="The file of the ring.")


@ring.command()
@_file
def status(file: str) -> None:
    """List the nodes of a ring, what they have, and whether all know their neighbours."""
    with Ring.open(file, "") as client:
        views = list(client.everyone())
    console = Console(highlight=False)
    table = Table("host", "address", "zone and rack", "fragments", "used", "of", "", box=None)
    for column in table.columns[3:6]:
        column.justify = "right"
    problems = 0
    for view in views:
        wrong = _wrong(view, views)
        problems += bool(wrong)
        table.add_row(
            view.me.host,
            view.me.address,
            f"{view.me.id.label:04x}",
            f"{view.fragments:,}",
            decimal(view.used),
            decimal(view.limit),
            wrong,
        )
    console.print(table)
    racks = len({view.me.id.label for view in views})
    console.print(f"{_count(len(views), 'node')} in {_count(racks, 'rack')}")
    if problems:
        console.print(f"the ring is not closed: {problems} nodes do not know their neighbours")
    else:
        console.print("the ring is closed: each node knows its neighbours")


@ring.command()
@click.argument("name")
@_file
@click.option("--query", help="Its id, in query.json; by default what the name begins with.")
@click.option("--owner", help="The host that it was stored for; by default the one in the name.")
def find(name: str, file: str, query: str | None, owner: str | None) -> None:
    """Show where the fragments of the state NAME are, and whether they are enough.

    NAME is that of a part in a manifest. For one that was stored with ab.save give --query states,
    and the --owner of its fragments.
    """
    whose = name.partition("/")[0] if query is None else query
    place = owner_of(name, whose) if owner is None else owner
    with Ring.open(file, whose) as client:
        found = survey(client, place, name)
        if not found.complete:
            widen(client, found)
    for pieces in found.generations().values():
        _show_pieces(pieces)
    for id, error in found.silent.items():
        click.echo(f"{found.asked[id].host} does not answer: {error}")
    if not found.pieces:
        raise CheckpointNotFound(
            f"none of the {len(found.asked)} nodes next to the place of {place} has a fragment of "
            f"{name} that belongs to {whose}: give the name as it is in a manifest, or --query and "
            "--owner with which it was stored"
        )


def _show_pieces(pieces: Sequence[Piece]) -> None:
    """Where the fragments of one coding of a state are."""
    console = Console(highlight=False)
    table = Table("fragment", "host", "address", box=None)
    at = {index: [p.node for p in pieces if p.name.index == index] for index in _indexes(pieces)}
    for index, nodes in at.items():
        for node in nodes:
            table.add_row(str(index), node.host, node.address)
        if not nodes:
            table.add_row(str(index), "lost", "")
    console.print(table)
    there, name = sum(map(bool, at.values())), pieces[0].name
    enough = "enough" if there >= name.data else "not enough"
    console.print(f"{there} of {name.total} fragments are there, {name.data} are needed: {enough}")


def _indexes(pieces: Sequence[Piece]) -> range:
    return range(pieces[0].name.total)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _wrong(view: View, views: Sequence[View]) -> str:
    """What a node does not know that it should."""
    if not view.joined:
        return "is joining"
    ids = sorted(each.me.id for each in views)
    at = ids.index(view.me.id)
    beside = {ids[(at + step) % len(ids)] for step in (-1, 1)} - {view.me.id}
    known = {each.contact.id for each in view.leaves}
    gone = known - set(ids)
    if beside - known:
        return "does not know its neighbours"
    return "knows nodes that do not answer" if gone else ""


def _show(reports: list[Report]) -> None:
    console = Console(highlight=False)
    table = Table("", *(f"{report.nodes:,} nodes" for report in reports), box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, value in _ROWS.items():
        shown = [value(report) for report in reports]
        if any(shown):
            table.add_row(name, *shown)
    console.print(table)
    _show_shares(console, "hops", [report.routing.within for report in reports], reports)
    _show_shares(console, "fragments", [report.spread.within for report in reports], reports)


def _show_shares(
    console: Console, what: str, shares: Sequence[Mapping[int, float]], reports: list[Report]
) -> None:
    """A cumulative distribution, one column for each simulation."""
    table = Table(f"at most {what}", *(f"{each.nodes:,} nodes" for each in reports), box=None)
    for column in table.columns:
        column.justify = "right"
    for value in range(max(map(max, shares)) + 1):
        found = [max((s for at, s in each.items() if at <= value), default=0.0) for each in shares]
        if any(found):
            table.add_row(str(value), *(f"{100 * share:.1f} %" for share in found))
    console.print()
    console.print(table)


def _after_kill(value: Callable[[Repair], str]) -> Callable[[Report], str]:
    return lambda report: "" if report.repair is None else value(report.repair)


_ROWS: dict[str, Callable[[Report], str]] = {
    "mean hops": lambda r: f"{r.routing.mean:.2f}",
    "log16 of the nodes": lambda r: f"{r.routing.logarithm:.2f}",
    "most hops": lambda r: str(r.routing.most),
    "search": lambda r: f"{1000 * r.routing.mean_seconds:.2f} ms",
    "retrieval": lambda r: f"{r.routing.retrieval_seconds:.3f} s",
    "fragments of a node, mean": lambda r: f"{r.spread.mean:.2f}",
    "at most, 95 % of nodes": lambda r: str(r.spread.most_of_95_percent),
    "at most, all nodes": lambda r: str(r.spread.most),
    "nodes killed": _after_kill(lambda r: f"{r.killed:,}"),
    "periods until repaired": _after_kill(lambda r: f"{r.periods:.2f}"),
    "messages of a node for it": _after_kill(lambda r: f"{r.messages_per_node:.1f}"),
    "keep-alives of a node then": _after_kill(lambda r: f"{r.usual_messages_per_node:.1f}"),
    "nodes named in them": _after_kill(lambda r: f"{r.contacts_per_node:,.0f}"),
    "fragments lost": _after_kill(lambda r: f"{r.lost_fragments:,}"),
    "states lost": _after_kill(lambda r: f"{r.lost_states:,}"),
    "moved to make them again": _after_kill(lambda r: decimal(r.moved_bytes)),
    "then at most, all nodes": _after_kill(lambda r: str(r.most_fragments)),
}


@ring.command()
@click.option("--size", default="128 MB", show_default=True, help="Size of a state.")
@click.option("--nodes", default=31, show_default=True, help="Nodes that can hold a fragment.")
@click.option("--up", default="12.5 MB", show_default=True, help="A node sends per second.")
@click.option("--down", default="12.5 MB", show_default=True, help="A node receives per second.")
@click.option("--encode", help="Bytes per second of coding with m = 10 and k = 10.")
@click.option("--recompute", help="The same of computing a state again, half of it lost.")
@click.option("--store", help="Per second, of a shared store with which Files is compared.")
@click.option("--failures", default=0.01, show_default=True, help="Of a node in an hour.")
@click.option("--interval", default="5 s", show_default=True, help="Between checkpoints.")
@click.option("--repair", default="0 s", show_default=True, help="Until fragments are made again.")
@click.option("--at-once", default=1, show_default=True, help="States recovered at once.")
@click.option(
    "--prefer",
    type=click.Choice([each.value for each in Prefer]),
    default=Prefer.RECOVERY.value,
    show_default=True,
    help="What is to be as good as possible.",
)
@click.option("--reliability", default=0.999999, show_default=True, help="The least probability.")
@click.option("--overhead", default=2.0, show_default=True, help="Most bytes on top, as a share.")
@click.option("--seconds", help="The longest recovery.")
@click.option("-m", "data", multiple=True, type=int, help="Data fragments to show; repeatable.")
@click.option("-k", "parity", multiple=True, type=int, help="Parity fragments to show; repeatable.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a picture.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def model(
    size: str,
    nodes: int,
    up: str,
    down: str,
    encode: str | None,
    recompute: str | None,
    store: str | None,
    failures: float,
    interval: str,
    repair: str,
    at_once: int,
    prefer: str,
    reliability: float,
    overhead: float,
    seconds: str | None,
    data: tuple[int, ...],
    parity: tuple[int, ...],
    plot: Path | None,
    as_json: bool,
) -> None:
    """Show what fragments take and survive by m and k, and what Adapt would choose.

    The recovery of a state is its retrieval and the computation of what was lost. It is lost if
    more than k of its m + k nodes are, before its fragments were made again.
    """
    adapt = Adapt(Prefer(prefer), reliability, overhead, seconds, store)
    measured = Measured(
        size=byte_count(size, what="--size"),
        nodes=nodes,
        up=byte_count(up, what="--up"),
        down=byte_count(down, what="--down"),
        encode=_rates(encode, "--encode", 10),
        recompute=_rates(recompute, "--recompute", lost_rows(10, 10)),
        store=adapt.store_rate,
        failures=failures,
        interval=microseconds(interval, what="--interval") / 1e6,
        repair=microseconds(repair, what="--repair") / 1e6,
        at_once=at_once,
    )
    found = Modelled.of(measured, adapt, data, parity)
    if as_json:
        options = [asdict(one) | {"retrieval": found.retrieval(one)} for one in found.options]
        choice = asdict(found.choice) | {"stripe": found.choice.stripe}
        fastest = {"fastest_store": found.fastest_store}
        click.echo(json.dumps({"choice": choice, "options": options, **fastest}, indent=2))
    else:
        show(found)
    if plot is not None:
        draw(found, plot)


def _rates(rate: str | None, option: str, rows: float) -> Rates:
    return Rates() if rate is None else Rates((Sample(10, rows, byte_count(rate, what=option)),))
