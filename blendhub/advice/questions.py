"""The file that ``blendhub advise`` reads: questions to documents, a line of JSON each."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub.errors import InvalidInput

Text = str | list[Annotated[int, Meta(ge=0, lt=2**32)]]
"""A text, or its token ids."""

SHAPE = '{"documents": ["a text", ...], "question": "a text"}'


class Question(msgspec.Struct, frozen=True):
    """A prompt: its documents in their order, and what follows them. Other fields are ignored."""

    documents: Annotated[list[Text], Meta(min_length=1)]
    question: Text


def read_questions(file: Path, most: int) -> list[Question]:
    """The first questions of a file; raises InvalidInput, naming the line that is none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {file}: {error}; it should have a line like {SHAPE} for each prompt") from None
    found: list[Question] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(found) == most:
            break
        try:
            found.append(msgspec.json.decode(line, type=Question))
        except msgspec.DecodeError as error:
            raise InvalidInput(f"{file}, line {number} is not like {SHAPE}: {error}") from None
    if not found:
        raise InvalidInput(f"{file} has no questions; it should have a line like {SHAPE} for each prompt")
    return found
