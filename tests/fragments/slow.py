"""A model of the code: GF(2^8) by the definition, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence


def times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo x^8 + x^4 + x^3 + x^2 + 1."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


TIMES = [[times(a, b) for b in range(256)] for a in range(256)]
INVERSE = [next((b for b in range(256) if TIMES[a][b] == 1), 0) for a in range(256)]


def matrix(data: int, parity: int) -> list[list[int]]:
    """An identity above a Cauchy matrix: 1 / (x + y), with x from m on and y below m."""
    identity = [[int(row == column) for column in range(data)] for row in range(data)]
    return identity + [
        [INVERSE[row ^ column] for column in range(data)] for row in range(data, data + parity)
    ]


def encode(data: int, parity: int, rows: Sequence[bytes]) -> list[bytes]:
    """The rows of parity."""
    coded = []
    for weights in matrix(data, parity)[data:]:
        total = bytes(len(rows[0]))
        for weight, row in zip(weights, rows, strict=True):
            total = bytes(x ^ TIMES[weight][y] for x, y in zip(total, row, strict=True))
        coded.append(total)
    return coded


def decode(data: int, parity: int, have: dict[int, bytes]) -> list[bytes]:
    """The rows of data from m rows, by elimination."""
    weights = matrix(data, parity)
    system = [(list(weights[index]), list(row)) for index, row in have.items()]
    assert len(system) == data
    for column in range(data):
        pivot = next(at for at in range(column, data) if system[at][0][column])
        system[column], system[pivot] = system[pivot], system[column]
        scale = INVERSE[system[column][0][column]]
        system[column] = (
            [TIMES[scale][x] for x in system[column][0]],
            [TIMES[scale][x] for x in system[column][1]],
        )
        for at in range(data):
            factor = system[at][0][column]
            if at != column and factor:
                system[at] = (
                    [
                        x ^ TIMES[factor][y]
                        for x, y in zip(system[at][0], system[column][0], strict=True)
                    ],
                    [
                        x ^ TIMES[factor][y]
                        for x, y in zip(system[at][1], system[column][1], strict=True)
                    ],
                )
    return [bytes(row) for _, row in system]
