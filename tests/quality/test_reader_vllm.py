"""vLLM serves the shipped reader, and answers as torch does."""

import pytest

from benchmarks.quality.reader import CHECKPOINT
from benchmarks.quality.reader.evaluate import answers, blended
from benchmarks.quality.reader.model import load
from benchmarks.quality.reader.task import make_prompt
from harness.engines import Engine

pytestmark = pytest.mark.slow


def test_vllm_answers_as_torch_does():
    reader, prompts = load(), [make_prompt(seed, "test") for seed in range(2)]
    with Engine(CHECKPOINT) as engine:
        for prompt in prompts:
            asked = prompt.questions[::10]
            text = [*prompt.header, *(token for document in prompt.documents for token in document)]
            given = engine.ask(*([*text, *question.tokens] for question in asked))
            expected = answers(reader, blended(reader, prompt, None, []), [question.tokens for question in asked])
            assert [answer.tokens for answer in given] == [[token] for token in expected]
