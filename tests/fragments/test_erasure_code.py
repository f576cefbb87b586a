"""The code against a slow model of it."""

import ctypes
import importlib.metadata
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import PlanError
from anabranch.fragments import code as code_module
from anabranch.fragments.code import LARGEST, Code, Row, code_of, library
from fragments import slow


def rows_of(data: list[bytes]) -> list[Row]:
    return [np.frombuffer(row, np.uint8) for row in data]


def empty(count: int, size: int) -> list[Row]:
    return [np.full(size, 0xEE, np.uint8) for _ in range(count)]


def coded(code: Code, data: list[bytes]) -> list[bytes]:
    """All rows."""
    parity = empty(code.parity, len(data[0]))
    products = code.products(range(code.data), range(code.data, code.data + code.parity))
    code.compute(products, rows_of(data), parity)
    return data + [row.tobytes() for row in parity]


@st.composite
def shapes(draw: st.DrawFn, largest: int = 12) -> tuple[int, int]:
    return draw(st.integers(1, largest)), draw(st.integers(1, largest))


@given(shapes(), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=60)
def test_parity_and_data_are_those_of_the_model(
    shape: tuple[int, int], blocks: int, seed: int
) -> None:
    m, k = shape
    chance = random.Random(seed)
    code = Code(m, k)
    data = [chance.randbytes(64 * blocks) for _ in range(m)]
    rows = coded(code, data)
    assert rows[m:] == slow.encode(m, k, data)
    have = chance.sample(range(m + k), m)
    again = empty(m, 64 * blocks)
    code.compute(code.products(have, range(m)), rows_of([rows[at] for at in have]), again)
    assert [row.tobytes() for row in again] == data
    assert slow.decode(m, k, {at: rows[at] for at in have}) == data


@given(
    st.sampled_from([(1, 254), (254, 1), (127, 128), (100, 100), (16, 16), (10, 20)]),
    st.integers(0, 2**32),
)
@settings(max_examples=25)
def test_large_codes_give_the_data_and_lost_parity_again(shape: tuple[int, int], seed: int) -> None:
    m, k = shape
    chance = random.Random(seed)
    code = code_of(m, k)
    rows = coded(code, [chance.randbytes(128) for _ in range(m)])
    have = chance.sample(range(m + k), m)
    want = sorted(set(range(m + k)) - set(have))
    again = empty(len(want), 128)
    code.compute(code.products(have, want), rows_of([rows[at] for at in have]), again)
    assert [row.tobytes() for row in again] == [rows[at] for at in want]


def test_every_set_of_rows_gives_the_data() -> None:
    code = Code(5, 5)
    rows = coded(code, [bytes([at]) * 64 for at in range(5)])
    for have in itertools.combinations(range(10), 5):
        again = empty(5, 64)
        code.compute(code.products(have, range(5)), rows_of([rows[at] for at in have]), again)
        assert [row[0] for row in again] == list(range(5))


def test_tables_of_a_set_of_rows_are_made_once_and_do_not_pile_up() -> None:
    code = Code(40, 40)
    first = code.products(range(40, 80), range(40))
    assert code.products(range(40, 80), range(40)) is first
    chance = random.Random(1)
    for _ in range(250):
        code.products(chance.sample(range(80), 40), range(40))
    assert code._cached <= code_module._CACHED
    assert code._cached == sum(made.tables.nbytes for made in code._cache.values())
    assert code.products(range(40, 80), range(40)) is not first


def test_threads_share_a_code() -> None:
    code = Code(4, 4)
    data = [bytes([at]) * 4096 for at in range(4)]
    rows = coded(code, data)
    wrong = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(200):
            have = chance.sample(range(8), 4)
            again = empty(4, 4096)
            code.compute(code.products(have, range(4)), rows_of([rows[at] for at in have]), again)
            if [row.tobytes() for row in again] != data:
                wrong.append(have)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("data", "parity"), [(0, 1), (1, 0), (-1, 3), (1, LARGEST), (LARGEST, 1), (128, 128)]
)
def test_shapes_without_a_code_are_refused(data: int, parity: int) -> None:
    with pytest.raises(PlanError, match=rf"Fragments\(data={data}, parity={parity}\): both must"):
        Code(data, parity)


def test_rows_that_do_not_fit_are_refused() -> None:
    code = Code(2, 1)
    products = code.products((0, 1), (2,))
    good = empty(2, 64)
    for have, want in (
        (empty(1, 64), empty(1, 64)),
        (good, empty(2, 64)),
        (good, empty(1, 128)),
        ([good[0], empty(1, 128)[0]], empty(1, 64)),
        (empty(2, 63), empty(1, 63)),
        ([np.zeros((64, 2), np.uint8)[:, 0]] * 2, empty(1, 64)),
        (good, rows_of([bytes(64)])),
    ):
        with pytest.raises(ValueError):
            code.compute(products, have, want)
    for rows in ((0,), (0, 0), (0, 3), (-1, 0), (0, 1, 2)):
        with pytest.raises(ValueError):
            code.products(rows, (2,))


@pytest.fixture
def no_library() -> Iterator[None]:
    library.cache_clear()
    yield
    library.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_a_library_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    monkeypatch.setattr(code_module, "_SYSTEM", "libnot-there.so.9")
    with pytest.raises(PlanError, match=r"pip install pyeclib.*apt-get install libisal2"):
        Code(2, 1)


@pytest.mark.usefixtures("no_library")
def test_another_library_of_that_name_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None)._name
    monkeypatch.setattr(code_module, "_candidates", lambda: [libc])
    with pytest.raises(PlanError, match="gf_gen_cauchy1_matrix"):
        library()


def test_the_wheel_has_the_library() -> None:
    assert "pyeclib" in code_module._candidates()[0]


class Wrong:
    """A library whose functions all return 7."""

    _name = "libwrong.so"

    def __init__(self, name: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 7


@pytest.mark.usefixtures("no_library")
def test_a_library_with_another_field_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Wrong)
    with pytest.raises(PlanError, match=r"libwrong\.so does not multiply modulo"):
        library()
