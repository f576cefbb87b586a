"""What the two distributions of this repository contain, and that one does not know the other."""

import re
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
BENCHMARKS = re.compile(r"\banabranch_(bench|linearroad)\b")


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return found


def wheel(folder: Path, target: Path) -> dict[str, str]:
    """The files of the wheel that is built from a folder, without what describes it."""
    (built,) = WheelBuilder(str(folder)).build(directory=str(target), versions=["standard"])
    with ZipFile(built) as packed:
        return {
            name: packed.read(name).decode()
            for name in packed.namelist()
            if ".dist-info/" not in name
        }


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return wheel(ROOT, tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return wheel(ROOT / "bench", tmp_path_factory.mktemp("benchmarks"))


def packages(files: dict[str, str]) -> set[str]:
    return {name.split("/")[0] for name in files}


def test_the_library_is_installed_alone(library: dict[str, str]) -> None:
    assert packages(library) == {"anabranch", "pyspark_anabranch"}
    assert "anabranch/py.typed" in library
    parts = {part.removesuffix(".py") for name in library for part in name.split("/")}
    assert not parts & {"bench", "linearroad", "lrb", "soak"}


def test_the_benchmarks_are_in_the_other_one(benchmarks: dict[str, str]) -> None:
    assert packages(benchmarks) == {"anabranch_bench", "anabranch_linearroad"}
    assert {f"{package}/py.typed" for package in packages(benchmarks)} <= set(benchmarks)


def test_dependencies_point_one_way(library: dict[str, str], benchmarks: dict[str, str]) -> None:
    assert [name for name, text in library.items() if BENCHMARKS.search(text)] == []
    road = {n: text for n, text in benchmarks.items() if n.startswith("anabranch_linearroad/")}
    assert len(road) > 10
    assert [name for name, text in road.items() if "anabranch_bench" in text] == []


def test_they_are_released_together() -> None:
    library, benchmarks = project(ROOT), project(ROOT / "bench")
    assert benchmarks["version"] == library["version"]
    assert f"anabranch=={library['version']}" in benchmarks["dependencies"]
    assert not {need for need in library["dependencies"] if "bench" in need}
