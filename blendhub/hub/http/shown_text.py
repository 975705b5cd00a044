"""The text of what a request reused, for a page that was asked to show it."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np

from blendhub.core.spans import Match, Span
from blendhub.core.tokens import Tokens
from blendhub.hub.http.tokenizers import Loaded, Tokenizers
from blendhub.hub.index.namespace_index import Run
from blendhub.hub.index.table import IndexTable
from blendhub.hub.limits import MOST_CHUNKS, MOST_SHOWN_CHARACTERS
from blendhub.hub.reports import ReportTable

NO_TOKENS = np.empty(0, np.uint32)


class Shown(msgspec.Struct, frozen=True):
    """A reused stretch of a prompt."""

    span: Span
    text: str
    note: str
    """The part of the text that is missing; empty if none is."""


class TextOfRequest(msgspec.Struct, frozen=True):
    model: str
    loading: bool
    """Whether the model's tokenizer is being loaded, so that there is no text yet."""
    problem: str
    """Why token ids are shown in place of text."""
    stretches: tuple[Shown, ...]


class Kept(msgspec.Struct, frozen=True):
    """The stored tokens of a stretch."""

    span: Span
    tokens: Tokens
    """The first tokens of the stretch."""
    n_tokens: int


class ShownText:
    """The texts for the hub's page. Runs on the hub's event loop; text is decoded in a thread."""

    def __init__(self, indexes: IndexTable, reports: ReportTable) -> None:
        self._indexes = indexes
        self._reports = reports
        self._tokenizers = Tokenizers()

    async def of(self, engine: str, request: str) -> TextOfRequest | None:
        """The text that a request reused; None if the request is unknown."""
        found = self._reports.of_engine(engine, request)
        if found is None:
            return None
        base, variant, report = found
        # Only the request's own namespace: an engine may report runs of others.
        index = self._indexes.find(base, variant)
        kept = [_kept(match, index.runs.get(match.run) if index else None) for match in report.sources]
        if index is None or not any(one.n_tokens for one in kept):
            return TextOfRequest("", False, "", tuple(Shown(one.span, "", _note(one, False)) for one in kept))
        model = index.namespace.model
        tokenizer = await self._tokenizers.get(model)
        if tokenizer is None:
            return TextOfRequest(model, True, "", ())
        return await asyncio.to_thread(_decoded, model, tokenizer, kept)


def _kept(match: Match, run: Run | None) -> Kept:
    if run is None:
        return Kept(match.span, NO_TOKENS, 0)
    start = match.source_start
    end = start + match.span.end - match.span.start
    parts, n_tokens = [NO_TOKENS], 0
    for chunk in run.chunks_between(start, end, MOST_CHUNKS):
        assert chunk.tokens is not None
        part = chunk.tokens[max(start - chunk.span.start, 0) : end - chunk.span.start]
        if n_tokens < MOST_SHOWN_CHARACTERS:
            parts.append(part)
        n_tokens += len(part)
    return Kept(match.span, np.concatenate(parts)[:MOST_SHOWN_CHARACTERS], n_tokens)


def _decoded(model: str, tokenizer: Loaded, kept: Sequence[Kept]) -> TextOfRequest:
    problem = tokenizer if isinstance(tokenizer, str) else ""
    texts = []
    try:
        texts = [_text(tokenizer, one.tokens) if one.n_tokens else "" for one in kept]
    except Exception as error:  # tokens come from engines, and need not be the tokenizer's
        problem = f"token ids are shown, because the tokenizer of {model!r} cannot decode them: {type(error).__name__}"
        texts = [_text("", one.tokens) for one in kept]
    shown = []
    for one, text in zip(kept, texts, strict=True):
        is_cut = len(text) > MOST_SHOWN_CHARACTERS or one.n_tokens > len(one.tokens)
        shown.append(Shown(one.span, text[:MOST_SHOWN_CHARACTERS], _note(one, is_cut)))
    return TextOfRequest(model, False, problem, tuple(shown))


def _text(tokenizer: Loaded, tokens: Tokens) -> str:
    ids: list[int] = tokens.tolist()
    if isinstance(tokenizer, str):
        return " ".join(map(str, ids))
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _note(kept: Kept, is_cut: bool) -> str:
    whole = kept.span.end - kept.span.start
    gone = whole - kept.n_tokens
    if not kept.n_tokens:
        return "It is no longer stored."
    notes = [f"{gone:,} of its {whole:,} tokens are no longer stored."] if gone else []
    if is_cut:
        notes.append(f"It is cut off: at most {MOST_SHOWN_CHARACTERS:,} characters and tokens are shown.")
    return " ".join(notes)
