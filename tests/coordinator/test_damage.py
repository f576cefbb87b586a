"""Every file of a checkpoint folder, damaged in every way: right results, or refused by its name.

``DAMAGE`` sets how many folders are damaged (make damage: 100,000), ``SEED`` repeats a run.
"""

import multiprocessing
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from anabranch.errors import AnabranchError
from coordinator.mini import Mini, expected, results

DAMAGE = int(os.environ.get("DAMAGE", "150"))
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
EVERY = 3

Damage = Callable[[Path, random.Random], None]


def flip(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def cut(file: Path, chance: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: chance.randrange(len(data))] if data else b"")


def swap(file: Path, chance: random.Random) -> None:
    other = chance.choice([each for each in file.parent.iterdir() if each.is_file()])
    data = other.read_bytes()
    other.write_bytes(file.read_bytes())
    file.write_bytes(data)


def lose(file: Path, chance: random.Random) -> None:
    file.unlink()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A query that was killed some batches after its third checkpoint; its tables are lost."""
    machine = tmp_path_factory.mktemp("machine")
    (machine / "disk").mkdir()
    query = Mini(machine / "disk", machine / "memory", None, every=EVERY)
    query.start()
    for _ in range(4 * EVERY + 1):
        query.step()
    query.end(killed=True)
    return machine


def started_again(machine: Path) -> str | None:
    """Go on for two batches; why that is refused, if it is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        query = None
        try:
            query = Mini(machine / "disk", Path(memory), None, every=EVERY)
            query.start()
            for _ in range(2):
                query.step()
        except AnabranchError as error:
            return str(error)
        finally:
            if query is not None:
                query.end(killed=True)
    return None


def damaged_once(whole: Path, number: int) -> str:
    """Damage one file of a copy, and go on: whether that was ``right`` or ``refused``."""
    chance = random.Random(f"{SEED}-{number}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as copy:
        machine = Path(copy)
        shutil.copytree(whole / "disk", machine / "disk")
        files = sorted(f for f in (machine / "disk" / "ck").rglob("*") if f.is_file())
        file, damage = chance.choice(files), chance.choice([flip, cut, swap, lose])
        damage(file, chance)
        told = f"SEED={SEED}, number {number}: {damage.__name__} {file.relative_to(machine)}"
        refusal = started_again(machine)
        if refusal is None:
            found = results(machine / "disk")
            assert found == expected(len(found)), told
            return "right"
        names = {file.name, file.name.removeprefix(".").removesuffix(".crc")}
        names |= {f.name for f in file.parent.iterdir()} if damage is swap else set()
        assert any(name in refusal for name in names), f"{told}: {refusal}"
        return "refused"


def test_damage_is_made_good_or_refused_by_name(whole: Path) -> None:
    print(f"SEED={SEED}")
    one = partial(damaged_once, whole)
    if DAMAGE <= 1000:
        outcomes = Counter(map(one, range(DAMAGE)))
    else:
        os.environ["SEED"] = str(SEED)  # for the other processes
        spawn = multiprocessing.get_context("spawn")
        # Twice the processors: a trial waits half of its time for its own threads.
        with ProcessPoolExecutor(2 * (os.cpu_count() or 1), spawn) as pool:
            outcomes = Counter(pool.map(one, range(DAMAGE), chunksize=100))
    print(dict(outcomes))
    assert outcomes.total() == DAMAGE
    assert min(outcomes["right"], outcomes["refused"]) > DAMAGE // 20
