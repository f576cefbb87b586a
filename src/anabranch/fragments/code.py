"""Reed-Solomon over GF(2^8): any m of m + k rows give all of them.

The first m rows are the data itself. Each of the k parity rows is a sum of the data rows, weighted
with a row of a Cauchy matrix. Every square part of such a matrix has an inverse, so any m rows will
do. A Vandermonde matrix below an identity, the other common choice, has parts without one.

The products are computed by ISA-L. Its library comes with the wheels of ``pyeclib``, or from the
system. It is called directly: ``pyeclib`` itself codes a whole state at once, which does not fit
into the processor's cache, keeps the interpreter's lock, and takes corrupt rows for good ones.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import PlanError

Row = NDArray[np.uint8]
"""The bytes of one row: one dimension, contiguous."""

LARGEST = 255
"""The limit of m + k."""

_SYSTEM = "libisal.so.2"
_REMEDY = "install it with 'pip install pyeclib', or with 'apt-get install libisal2'"
_TABLE = 32
"""The bytes of a table that ISA-L makes for one coefficient."""
_VECTOR = 64
"""Shorter rows are left to code for which ISA-L's tables may have another form."""
_CACHED = 8 << 20
"""The bytes of tables that a code keeps."""


@cache
def library() -> ctypes.CDLL:
    """ISA-L. PlanError, which says what to install, if it is not there.

    The interpreter's lock is released while one of its functions runs.
    """
    tried = []
    for name in _candidates():
        try:
            loaded = ctypes.CDLL(name)
            _declare(loaded)
        except (OSError, AttributeError) as error:
            tried.append(str(error))
            continue
        return loaded
    raise PlanError(
        f"Fragments: the library ISA-L cannot be loaded; {_REMEDY} (tried: {'; '.join(tried)})"
    )


def _candidates() -> list[str]:
    """The file in pyeclib's wheel, whose name may have a hash, and then the system's."""
    try:
        files = importlib.metadata.files("pyeclib") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    return [*(str(f.locate()) for f in files if f.name.startswith("libisal")), _SYSTEM]


def _declare(loaded: ctypes.CDLL) -> None:
    number, pointer, byte = ctypes.c_int, ctypes.c_void_p, ctypes.c_ubyte
    for name, arguments, result in (
        ("gf_gen_cauchy1_matrix", (pointer, number, number), None),
        ("gf_invert_matrix", (pointer, pointer, number), number),
        ("ec_init_tables", (number, number, pointer, pointer), None),
        ("ec_encode_data", (number, number, number, pointer, pointer, pointer), None),
        ("gf_mul", (byte, byte), byte),
    ):
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    if loaded.gf_mul(2, 0x80) != 0x1D:
        raise OSError(f"{loaded._name} does not multiply modulo x^8 + x^4 + x^3 + x^2 + 1")


def check_shape(data: int, parity: int) -> None:
    """PlanError if there is no code of so many data and parity rows."""
    if data < 1 or parity < 1 or data + parity > LARGEST:
        raise PlanError(
            f"Fragments(data={data}, parity={parity}): both must be at least 1 and their sum at "
            f"most {LARGEST}"
        )


def row_of(data: Any) -> Row:
    """The bytes of any contiguous buffer, without a copy."""
    view = memoryview(data)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


@dataclass(frozen=True)
class Products:
    """How to compute some rows from m others."""

    have: tuple[int, ...]
    want: tuple[int, ...]
    tables: Row = field(repr=False)


