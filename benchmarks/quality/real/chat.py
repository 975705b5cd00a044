"""Prompts of a chat model, cut in pieces that are the same tokens wherever they stand."""

from collections.abc import Sequence
from typing import Any

from benchmarks.quality.workload import Tokens

CUT = "\u241f"
"""Stands in messages where a piece ends."""


class Chat:
    """Writes prompts with a tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def pieces(self, messages: Sequence[tuple[str, str]], begun: str = "") -> list[Tokens]:
        """Messages as pairs of role and content; ``begun`` is how the answer begins. Each piece is tokenized apart."""
        said = [{"role": role, "content": content} for role, content in messages]
        text: str = self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        return [self.tokens(piece) for piece in (text + begun).split(CUT)]

    def prompt(self, messages: Sequence[tuple[str, str]]) -> Tokens:
        return [token for piece in self.pieces(messages) for token in piece]

    def tokens(self, text: str) -> Tokens:
        tokens: Tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens
