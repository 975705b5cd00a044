"""How much of the prompts stands behind an edit: in a conversation that goes on, but not as it was."""

from collections.abc import Sequence

from blendhub.core.bounded import put_last
from blendhub.core.spans import Match

SLACK = 32
"""Tokens at the end of a prompt that the next one may lack without an edit: what a template writes before an answer."""


class Edits:
    """Counts over the prompts of conversations, which are known by their beginnings. In bounded memory."""

    def __init__(self, most: int = 2**16) -> None:
        self.prompts = 0
        """The prompts that go on behind an edit."""
        self.behind = 0
        """Their tokens from the first one that has changed, to the last one that was seen before."""
        self.moved = 0
        """The number of these tokens that the hub reuses; a prefix cache reuses none of them."""
        self._lengths: dict[int, int] = {}
        """The length of the last prompt of each conversation; the one that was silent longest comes first."""
        self._most = most

    def add(self, conversation: int, n_tokens: int, prefix: int, matches: Sequence[Match]) -> None:
        """A prompt of which a prefix cache reuses the first ``prefix`` tokens, and the hub these matches."""
        before = self._lengths.get(conversation, 0)
        put_last(self._lengths, conversation, n_tokens, self._most)
        behind = [match.span for match in matches if match.span.end > prefix]
        if prefix + SLACK >= before or not behind:
            return
        self.prompts += 1
        self.behind += behind[-1].end - prefix
        self.moved += sum(span.end - max(span.start, prefix) for span in behind)
