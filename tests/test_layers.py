"""The import graph, drawn from the syntax trees: dependencies point one way.

An import counts wherever it stands: in a function, or for types alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "anabranch"

FACADE = "anabranch"
LEAVES = {"errors", "units", "boot", "durable", "places", "priority", "private"}
ORDER: list[set[str]] = [
    {"cli", "dashboard"},
    {"cluster", "testing", FACADE},
    {"query"},
    {"coordinator"},
    {"protocols", "checkpointing", "backup", "movement", "placement", "detection", "spark"},
    {"worker"},
    {"plan", "nodes"},
    {"operators"},
    {"state"},
    {"kernels"},
    LEAVES,
]
"""A package imports those that stand below it. The facade is ``import anabranch`` itself."""

BESIDE = {
    ("protocols", "checkpointing"),  # when a checkpoint is due is asked of the policy
    ("spark", "backup"),  # Spark reads the state that is in a checkpoint folder
}
"""The only edges between packages that stand beside each other. The leaves may form a tree."""

NEVER = {
    ("protocols", "spark"),
    ("protocols", "worker"),
    ("protocols", "nodes"),
    ("backup", "worker"),
    ("worker", "plan"),
}
"""Edges that point down and are wrong all the same."""

WITH_SPARK = {"cli", "cluster", "testing", "query", "coordinator", "spark", "worker"}
"""Where PySpark is imported. Anywhere else it is not, not even for a type."""

_STORES = "the parts of backups and the protocol of a store are not below nodes yet"
KNOWN = {
    ("anabranch.nodes.codec", "backup"): _STORES,
    ("anabranch.nodes.fence", "backup"): _STORES,
    ("anabranch.nodes.local", "backup"): _STORES,
    ("anabranch.nodes.remote", "backup"): _STORES,
    ("anabranch.nodes.serving", "backup"): _STORES,
    ("anabranch.nodes.vault", "backup"): _STORES,
}
"""Edges against the order that are still there, each from a module to a package, and why."""

LEVEL = {name: level for level, row in enumerate(ORDER) for name in row}


class Edge(NamedTuple):
    """A module imports something."""

    module: str
    imported: str

    @property
    def packages(self) -> tuple[str, str]:
        return package(self.module), package(self.imported)

    @property
    def known_as(self) -> tuple[str, str]:
        return self.module, package(self.imported)

    def __str__(self) -> str:
        return f"{self.module} imports {self.imported}"


def package(module: str) -> str:
    """The part of the library that a module belongs to."""
    _, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if not name:
        return FACADE
    return name if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file() else FACADE


def imported_by(tree: ast.AST) -> Iterator[str]:
    """What the imports of a syntax tree name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            if node.module == FACADE:
                yield from (f"{FACADE}.{name.name}" for name in node.names)
            else:
                yield node.module


def graph() -> list[Edge]:
    """All imports of all modules, but for those of the facade, which imports everything."""
    edges = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        if module != FACADE:
            edges += [Edge(module, name) for name in imported_by(ast.parse(path.read_text()))]
    return edges


def is_allowed(edge: Edge) -> bool:
    above, below = edge.packages
    if above == below or {above, below} <= LEAVES:
        return True
    if LEVEL[above] == LEVEL[below]:
        return (above, below) in BESIDE
    return LEVEL[above] < LEVEL[below] and (above, below) not in NEVER


def against() -> list[Edge]:
    """The edges against the order."""
    ours = [edge for edge in graph() if edge.imported.partition(".")[0] == FACADE]
    return [edge for edge in ours if not is_allowed(edge)]


def test_every_package_has_its_place_in_the_order() -> None:
    names = {path.stem for path in SOURCE.iterdir() if not path.name.startswith("_")}
    assert names - {"py"} <= LEVEL.keys()


def test_dependencies_point_one_way() -> None:
    assert [str(edge) for edge in against() if edge.known_as not in KNOWN] == []


def test_edges_that_are_gone_are_not_known_any_more() -> None:
    assert KNOWN.keys() - {edge.known_as for edge in against()} == set()


def test_spark_is_imported_where_it_is_used_alone() -> None:
    spark = [edge for edge in graph() if edge.imported.partition(".")[0] in ("pyspark", "py4j")]
    assert [str(edge) for edge in spark if package(edge.module) not in WITH_SPARK] == []
    assert {package(edge.module) for edge in spark} == WITH_SPARK
