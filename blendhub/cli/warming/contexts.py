"""The prompts in which documents are computed, as token ids: alone, and in the company of others."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import msgspec

from blendhub.cli.warming.documents import Document
from blendhub.cli.warming.server import Server
from blendhub.core.errors import InvalidInput

BETWEEN = "\n\n"
ONE, OTHER = "1", "x"
"""Contents that have no token in common, between which the begin and the end of a chat template are seen."""

LEAST_TOKENS = 32
"""The least tokens of a part of a document."""

COMPANY_TOKENS = 1024
"""The most tokens before a document in company: more would cost loads, and changes its KV little."""


class Context(NamedTuple):
    """A prompt to compute, for the tokens at its end."""

    prompt: list[int]
    new: int


class Contexts:
    """Makes prompts of documents as a server reads them: in its model's chat template, if it has one."""

    def __init__(self, server: Server, system: str) -> None:
        self._server = server
        self._system = [{"role": "system", "content": system}] if system else []
        self._begin: list[int]
        self._end: list[int] = []
        try:
            one, other = (self._chat(content) for content in (ONE, OTHER))
            self._begin = one[: common(one, other)]
            self._end = one[len(one) - common(one[::-1], other[::-1]) :]
        except InvalidInput:  # the model has no chat template
            self._begin = server.tokens(system + BETWEEN if system else "", begins=True)
        self._between = server.tokens(BETWEEN)
        longest = server.longest or 2**30
        self._room = longest - len(self._begin) - len(self._between) - 1
        """The tokens that a prompt has room for, beside an answer."""
        if self._room < 2 * LEAST_TOKENS:
            raise InvalidInput(
                f"the system text has {len(self._begin):,} tokens, and a prompt of {server.model} at most {longest:,}: "
                "no room is left for documents; shorten it, or start vLLM with a larger --max-model-len"
            )

    def parts_of(self, document: Document) -> list[list[int]]:
        """The tokens of a document, in parts of equal length of which a prompt holds two."""
        if self._end:
            tokens = self._chat(document.text)[len(self._begin) :]
            tokens = tokens[: len(tokens) - common(tokens[::-1], self._end[::-1])]
        else:
            tokens = self._server.tokens(document.text)
        number = max(1, -(-len(tokens) // (self._room // 2)))
        ends = [len(tokens) * part // number for part in range(number + 1)]
        return [tokens[start:end] for start, end in pairwise(ends)]

    def conversation(self, document: Document) -> Context:
        """A conversation as it is; with its own system text, if it has one."""
        messages = [msgspec.to_builtins(message) for message in document.messages]
        has_system = messages[0]["role"] == "system"
        tokens = self._server.tokens_of_chat(messages if has_system else [*self._system, *messages])
        return Context(tokens, len(tokens))

    def alone(self, part: Sequence[int]) -> Context:
        return Context([*self._begin, *part], len(part))

    def in_company(self, parts: Sequence[Sequence[int]]) -> Iterator[list[Context]]:
        """Each part behind others that are drawn by chance. What the contexts of one list begin with is computed by
        the lists before, so that only the parts themselves are new.

        Parts that are added change the context of no other.
        """
        paths: list[list[int]] = [[]]
        for number in range(1, len(parts)):
            drawn = random.Random(str(parts[number])).randrange(number)
            longer = [*paths[drawn], drawn]
            most = min(COMPANY_TOKENS, self._room - len(parts[number]))
            paths.append(longer if sum(len(parts[other]) for other in longer) <= most else [drawn])
        paths[0] = [1] if len(parts) > 1 else []
        for length in sorted({len(path) for path in paths} - {0}):
            yield [self._behind(path, number, parts) for number, path in enumerate(paths) if len(path) == length]

    def _behind(self, path: list[int], number: int, parts: Sequence[Sequence[int]]) -> Context:
        before = [token for other in path for token in (*parts[other], *self._between)]
        part = parts[number]
        return Context([*self._begin, *before[: self._room - len(part)], *part], len(part))

    def _chat(self, content: str) -> list[int]:
        return self._server.tokens_of_chat([*self._system, {"role": "user", "content": content}])


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from their starts on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
