"""Models with recurrent layers whose text moves: what prompts repeat becomes segments, over which states go by maps.

Repair, doubt and audits there: states become exact with KV.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest

from blendhub.vllm.scheduler.segments import SEAM_TOKENS, TAIL_TOKENS
from harness.engines import Engine, deviation, disagreement
from harness.engines.shapes import GRANITE4, LFM2, QWEN3_NEXT
from tests.hub.processes import HubProcess
from tests.vllm.arrangements import (
    arrange,
    draw_wide_weights,
    error_of_states,
    fail_loads,
    fail_repairs,
    inside,
    note_states,
    poison_blocks,
    ranks,
    spoil_states,
    unfinished_repairs,
)
from tests.vllm.conftest import SETTINGS, drawn
from tests.vllm.shapes import KIMI_LINEAR
from tests.vllm.test_engine_ranks import RANKS
from tests.vllm.test_engine_recurrent import check_as_in_vllms_own_cache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MOVING = SETTINGS | {"policy": SETTINGS["policy"] | {"moves_states": True}}
OPTIONS: dict[str, Any] = {"load_format": "dummy", "seed": 7, "enable_prefix_caching": True}
SHORT, KIMI_DELTA = "short convolutions", "Kimi delta attention"
SHAPES = {
    SHORT: LFM2,
    "gated delta rule": QWEN3_NEXT | {"mlp_only_layers": [0, 1, 2]},
    "Mamba 2": GRANITE4,
    KIMI_DELTA: KIMI_LINEAR,
}
"""The second has experts in its last layer only. Where two are almost as likely, rounding decides, and what follows
from a token differs much."""
EXACT = {SHORT: 1e-4, "gated delta rule": 0.02, "Mamba 2": 1e-4, KIMI_DELTA: 1e-3}
"""How far log-probabilities of what is computed in parts may be off: float32, and bfloat16."""
CUT_TOKENS = 64
"""A chunk that ends with a state is stored as a run by itself. What lies there of a text is not found if it is shorter;
where states end depends on the processor."""
MOVED = 0.15
"""Of what is approximate. The likelihoods of tokens lie close together here."""
GAIN = "20"
"""Of dummy weights with which rounding grows little from layer to layer, and states tell what stood before."""
TEXT = 400
"""The tokens of a text that becomes a segment."""
LEAST_MOVED = TEXT - SEAM_TOKENS - 2 * TAIL_TOKENS - CUT_TOKENS
"""All but what begins a text, and what ends it."""

TOKENS, BEFORE = 40, 70
DOCUMENTS, BEHIND = 300 + 11 + 300, 9
"""The tokens of what moves, and of what stands behind it in a prompt."""
ALWAYS = 1e6
"""A margin that no token reaches."""
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
    SHORT: Errors(1e-5, 1e-5, 1e-5),
    "gated delta rule": Errors(0.01, 0.03, 0.015),
    "Mamba 2": Errors(1e-5, 1e-5, 1e-5),
    KIMI_DELTA: Errors(1e-4, 1e-4, 1e-4),
}
"""What is off where vLLM computes a prompt in two parts: in float32, and in bfloat16 about .007, .012 and .008."""


def start(folder, shape, settings=MOVING, **options):
    arranged = ["harness.engines.dummy_weights:mend_for_cpus", GAIN]
    if shape["model_type"] == "kimi_linear":
        arranged = ["tests.vllm.kimi_stand_ins:put_in_place", GAIN]
    usual = OPTIONS | {"dtype": shape["torch_dtype"], "arrange": arranged}
    engine = Engine(drawn(folder, shape), settings, **usual | options)
    inside(engine, note_states)
    return engine


@pytest.fixture(scope="module", params=SHAPES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engine(kind, tmp_path_factory):
    with start(tmp_path_factory.mktemp("segments"), SHAPES[kind]) as engine:
        assert engine.call("batches_in_flight") == 2
        yield engine
        assert inside(engine, unfinished_repairs) == 0


def apart(answer, expected):
    """How far the log-probabilities of the first token are off, of those tokens that both answers name."""
    ours, theirs = answer.logprobs[0], expected.logprobs[0]
    assert len(ours.keys() & theirs) > len(ours) // 2
    return max(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs)


def make_segments(engine, texts, *documents):
    """Have two prompts repeat documents, each behind other text."""
    for order in (documents, documents[::-1]):
        engine.one([*texts.new(40), *(token for document in order for token in (*document, *texts.new(20)))])
        engine.forget()


def test_what_prompts_repeat_becomes_segments_that_move(kind, engine, texts):
    first, second, third = (texts.new(TEXT) for _ in range(3))
    engine.one([*texts.new(40), *first, *second, *texts.new(20)])
    # What stood elsewhere before is computed with its map. The whole prompt is computed, and so it is exact.
    for prompt in ([*texts.new(60), *third, *first, *texts.new(25)], [*second, *texts.new(9), *third]):
        made = engine.one(prompt, tokens=8)
        assert made.report["moved_tokens"] == 0 and made.report["hole_tokens"] > 700, made.report["reason"]
        error, rounding = inside(engine, error_of_states)
        assert error <= 3 * rounding + 1e-6
        own = engine.one(prompt, tokens=8, mode="off", store=False)
        assert disagreement([made], [own]) < EXACT[kind]
    prompt = [*texts.new(50), *second, *first, *texts.new(70), *third, *texts.new(28)]
    engine.forget()
    moved = engine.one(prompt, tokens=8, store=False)
    assert moved.report["moved_tokens"] > 3 * LEAST_MOVED
    error, _ = inside(engine, error_of_states)
    assert error < 0.5, "the state stands behind other tokens"
    own = engine.one(prompt, tokens=8, mode="off", store=False)
    assert apart(moved, own) < MOVED
    engine.forget()


@pytest.mark.parametrize("kind", [SHORT], indirect=True)
def test_a_state_goes_on_from_vllms_own_cache_and_from_one_that_is_loaded(kind, engine, texts):
    document, other, system = texts.new(300), texts.new(300), texts.new(330)
    make_segments(engine, texts, document, other)
    engine.one([*system, *texts.new(9)])
    prompt = [*system, *texts.new(30), *document, *texts.new(9)]
    for reused in ("engine", "exact"):  # what vLLM has, and what it had and the hub has still
        moved = engine.one(prompt, tokens=8, store=False)
        assert moved.report[f"{reused}_tokens"] == 320 and moved.report["moved_tokens"] > 200
        assert inside(engine, error_of_states)[0] < 0.5
        own = engine.one(prompt, tokens=8, mode="off", store=False)
        assert apart(moved, own) < MOVED
        engine.forget()
    # A load that fails takes nothing with it, and a prompt that moves nothing is computed as ever.
    inside(engine, fail_loads, True)
    failed = engine.one(prompt, tokens=8, store=False)
    inside(engine, fail_loads, False)
    assert disagreement([failed], [own]) < EXACT[kind] and failed.report["moved_tokens"] == 0
    engine.forget()


def test_segments_move_into_another_engine(texts, tmp_path):
    documents = texts.new(TEXT), texts.new(TEXT)
    hub = HubProcess(tmp_path, arena_gib=0.25)
    settings = MOVING | {"endpoint": hub.endpoint, "hub": {}}
    try:
        with start(tmp_path, LFM2, settings) as engine, start(tmp_path, LFM2, settings) as another:
            make_segments(engine, texts, *documents)
            prompt = [*texts.new(50), *documents[1], *documents[0], *texts.new(28)]
            moved = another.one(prompt, tokens=8, store=False)
            assert moved.report["moved_tokens"] > 2 * LEAST_MOVED
            assert inside(another, error_of_states)[0] < 0.5
            assert apart(moved, another.one(prompt, tokens=8, mode="off", store=False)) < MOVED
    finally:
        hub.kill()


def test_each_rank_has_its_own_shard_of_states_and_makes_the_maps_of_its_heads_and_goes_over_them(texts, tmp_path):
    documents, prefix = (texts.new(300), texts.new(300)), texts.new(550)
    with Engine(
        drawn(tmp_path, QWEN3_NEXT),
        MOVING,
        **OPTIONS | RANKS | {"dtype": "bfloat16", "arrange": arrange(ranks, "", GAIN)},
    ) as engine:
        make_segments(engine, texts, *documents)
        prompt = [*texts.new(70), *documents[1], *documents[0], *texts.new(9)]
        moved = engine.one(prompt, tokens=8, store=False)
        assert moved.report["moved_tokens"] > 400
        own = engine.one(prompt, tokens=8, mode="off", store=False)
        assert apart(moved, own) < MOVED
        engine.forget()
        held = engine.one(prompt, tokens=8, store=False, doubt=1e6)
        assert held.report["doubt"]["token"] == 1 and "approximate_from" not in held.report
        assert apart(held, own) < MOVED
        engine.forget()
        engine.one(prefix)
        prompt = [*prefix, *texts.new(9)]  # it ends soon behind the state, which it forgets
        own = engine.one(prompt, tokens=10, mode="off", store=False)
        engine.forget()
        # Blocks that others have used hold no state that could be taken for the loaded one.
        engine.ask(*(texts.new(600) for _ in range(8)), mode="off", store=False)
        engine.forget()
        check_as_in_vllms_own_cache(engine.one(prompt, tokens=10, store=False), own)


def test_a_model_whose_maps_are_wrong_reuses_exact_prefixes_and_a_line_says_why(texts, tmp_path):
    """vLLM's rotation of keys for CPUs is wrong for this model, and differs with the number of tokens."""
    with start(tmp_path, LFM2, arrange=arrange(draw_wide_weights, "", GAIN)) as engine:
        assert engine.log.count("exact prefixes are reused all the same") == 1
        document = texts.new(200)
        make_segments(engine, texts, document)
        engine.one(document)
        engine.forget()
        again = engine.one([*document, *texts.new(9)], store=False)
        assert again.report["exact_tokens"] == 192 and again.report["moved_tokens"] == 0


