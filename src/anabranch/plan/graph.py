"""The plan of a query: a graph of sources, steps, operators and sinks.

Nodes are plain values that point at their inputs. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from anabranch.operators.operator import Operator

Frame = Any
"""A DataFrame of Spark, of which a plan knows nothing but the names of its columns."""
DEFAULT_KEY_GROUPS = 128


@dataclass(frozen=True, eq=False)
class Source:
    """A streaming DataFrame."""

    frame: Frame

    def __str__(self) -> str:
        return f"source [{', '.join(self.frame.columns)}]"


@dataclass(frozen=True, eq=False)
class Transform:
    """A stateless step: a function from DataFrame to DataFrame."""

    input: Node
    function: Callable[[Frame], Frame]

    def __str__(self) -> str:
        return f"transform {getattr(self.function, '__name__', type(self.function).__name__)}"


@dataclass(frozen=True, eq=False)
class Unpack:
    """The rows in the values of a binary column, many in each."""

    input: Node
    column: str
    schema: pa.Schema

    def __str__(self) -> str:
        return f"unpack {self.column!r} [{', '.join(self.schema.names)}]"


@dataclass(frozen=True, eq=False)
class Stateful:
    """A stateful operator over one keyed input, or over two with the same key."""

    name: str
    operator: Operator
    inputs: tuple[Node, ...]
    keys: tuple[tuple[str, ...], ...]
    key_groups: int = DEFAULT_KEY_GROUPS
    instances: int | None = None

    def __str__(self) -> str:
        keys = " = ".join(", ".join(names) for names in self.keys)
        instances = "" if self.instances is None else f", {self.instances} instances"
        return (
            f"operator {self.name!r}: {self.operator!r} by [{keys}], "
            f"{self.key_groups} key groups{instances}"
        )


@dataclass(frozen=True, eq=False)
class Late:
    """The late rows of an operator."""

    of: Stateful

    def __str__(self) -> str:
        return f"late rows of {self.of.name!r}"


Node = Source | Transform | Unpack | Stateful | Late


@dataclass(frozen=True, eq=False)
class Output:
    """A sink and its input."""

    input: Node
    sink: Any
    """A :class:`~anabranch.spark.sinks.sink.Sink`, which a plan only names."""

    def __str__(self) -> str:
        return f"sink {self.sink!r}"


def inputs(node: Node | Output) -> tuple[Node, ...]:
    """The inputs of a node."""
    match node:
        case Source():
            return ()
        case Stateful():
            return node.inputs
        case Late():
            return (node.of,)
        case _:
            return (node.input,)


@dataclass(frozen=True, eq=False)
class Plan:
    """All sinks of a query, and through them all nodes before them."""

    outputs: tuple[Output, ...]

    def nodes(self) -> list[Node]:
        """Every node once, inputs before their consumers."""
        order: list[Node] = []
        seen: set[int] = set()

        def visit(node: Node) -> None:
            if id(node) in seen:
                return
            seen.add(id(node))
            for before in inputs(node):
                visit(before)
            order.append(node)

        for output in self.outputs:
            visit(output.input)
        return order

    def sources(self) -> list[Source]:
        """The sources, in the order in which the plan reaches them."""
        return [node for node in self.nodes() if isinstance(node, Source)]

    def operators(self) -> list[Stateful]:
        """The stateful operators, upstream ones first."""
        return [node for node in self.nodes() if isinstance(node, Stateful)]

    def consumers(self, node: Node) -> list[Node | Output]:
        """The consumers of a node."""
        everything: list[Node | Output] = [*self.nodes(), *self.outputs]
        return [after for after in everything if any(before is node for before in inputs(after))]

    def operators_after(self, node: Node) -> Iterator[Stateful]:
        """The operators after a node, directly or through other nodes."""
        for after in self.consumers(node):
            if isinstance(after, Stateful):
                yield after
            if not isinstance(after, Output):
                yield from self.operators_after(after)

    def packs(self, node: Stateful) -> bool:
        """Whether rows reach an operator packed: a worker makes them, and they have no other use.

        From any other step they come as rows of Spark.
        """
        if len(node.inputs) > 1:
            return False
        before = node.inputs[0]
        return isinstance(before, Unpack | Stateful) and len(self.consumers(before)) == 1

    def tree(self) -> str:
        """The plan as text: every sink with its inputs below.

        A node with several consumers is printed once, and then referred to by its number.
        """
        lines: list[str] = []
        numbers: dict[int, int] = {}

        def draw(node: Node | Output, prefix: str, branch: str, below: str) -> None:
            if id(node) in numbers:
                lines.append(f"{prefix}{branch}(see #{numbers[id(node)]})")
                return
            shared = not isinstance(node, Output) and len(self.consumers(node)) > 1
            mark = ""
            if shared:
                numbers[id(node)] = len(numbers) + 1
                mark = f"#{numbers[id(node)]} "
            lines.append(f"{prefix}{branch}{mark}{node}")
            before: Sequence[Node] = inputs(node)
            for at, child in enumerate(before):
                last = at == len(before) - 1
                draw(child, prefix + below, "└─ " if last else "├─ ", "   " if last else "│  ")

        for output in self.outputs:
            draw(output, "", "", "")
        return "\n".join(lines)
