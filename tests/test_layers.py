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
LEAVES = {"errors", "units", "boot", "durable", "mounts", "named", "priority", "private", "uris"}
ORDER: list[set[str]] = [
    {"cli", "dashboard"},
    {"cluster", "testing", FACADE},
    {"queries"},
    {"coordinator"},
    {"protocols", "spark"},
    {"checkpointing", "backup", "movement", "placement", "detection"},
    {"worker"},
    {"plan", "nodes"},
    {"operators"},
    {"stores"},
    {"state", "fragments"},
    {"kernels", "ring"},
    LEAVES,
]
"""A package imports those that stand below it, never one beside it; the leaves may form a tree. The
facade is ``import anabranch`` itself."""

NEVER = {
    ("protocols", "spark"),
    ("protocols", "worker"),
    ("protocols", "nodes"),
    ("backup", "worker"),
    ("worker", "plan"),
}
"""Edges that point down and are wrong all the same."""

WITH_SPARK = {"cli", "cluster", "testing", "queries", "coordinator", "spark", "worker"}
"""Where PySpark is imported. Anywhere else it is not, not even for a type."""

LEVEL = {name: level for level, row in enumerate(ORDER) for name in row}


class Edge(NamedTuple):
    """A module imports something."""

    module: str
    imported: str

    @property
    def packages(self) -> tuple[str, str]:
        return package(self.module), package(self.imported)

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
    return LEVEL[above] < LEVEL[below] and (above, below) not in NEVER


def test_every_package_has_its_place_in_the_order() -> None:
    names = {path.stem for path in SOURCE.iterdir() if not path.name.startswith("_")}
    assert names - {"py"} <= LEVEL.keys()


def test_dependencies_point_one_way() -> None:
    ours = [edge for edge in graph() if edge.imported.partition(".")[0] == FACADE]
    assert [str(edge) for edge in ours if not is_allowed(edge)] == []


def test_spark_is_imported_where_it_is_used_alone() -> None:
    spark = [edge for edge in graph() if edge.imported.partition(".")[0] in ("pyspark", "py4j")]
    assert [str(edge) for edge in spark if package(edge.module) not in WITH_SPARK] == []
    assert {package(edge.module) for edge in spark} == WITH_SPARK


AXES = {"checkpointing", "backup", "movement", "placement", "detection"}
A_FOLDER = "anabranch.coordinator.folder imports anabranch.backup.files"
"""The checkpoint folder is a store of files, whatever the backup policy is."""


def test_protocols_and_coordinator_name_no_policy() -> None:
    """They know what every policy of an axis can be asked, and not which ones there are."""
    named = [
        str(edge)
        for edge in graph()
        if package(edge.module) in ("protocols", "coordinator")
        and package(edge.imported) in AXES
        and not edge.imported.endswith(".policy")
    ]
    assert named == [A_FOLDER]
