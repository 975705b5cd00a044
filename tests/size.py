"""The size of the house and its bounds: ``python -m tests.size``, which is ``make size``."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

BOUNDS = {
    "blendhub/, plugins/": 35_900,
    "blendhub/testing/": 5_450,
    "tests/, plugins/*/tests/": 28_900,
    "benchmarks/, harness/, examples/": 6_300,
}
"""The most lines of Python in these folders: at most 4% more than there are. A folder's files count in the row that
names it most closely; ``research/`` counts in none."""


def row_of(file: Path) -> str | None:
    """The row that counts a file, whose path is relative to the repository; None for what stands beside all folders."""
    top, *inner = file.parts[:-1] or ("",)
    if top == "plugins" and inner[1:2] == ["tests"]:
        top = "tests"
    if top == "blendhub" and inner[:1] == ["testing"]:
        return "blendhub/testing/"
    return next((row for row in BOUNDS if f"{top}/" in row.split(", ")), None)


def python_files() -> Iterator[Path]:
    """Every module of the repository, but for what is built or installed in it, and studies."""
    for folder in sorted(ROOT.iterdir()):
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in ("build", "dist", "research"):
            yield from folder.rglob("*.py")


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def types(files: Iterable[Path]) -> int:
    """Classes that are not within functions or other classes."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    return sum(isinstance(node, ast.ClassDef) for tree in trees for node in tree.body)


def rows() -> dict[str, list[Path]]:
    """The modules that each row counts."""
    sorted_files: dict[str, list[Path]] = {row: [] for row in BOUNDS}
    for file in python_files():
        row = row_of(file.relative_to(ROOT))
        if row is None:
            raise LookupError(f"no row counts {file.relative_to(ROOT)}; add its folder to BOUNDS")
        sorted_files[row].append(file)
    return sorted_files


def collected() -> str:
    """How many tests pytest finds."""
    listing = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--no-header"]
    printed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    return printed[-1] if printed else "pytest found nothing"


def main() -> None:
    counted = {row: (lines(files), types(files)) for row, files in rows().items()}
    counted["all"] = (sum(n for n, _ in counted.values()), sum(n for _, n in counted.values()))
    most = BOUNDS | {"all": sum(BOUNDS.values())}
    print(f"{'folder':<34}{'lines':>9}{'at most':>9}{'types':>7}")
    for row, (n_lines, n_types) in counted.items():
        print(f"{row:<34}{n_lines:>9,}{most[row]:>9,}{n_types:>7,}")
    print(collected())


if __name__ == "__main__":
    main()
