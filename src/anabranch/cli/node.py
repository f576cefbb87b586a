"""``anabranch node``: a standing node, which keeps fragments for many queries."""

from __future__ import annotations

import logging
import os
import platform
import signal
import threading
from pathlib import Path

import click

from anabranch.units import byte_count, microseconds


@click.command()
@click.option("--ring", "file", required=True, help="The file of the ring; made by the first node.")
@click.option("--join", help="HOST:PORT of a node; not needed if the file knows one that answers.")
@click.option("--host", default=platform.node, show_default="this machine's name")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=7070,
    show_default=True,
    help="0: any that is free.",
)
@click.option("--folder", help="Where it keeps fragments; of this node alone.")
@click.option("--capacity", help="The most that it keeps, such as '64 GiB'.")
@click.option("--zone", default="", help="Where it is; fragments of a state are spread over racks.")
@click.option("--rack", default="", help="Where it is, within the zone.")
@click.option("--period", default="5 s", show_default=True, help="Between keep-alives; a new ring.")
@click.option("--leaves", default=32, show_default=True, help="Size of leaf sets; a new ring.")
@click.option("--tls-certificate", help="Encrypt: this node's certificate, which names --host.")
@click.option("--tls-key", help="The private key of the certificate.")
@click.option("--tls-root", help="The certificate to trust; it is written to the ring's file.")
def node(
    file: str,
    join: str | None,
    host: str,
    port: int,
    folder: str | None,
    capacity: str | None,
    zone: str,
    rack: str,
    period: str,
    leaves: int,
    tls_certificate: str | None,
    tls_key: str | None,
    tls_root: str | None,
) -> None:
    """Keep fragments of state for the queries that use a ring, until Ctrl-C or SIGTERM.

    The first node makes the file of the ring. Each further one, and each driver, needs a copy.
    Start a node again in the same folder, and it has its fragments again.
    """
    from anabranch.errors import AnabranchError, PlanError
    from anabranch.nodes.agent import open_many_files
    from anabranch.nodes.folders import backup_folder
    from anabranch.nodes.memory import give_memory_back
    from anabranch.nodes.standing.file import RingFile
    from anabranch.nodes.standing.process import Standing, serve
    from anabranch.nodes.tls import read_root
    from anabranch.priority import process_gives_way
    from anabranch.ring import Settings

    os.umask(0o077)
    path = Path(file).absolute()
    root = "" if tls_root is None else read_root(tls_root)
    if root and (tls_certificate is None or tls_key is None):
        raise PlanError("--tls-root needs --tls-certificate and --tls-key: nodes that encrypt")
    if not path.exists():
        if join is not None:
            raise PlanError(
                f"{path} does not exist: copy it from the node at {join}; it has the secret of the "
                "ring"
            )
        settings = Settings(leaves=leaves, period=microseconds(period, what="--period") / 1e6)
        try:
            RingFile.create(path, settings, root)
        except FileExistsError:
            click.echo(f"another node has made {path}")
        else:
            click.echo(
                f"made {path}, the file of a new ring; copy it to the other nodes and to drivers, "
                "and keep it secret"
            )
    ring = RingFile.read(path)
    if root:
        ring = ring.trust(root)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    process_gives_way()
    give_memory_back()
    open_many_files()
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    standing = Standing(
        ring,
        host,
        backup_folder() / "ring" / host if folder is None else Path(folder).absolute(),
        port,
        zone,
        rack,
        None if capacity is None else byte_count(capacity, what="--capacity"),
        join,
        tls_certificate,
        tls_key,
    )
    code = 0
    try:
        serve(standing, done, lambda address: click.echo(f"serving at {address}"))
    except AnabranchError as error:
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        code = 1
    logging.shutdown()
    # Requests that are still under way would keep the interpreter from ending.
    os._exit(code)
