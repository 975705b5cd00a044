"""What must agree before a release is built: ``python -m tests.release v0.1.0 https://github.com/OWNER/NAME``.

Needs nothing but Python.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]


def projects() -> dict[str, dict]:
    """The metadata of each distribution by its name, as ``pyproject.toml`` has it."""
    metadata = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in FILES]
    return {project["name"]: project for project in metadata}


def version() -> str:
    (found,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "blendhub" / "__init__.py").read_text(), re.M)
    return found


def disagreements(tag: str, repository: str) -> Iterator[str]:
    """What a release with this tag, of this repository, would have wrong."""
    if tag != f"v{version()}":
        yield f"the tag is {tag}, but blendhub.__version__ is {version()}"
    heading = f"\n## {version()}, "
    date = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition(heading)[2].partition("\n")[0]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        yield f"CHANGELOG.md should have the date of {version()} in its heading, not {date!r}"
    if f"\nversion: {version()}\n" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8"):
        yield f"CITATION.cff has another version than {version()}"
    for name, project in projects().items():
        if project.get("version", version()) != version():
            yield f"{name} has version {project['version']}"
    for file in FILES:
        for address in {*re.findall(r"https://[\w.]+/[\w-]+/[\w-]+", file.read_text(encoding="utf-8"))} - {repository}:
            yield f"{file.relative_to(ROOT)} names {address}, expected {repository}"
    for file in (ROOT / "SECURITY.md", ROOT / "CODE_OF_CONDUCT.md", ROOT / "CITATION.cff"):
        if repository not in file.read_text(encoding="utf-8"):
            yield f"{file.name} does not name {repository}"


if __name__ == "__main__":
    sys.exit("\n".join(disagreements(*sys.argv[1:])) or None)
