"""Repair, doubt and audits where text moves in models with recurrent layers: states become exact with KV."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from blendhub.vllm.scheduler.segments import SEAM_TOKENS
from harness.engines import deviation
from harness.engines.shapes import GRANITE4, LFM2, QWEN3_NEXT
from tests.vllm.arrangements import fail_repairs, inside, poison_blocks, spoil_states, unfinished_repairs
from tests.vllm.shapes import KIMI_LINEAR
from tests.vllm.test_engine_segments import CUT_TOKENS, KIMI_DELTA, MOVED, MOVING, make_segments, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS, BEFORE = 40, 70
DOCUMENTS, BEHIND = 300 + 11 + 300, 9
"""The tokens of what moves, and of what stands behind it in a prompt."""
ALWAYS = 1e6
"""A margin that no token reaches."""
SHAPES = {
    "short convolutions": LFM2,
    "gated delta rule": QWEN3_NEXT | {"mlp_only_layers": [0, 1, 2]},
    "Mamba 2": GRANITE4,
    KIMI_DELTA: KIMI_LINEAR,
}
"""The second has experts in its last layer only. Where two are almost as likely, rounding decides, and what follows
from a token differs much."""
WRITTEN: dict[str, Any] = {"sampling": {"ignore_eos": True}}


class Errors(NamedTuple):
    """How far an answer is off from a full prefill, behind which vLLM writes the same tokens."""

    kv: float
    """Half of the last 500 tokens of the prompt, and those of the answer, are off by less, relative to their KV."""
    states: float
    """The layer that is off most."""
    said: float
    """The log-probabilities of half of the tokens are off by less."""


ROUNDING = {
    "short convolutions": Errors(1e-5, 1e-5, 1e-5),
    "gated delta rule": Errors(0.01, 0.03, 0.015),
    "Mamba 2": Errors(1e-5, 1e-5, 1e-5),
    KIMI_DELTA: Errors(1e-4, 1e-4, 1e-4),
}
"""What is off where vLLM computes a prompt in two parts: in float32, and in bfloat16 about .007, .012 and .008."""


def errors(engine, answer, prompt, first_said: int = 0) -> Errors:
    """``first_said``: the number of the first token whose log-probabilities are compared."""
    n = len(prompt) + len(answer.tokens) - 1
    kv, states = answer.kv(n), answer.states()
    engine.forget()
    own = engine.one(prompt, len(answer.tokens), mode="off", store=False, forced=answer.tokens)
    assert own.tokens == answer.tokens
    expected, said = own.kv(n), []
    for ours, theirs in zip(answer.logprobs, own.logprobs, strict=True):
        said.append(max(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs))
    of_states = max(deviation(*pair) for pair in zip(states, own.states(), strict=True))
    engine.forget()
    of_kv = [deviation(kv[:, :, at], expected[:, :, at]) for at in range(len(prompt) - 500, n)]
    return Errors(float(np.median(of_kv)), of_states, float(np.median(said[first_said:])))


def are_within(found: Errors, allowed: Errors) -> bool:
    return all(error < most for error, most in zip(found, allowed, strict=True))


def size_of(engine) -> int:
    """The tokens from one state that vLLM keeps to the next."""
    return int(engine.log.split("reused where one is stored behind a multiple of ")[1].split()[0])


def moving_prompt(engine, texts) -> list[int]:
    """A prompt that moves two segments, and in whose answer a block of vLLM's ends. States behind it are spoiled, and
    so is what blocks held before."""
    documents = texts.new(300), texts.new(300)
    make_segments(engine, texts, *documents)
    inside(engine, spoil_states)
    inside(engine, poison_blocks)
    prompt = [*texts.new(BEFORE), *documents[1], *texts.new(11), *documents[0], *texts.new(BEHIND)]
    # In front, as states forget what stands far behind.
    return [*texts.new((-len(prompt) - TOKENS // 2) % size_of(engine)), *prompt]


def is_approximate(answer, prompt) -> bool:
    """Whether KV is approximate from the seam of the first document on."""
    first = len(prompt) - BEHIND - DOCUMENTS + SEAM_TOKENS
    return first <= answer.report["approximate_from"] < first + CUT_TOKENS


@pytest.mark.parametrize("kind", SHAPES)
def test_an_answer_goes_on_from_exact_kv_and_states_and_so_does_the_next_turn(kind, texts, tmp_path):
    rounding = ROUNDING[kind]
    with start(tmp_path, SHAPES[kind]) as engine:
        assert engine.call("batches_in_flight") == 2
        prompt = moving_prompt(engine, texts)
        blended = engine.one(prompt, TOKENS, store=False, **WRITTEN)
        assert blended.report["moved_tokens"] > 400 and is_approximate(blended, prompt)
        off = errors(engine, blended, prompt)
        assert off.kv > 1.5 * rounding.kv and off.said > 1.5 * rounding.said, "a repair would show nowhere"
        # Short convolutions have forgotten by then what was spoiled.
        assert kind == "short convolutions" or off.states > 2 * rounding.states
        answer = engine.one(prompt, TOKENS, repair="always", audit=True, store=False, **WRITTEN)
        report = answer.report
        assert "approximate_from" not in report and 2 <= report["repair"]["exact_from"] < TOKENS - 9
        assert report["audit"]["kl"] > 1e-7 and "doubt" not in report
        repaired = errors(engine, answer, prompt, report["repair"]["exact_from"] - 1)
        assert are_within(repaired, rounding), repaired
        # The last state of the prompt is in vLLM's own cache, and then in the hub.
        answer = engine.one(prompt, TOKENS, repair="always", **WRITTEN)
        turn = [*prompt, *answer.tokens, *texts.new(20)]
        for fate in ("engine", "exact"):
            found = engine.one(turn, 8, mode="exact", store=False)
            assert found.report[f"{fate}_tokens"] >= (len(prompt) - 1) // size_of(engine) * size_of(engine)
            next_turn = errors(engine, found, turn)
            assert are_within(next_turn, rounding), next_turn
        assert inside(engine, unfinished_repairs) == 0


@pytest.mark.parametrize("kind", SHAPES)
def test_tokens_in_doubt_wait_and_the_whole_answer_is_the_models_own(kind, texts, tmp_path):
    with start(tmp_path, SHAPES[kind], MOVING | {"doubt": ALWAYS}) as engine:
        prompt = moving_prompt(engine, texts)
        asked = prompt, [*prompt, *texts.new(5)]
        held = engine.ask(*asked, tokens=TOKENS, audit=True, store=False)
        for answer, one in zip(held, asked, strict=True):
            report = answer.report
            assert report["doubt"]["token"] == report["repair"]["exact_from"] == 1 and report["audit"]["kl"] > 1e-7
            assert "approximate_from" not in report
            own = engine.one(one, TOKENS, mode="off", store=False)
            assert kind == "gated delta rule" or answer.tokens == own.tokens
            engine.forget()
        answer = engine.one(prompt, TOKENS, store=False)
        exact = errors(engine, answer, prompt)
        assert answer.report["doubt"]["token"] == 1 and are_within(exact, ROUNDING[kind]), exact
        # If what a token waits for fails, it goes out as it is.
        inside(engine, fail_repairs)
        answer = engine.one(prompt, TOKENS, store=False)
        assert is_approximate(answer, prompt) and "is not repaired" in engine.log
        assert inside(engine, unfinished_repairs) == 0


def test_answers_that_are_preempted_or_end_while_they_are_repaired_are_as_right_as_before(texts, tmp_path):
    with start(tmp_path, LFM2, num_gpu_blocks_override=75, max_model_len=1024) as engine:
        prompt = moving_prompt(engine, texts)
        prompts = [[*texts.new(BEFORE), *prompt[BEFORE:], *texts.new(number)] for number in (5, 9, 14)]
        answers = engine.ask(*prompts, tokens=100, repair="always", store=False, **WRITTEN)
        assert engine.call("preemptions") > 0
        for answer, asked in zip(answers, prompts, strict=True):
            engine.forget()
            own = engine.one(asked, 100, mode="off", store=False, forced=answer.tokens)
            for ours, theirs in zip(answer.logprobs, own.logprobs, strict=True):
                assert max(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs) < MOVED
        engine.forget()
        # An answer of one token is repaired behind its end.
        answer = engine.one(prompt, 1, repair="always", store=False)
        assert is_approximate(answer, prompt)
        turn = [*prompt, *answer.tokens, *texts.new(9)]
        found = engine.one(turn, 8, mode="exact", store=False)
        assert found.report["engine_tokens"] == (len(prompt) - 1) // 32 * 32
        assert are_within(errors(engine, found, turn), ROUNDING["short convolutions"])
        assert inside(engine, unfinished_repairs) == 0