class Code:
    """The code of m data rows and k parity rows. Threads may share it.

    >>> code = Code(2, 1)
    >>> rows = [np.full(64, byte, np.uint8) for byte in b"ab"]
    >>> parity = [np.zeros(64, np.uint8)]
    >>> code.compute(code.products((0, 1), (2,)), rows, parity)
    >>> again = [np.zeros(64, np.uint8)]
    >>> code.compute(code.products((1, 2), (0,)), [rows[1], parity[0]], again)
    >>> again[0].tobytes() == b"a" * 64
    True
    """

    def __init__(self, data: int, parity: int) -> None:
        check_shape(data, parity)
        self.data = data
        self.parity = parity
        self._isal = library()
        self._matrix = np.zeros((data + parity, data), np.uint8)
        self._isal.gf_gen_cauchy1_matrix(self._matrix.ctypes.data, data + parity, data)
        self._cache: OrderedDict[tuple[tuple[int, ...], tuple[int, ...]], Products] = OrderedDict()
        self._cached = 0
        self._lock = threading.Lock()

    def products(self, have: Sequence[int], want: Sequence[int]) -> Products:
        """How to compute the rows ``want`` from the m different rows ``have``, in this order.

        Those of a set of rows that was used before come from a cache.
        """
        key = (tuple(have), tuple(want))
        with self._lock:
            if found := self._cache.get(key):
                self._cache.move_to_end(key)
                return found
        made = Products(*key, self._tables(*key))
        with self._lock:
            if key not in self._cache:
                self._cache[key] = made
                self._cached += made.tables.nbytes
            while self._cached > _CACHED and len(self._cache) > 1:
                self._cached -= self._cache.popitem(last=False)[1].tables.nbytes
        return made

    def compute(self, products: Products, have: Sequence[Row], want: Sequence[Row]) -> None:
        """Compute rows from others, which must all have the same length, a multiple of 64."""
        size = have[0].nbytes
        if len(have) != len(products.have) or len(want) != len(products.want):
            raise ValueError(f"{products} takes other numbers of rows")
        for row in chain(have, want):
            if row.nbytes != size or size % _VECTOR or not row.flags.c_contiguous:
                raise ValueError(f"rows must be contiguous, of one length in {_VECTOR} bytes")
        if not all(row.flags.writeable for row in want):
            raise ValueError("the rows to compute are read-only")
        if size and want:
            self._multiply(size, products.tables, have, want)

    def _multiply(self, size: int, tables: Row, have: Sequence[Row], want: Sequence[Row]) -> None:
        """``have`` and ``want`` stay referenced until this returns, and so valid."""
        sources = _addresses(have)
        targets = _addresses(want)
        self._isal.ec_encode_data(
            size, len(have), len(want), tables.ctypes.data, sources.ctypes.data, targets.ctypes.data
        )

    def _tables(self, have: tuple[int, ...], want: tuple[int, ...]) -> Row:
        """Of the coefficients with which the rows ``have`` add up to the rows ``want``."""
        if len(set(have)) != self.data or len(have) != self.data:
            raise ValueError(f"{len(set(have))} different rows given, {self.data} are needed")
        if not all(0 <= row < self.data + self.parity for row in (*have, *want)):
            raise ValueError(f"a code of {self.data} + {self.parity} has no such rows")
        rows = np.ascontiguousarray(self._matrix[list(want)])
        if have == tuple(range(self.data)):
            return self._expanded(rows)
        square = np.ascontiguousarray(self._matrix[list(have)])
        inverse = np.zeros_like(square)
        if self._isal.gf_invert_matrix(square.ctypes.data, inverse.ctypes.data, self.data):
            raise ValueError(f"the rows {have} do not give the data")  # no such rows with Cauchy
        return self._expanded(self._product(rows, inverse))

    def _product(self, left: Row, right: Row) -> Row:
        """Of two matrices: the rows of the right one are coded like rows of data."""
        width = -(-self.data // _VECTOR) * _VECTOR
        padded = np.zeros((self.data, width), np.uint8)
        padded[:, : self.data] = right
        result = np.zeros((len(left), width), np.uint8)
        if len(left):
            self._multiply(width, self._expanded(left), list(padded), list(result))
        return np.ascontiguousarray(result[:, : self.data])

    def _expanded(self, coefficients: Row) -> Row:
        tables = np.zeros(_TABLE * coefficients.size, np.uint8)
        if coefficients.size:
            self._isal.ec_init_tables(
                self.data, len(coefficients), coefficients.ctypes.data, tables.ctypes.data
            )
        return tables


def _addresses(rows: Sequence[Row]) -> NDArray[np.uintp]:
    return np.array([row.__array_interface__["data"][0] for row in rows], np.uintp)


@lru_cache(maxsize=8)
def code_of(data: int, parity: int) -> Code:
    """The code of this shape, made once in a process, so that its cache is shared."""
    return Code(data, parity)
