"""A prompt of a log, as text, as chat messages or as token ids, and its time."""

from array import array
from typing import Any

import msgspec
import numpy as np

from blendhub.core.tokens import Tokens, as_tokens
from blendhub.tools.analysis.broken import BrokenLine, Place
from blendhub.tools.analysis.lines import decoded

SYSTEM = ("system", "developer")


class Prompt(msgspec.Struct):
    """One prompt of a log: one of ``text``, ``messages`` and ``ids``."""

    place: Place
    time: float | None = None
    """Seconds since 1970; None where the log has no times."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    ids: Tokens | None = None

    @property
    def size(self) -> int:
        """The approximate size of the prompt in bytes."""
        if self.ids is not None:
            return self.ids.nbytes
        texts = [self.text] if self.text is not None else [str(one.get("content")) for one in self.messages or ()]
        return sum(map(len, texts))

    @property
    def system(self) -> str | None:
        """The system prompt; None where there is none, or where the log does not separate it."""
        first = self.messages[0] if self.messages else {}
        return first.get("content") if first.get("role") in SYSTEM else None


def read_text(place: Place, line: bytes) -> list[Prompt]:
    """The prompt of a line of plain text."""
    return [Prompt(place, text=decoded(line))]


def read_ids(place: Place, line: bytes) -> list[Prompt]:
    """The prompt of a line of token ids, with commas or blanks between."""
    try:
        return [Prompt(place, ids=token_ids([int(one) for one in line.replace(b",", b" ").split()]))]
    except ValueError:
        raise BrokenLine("is no list of token ids") from None


def token_ids(given: Any) -> Tokens:
    if not isinstance(given, list) or not given:
        raise BrokenLine("its token ids are no list, or an empty one")
    try:
        ids = array("I", given)
    except (TypeError, OverflowError):
        raise BrokenLine("its token ids are not all integers from 0 to 2**32 - 1") from None
    return as_tokens(np.frombuffer(ids, np.uint32))
