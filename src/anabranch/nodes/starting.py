"""Starting the agent of a node, or finding the one that runs."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.errors import DidNotHappen, PlanError, Refused, StoreError
from anabranch.nodes.chunks import TIMEOUT
from anabranch.nodes.fence import EPOCH, Fence
from anabranch.nodes.log import private_file
from anabranch.nodes.node import Deadline
from anabranch.nodes.remote import RemoteNode
from anabranch.nodes.requests import Epoch, Ping
from anabranch.nodes.tickets import Secret, Signer
from anabranch.private import private_folder
from anabranch.state.lock import holder_of

_log = logging.getLogger(__name__)

ADDRESS = "agent.json"
START = 60.0
_PING = 5.0
_SILENT = 10.0
"""An agent that uses a folder and does not answer for this many seconds is killed."""
_END = 10.0
_PAUSE = 0.1
_QUOTED_LINES = 15


@dataclass(frozen=True)
class AgentAddress:
    """The address of an agent, and its process there; prints as ``host:port``."""

    host: str
    port: int
    pid: int

    def __str__(self) -> str:
        return join(self.host, self.port)


def join(host: str, port: int) -> str:
    """``host:port``, with brackets around the numbers of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def start_agent(
    *,
    secret: Secret,
    host: str,
    folder: Path,
    limit: int | None,
    watch_pid: int | None,
    epoch: Epoch | None = None,
    node: str | None = None,
    context: Mapping[str, Any] | None = None,
    warm: str | None = None,
    log: Path,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    tls_root: Path | None = None,
    timeout: float = START,
    transfer_timeout: float = TIMEOUT,
) -> AgentAddress:
    """Start an agent on this machine that keeps up to ``limit`` bytes of backups in ``folder``.

    With a limit of None it keeps as much as the disk has room for. Only this user can read folder
    and log. The agent listens at ``host`` and writes to ``log``. It survives this process, and ends
    with the process ``watch_pid`` (None: on the request Stop). ``node`` names a function
    ``make(context, vault, fence) -> Node`` as ``module:attribute``. ``warm`` names one that is
    called once during the first requests, to load what they need. A transfer that stalls for
    ``transfer_timeout`` seconds fails.

    If an agent with the same secret uses the folder already, its address is returned, and it keeps
    its settings. An agent that hangs is killed and replaced, and so is one of a driver before that
    of ``epoch``. Deposed if it belongs to a later driver. DidNotHappen, with the end of the log, if
    no agent answers within ``timeout`` seconds.
    """
    request = {
        "secret": secret.to_hex(),
        "host": host,
        "port": 0,
        "folder": str(Path(folder).absolute()),
        "limit": limit,
        "log": _text(log),
        "timeout": transfer_timeout,
        "watch_pid": watch_pid,
        "epoch": epoch,
        "node": node,
        "warm": warm,
        "context": dict(context or {}),
        "tls_cert": _text(tls_cert),
        "tls_key": _text(tls_key),
    }
    if tls_cert is not None and tls_root is None:
        raise PlanError("start_agent: tls_cert needs tls_root, which clients verify the agent with")
    root = None if tls_root is None else tls_root.read_bytes()
    try:
        line = json.dumps(request).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise PlanError(f"start_agent: the context cannot be sent as JSON: {error}") from error
    fence = Fence(Path(folder) / EPOCH)
    deadline = time.monotonic() + timeout
    silent: dict[int, float] = {}
    while True:
        if epoch is not None:
            fence.check(epoch)
        found, why = _running(Path(folder) / ADDRESS, Signer(secret), root)
        if found is not None:
            return found
        answer = _spawn(line, log, deadline)
        if "port" in answer:
            return AgentAddress(host, answer["port"], answer["pid"])
        # Another agent has the folder: it is just starting, it hangs, or it is of another driver.
        holder = holder_of(Path(folder))
        older = epoch is not None and fence.greatest() < epoch
        if holder is not None and isinstance(why, Refused) and older:
            _log.warning("Killing agent %d in %s: it belongs to an earlier driver.", holder, folder)
            _end(holder, Path(folder))
            continue
        if isinstance(why, Refused) or time.monotonic() > deadline:
            raise DidNotHappen(
                f"another agent uses {folder} and does not answer: {why}; kill it (its process id "
                f"is in {Path(folder) / ADDRESS}) or give another folder"
            )
        if holder is not None:
            since = silent.setdefault(holder, time.monotonic() - _PING)
            if time.monotonic() - since >= _SILENT:
                _log.warning("Killing agent %d in %s: it does not answer.", holder, folder)
                _end(holder, Path(folder))
                continue
        time.sleep(_PAUSE)


def _end(pid: int, folder: Path) -> None:
    """Kill the agent that uses a folder, and wait for its end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if holder_of(folder) != pid:  # it has ended, and its number may be that of a stranger
            return
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(1000 * _END)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def _running(
    path: Path, signer: Signer, root: bytes | None
) -> tuple[AgentAddress | None, StoreError | None]:
    """The agent named in a folder, if it answers, otherwise the error."""
    try:
        address = AgentAddress(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        return None, DidNotHappen(f"it has not said where it is: {error}")
    try:
        with RemoteNode(str(address), signer, tls_root=root) as node:
            pid = node.ask(Ping(), Deadline(_PING)).pid
    except StoreError as error:
        return None, error
    if pid != address.pid:
        # The port of an agent that is gone can be the port of another one.
        return None, DidNotHappen(f"at {address} is the agent of another folder")
    return address, None


def _spawn(line: bytes, log: Path, deadline: float) -> dict[str, Any]:
    """Start the process; its answer."""
    private_folder(log.parent)
    with private_file(log) as output, os.fdopen(os.memfd_create("agent"), "w+b") as told:
        written = output.tell()
        told.write(line)
        told.seek(0)
        process = subprocess.Popen(
            # -P: what lies in the working directory is not to be imported.
            [sys.executable, "-P", "-m", "anabranch.nodes.agent"],
            stdin=told,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    received = _received(process, deadline)
    if received.endswith(b"\n"):
        # Someone has to take note of its end, or it stays in the table of processes.
        threading.Thread(target=process.wait, name="agent's end", daemon=True).start()
        answer: dict[str, Any] = json.loads(received)
        return answer
    if time.monotonic() < deadline:
        why = f"its process ended with code {process.wait()}"
    else:
        process.kill()
        process.wait()
        why = "there was no answer in time"
    quoted = _last_lines(log, written) or "(nothing)"
    raise DidNotHappen(f"the agent did not start: {why}; the end of {log}:\n{quoted}")


def _received(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """The answer of the process: a line, incomplete if the process ends or at the deadline."""
    assert process.stdout is not None
    received = b""
    poll = select.poll()
    with process.stdout as stdout:
        poll.register(stdout, select.POLLIN)
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(1000 * left):
                break
            if not (more := os.read(stdout.fileno(), 4096)):
                break
            received += more
    return received


def _last_lines(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_QUOTED_LINES:])


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
