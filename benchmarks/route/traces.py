"""Prompts of two kinds of service, as token ids: documents in new orders, and chats that grow."""

from collections.abc import Iterator

import numpy as np

from blendhub.core.tokens import Tokens, as_tokens

VOCABULARY = 150_000
CHUNK = 256
TOPIC_DOCUMENTS = 12
FOUND = 5
"""The documents of a prompt, most of one topic, ranked anew for each question."""
STRAY = 0.1
"""The share of a prompt's documents that are of any topic."""
TURNS = 8
CHATS_AN_ENGINE = 8
TOPICS_AN_ENGINE = 4


class Trace:
    """Endless prompts for so many engines: the more engines, the more topics and chats."""

    def __init__(self, n_engines: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._systems = [self._text(200) for _ in range(3)]
        self._n_engines = n_engines

    def documents(self) -> Iterator[Tokens]:
        """A system text, found documents in the order of their ranks, and a question."""
        topics = [
            [self._text(int(self._random.integers(250, 800))) for _ in range(TOPIC_DOCUMENTS)]
            for _ in range(TOPICS_AN_ENGINE * self._n_engines)
        ]
        while True:
            topic = int(self._random.integers(len(topics)))
            found = [
                topics[int(self._random.integers(len(topics))) if self._random.random() < STRAY else topic][number]
                for number in self._random.permutation(TOPIC_DOCUMENTS)[:FOUND]
            ]
            yield as_tokens(np.concatenate([self._system(), *found, self._text(40)]))

    def chats(self) -> Iterator[Tokens]:
        """Conversations beside each other: each prompt repeats what was said, and asks one more question."""
        open_chats = [self._new_chat() for _ in range(CHATS_AN_ENGINE * self._n_engines)]
        while True:
            number = int(self._random.integers(len(open_chats)))
            said, turns = open_chats[number]
            prompt = np.concatenate([said, self._text(int(self._random.integers(20, 300)))])
            yield as_tokens(prompt)
            answered = np.concatenate([prompt, self._text(int(self._random.integers(50, 300)))])
            open_chats[number] = (answered, turns + 1) if turns < TURNS else self._new_chat()

    def _new_chat(self) -> tuple[Tokens, int]:
        # They begin at any age, so that they do not end together.
        return self._system(), int(self._random.integers(TURNS))

    def _system(self) -> Tokens:
        return self._systems[int(self._random.integers(len(self._systems)))]

    def _text(self, length: int) -> Tokens:
        return self._random.integers(0, VOCABULARY, length, dtype=np.uint32)


DOCUMENT_TOKENS = 525 * TOPIC_DOCUMENTS * TOPICS_AN_ENGINE
"""The documents for each engine."""
CHAT_TOKENS = 1700 * CHATS_AN_ENGINE
"""Chats of middle age for each engine."""
