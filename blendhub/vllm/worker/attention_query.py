"""The query of a selector that wants to know what the end of a prompt attends to."""

from blendhub.core.spans import Span, gaps, total
from blendhub.vllm.messages import LoadJob
from blendhub.vllm.model.attention_probe import AttentionQuery
from blendhub.vllm.model.recompute_set import RequestTokens
from blendhub.vllm.spans import behind, cut

FEWEST = 4
"""A shorter end that nothing stored covers is no question, but a rest, such as that of a chat template."""


def attention_query(job: LoadJob, most: int) -> AttentionQuery:
    """The last ``most`` tokens of the question; without one, of all that nothing stored covers, or of the prompt."""
    decision, n = job.decision, len(job.tokens)
    question = Span(decision.end, n)
    choices = [question], [*decision.holes, question], [Span(0, n)]
    spans = next(spans for spans in choices if total(spans) >= FEWEST or spans is choices[-1])
    # Half of a short prompt: they ask the rest.
    if before := cut(spans, total(spans) - min(most, n // 2)):
        spans = behind(spans, before[-1].end)
    stored = gaps(Span(0, decision.end), sorted([*decision.holes, *spans]))
    return AttentionQuery(RequestTokens(job.tokens, job.blocks, spans), list(stored))
