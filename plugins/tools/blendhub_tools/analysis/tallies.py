"""The numbers that are counted while prompts are played, in bounded memory, and the times they stand for."""

from copy import copy
from hashlib import blake2b

import msgspec

from blendhub.core.spans import Match
from blendhub.core.tokens import Tokens
from blendhub_tools.analysis.lines import Place

HEAD_TOKENS = 64
"""The number of a text's first tokens that are kept, to show how the text begins."""


class ReusedTokens(msgspec.Struct):
    """Prompts, and how many of their tokens could be reused."""

    requests: int = 0
    tokens: int = 0
    prefix: int = 0
    """The tokens that a prefix cache reuses."""
    exact: int = 0
    moved: int = 0
    """The tokens that the hub reuses: bit for bit, and at another place or behind other text."""

    def add(self, other: "ReusedTokens") -> None:
        self.requests += other.requests
        self.tokens += other.tokens
        self.prefix += other.prefix
        self.exact += other.exact
        self.moved += other.moved

    @property
    def anywhere(self) -> int:
        return self.exact + self.moved


class Group(msgspec.Struct):
    """Prompts that have something in common."""

    first_seen: Place
    head: tuple[int, ...]
    """The first tokens of the first prompt of the group."""
    share: ReusedTokens = msgspec.field(default_factory=ReusedTokens)


class Groups:
    """Groups by name. If there are too many, those with the fewest tokens become one."""

    def __init__(self, most: int = 4096) -> None:
        self.by_name: dict[str, Group] = {}
        self.others = ReusedTokens()
        self._most = most

    def add(self, name: str, share: ReusedTokens, seen: Place, tokens: Tokens) -> None:
        """A prompt of the group ``name``."""
        group = self.by_name.get(name)
        if group is None:
            if len(self.by_name) >= self._most:
                self._fold()
            group = self.by_name[name] = Group(seen, head_of(tokens))
        group.share.add(share)

    def _fold(self) -> None:
        largest = sorted(self.by_name, key=lambda name: -self.by_name[name].share.tokens)
        for name in largest[self._most // 2 :]:
            self.others.add(self.by_name.pop(name).share)


class ReusedText(msgspec.Struct):
    """A text that was reused."""

    id: str
    """A name made from the text's tokens, so that every analysis gives the text the same id."""
    tokens: int
    head: tuple[int, ...]
    first_seen: Place
    run: int
    start: int
    reuses: int = 0

    @property
    def reused(self) -> int:
        return self.reuses * self.tokens


class Texts:
    """The texts that are reused most. If there are too many, those that were reused least are forgotten."""

    def __init__(self, most: int = 2**15) -> None:
        self._texts: dict[tuple[int, int, int], ReusedText] = {}
        self._most = most

    def add(self, match: Match, tokens: Tokens, seen: Place) -> None:
        """A match in a prompt of these tokens, whose text was first seen there."""
        length = len(match.span)
        key = (match.run, match.source_start, length)
        known = self._texts.get(key)
        if known is None:
            if len(self._texts) >= self._most:
                self._forget()
            text = tokens[match.span.start : match.span.end]
            name = name_of(text.tobytes())
            known = self._texts[key] = ReusedText(name, length, head_of(text), seen, match.run, match.source_start)
        known.reuses += 1

    def most_reused(self, most: int) -> list[ReusedText]:
        """The texts that saved the most tokens, without texts that nearly equal one of these."""
        ranked = sorted(self._texts.values(), key=lambda text: -text.reused)
        chosen: dict[tuple[int, ...], ReusedText] = {}
        by_run: dict[int, list[ReusedText]] = {}
        for text in ranked:
            # Stored twice, after an eviction, it has another run.
            same = next((one for one in by_run.get(text.run, ()) if _overlap(one, text)), chosen.get(text.head))
            if same:
                same.reuses += text.reuses
            elif len(chosen) < most:
                chosen[text.head] = kept = copy(text)
                by_run.setdefault(text.run, []).append(kept)
        return sorted(chosen.values(), key=lambda text: -text.reused)

    def _forget(self) -> None:
        ranked = sorted(self._texts.items(), key=lambda item: -item[1].reused)
        self._texts = dict(ranked[: self._most // 2])


def _overlap(one: ReusedText, other: ReusedText) -> bool:
    """Whether two texts of a run have most of their tokens in common: their ends may be alike by chance."""
    common = min(one.start + one.tokens, other.start + other.tokens) - max(one.start, other.start)
    return 2 * common > max(one.tokens, other.tokens)


def name_of(content: bytes) -> str:
    """A short name for a text: always the same name for one text, and it tells nothing about the content."""
    return blake2b(content, digest_size=4).hexdigest()


def head_of(tokens: Tokens) -> tuple[int, ...]:
    return tuple(tokens[:HEAD_TOKENS].tolist())


DOCUMENTS, DOCUMENT, BETWEEN, QUESTION = 7, 512, 26, 64
PROMPT = DOCUMENTS * (DOCUMENT + BETWEEN) + QUESTION

EXACT = 0.049
"""Time relative to full prefill, where every token but those of the question is exact."""

MOVED = 0.277
"""The documents are moved, and 15% of their tokens are recomputed, picked by the default selector."""

_HELD = (PROMPT - QUESTION) / PROMPT
_DOCUMENTS = DOCUMENTS * DOCUMENT / PROMPT


class Costs(msgspec.Struct, frozen=True):
    """What a token costs, relative to a computed one."""

    exact: float
    moved: float
    of_user: bool = True
    """Whether the user measured the costs; if not, they are those of another model."""

    def ratio(self, tokens: int, exact: int, moved: int, settled: int = 0) -> float:
        """The time of a prompt, relative to that of its full prefill. Settled text is loaded like exact text."""
        computed = tokens - exact - moved - settled
        return (computed + self.exact * (exact + settled) + self.moved * moved) / tokens if tokens else 1.0

    def sentence(self) -> str:
        source = "as you measured" if self.of_user else "as measured with another model; --token-costs takes yours"
        exact, moved = f"an exact token is taken to cost {self.exact:.2f}", f"a moved token {self.moved:.2f}"
        return f"{exact} of a computed one, {moved}, {source}"


MEASURED = Costs((EXACT - (1 - _HELD)) / _HELD, (MOVED - (1 - _DOCUMENTS)) / _DOCUMENTS, of_user=False)


class Ratios:
    """The ratios of many prompts, in thousandths."""

    STEPS = 1000

    def __init__(self) -> None:
        self._counts = [0] * (self.STEPS + 1)
        self._total = 0

    def add(self, ratio: float) -> None:
        self._counts[min(round(ratio * self.STEPS), self.STEPS)] += 1
        self._total += 1

    def quantile(self, part: float) -> float:
        """The ratio that this part of the prompts reaches or stays below; 1 if there are no prompts."""
        left = part * self._total
        for step, count in enumerate(self._counts):
            left -= count
            if count and left <= 0:
                return step / self.STEPS
        return 1.0
