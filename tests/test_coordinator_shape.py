"""The coordinator is a loop and a thin shell: small classes, and Spark in the shell alone."""

from __future__ import annotations

import ast
from pathlib import Path

COORDINATOR = Path(__file__).parents[1] / "src" / "anabranch" / "coordinator"

SHELL = {"assembly", "batches", "failures", "frames", "nodes", "replays", "stream"}
"""The modules around the loop that speak to Spark. All others know of it by name at most."""

MOST_METHODS = 15


def modules() -> dict[str, ast.Module]:
    return {path.stem: ast.parse(path.read_text()) for path in COORDINATOR.glob("*.py")}


def imports_spark(tree: ast.Module) -> bool:
    """Whether a module imports PySpark or py4j, wherever it does so and be it for a type."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return any(name.partition(".")[0] in ("pyspark", "py4j") for name in names)


def test_no_class_does_everything() -> None:
    sizes = {
        f"{module}.{node.name}": sum(isinstance(each, ast.FunctionDef) for each in node.body)
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert sizes
    assert {name: size for name, size in sizes.items() if size > MOST_METHODS} == {}


def test_spark_is_imported_in_the_shell_alone() -> None:
    assert {module for module, tree in modules().items() if imports_spark(tree)} == SHELL


def test_there_is_one_way_with_a_cluster_and_without() -> None:
    """Who would ask whether there is a cluster asks a node instead, which is there in any case."""
    asked = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and "cluster" in ast.unparse(node.left)
        and isinstance(node.ops[0], ast.Is | ast.IsNot)
    ]
    assert asked == []
