"""The process of the query, watched: orders and answers, and a new one when it has ended."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.errors import AnabranchError, QueryFailed

_LOG_BYTES = 64 * 2**20
"""The error output is begun anew when it is larger than this, and the older half is kept."""
_GRACE, _STOP = 20.0, 120.0


class Gone(AnabranchError):
    """The process ended before it answered."""


class Hung(AnabranchError):
    """Nothing has happened for too long; the message says what was waited for."""


@dataclass
class Driver:
    """Starts the program, again whenever it ends, and asks it for things."""

    settings: Callable[[], dict[str, Any]]
    environment: dict[str, str]
    log: Path
    say: Callable[[str], None]
    status: dict[str, Any] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    """How many events of each kind there were, in all runs of the program."""
    starts: int = 0
    failures: list[str] = field(default_factory=list)
    """Why the query ended by itself, if it did."""
    advanced: float = field(default_factory=time.monotonic)
    """When the last batch was committed, or the program was started."""
    _process: subprocess.Popen[str] | None = None
    _answers: dict[int, queue.Queue[dict[str, Any] | None]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sent: int = 0
    _killed: bool = False
    _over: bool = False
    _said: str | None = None

    def start(self) -> None:
        """Start the program and keep it running."""
        threading.Thread(target=self._keep_running, name="driver", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def ask(self, op: str, seconds: float, **fields: Any) -> Any:
        """Have something done; Gone if the process ends first, Hung if it takes too long."""
        with self._lock:
            self._sent += 1
            number, answers = self._sent, queue.Queue[dict[str, Any] | None]()
            process = self._process
            if process is None or process.stdin is None or not self.status:
                raise Gone(f"{op}: the query is not running")
            self._answers[number] = answers
            try:
                process.stdin.write(json.dumps({"id": number, "op": op, **fields}) + "\n")
                process.stdin.flush()
            except (BrokenPipeError, ValueError) as error:
                raise Gone(f"{op}: the query is not running") from error
        try:
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            self.show_stacks()
            raise Hung(f"{op} {fields}: no answer in {seconds:.0f} s; see {self.log}") from None
        finally:
            self._answers.pop(number, None)
        if answer is None:
            raise Gone(f"{op}: the driver ended before it was done")
        if "error" in answer:
            raise QueryFailed(str(answer["error"]))
        return answer["ok"]

    def insist(self, op: str, seconds: float, **fields: Any) -> Any:
        """Ask again and again, whatever happens to the process, until it is done."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                self.show_stacks()
                raise Hung(f"{op} {fields}: not done after {seconds:.0f} s; see {self.log}")
            try:
                return self.ask(op, left, **fields)
            except (Gone, QueryFailed):
                time.sleep(1.0)

    def kill(self) -> None:
        """Kill the driver with its JVM, as when its machine is lost."""
        process = self._process
        if process is not None and process.poll() is None:
            self._killed, self.status = True, {}
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def pause(self, seconds: float) -> None:
        """Have the driver and its JVM stand still for a while."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.killpg(process.pid, signal.SIGCONT)

    def show_stacks(self) -> None:
        """Have all threads of the driver, and of its JVM, write where they are into the log."""
        pid = self.pid
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
        )
        for child in found.stdout.split():
            command = Path(f"/proc/{child}/cmdline")
            with suppress(OSError):
                if b"java" in command.read_bytes():
                    os.kill(int(child), signal.SIGQUIT)
        time.sleep(1.0)

    def stop(self) -> None:
        """Stop the query and end the process."""
        self._over = True
        process = self._process
        if process is None:
            return
        try:
            self.ask("stop", _STOP)
        except (Gone, QueryFailed) as error:
            ended = str(error)
        else:
            ended = "it did not end"
        try:
            code = process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            code = -1
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code:
            self.failures.append(f"the query could not be stopped in order: {ended}")

    def _keep_running(self) -> None:
        while not self._over:
            self._killed, self._said, self.status = False, None, {}
            _shorten(self.log)
            with self.log.open("a") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "anabranch_bench.soak.program",
                        json.dumps(self.settings()),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=self.environment,
                    start_new_session=True,
                )
            self.starts += 1
            self.advanced = time.monotonic()
            self._listen(self._process)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        seen: dict[str, int] = {}
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            told = json.loads(line)
            if "status" in told:
                self._note(told["status"], seen)
            elif "failed" in told:
                self._said = told["failed"]
            elif (answers := self._answers.get(told.get("id", -1))) is not None:
                answers.put(told)
        code = process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a JVM that is left would hold the query
        with self._lock:
            self._process = None
            for answers in self._answers.values():
                answers.put(None)
        if not self._killed and not self._over:
            why = self._said or f"the process ended with code {code}; see {self.log}"
            self.failures.append(why)
            self.say(f"FAILED BY ITSELF: {why[:1500]}")

    def _note(self, status: dict[str, Any], seen: dict[str, int]) -> None:
        if self._killed:
            return
        if status["version"] != self.status.get("version"):
            self.advanced = time.monotonic()
        for kind, count in status["events"].items():
            # The program counts the newest thousand of its run.
            self.events[kind] = self.events.get(kind, 0) + max(0, count - seen.get(kind, 0))
            seen[kind] = count
        self.status = status


def _shorten(log: Path) -> None:
    if log.exists() and log.stat().st_size > _LOG_BYTES:
        log.write_bytes(log.read_bytes()[-_LOG_BYTES // 2 :])
