"""Actions for the agents in the tests, imported by the agents themselves."""

from collections.abc import Callable, Mapping
from typing import Any

from anabranch.errors import CheckpointCorrupt, Fenced
from anabranch.nodes import Vault


class Special(Fenced):
    pass


Actions = Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]


def make(context: dict[str, Any], vault: Vault) -> Actions:
    print("this goes to the log, not into the answer")

    def fail(request: dict[str, Any]) -> dict[str, Any]:
        kinds = {"corrupt": CheckpointCorrupt, "special": Special, "bug": ZeroDivisionError}
        raise kinds[request["kind"]](request["message"])

    return {
        "echo": lambda request: {"context": context, "request": request},
        "names": lambda request: {"names": list(vault.list())},
        "fail": fail,
        "odd": lambda request: {"x": object()},
    }


def broken(context: dict[str, Any], vault: Vault) -> Actions:
    raise RuntimeError("these actions cannot be made")
