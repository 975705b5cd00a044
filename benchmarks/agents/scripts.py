"""What an agent sends, turn by turn: each script edits its conversation in another way."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from benchmarks.agents.conversations import Conversation
from benchmarks.quality.real.sources import Turn
from benchmarks.quality.real.workloads import CLEARED, ONE_WORD, biographies

Message: TypeAlias = dict[str, str]
EVERY = 5
"""So many turns after an edit comes the next."""
KEPT_RESULTS = 2
EDITS = 10


class Step(NamedTuple):
    """One request."""

    messages: list[Message]
    is_edited: bool = False
    """Whether text that an earlier request held has changed, gone or moved."""


Script: TypeAlias = Callable[[Conversation], Iterator[Step]]


def clear(conversation: Conversation) -> Iterator[Step]:
    """Old tool results are cleared, all but the last two, every fifth turn."""
    system, turns = _system(conversation.functions.values()), list[Turn]()
    for number, turn in enumerate(conversation.turns):
        if edited := _is_due(number):
            turns = _cleared(turns, len(turns) - KEPT_RESULTS)
        yield Step([system, *_said(turns), _user(turn)], edited)
        turns.append(turn)


def compact(conversation: Conversation) -> Iterator[Step]:
    """The older half becomes a summary, every tenth turn. The data has no summaries: the first words of each request
    are one."""
    begin, turns = [_system(conversation.functions.values())], list[Turn]()
    for number, turn in enumerate(conversation.turns):
        if edited := _is_due(number) and number % (2 * EVERY) == 0:
            older, turns = turns[: len(turns) // 2], turns[len(turns) // 2 :]
            summary = "; ".join(" ".join(one.user.split()[:12]) for one in older)
            begin.append(_message("user", f"Summary of what was done before: {summary}"))
        yield Step([*begin, *_said(turns), _user(turn)], edited)
        turns.append(turn)


def tools(conversation: Conversation) -> Iterator[Step]:
    """The functions are another selection in another order, every fifth turn."""
    rng, functions = random.Random("tools"), list(conversation.functions.values())
    system, turns = _system(functions), list[Turn]()
    for number, turn in enumerate(conversation.turns):
        if edited := _is_due(number):
            system = _system(rng.sample(functions, max(1, 3 * len(functions) // 4)))
        yield Step([system, *_said(turns), _user(turn)], edited)
        turns.append(turn)


def think(conversation: Conversation) -> Iterator[Step]:
    """An agent reasons before it calls. When the user speaks again, the reasoning of earlier turns is stripped."""
    system, turns = _system(conversation.functions.values()), list[Turn]()
    for turn in conversation.turns:
        yield Step([system, *_said(turns), _user(turn)], bool(turns))
        call = _message("assistant", f"<think>\n{_reasoning(conversation, turn)}\n</think>\n\n{turn.calls}")
        yield Step([system, *_said(turns), _user(turn), call, _message("tool", turn.result)])
        turns.append(turn)


def branch(conversation: Conversation) -> Iterator[Step]:
    """Three agents begin with the same system text and functions. Each reads other texts in another order."""
    rng, system = random.Random("branch"), _system(conversation.functions.values())
    for number in range(3):
        texts = rng.sample(conversation.texts, 4)
        turns = conversation.turns[number::3]
        for place in range(len(turns)):
            task = _message("user", "\n\n".join([*texts, turns[0].user]))
            history = [task, *_said(turns[:place])[1:], _user(turns[place])] if place else [task]
            yield Step([system, *history], number > 0 and place == 0)


def retry(conversation: Conversation) -> Iterator[Step]:
    """Every fifth turn is asked again, with another word from the user before the call and its result."""
    system, turns = _system(conversation.functions.values()), list[Turn]()
    for number, turn in enumerate(conversation.turns):
        yield Step([system, *_said([*turns, turn])])
        if _is_due(number):
            turn = turn._replace(user=f"Carefully: {turn.user}")
            yield Step([system, *_said([*turns, turn])], is_edited=True)
        turns.append(turn)


def edits10(conversation: Conversation) -> Iterator[Step]:
    """Ten edits after each other: the oldest result that is left is cleared."""
    system, (*turns, last) = _system(conversation.functions.values()), conversation.turns[: EDITS + 3]
    for number in range(len(turns)):
        yield Step([system, *_said(turns[:number]), _user(turns[number])])
    for number in range(EDITS + 1):
        yield Step([system, *_said(_cleared(turns, number)), _user(last)], number > 0)


def edits_at_once(conversation: Conversation) -> Iterator[Step]:
    """The conversation of ``edits10`` with all of its edits made at once: they lead to the same last prompt."""
    steps = list(edits10(conversation))
    yield from (step for step in steps if not step.is_edited)
    yield steps[-1]


def documents() -> Iterator[Step]:
    """Documents in another order, without a conversation: the reference for what edits may cost."""
    for texts, asked in islice(biographies("test"), 6):
        for order, question in zip((texts, texts[::-1]), asked, strict=False):
            begun = f"{''.join(order)}Question: {question.question}"
            yield Step([_message("system", ONE_WORD), _message("user", begun)], order is not texts)


SCRIPTS: dict[str, Script] = {
    script.__name__: script for script in (clear, compact, tools, think, branch, retry, edits10)
}


def _is_due(number: int) -> bool:
    return number > 0 and number % EVERY == 0


def _cleared(turns: Sequence[Turn], n: int) -> list[Turn]:
    return [turn._replace(result=CLEARED) if number < n else turn for number, turn in enumerate(turns)]


def _reasoning(conversation: Conversation, turn: Turn) -> str:
    called = [text for name, text in conversation.functions.items() if f"{name}(" in turn.calls]
    return "\n".join([f"The user says: {turn.user}", "Functions that may help:", *called])


def _system(functions: Iterable[str]) -> Message:
    return _message("system", "\n".join(["You act by calling these functions:", *functions]))


def _said(turns: Sequence[Turn]) -> list[Message]:
    return [
        message
        for turn in turns
        for message in (_user(turn), _message("assistant", turn.calls), _message("tool", turn.result))
    ]


def _user(turn: Turn) -> Message:
    return _message("user", turn.user)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
