"""Documents between separators, as an application for LMCache writes its prompts, and a hub within vLLM's one process.

The settings are those that a person writes: beside what makes an answer come on a busy machine, they name the transport
and the separator, which is text.
"""

import os
from contextlib import suppress
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from harness.engines import Engine, disagreement, largest_difference
from harness.engines.tiny_model import make_tiny_model
from tests.vllm.byte_pairs import byte_pairs
from tests.vllm.conftest import ROUNDING, TOLERANCE, reused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEPARATOR = " # # "
CHOSEN = {
    "hub": {"arena_gib": 0.25},
    "transport": {"name": "inproc"},
    "matchers": [{"name": "prefix"}, {"name": "separator", "options": {"separator": SEPARATOR}}],
    "policy": {"min_reused_tokens": 64},
    "lookup_timeout_s": 10.0,
}
WORDS = ["the", "other", "word", "is", "more", "than", "what", "ends", "here", "and", "seven", "(7)", "lines."]


class Prompts:
    """Makes texts, and the tokens of what is put together from them."""

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)
        self._tokenizer = byte_pairs()

    def text(self, n):
        return " ".join(self._random.choice(WORDS, n))

    def tokens(self, *texts):
        """The texts with separators between them, tokenized as a whole."""
        return self._tokenizer.encode(SEPARATOR.join(texts))

    def spans(self, tokens):
        """Where each of the texts stands."""
        signs = self._tokenizer.encode(SEPARATOR.rstrip())
        ends = [at for at in range(len(tokens)) if tokens[at : at + len(signs)] == signs]
        return [list(span) for span in zip([0, *(end + len(signs) for end in ends)], [*ends, len(tokens)], strict=True)]


@pytest.fixture
def prompts(request):
    return Prompts(sum(request.node.name.encode()))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model = make_tiny_model(tmp_path_factory.mktemp("separator") / "tiny")
    byte_pairs().save_pretrained(model)
    with Engine(model, CHOSEN, skip_tokenizer_init=False) as engine:
        yield engine


def test_documents_between_separators_move_whole_and_nothing_else_does(engine, plain, prompts):
    system, first, second, question = (prompts.text(n) for n in (200, 90, 80, 12))
    stored = prompts.tokens(system, first, second, question)
    engine.one(stored)
    engine.forget()
    prompt = prompts.tokens(prompts.text(50), second, first, prompts.text(12))
    blended = engine.one(prompt, tokens=4, store=False, explain=True)
    assert blended.report["spans"]["moved"] == prompts.spans(prompt)[1:3], blended.report
    assert blended.report["recomputed_tokens"] == ceil(0.3 * blended.report["moved_tokens"])
    engine.forget()
    all_anew = engine.one(prompt, tokens=4, recompute_ratio=1.0, store=False)
    expected = plain.one(prompt, tokens=4)
    assert disagreement([all_anew], [expected]) < TOLERANCE
    n = len(prompt) - 1
    assert largest_difference(all_anew.kv(n), expected.kv(n)) < ROUNDING
    engine.forget()
    # Neither a part of a document nor one that stands within a sentence is a segment.
    for text in (first[: len(first) // 2], f"{prompts.text(9)} {first} {prompts.text(9)}"):
        assert reused(engine.one(prompts.tokens(prompts.text(50), text, prompts.text(12)), store=False)) == 0
    # What has not moved needs no separator.
    half = f"{system}{SEPARATOR}{first[: len(first) // 2]}"
    exact = engine.one(prompts.tokens(half, prompts.text(12)), store=False)
    assert exact.report["exact_tokens"] > prompts.spans(stored)[1][0] and exact.report["moved_tokens"] == 0


def test_a_hub_in_vllm_s_process_serves_many_requests_at_once_without_a_socket(engine, plain, prompts):
    system, question, n = prompts.text(200), prompts.text(12), 6
    documents = [prompts.text(70) for _ in range(n)]
    engine.ask(*(prompts.tokens(system, document, question) for document in documents))
    engine.forget()
    asked = [
        prompts.tokens(prompts.text(30 + at), documents[at], documents[at - 1], prompts.text(12)) for at in range(n)
    ]
    answers = engine.ask(*asked, tokens=8, recompute_ratio=1.0, explain=True)
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.report["spans"]["moved"] == prompts.spans(prompt)[1:3]
    assert disagreement(answers, plain.ask(*asked, tokens=8)) < TOLERANCE
    # Later turns find what these have saved meanwhile.
    engine.forget()
    later = engine.ask(*([*prompt, *answer.tokens] for prompt, answer in zip(asked, answers, strict=True)))
    assert all(reused(one) >= len(prompt) - 1 for one, prompt in zip(later, asked, strict=True))
    ends = set()
    for end in Path(f"/proc/{engine.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the engine closes files meanwhile
            ends.add(os.readlink(end))
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    assert not [at for at in sockets if at[-1].endswith("/hub.sock") and f"socket:[{at[6]}]" in ends]
    assert "embedded hub in a thread" in engine.log
