"""What ``deploy/Containerfile`` says, instruction by instruction, and how its images start."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
CONTAINERFILE = ROOT / "deploy" / "Containerfile"


class Stage(NamedTuple):
    """A stage of the Containerfile, with the instructions after its FROM."""

    base: str
    """An image, or an earlier stage."""
    instructions: list[tuple[str, str]]


def stages() -> dict[str, Stage]:
    text = re.sub(r"^\s*#.*\n", "", CONTAINERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, name = rest.split(" AS ")
            stage = found[name] = Stage(base, [])
        else:
            stage.instructions.append((word, rest.strip()))
    return found


def told(target: str) -> Iterator[tuple[str, str]]:
    """The instructions of a stage, after those of the stages that it is made from."""
    stage = stages()[target]
    if stage.base in stages():
        yield from told(stage.base)
    yield from stage.instructions


def variables_of(target: str) -> dict[str, str]:
    settings = " ".join(rest for word, rest in told(target) if word == "ENV")
    return dict(setting.split("=", 1) for setting in settings.split())


class Image(NamedTuple):
    """What a container of an image starts with."""

    variables: dict[str, str]
    user: int
    command: list[str]
    health: list[str]

    @classmethod
    def of(cls, target: str) -> "Image":
        last = dict(told(target))
        health = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
        return cls(variables_of(target), int(last["USER"].split(":")[0]), json.loads(last["ENTRYPOINT"]), health)
