"""``import anabranch as ab``: what is public, and that type checkers see the same as programs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import anabranch as ab


def for_type_checkers() -> dict[str, str]:
    """The names that the imports in the block for type checkers give, and their modules."""
    tree = ast.parse(Path(ab.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    found: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for name in node.names:
            assert name.asname == name.name, "only this form is exported"
            found[name.name] = f"{node.module}"
    return found


def test_programs_and_type_checkers_see_the_same() -> None:
    homes = {name: f"anabranch.{module}" for name, module in ab._HOMES.items()}
    assert homes == for_type_checkers()


@pytest.mark.parametrize("name", ab.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(ab, name)
    assert value is getattr(sys.modules[f"anabranch.{ab._HOMES[name]}"], name)
    assert name in dir(ab)


def test_no_public_name_is_that_of_a_package() -> None:
    """The interpreter would put the package in its place as soon as that is imported."""
    parts = {path.stem for path in Path(ab.__file__).parent.iterdir()}
    assert parts & set(ab.__all__) == set()


def test_public_names_can_be_imported_and_others_are_refused() -> None:
    program = "from anabranch import Files, query, tumbling; from anabranch import *; print(Query)"
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)
    with pytest.raises(AttributeError, match="module 'anabranch' has no attribute 'wat'"):
        getattr(ab, "wat")  # noqa: B009  type checkers know that it is not there
