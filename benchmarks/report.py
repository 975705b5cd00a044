"""One shape for every benchmark: the arguments, the rows, the table at the end, and the JSON file."""

import argparse
import os
import platform
import statistics
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from blendhub.outcome.agreement import wilson

T = TypeVar("T")
Better: TypeAlias = Literal["higher", "lower"]


class Row(msgspec.Struct, frozen=True):
    id: str
    what: str
    value: float | None
    unit: str
    bar: float | None
    better: Better
    ok: bool | None
    spread: tuple[float, float] | None


class Report(msgspec.Struct, omit_defaults=True):
    benchmark: str
    machine: dict[str, str | int]
    versions: dict[str, str]
    rows: list[Row]
    details: Any = None
    """The data that the rows were made from, where a benchmark keeps them."""


def parser(description: str, parts: Sequence[str] = ()) -> argparse.ArgumentParser:
    """With the arguments that every benchmark has. ``parts``: what may be measured alone."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    arguments.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, measures little")
    if parts:
        arguments.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    return arguments


def row(
    id: str,
    what: str,
    unit: str,
    values: Sequence[float],
    bar: float | None = None,
    better: Better = "higher",
    spread: tuple[float, float] | None = None,
) -> Row:
    """Repeated measurements: their median, held against the bar, and how far they spread. Without any, ``what`` says
    why.
    """
    if not values:
        return Row(id, what, None, unit, bar, better, None, None)
    value = float(statistics.median(values))
    ok = None if bar is None else value >= bar if better == "higher" else value <= bar
    if len(values) > 1:
        spread = spread or (min(values), max(values))
    return Row(id, what, value, unit, bar, better, ok, spread)


def share_row(id: str, what: str, values: Sequence[bool], bar: float | None = None, better: Better = "higher") -> Row:
    """How many of these values are true, as a share with its 95% interval."""
    n, count = len(values), sum(values)
    return row(id, f"{what}: {count} of {n}", "share", [count / n] if n else [], bar, better, wilson(count, n))


def finish(benchmark: str, rows: Sequence[Row], packages: str, json: Path | None, details: Any = None) -> None:
    """Print the table, last of all, and write the JSON file with the versions of packages, named in one string."""
    if json:
        json.parent.mkdir(parents=True, exist_ok=True)
        versions = {name: version_of(name) for name in ("blendhub", *packages.split())}
        report = Report(benchmark, _machine(), {"python": platform.python_version()} | versions, [*rows], details)
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    # Plain text: some benchmarks run on machines that have little installed.
    lines = [("id", "value", "bar", "ok", "spread", "what"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(benchmark)
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def written(outcomes: Iterable[T], file: Path) -> Iterator[T]:
    """The outcomes, each written to a file at once: a run takes long, and may end before its report."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as lines:
        for outcome in outcomes:
            lines.write(msgspec.json.encode(outcome) + b"\n")
            lines.flush()
            yield outcome


def _cells(row: Row) -> tuple[str, ...]:
    bar = "" if row.bar is None else f"{'>=' if row.better == 'higher' else '<='} {row.bar:g}"
    spread = f"{row.spread[0]:.4g} .. {row.spread[1]:.4g}" if row.spread else ""
    value = "-" if row.value is None else f"{row.value:.4g} {row.unit}"
    return row.id, value, bar, {None: "", True: "yes", False: "NO"}[row.ok], spread, row.what


def _machine() -> dict[str, str | int]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(models, platform.machine()),
        "cores": os.cpu_count() or 0,
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30,
        "system": platform.system() + " " + platform.release(),
    }


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
