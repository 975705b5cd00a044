"""The shipped reader in vLLM: reuse loses what depends on other documents, and recomputation wins it back."""

from typing import Any

import pytest

from benchmarks.quality.reader import CHECKPOINT
from benchmarks.quality.reader import words as w
from benchmarks.quality.reader.task import headers, make_prompt
from benchmarks.quality.serving import PLAIN
from benchmarks.quality.workload import Case, make_visits
from harness.engines import Engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts():
    return [make_prompt(seed, "test") for seed in range(4)]


def test_what_depends_on_other_documents_is_lost_by_reuse_and_won_back_by_recomputation(prompts):
    cases = [Case(prompt.header, prompt.documents, []) for prompt in prompts]
    asked = [
        (case, question)
        for case, prompt in zip(cases, prompts, strict=True)
        for stratum in ("plain", "cross")
        for question in [one for one in prompt.questions if one.stratum == stratum][:6]
    ]
    with Engine(CHECKPOINT, {"hub": {"arena_gib": 1.0, "metrics": ""}}, **PLAIN) as engine:
        for visit in make_visits(cases, headers(), 2048):
            engine.one(visit, mode="exact")

        def right(stratum: str, **request: Any) -> float:
            of = [(case, question) for case, question in asked if question.stratum == stratum]
            engine.forget()
            given = engine.ask(*([*case.body, *one.tokens] for case, one in of), store=False, **request)
            return sum(answer.tokens == [one.answer] for answer, (_, one) in zip(given, of, strict=True)) / len(of)

        assert right("plain", mode="off") >= 0.95 and right("cross", mode="off") >= 0.95
        assert right("plain", recompute_ratio=0.0) >= 0.9
        assert right("cross", recompute_ratio=0.0) <= 0.5
        assert right("cross", recompute_ratio=1.0) == right("cross", mode="off")


def test_the_tokenizer_reads_what_a_prompt_looks_like(prompts):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    tokens = [*prompts[0].header, *prompts[0].documents[0]]
    assert tokenizer(w.text(tokens), add_special_tokens=False)["input_ids"] == tokens
    assert tokenizer.decode(tokens) == w.text(tokens)
