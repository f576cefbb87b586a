"""Actions for the agents in the tests, imported by the agents themselves."""

import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from anabranch.errors import CheckpointCorrupt, Fenced
from anabranch.nodes import NodeStore, Secret, Signer, Vault


class Special(Fenced):
    pass


Actions = Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]


def make(context: dict[str, Any], vault: Vault) -> Actions:
    print("this goes to the log, not into the answer")

    def fail(request: dict[str, Any]) -> dict[str, Any]:
        kinds = {"corrupt": CheckpointCorrupt, "special": Special, "bug": ZeroDivisionError}
        raise kinds[request["kind"]](request["message"])

    def pass_on(request: dict[str, Any]) -> dict[str, Any]:
        signer = Signer(Secret.from_hex(context["secret"]))
        with NodeStore(request["to"], signer, timeout=20) as node:
            node.put(request["name"], bytes(1 << 20))
        return {}

    return {
        "echo": lambda request: {"context": context, "request": request},
        "names": lambda request: {"names": list(vault.list())},
        "fail": fail,
        "odd": lambda request: {"x": object()},
        "sleep": lambda request: time.sleep(request["seconds"]) or {},
        "pass_on": pass_on,
        "temporary": lambda request: {"name": tempfile.mkdtemp()},
        "print": lambda request: print(("x" * 99 + "\n") * request["times"]) or {},
    }


def broken(context: dict[str, Any], vault: Vault) -> Actions:
    raise RuntimeError("these actions cannot be made")
