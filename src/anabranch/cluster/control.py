"""Commands to the process that runs a cluster: JSON lines over a unix socket.

A request is ``{"op": "kill", "host": "127.0.0.2"}``; an answer is ``{"ok": {...}}`` or
``{"error": "..."}``. The socket is in a folder that only its user can enter.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import socketserver
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from anabranch.errors import AnabranchError, ClusterFailed

LONGEST = 1 << 16
"""How many bytes a request or an answer may have."""
_PATIENCE = 5.0  # seconds for a client to say what it wants
_ANSWER = 240.0  # seconds; starting a node on a busy machine takes a while

Operation = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Takes the fields of a request and returns those of the answer."""


def runtime_folder() -> Path:
    """The user's folder for sockets; made if missing, refused if others can enter it."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(given) / "anabranch"
        if given
        else Path(tempfile.gettempdir()) / f"anabranch-{os.getuid()}"
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ClusterFailed(
            f"{folder} must be a folder that only you can enter; remove it, or set "
            "XDG_RUNTIME_DIR to a folder of your own"
        )
    return folder


@contextmanager
def serve(path: Path, operations: Mapping[str, Operation]) -> Iterator[None]:
    """Answer requests in the background, for as long as the block runs.

    Only one process serves a path; another one is refused.
    """
    with _claimed(path), _Server(str(path), _Handler) as server:
        path.chmod(0o600)
        server.operations = operations
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            path.unlink(missing_ok=True)


def ask(path: Path, op: str, **fields: Any) -> dict[str, Any]:
    """Send a command to the cluster behind a socket, and return its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise ClusterFailed("no cluster is running; start one: anabranch cluster up") from error
        try:
            connection.sendall(_line({"op": op, **fields}))
            with connection.makefile("rb") as answers:
                line = answers.readline(LONGEST)
        except OSError as error:
            raise ClusterFailed(
                f"the cluster did not answer the command {op!r} ({error}); check its state with: "
                "anabranch cluster status"
            ) from error
    answer = _parse(line)
    if answer is None:
        raise ClusterFailed(f"the cluster's process ended before it answered the command {op!r}")
    if "error" in answer:
        raise ClusterFailed(str(answer["error"]))
    return cast("dict[str, Any]", answer["ok"])


class _Server(socketserver.ThreadingUnixStreamServer):
    # An answer under way is sent before the server is gone.
    daemon_threads = False
    operations: Mapping[str, Operation]


class _Handler(socketserver.StreamRequestHandler):
    timeout = _PATIENCE

    def handle(self) -> None:
        try:
            line = self.rfile.readline(LONGEST)
        except TimeoutError:
            return
        answer = _answer(cast("_Server", self.server).operations, line)
        self.connection.settimeout(_PATIENCE)
        try:
            self.wfile.write(_line(answer))
        except (BrokenPipeError, TimeoutError):
            return  # nobody waits for the answer any more


def _answer(operations: Mapping[str, Operation], line: bytes) -> Mapping[str, Any]:
    request = _parse(line)
    if request is None:
        return {"error": f"a request is one line of JSON, an object of at most {LONGEST} bytes"}
    operation = operations.get(str(request.get("op")))
    if operation is None:
        known = ", ".join(sorted(operations))
        return {"error": f"there is no operation {request.get('op')!r}; there are {known}"}
    try:
        return {"ok": operation(request)}
    except AnabranchError as error:
        return {"error": str(error)}


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


@contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Hold the lock of this path, and remove what a killed process has left there."""
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ClusterFailed(
                "you have a cluster running already; stop it first: anabranch cluster down"
            ) from error
        path.unlink(missing_ok=True)
        yield
