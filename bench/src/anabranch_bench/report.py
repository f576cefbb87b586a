"""All results of benchmarks in a folder as one page that needs nothing else to be read."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from anabranch.errors import PlanError

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-top: 1px solid #d6dae0;
     padding-top: 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } caption { text-align: left; font-weight: 600; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e6e9ee; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.holds { color: #1a7f4b; } .fails { color: #b5493c; font-weight: 600; }
.small { color: #5d6673; font-size: .9rem; } img { max-width: 100%; }
"""


def write(folder: Path, target: Path) -> int:
    """Write a page of all results in a folder, and of the pictures beside them; how many."""
    found = [(path, _load(path)) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise PlanError(f"{folder} has no results; run anabranch bench NAME --json {folder}/...")
    body = "\n".join(_section(result, path) for path, result in found)
    summary = _bars([(path.stem, bar) for path, result in found for bar in result["bars"]])
    target.write_text(
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>Anabranch: benchmarks</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>Anabranch: benchmarks</h1>\n{summary}\n{body}\n</body></html>\n"
    )
    return len(found)


def _load(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    missing = [name for name in ("benchmark", "bars", "measures") if name not in result]
    if missing:
        raise PlanError(f"{path} is no result of a benchmark: it has no {', '.join(missing)}")
    return result


def _section(result: Mapping[str, Any], path: Path) -> str:
    named = result["benchmark"]
    title = named if named == path.stem else f"{path.stem} (bench {named})"
    lines = [f"<h2>{escape(title)}</h2>", _circumstances(result)]
    lines += [f"<p>{escape(note)}</p>" for note in result.get("notes", [])]
    picture = path.with_suffix(".png")
    if picture.exists():
        data = base64.b64encode(picture.read_bytes()).decode()
        lines.append(f"<img alt='{escape(picture.stem)}' src='data:image/png;base64,{data}'>")
    for grid in result.get("tables", []):
        rows = [[row[0], *map(_Number, row[1:])] for row in grid["rows"]]
        lines.append(_table(grid["title"], grid["heads"], rows))
    lines.append(_measures(result["measures"]))
    return "\n".join(lines)


def _circumstances(result: Mapping[str, Any]) -> str:
    parts = [str(result.get("started", "")), f"seed {result.get('seed')}"]
    if result.get("quick"):
        parts.append("quick run")
    parts += [f"{name} {value}" for name, value in result.get("machine", {}).items()]
    parts += [f"{name} {value}" for name, value in result.get("versions", {}).items()]
    return f"<p class='small'>{escape(' · '.join(parts))}</p>"


def _bars(bars: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    rows = [
        (
            name,
            bar["name"],
            _number(bar["value"]),
            f"{bar.get('sense', 'at least')} {_number(bar['bar'])}",
            ("holds", "holds") if bar["holds"] else ("fails", "does not hold"),
        )
        for name, bar in bars
    ]
    return _table("Bars", ("result", "bar", "value", "has to be", ""), rows)


def _measures(measures: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            each["benchmark"],
            each["case"],
            each["side"],
            each["batches"],
            _number(each["median_seconds"]),
            _number(each["p95_seconds"]),
            _number(each["rows_per_second"]),
        )
        for each in measures
    ]
    heads = ("what", "case", "side", "batches", "median s", "95th s", "rows/s")
    return _table("Measures", heads, rows)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><tr>{head}</tr>\n{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        kind, text = value
        return f"<td class='{kind}'>{escape(text)}</td>"
    if isinstance(value, _Number | int):
        return f"<td class='number'>{escape(str(value))}</td>"
    return f"<td>{escape(str(value))}</td>"


class _Number(str):
    """A number as text, to be aligned as one."""


def _number(value: float) -> _Number:
    return _Number(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")
