"""The query of a selector that wants to know what the end of a prompt attends to."""

from collections.abc import Sequence

from blendhub.core.spans import Span, gaps, total
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadJob
from blendhub.vllm.model.attention_probe import AttentionQuery
from blendhub.vllm.model.recompute_set import RequestTokens

FEWEST = 4
"""A shorter end that nothing stored covers is no question, but a rest, such as that of a chat template."""


def attention_query(job: LoadJob, most: int) -> AttentionQuery:
    """The last ``most`` tokens of the question; without one, of all that nothing stored covers, or of the prompt."""
    decision, n = job.decision, len(job.tokens)
    # Half of a short prompt: they ask the rest.
    spans = _asking_spans(decision, n, min(most, n // 2))
    stored = gaps(Span(0, decision.end), sorted([*decision.holes, *spans]))
    return AttentionQuery(RequestTokens(job.tokens, job.blocks, spans), list(stored))


def _asking_spans(decision: Decision, n_tokens: int, most: int) -> list[Span]:
    prompt, question = Span(0, n_tokens), Span(decision.end, n_tokens)
    for spans in ([question], [*decision.holes, question], [prompt]):
        if total(spans) >= FEWEST:
            break
    return _last(spans, most)


def _last(spans: Sequence[Span], n_tokens: int) -> list[Span]:
    """The last tokens of the spans, as many as there are, or ``n_tokens``."""
    taken: list[Span] = []
    for span in reversed(spans):
        if n_tokens <= 0:
            break
        taken.append(Span(max(span.start, span.end - n_tokens), span.end))
        n_tokens -= len(taken[-1])
    return taken[::-1]
