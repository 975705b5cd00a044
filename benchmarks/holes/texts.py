"""Cases of texts: prompts in the words of a model's tokenizer, answers scored as text."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from blendhub_tools.advice import questions

from benchmarks.holes.scores import f1, rouge_l
from benchmarks.quality.workload import Case, Question, Scores, Tokens
from blendhub.core.errors import InvalidInput

INSTRUCTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
)
CONTENT = "\u241f"
"""Stands for what a user says, in a chat template."""


class Writer:
    """Writes prompts. Each document is tokenized by itself, so that it is the same tokens wherever it stands."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer`` is one of transformers."""
        self._tokenizer = tokenizer
        self._before, self._behind = "", ""
        if tokenizer.chat_template:
            said = [{"role": "user", "content": CONTENT}]
            # Templates without such a switch ignore it; with it, models would think before they answer.
            whole = tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            self._before, _, self._behind = whole.partition(CONTENT)

    @property
    def header(self) -> Tokens:
        return self.tokens(self._before + INSTRUCTION, add_special_tokens=not self._before)

    @property
    def stop(self) -> tuple[int, ...]:
        end = self._tokenizer.eos_token_id
        return () if end is None else (int(end),)

    def case(self, read: questions.Question) -> Case:
        """Raises InvalidInput if its answers are not known, or if it is not text."""
        if not read.answers or not all(isinstance(text, str) for text in (*read.documents, read.question)):
            raise InvalidInput(f"the question {read.question!r} should be text, and have an answer to compare with")
        asked = f"\n\nQuestion: {read.question}\nAnswer:{self._behind}"
        return Case(
            self.header,
            [self.tokens(f"{document}\n\n") for document in read.documents],
            [Question(self.tokens(asked), partial(score, self.text, read.answers), tuple(read.answers))],
        )

    def tokens(self, text: str, add_special_tokens: bool = False) -> Tokens:
        tokens: Tokens = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tokens

    def text(self, answer: Tokens) -> str:
        text: str = self._tokenizer.decode(answer, skip_special_tokens=True)
        return text


def score(text: Callable[[Tokens], str], right: Sequence[str], answer: Tokens) -> Scores:
    """The scores of the answer's first line: models go on to further questions behind it."""
    line = text(answer).strip().partition("\n")[0]
    return Scores(f1(line, right), rouge_l(line, right))
