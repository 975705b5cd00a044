"""The prompts that are audited, in tokens: documents and a question as a chat gives them to the model."""

from collections.abc import Iterator, Sequence
from typing import Any

from blendhub.tools.advice.questions import Question, Text

BETWEEN = "\n\n"
"""Ends each document that is given as text."""

CONTENT = "CONTENT"
"""Stands for the user's words while the chat template is rendered."""


class Prompts:
    """Questions as one model reads them: in its chat template, if its tokenizer has one."""

    def __init__(self, tokenizer: Any, questions: Sequence[Question]) -> None:
        """The tokenizer may be None if there are token ids only; these get no template."""
        self._tokenizer = tokenizer
        is_text = any(isinstance(text, str) for one in questions for text in (*one.documents, one.question))
        begin, end = self._frame() if is_text else ([], [])
        self.asked = [[*begin, *self._body(one), *end] for one in questions]
        documents = {tuple(self._tokens(text, BETWEEN)): None for one in questions for text in one.documents}
        self.documents = [[*begin, *document] for document in sorted(documents, key=len) if document]
        """Each document alone, the longest last."""

    def _frame(self) -> tuple[list[int], list[int]]:
        """The tokens that the chat template puts before and behind the words of a user."""
        if getattr(self._tokenizer, "chat_template", None):
            message = [{"role": "user", "content": CONTENT}]
            chat: str = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            begin, _, end = chat.partition(CONTENT)
            return self._tokens(begin), self._tokens(end)
        first = getattr(self._tokenizer, "bos_token_id", None)
        return [first] if first is not None and first in self._tokenizer.encode("a") else [], []

    def _body(self, question: Question) -> Iterator[int]:
        for document in question.documents:
            yield from self._tokens(document, BETWEEN)
        yield from self._tokens(question.question)

    def _tokens(self, text: Text, behind: str = "") -> list[int]:
        if not isinstance(text, str):
            return text
        tokens: list[int] = self._tokenizer.encode(text + behind, add_special_tokens=False)
        return tokens
