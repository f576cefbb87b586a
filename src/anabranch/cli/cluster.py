"""``anabranch cluster``: a Spark cluster on this machine."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from anabranch.cluster import LocalCluster
    from anabranch.cluster.control import Operation


@click.group()
def cluster() -> None:
    """Run a Spark cluster on this machine, and kill and add its nodes.

    `up` runs it in this terminal; the other commands are for a second one.
    """


@cluster.command()
@click.option("--nodes", default=4, show_default=True, help="Workers, each on its own address.")
@click.option("--cores", default=1, show_default=True, help="Tasks that a node runs at a time.")
@click.option("--memory", default="1g", show_default=True, help="Heap of a node's executor.")
@click.option("--cpus", type=float, help="CPU quota of a node in cores, such as 0.3.")
@click.option("--link", help="Rate of a node's link, such as '100 Mbit'; takes root.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep state and logs here.")
def up(
    nodes: int,
    cores: int,
    memory: str,
    cpus: float | None,
    link: str | None,
    folder: Path | None,
) -> None:
    """Start a cluster and run it until Ctrl-C."""
    from anabranch.cluster import LocalCluster
    from anabranch.cluster.control import serve

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    made = LocalCluster(nodes, cores, memory, cpus, folder, link)
    console = Console(highlight=False)
    asked, gone = threading.Event(), threading.Event()
    with _terminable(), serve(_socket(), _operations(made, asked, gone)):
        try:
            with console.status(f"starting {nodes} nodes"):
                made.start()
            _introduce(made, console)
            asked.wait()
        except KeyboardInterrupt:
            pass
        finally:
            _hold_signals()
            try:
                with console.status("stopping"):
                    made.stop()
            finally:
                gone.set()
    console.print("stopped")


@cluster.command()
def status() -> None:
    """Show the master and the nodes that are up."""
    from anabranch.cluster.control import ask

    found = ask(_socket(), "status")
    click.echo(f"master {found['master']}")
    table = Table("node", "folder", box=None, pad_edge=False)
    for host in found["nodes"]:
        table.add_row(host, f"{found['folder']}/{host}")
    Console(highlight=False, soft_wrap=True).print(table)


@cluster.command()
@click.argument("host")
@click.option("--keep-state", is_flag=True, help="Keep its state folder for its return.")
def kill(host: str, keep_state: bool) -> None:
    """Kill every process of a node at once."""
    from anabranch.cluster.control import ask

    ask(_socket(), "kill", host=host, keep_state=keep_state)
    click.echo(f"killed {host}")


@cluster.command()
@click.argument("host", required=False)
def add(host: str | None) -> None:
    """Add a node on a fresh address, or bring a killed one back."""
    from anabranch.cluster.control import ask

    click.echo(f"added {ask(_socket(), 'add', host=host)['host']}")


@cluster.command()
def down() -> None:
    """End the cluster and wait until it is gone."""
    from anabranch.cluster.control import ask

    ask(_socket(), "down")
    click.echo("stopped")


def _socket() -> Path:
    from anabranch.cluster.control import runtime_folder

    return runtime_folder() / "cluster.sock"


def _operations(
    made: LocalCluster, asked: threading.Event, gone: threading.Event
) -> dict[str, Operation]:
    from anabranch.errors import PlanError

    def text(request: Mapping[str, Any], field: str) -> str:
        value = request.get(field)
        if not isinstance(value, str):
            raise PlanError(f"{field} must be a text such as '127.0.0.2', not {value!r}")
        return value

    def status(request: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "master": made.master,
            "nodes": list(made.nodes),
            "folder": str(made.folder),
            "limited": made.limited,
        }

    def kill(request: Mapping[str, Any]) -> dict[str, Any]:
        made.kill(text(request, "host"), keep_state=request.get("keep_state") is True)
        return {}

    def add(request: Mapping[str, Any]) -> dict[str, Any]:
        given = None if request.get("host") is None else text(request, "host")
        return {"host": made.add(given)}

    def down(request: Mapping[str, Any]) -> dict[str, Any]:
        asked.set()
        gone.wait()
        return {}

    return {"status": status, "kill": kill, "add": add, "down": down}


def _introduce(made: LocalCluster, console: Console) -> None:
    console.print(f"master  {made.master}", soft_wrap=True)
    console.print(f"nodes   {' '.join(made.nodes)}", soft_wrap=True)
    console.print(f"logs    {made.folder}", soft_wrap=True)
    console.print(f'\nspark = anabranch.session("{made.master}")\n', soft_wrap=True)
    console.print("Ctrl-C, or in another terminal: anabranch cluster status | kill | add | down")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does; afterwards both do what they did before."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hold_signals() -> None:
    # A second Ctrl-C must not leave half of the processes to be cleared away later.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
