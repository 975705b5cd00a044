"""The prompts in which documents are computed, as token ids: behind the system text, and behind a neighbour."""

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from blendhub.core.errors import InvalidInput
from blendhub.tools.analysis.formats import SYSTEM
from blendhub.tools.warm.documents import Document
from blendhub.tools.warm.server import Server

BETWEEN = "\n\n"
ONE, OTHER = "1", "x"
"""Contents that have no token in common, between which the begin and the end of a chat template are seen."""
LEAST_TOKENS = 32
"""The least tokens of a part of a document."""


PATH_TOKENS = 1024
"""The most tokens between the system text and a document: more would cost loads, and changes its KV little."""


class Frame(NamedTuple):
    """The tokens before and behind the words of a user."""

    begin: list[int]
    end: list[int]


class Part(NamedTuple):
    """A document, or as much of it as prompts hold."""

    begin: list[int]
    """The tokens of the system text that stands before it."""
    tokens: list[int]


class Prompts:
    """Makes prompts of documents as a server reads them: in its model's chat template, if it has one."""

    def __init__(self, server: Server, system: str = "") -> None:
        self._server = server
        self._system = system
        self._frames: dict[str, Frame] = {}
        """The frames of the system texts that were seen."""
        try:
            server.tokens_of_chat([_message("user", ONE)])
            self.has_template = True
        except InvalidInput:
            self.has_template = False
        self._between = server.tokens(BETWEEN)
        self._most(self.frame(system))

    def frame(self, system: str) -> Frame:
        """What stands around the words of a user behind this system text."""
        if system not in self._frames:
            one, other = (self._tokenized(system, [_message("user", text)]) for text in (ONE, OTHER))
            same_end = common(one[::-1], other[::-1])
            self._frames[system] = Frame(one[: common(one, other)], one[len(one) - same_end :])
        return self._frames[system]

    def parts_of(self, document: Document) -> list[Part]:
        """A document as prompts hold it: whole, or in parts of equal length of which a prompt holds two."""
        messages = [*document.messages] or [_message("user", document.text)]
        system = self._system
        if messages[0].get("role") in SYSTEM:
            system = messages.pop(0)["content"]
        if document.messages and not self.has_template:
            raise InvalidInput("is a conversation, and the model has no chat template")
        frame = self.frame(system)
        tokens = self._tokenized(system, messages)
        tokens = tokens[common(tokens, frame.begin) :]
        if not document.messages:
            tokens = tokens[: len(tokens) - common(tokens[::-1], frame.end[::-1])]
        number = max(1, -(-len(tokens) // self._most(frame))) if self._server.longest else 1
        ends = [len(tokens) * part // number for part in range(number + 1)]
        return [Part(frame.begin, tokens[start:end]) for start, end in pairwise(ends)]

    def alone(self, part: Part) -> list[int]:
        return [*part.begin, *part.tokens]

    def behind(self, path: Sequence[Part], part: Part) -> list[int]:
        """A part behind others; where there is one alone, behind as much of it as a prompt has room for."""
        most = self._room(part) if len(path) == 1 else None
        before = [token for one in path for token in (*one.tokens[:most], *self._between)]
        return [*part.begin, *before, *part.tokens]

    def has_room(self, path: Sequence[Part], part: Part) -> bool:
        """Whether so much may stand before a part."""
        taken = sum(len(one.tokens) + len(self._between) for one in path)
        room = self._room(part)
        return taken <= (PATH_TOKENS if room is None else min(PATH_TOKENS, room))

    def _room(self, part: Part) -> int | None:
        """The tokens that a prompt has room for before a part; None if the server does not say how many."""
        return self._server.longest and self._server.longest - self._taken(part.begin) - len(part.tokens)

    def asking(self, parts: Sequence[Part], question: str) -> list[int]:
        """A prompt of several documents, as many as it has room for, and a question to them."""
        begin, end = self.frame(self._system)
        last = [*self._server.tokens(question), *end]
        prompt = [*begin]
        for part in parts:
            more = [*part.tokens, *self._between]
            if self._server.longest and len(prompt) + len(more) + len(last) >= self._server.longest:
                break
            prompt += more
        return prompt + last

    def _most(self, frame: Frame) -> int:
        """The most tokens of a part."""
        if not self._server.longest:
            return LEAST_TOKENS
        most = (self._server.longest - self._taken(frame.begin)) // 2
        if most < LEAST_TOKENS:
            raise InvalidInput(
                f"the system text has {len(frame.begin):,} tokens, and a prompt of {self._server.model} at most "
                f"{self._server.longest:,}: no room is left for documents; shorten it, or start vLLM with a larger "
                "--max-model-len"
            )
        return most

    def _taken(self, begin: Sequence[int]) -> int:
        """The tokens of a prompt beside those of two parts; one is of the answer."""
        return len(begin) + len(self._between) + 1

    def _tokenized(self, system: str, messages: Sequence[dict[str, Any]]) -> list[int]:
        if self.has_template:
            return self._server.tokens_of_chat([*([_message("system", system)] if system else []), *messages])
        return self._server.tokens_of_prompt((system + BETWEEN if system else "") + messages[0]["content"])


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from their starts on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
