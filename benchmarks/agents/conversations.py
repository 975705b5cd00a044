"""Conversations of an agent: dialogues of BFCL one after the other, with the functions of all of them."""

from collections.abc import Iterator
from itertools import cycle
from typing import NamedTuple

from benchmarks.quality.real.people import Half
from benchmarks.quality.real.sources import Turn, dialogues, manual, shuffled

RESULT_CHARACTERS = 260
"""The length of a tool's result."""


class Conversation(NamedTuple):
    functions: dict[str, str]
    """Descriptions by name."""
    turns: list[Turn]
    texts: list[str]
    """Sections of a manual, for agents that read."""


def conversations(half: Half, turns: int) -> Iterator[Conversation]:
    """Conversations of so many turns. None has a dialogue or a section in common with the nineteen after it."""
    those, sections = (
        cycle(shuffled(dialogues(half), "agents")),
        cycle(text for topic in manual(half) for text in topic),
    )
    while True:
        functions, said = dict[str, str](), list[Turn]()
        while len(said) < turns:
            dialogue = next(those)
            functions |= dialogue.functions
            said += [turn._replace(result=turn.result[:RESULT_CHARACTERS]) for turn in dialogue.turns]
        yield Conversation(functions, said[:turns], [next(sections) for _ in range(6)])
