"""The size of the house, and its bounds, which stand in ``docs/testing.md``: ``python -m tests.size``."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| `(?P<folder>[\w/]+)/` \| (?P<bound>[\d,]+) \|", re.M)


def bounds() -> dict[str, int]:
    """The most lines that each folder may have."""
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    return {row["folder"]: int(row["bound"].replace(",", "")) for row in ROW.finditer(page)}


def files_of(folder: str, all_folders: Iterable[str]) -> Iterator[Path]:
    """The modules in a folder that are in none of the folders below it that count for themselves."""
    inner = [ROOT / other for other in all_folders if other.startswith(f"{folder}/")]
    for file in (ROOT / folder).rglob("*.py"):
        if not any(other in file.parents for other in inner):
            yield file


def measure(files: Iterable[Path]) -> tuple[int, int]:
    """Lines, and types: classes that are not within functions or other classes."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    types = sum(isinstance(node, ast.ClassDef) for text in texts for node in ast.parse(text).body)
    return sum(len(text.splitlines()) for text in texts), types


def collected() -> str:
    """How many tests pytest finds."""
    listing = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--no-header"]
    lines = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    return lines[-1] if lines else "pytest found nothing"


def main() -> None:
    total_lines = total_types = 0
    most = bounds()
    print(f"{'folder':<20}{'lines':>9}{'at most':>9}{'types':>7}")
    for folder, bound in most.items():
        lines, types = measure(files_of(folder, most))
        print(f"{folder:<20}{lines:>9,}{bound:>9,}{types:>7,}")
        total_lines, total_types = total_lines + lines, total_types + types
    print(f"{'all':<20}{total_lines:>9,}{sum(most.values()):>9,}{total_types:>7,}")
    print(collected())


if __name__ == "__main__":
    main()
