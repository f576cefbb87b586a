"""Requests of the tests, and a node that carries them out, imported by the agents themselves."""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node_tools import Reached

from anabranch.errors import CheckpointCorrupt, Fenced, Refused
from anabranch.nodes import Deadline, Fence, Secret, Signer, Vault
from anabranch.nodes.requests import Address, Change, Request


class Special(Fenced):
    pass


@dataclass(frozen=True)
class Echoed:
    where: str
    text: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Echo(Change[Echoed]):
    text: str = ""
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Names(Request[tuple[str, ...]]):
    pass


@dataclass(frozen=True, kw_only=True)
class Fail(Request[None]):
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Odd(Request[str]):
    pass


@dataclass(frozen=True, kw_only=True)
class Sleep(Change[None]):
    milliseconds: int


@dataclass(frozen=True, kw_only=True)
class Look(Request[None]):
    """Sleeps too, and changes nothing."""

    milliseconds: int


@dataclass(frozen=True, kw_only=True)
class PassOn(Change[None]):
    to: Address
    name: str


@dataclass(frozen=True, kw_only=True)
class Temporary(Request[str]):
    pass


@dataclass(frozen=True, kw_only=True)
class Print(Request[None]):
    times: int


class Acting:
    def __init__(self, context: Mapping[str, Any], vault: Vault) -> None:
        self._context = context
        self._vault = vault

    def ask(self, request: Request[Any], deadline: Deadline) -> Any:
        match request:
            case Echo():
                return Echoed(self._context["where"], request.text, request.numbers)
            case Names():
                return tuple(self._vault.list())
            case Fail():
                kinds = {"corrupt": CheckpointCorrupt, "special": Special, "bug": ZeroDivisionError}
                raise kinds[request.kind](request.message)
            case Odd():
                return object()
            case Sleep() | Look():
                return time.sleep(request.milliseconds / 1000)
            case PassOn():
                signer = Signer(Secret.from_hex(self._context["secret"]))
                with Reached(request.to, signer, timeout=20) as node:
                    return node.put(request.name, bytes(1 << 20))
            case Temporary():
                folder = tempfile.mkdtemp()
                Path(folder, "file").write_text("x")
                return folder
            case Print():
                return print(("x" * 99 + "\n") * request.times)
        raise Refused(f"there is nothing to {request.verb} here")


def make(context: Mapping[str, Any], vault: Vault, fence: Fence) -> Acting:
    print("this goes to the log, not into the answer")
    return Acting(context, vault)


def broken(context: Mapping[str, Any], vault: Vault, fence: Fence) -> Acting:
    raise RuntimeError("this node cannot be made")
