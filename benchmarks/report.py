"""One shape for every benchmark: the arguments, the rows, the table at the end, and the JSON file."""

import argparse
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec


class Row(msgspec.Struct, frozen=True):
    id: str
    what: str
    value: float | None
    unit: str
    bar: float | None
    better: Literal["higher", "lower"]
    ok: bool | None
    spread: tuple[float, float] | None


class Report(msgspec.Struct, omit_defaults=True):
    benchmark: str
    machine: dict[str, str | int]
    versions: dict[str, str]
    rows: list[Row]
    details: Any = None
    """The data that the rows were made from, where a benchmark keeps them."""


def arguments(description: str, parts: Sequence[str] = ()) -> argparse.Namespace:
    """``parts``: what may be measured alone, in a benchmark that takes long."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has the peer, to compare with it")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, measures little")
    if parts:
        parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    return parser.parse_args()


def row(
    id: str,
    what: str,
    unit: str,
    values: Sequence[float],
    bar: float | None = None,
    better: Literal["higher", "lower"] = "higher",
) -> Row:
    """A row from repeated measurements: their median, held against the bar."""
    value = statistics.median(values)
    ok = None if bar is None else value >= bar if better == "higher" else value <= bar
    return Row(id, what, value, unit, bar, better, ok, (min(values), max(values)))


def missing_row(id: str, why: str, unit: str, bar: float | None, better: Literal["higher", "lower"] = "higher") -> Row:
    """A row that could not be measured here, and why."""
    return Row(id, why, None, unit, bar, better, None, None)


class Planned(NamedTuple):
    """What a row is to say, whether it is measured here or not."""

    what: str
    unit: str
    bar: float | None = None
    better: Literal["higher", "lower"] = "lower"


def rows_of(
    planned: Mapping[str, Planned], measured: Mapping[str, Sequence[float]], why: str = "not measured here"
) -> list[Row]:
    """A row for each id. One without values says ``why``."""
    return [
        row(id, one.what, one.unit, measured[id], one.bar, one.better)
        if id in measured
        else missing_row(id, f"{why}: {one.what}", one.unit, one.bar, one.better)
        for id, one in planned.items()
    ]


def finish(benchmark: str, rows: list[Row], packages: Sequence[str], json: Path | None, details: Any = None) -> None:
    """Print the table, last of all, and write the JSON file."""
    if json:
        json.parent.mkdir(parents=True, exist_ok=True)
        report = Report(benchmark, _machine(), {name: _version(name) for name in packages}, rows, details)
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    # Plain text: some benchmarks run on machines that have little installed.
    lines = [("id", "value", "bar", "ok", "spread", "what"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"benchmarks.{benchmark}")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cells(one: Row) -> tuple[str, ...]:
    bar = "" if one.bar is None else f"{'>=' if one.better == 'higher' else '<='} {one.bar:g}"
    spread = f"{one.spread[0]:.4g} .. {one.spread[1]:.4g}" if one.spread else ""
    value = "-" if one.value is None else f"{one.value:.4g} {one.unit}"
    return one.id, value, bar, {None: "", True: "yes", False: "NO"}[one.ok], spread, one.what


def _machine() -> dict[str, str | int]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30,
        "system": platform.system() + " " + platform.release(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str:
    if package == "python":
        return platform.python_version()
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