# Exact again.


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


def test_an_answer_goes_on_from_exact_kv_and_states_and_so_does_the_next_turn(kind, engine, texts):
    rounding = ROUNDING[kind]
    prompt = moving_prompt(engine, texts)
    blended = engine.one(prompt, TOKENS, store=False, **WRITTEN)
    assert blended.report["moved_tokens"] > 400 and is_approximate(blended, prompt)
    off = errors(engine, blended, prompt)
    assert off.kv > 1.5 * rounding.kv and off.said > 1.5 * rounding.said, "a repair would show nowhere"
    # Short convolutions have forgotten by then what was spoiled.
    assert kind == SHORT or off.states > 2 * rounding.states
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


def test_tokens_in_doubt_wait_and_the_whole_answer_is_the_models_own(kind, engine, texts):
    prompt = moving_prompt(engine, texts)
    asked = prompt, [*prompt, *texts.new(5)]
    held = engine.ask(*asked, tokens=TOKENS, doubt=ALWAYS, audit=True, store=False)
    for answer, one in zip(held, asked, strict=True):
        report = answer.report
        assert report["doubt"]["token"] == report["repair"]["exact_from"] == 1 and report["audit"]["kl"] > 1e-7
        assert "approximate_from" not in report
        own = engine.one(one, TOKENS, mode="off", store=False)
        assert kind == "gated delta rule" or answer.tokens == own.tokens
        engine.forget()
    answer = engine.one(prompt, TOKENS, doubt=ALWAYS, store=False)
    exact = errors(engine, answer, prompt)
    assert answer.report["doubt"]["token"] == 1 and are_within(exact, ROUNDING[kind]), exact
    # If what a token waits for fails, it goes out as it is.
    inside(engine, fail_repairs, True)
    answer = engine.one(prompt, TOKENS, doubt=ALWAYS, store=False)
    inside(engine, fail_repairs, False)
    assert is_approximate(answer, prompt) and "is not repaired" in engine.log
    engine.forget()


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
        assert are_within(errors(engine, found, turn), ROUNDING[SHORT])
        assert inside(engine, unfinished_repairs) == 0
