"""The process of a node's agent: ``python -m anabranch.nodes.agent``.

It reads one line of JSON from its standard input, which has the secret. It answers with one line:
its address, or that another agent uses the folder. It ends with the process that it watches, on
SIGTERM, and on the request Stop.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from anabranch.errors import PlanError, StateLocked
from anabranch.named import named
from anabranch.nodes.chunks import TIMEOUT
from anabranch.nodes.fence import EPOCH, Fence
from anabranch.nodes.log import Trimmed, trim
from anabranch.nodes.memory import give_memory_back
from anabranch.nodes.node import Deadline, Node
from anabranch.nodes.requests import Epoch
from anabranch.nodes.server import Agent
from anabranch.nodes.starting import ADDRESS, join
from anabranch.nodes.tickets import Secret, Verifier
from anabranch.nodes.tls import server_context
from anabranch.nodes.vault import Vault
from anabranch.priority import process_gives_way
from anabranch.private import private_folder
from anabranch.state.lock import locked

_BACKUPS, _SCRATCH = "backups", "scratch"
_GRACE = 1.0
_LOOK_AT_LOG = 1.0
_MOST_FILES = 1 << 14

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """The settings of an agent; see :func:`anabranch.nodes.start_agent`."""

    secret: str = field(repr=False)
    host: str
    folder: str
    limit: int | None
    port: int = 0
    log: str | None = None
    timeout: float = TIMEOUT
    watch_pid: int | None = None
    epoch: int | None = None
    node: str | None = None
    warm: str | None = None
    context: dict[str, Any] = field(default_factory=dict, repr=False)
    tls_cert: str | None = None
    tls_key: str | None = None

    @classmethod
    def parse(cls, line: str) -> Config:
        """The configuration in one line of JSON."""
        try:
            values = json.loads(line)
            config = cls(**values)
        except (ValueError, TypeError):
            # Neither the line nor the causes are shown: the secret is among them.
            names = ", ".join(each.name for each in fields(cls))
            raise PlanError(f"an agent reads one line, a JSON object with {names}") from None
        if (config.tls_cert is None) != (config.tls_key is None):
            raise PlanError("an agent needs both tls_cert and tls_key, or neither")
        return config


def serve(config: Config, done: threading.Event, answer: Callable[[dict[str, Any]], None]) -> None:
    """Serve until ``done`` or the request Stop. Calls ``answer`` when ready."""
    folder = private_folder(Path(config.folder))
    with locked(folder, timeout=0):
        # Parts on their way are kept beside the backups: elsewhere may be memory.
        tempfile.tempdir = str(emptied(folder / _SCRATCH))
        vault = Vault(folder / _BACKUPS, config.limit)
        fence = Fence(folder / EPOCH)
        if config.epoch is not None:
            with fence.admit(Epoch(config.epoch), Deadline(config.timeout)):
                pass  # no driver before this one starts an agent here any more
        agent = _listen(config, vault, fence, done)
        _log.info("Listening at %s port %d; backups: %r", config.host, agent.port, vault)
        address = folder / ADDRESS
        record(address, {"host": config.host, "port": agent.port, "pid": os.getpid()})
        answer({"port": agent.port, "pid": os.getpid()})
        if config.warm is not None:
            # Loading kernels takes seconds; neither the answer nor the first table waits for it.
            warm = partial(_warm, config.warm)
            threading.Thread(target=warm, name="warm", daemon=True).start()
        while not done.wait(_LOOK_AT_LOG):
            # Not all that is written there goes through a logger.
            if config.log is not None:
                trim(Path(config.log))
        address.unlink(missing_ok=True)
        # Backups are stored whole or not at all, so nobody is waited for very long.
        ending = threading.Thread(target=agent.shutdown, daemon=True)
        ending.start()
        ending.join(_GRACE)


def emptied(folder: Path) -> Path:
    """Make a private folder, without what was in it."""
    shutil.rmtree(folder, ignore_errors=True)
    return private_folder(folder)


def _warm(path: str) -> None:
    named("warm", path)()


def _listen(config: Config, vault: Vault, fence: Fence, done: threading.Event) -> Agent:
    node = load_node(config.node, config.context, vault, fence)
    verifier = Verifier(Secret.from_hex(config.secret))
    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = server_context(config.tls_cert, config.tls_key)
    try:
        agent = Agent(
            config.host,
            config.port,
            vault,
            fence,
            verifier,
            node,
            tls=tls,
            timeout=config.timeout,
            stopping=done,
        )
    except OSError as error:
        raise PlanError(
            f"cannot listen at {config.host} port {config.port}: {error}; give an address of this "
            "machine, and a port that is free, or 0"
        ) from error
    # Nobody knows the port before it is told.
    verifier.address = join(config.host, agent.port)
    return agent


def watch(pid: int, done: threading.Event) -> None:
    """Set ``done`` when a process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise PlanError(f"there is no process {pid} for the agent to watch") from error

    def wait() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        _log.info("Process %d, which started this agent, has ended. Ending the agent.", pid)
        done.set()

    threading.Thread(target=wait, name="watch", daemon=True).start()


def load_node(
    path: str | None, context: Mapping[str, Any], vault: Vault, fence: Fence
) -> Node | None:
    """The node that the function at ``module:attribute`` makes."""
    if path is None:
        return None
    node: Node = named("node", path)(context, vault, fence)
    return node


def record(path: Path, value: dict[str, Any]) -> None:
    """Write a small file that only this user reads, at once."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file)
    partial.rename(path)


def _answers() -> Callable[[dict[str, Any]], None]:
    """The function that answers on standard output. Everything else printed goes to the log."""
    kept = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(value: dict[str, Any]) -> None:
        with os.fdopen(kept, "w") as output:
            output.write(json.dumps(value) + "\n")

    return answer


def _read_config() -> Config:
    line = sys.stdin.readline()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return Config.parse(line)


def _log_to(path: str | None) -> None:
    """Log to the standard error. If its path is given, the file is kept small."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[logging.StreamHandler() if path is None else Trimmed(Path(path))],
        force=True,
    )


def open_many_files() -> None:
    """Raise the limit of open files as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> int:
    """Run the agent. Returns the exit code."""
    # Whatever is written from here on is for this user alone.
    os.umask(0o077)
    _log_to(None)
    process_gives_way()
    give_memory_back()
    answer = _answers()
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    try:
        config = _read_config()
        _log_to(config.log)
        open_many_files()
        if config.watch_pid is not None:
            watch(config.watch_pid, done)
        serve(config, done, answer)
    except StateLocked as error:
        _log.warning("Another agent uses this folder already. Ending this agent: %s", error)
        answer({"busy": True})
    except Exception:
        _log.exception("The agent failed.")
        return 1
    _log.info("The agent has ended.")
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Calls that are still under way would keep the interpreter from ending.
    os._exit(code)
