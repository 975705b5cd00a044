"""``POST /score``: how many tokens of a prompt this hub's engines would reuse, by fate; and who may ask. For routers.

It matches as a lookup does, but takes no lease, fetches nothing from the store and changes no statistics of use.
"""

import hmac
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from blendhub.core.errors import Busy, InvalidInput
from blendhub.core.layout import Text, Variant
from blendhub.core.spans import MAX_GENERATION
from blendhub.core.tokens import Tokens, as_tokens
from blendhub.hub.counters import Counters
from blendhub.hub.http.prompt_text import Tokenizers
from blendhub.hub.http.routes import JSON, is_address
from blendhub.hub.http.server import TEXT, Page
from blendhub.hub.index.namespace_index import ChunkMatch, NamespaceIndex
from blendhub.hub.leases.sessions import EngineEntry
from blendhub.hub.limits import MOST_SCORE_TOKENS, SCORE_BURST_S, SCORE_SHARE
from blendhub.hub.state import HubState
from blendhub.outcome.fates import Fate, fate_of

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, as token ids or as text, and the engine that would serve it."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MOST_SCORE_TOKENS)] | None = None
    text: str | None = None
    model: Text = ""
    """The model as engines name it; empty: the only one that engines have registered."""
    engine: Text = ""
    """The engine's id, where engines with other weights or layouts serve the same model."""
    cache_salt: Text = ""
    lora: Text = ""
    """The name of the adapter's weights, as reports have it."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    model: str
    tokens: int
    """The length of the prompt."""
    reused: dict[str, int]
    """The tokens that would be reused, by fate. An engine computes the last token of every prompt."""
    in_store: int = 0
    """The reused tokens that only the store has: the engine waits for them, or computes them."""


class Scorer:
    """Answers on the hub's event loop, which spends at most a share of its time on this."""

    def __init__(
        self,
        state: HubState,
        counters: Counters,
        tokenizers: Tokenizers,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._state = state
        self._counters = counters
        self._tokenizers = tokenizers
        self._clock = clock
        self._allowed_s = SCORE_BURST_S
        self._counted_at = clock()

    async def score(self, body: bytes) -> Score:
        """Raises InvalidInput or a ValidationError for a question that is wrong, and Busy."""
        started = self._admit()
        try:
            question = msgspec.json.decode(body, type=Question)
            engine = self._engine(question)
            tokens = _tokens_of(question)
        finally:
            self._spend(started)
        if tokens is None:
            tokens = _as_tokens(await self._tokenizers.encode(engine.namespace.model, question.text or ""))
            if len(tokens) > MOST_SCORE_TOKENS:
                raise InvalidInput(
                    f"the text has {len(tokens):,} tokens, more than the {MOST_SCORE_TOKENS:,} of a score"
                )
        began = self._clock()
        try:
            answer = self._answer(engine, Variant(question.lora, question.cache_salt), tokens)
        finally:
            self._spend(began)
        self._counters.requests["score"].add(self._clock() - started)
        return answer

    def _answer(self, engine: EngineEntry, variant: Variant, tokens: Tokens) -> Score:
        index = self._state.indexes.find(engine.base, variant)
        found = self._matches(index, tokens) if index and len(tokens) else []
        reused: dict[str, int] = dict.fromkeys((Fate.EXACT, Fate.SETTLED, Fate.MOVED), 0)
        in_store = 0
        for piece in found:
            n = min(piece.end, len(tokens) - 1) - piece.start
            reused[fate_of(piece.match)] += n
            if piece.chunk.offset is None:
                in_store += n
        return Score(model=engine.namespace.model, tokens=len(tokens), reused=reused, in_store=in_store)

    def _matches(self, index: NamespaceIndex, tokens: Tokens) -> list[ChunkMatch]:
        if not index.queue.is_inline(len(tokens)):
            raise Busy("a long lookup of this model is under way; ask again, or route without this hub's score")
        matched = index.match(tokens, 0.0, MAX_GENERATION)
        return index.cut_at_chunks(matched.matches)

    def _engine(self, question: Question) -> EngineEntry:
        """An engine of the namespace that the question names. Data-parallel engines share one."""
        engines = self._state.sessions.engines()
        fitting = {
            engine.base: engine
            for engine in engines
            if question.model in ("", engine.namespace.model) and question.engine in ("", engine.name)
        }
        if not engines:
            raise InvalidInput("no engine is connected to this hub")
        if len(fitting) != 1:
            fits = "engines with different KV fit" if fitting else "no engine fits"
            named = ", ".join(f"{engine.namespace.model!r} (engine {engine.name!r})" for engine in engines)
            asked = f"model {question.model!r}, engine {question.engine!r}"
            raise InvalidInput(f"{fits} {asked}; name one of: {named}")
        return next(iter(fitting.values()))

    def _admit(self) -> float:
        """The time; raises Busy where the share of the loop's time is used up."""
        now = self._clock()
        self._allowed_s = min(self._allowed_s + (now - self._counted_at) * SCORE_SHARE, SCORE_BURST_S)
        self._counted_at = now
        if self._allowed_s <= 0:
            raise Busy(f"scores take {SCORE_SHARE:.0%} of the hub's time already; route without this hub's score")
        return now

    def _spend(self, since: float) -> None:
        self._allowed_s -= self._clock() - since


def _tokens_of(question: Question) -> Tokens | None:
    """The tokens; None for text. Raises InvalidInput unless the question has one of the two."""
    if (question.token_ids is None) == (question.text is None):
        raise InvalidInput("name one: token_ids, or text")
    return None if question.token_ids is None else _as_tokens(question.token_ids)


def _as_tokens(ids: list[int]) -> Tokens:
    # Twice as fast as numpy's conversion of a list.
    return as_tokens(memoryview(array("I", ids)))


class ScoreRoute:
    """Scores tell what text is stored, so that only the hub's user and those with its token may ask."""

    def __init__(self, scorer: Scorer, counters: Counters, token: str) -> None:
        """``token``: for ``Authorization: Bearer``; empty: only the hub's user on this machine may ask."""
        self._scorer = scorer
        self._counters = counters
        self._token = f"Bearer {token}".encode() if token else b""

    def refusal(self, target: str, headers: Mapping[str, str], is_own: Callable[[], bool]) -> Page | None:
        """Why a request is not answered; None: its body may be read. ``is_own``: it comes from the hub's own user."""
        if urlsplit(target).path != "/score":
            return Page("404 Not Found", TEXT, b"POST /score is the only one\n")
        given = headers.get("authorization", "").encode("latin-1")
        if self._token and hmac.compare_digest(given, self._token):
            return None
        if is_address(headers.get("host", "")) and is_own():
            return None
        return Page(
            "403 Forbidden", TEXT, b"only the hub's own user may ask here, or who sends its score_token as Bearer\n"
        )

    async def answer(self, body: bytes) -> Page:
        try:
            return Page("200 OK", JSON, msgspec.json.encode(await self._scorer.score(body)))
        except Busy as error:
            self._count(error)
            return Page("429 Too Many Requests", TEXT, f"{error}\n".encode())
        except (InvalidInput, msgspec.MsgspecError) as error:
            self._count(error)
            return Page("400 Bad Request", TEXT, f"{error}\n".encode())

    def _count(self, error: Exception) -> None:
        kind = type(error) if isinstance(error, Busy) else InvalidInput
        self._counters.totals[f"refused_{kind.__name__}"] += 1
