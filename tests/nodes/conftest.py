"""Agents for the tests: real processes, which end with the tests."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from node_tools import LIMIT, Reached, Starter

from anabranch.nodes import AgentAddress, Secret, Signer, start_agent


@pytest.fixture(scope="module")
def secret() -> Secret:
    return Secret.new()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def start(secret: Secret, home: Path) -> Iterator[Starter]:
    """Starts agents, and ends them afterwards."""
    started: list[int] = []

    def one(**changes: Any) -> AgentAddress:
        wanted = {
            "secret": secret, "host": "127.0.0.1", "folder": home / "folder", "limit": LIMIT,
            "watch_pid": os.getpid(), "node": "acting:make", "context": {"where": "here"},
            "log": home / "agent.log",
        }  # fmt: skip
        address = start_agent(**{**wanted, **changes})
        # A descriptor: the number of a process that ended may be that of another one later.
        started.append(os.pidfd_open(address.pid))
        return address

    yield one
    for descriptor in started:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


@pytest.fixture(scope="module")
def agent(start: Starter) -> AgentAddress:
    return start()


@pytest.fixture
def node(agent: AgentAddress, secret: Secret) -> Iterator[Reached]:
    """A store over the agent of the module, empty at first."""
    with Reached(str(agent), Signer(secret)) as store:
        for name in store.list():
            store.delete(name)
        yield store
