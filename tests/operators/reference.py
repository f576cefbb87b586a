"""Aggregates recomputed from a list of values in plain Python, as Spark defines them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Values = Sequence[Any]


def _number_key(value: Any) -> Any:
    return (math.isnan(value), value) if isinstance(value, float) else value


def _least(values: Values, choose: Callable[..., Any]) -> Any:
    chosen = choose(values, key=_number_key)
    return chosen + 0.0 if isinstance(chosen, float) else chosen


def _sum(values: Values) -> Any:
    total = 0
    for value in values:
        total = total + value
    return total


def _wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63


def _variance(values: Values) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def aggregate(kind: str, values: Values) -> Any:
    """The aggregate of this name over values, of which nulls are left out."""
    there = [value for value in values if value is not None]
    if kind == "rows":
        return len(values)
    if kind == "count":
        return len(there)
    if not there or (kind == "variance" and len(there) < 2):
        return None
    match kind:
        case "sum":
            total = _sum(there)
            return _wrapped(total) if isinstance(total, int) else total
        case "mean":
            return float(_sum([float(value) for value in there])) / len(there)
        case "variance":
            return _variance(there)
        case "min":
            return _least(there, min)
        case "max":
            return _least(there, max)
        case "first":
            return there[0]
        case "last":
            return there[-1]
    raise ValueError(kind)
