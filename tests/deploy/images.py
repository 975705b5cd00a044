"""What ``deploy/Containerfile`` says, instruction by instruction."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
USER = 10001


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """By stage: the image or the stage that it is made from, and its instructions."""
    text = re.sub(r"^\s*#.*\n", "", CONTAINERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, name = rest.split(" AS ")
            found[name] = base, []
        else:
            found[name][1].append((word, rest.strip()))
    return found


def instructions(target: str) -> Iterator[tuple[str, str]]:
    """The instructions of a stage, after those of the stages that it is made from."""
    base, own = stages()[target]
    if base in stages():
        yield from instructions(base)
    yield from own


def command_of(target: str, instruction: str) -> Any:
    """The command of an ENTRYPOINT or a HEALTHCHECK."""
    return json.loads(re.search(r"\[.*", dict(instructions(target))[instruction])[0])


def variables_of(target: str) -> dict[str, str]:
    settings = " ".join(rest for word, rest in instructions(target) if word == "ENV")
    return dict(setting.split("=", 1) for setting in settings.split())
