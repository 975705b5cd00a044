"""A conversation blends each document once: its next turns find the blended KV again, and no other prompt does."""

import pytest

from harness.engines import Engine, disagreement, largest_difference
from tests.vllm.adapters import make_adapter
from tests.vllm.conftest import PROBING, ROUNDING, SETTINGS, TOLERANCE, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK, ANSWER = 32, 20
SYSTEM = 61
"""Where the first document of a chat begins."""


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS | PROBING, enable_lora=True, max_lora_rank=8) as engine:
        yield engine


class Chat:
    """A conversation; each turn brings a document that is stored, and a question."""

    def __init__(self, engine, texts, turns=6):
        self._engine = engine
        self._texts = texts
        self._documents = [texts.new(160) for _ in range(turns)]
        store(engine, *self._documents)
        self.prompt = texts.new(50)

    def turn(self, answer=None, **asked):
        """The answer to the next question, behind the last answer; ``prompt`` has everything that was said before."""
        if answer:
            self.prompt += answer.tokens
        self.prompt += [*self._texts.new(11), *self._documents.pop(), *self._texts.new(30)]
        return self._engine.one(self.prompt, tokens=ANSWER, explain=True, **asked)


def test_each_turn_blends_its_document_only_wherever_the_others_are_found(engine, plain, texts):
    chat, answer, before, there = Chat(engine, texts), None, None, 0
    for number in range(6):
        if number == 4:
            engine.forget()  # from here on the hub alone has what was said before
        answer = chat.turn(answer)
        report = answer.report
        assert report["moved_tokens"] == 160 and report["recomputed_tokens"] == 24
        if number:
            # vLLM has whole blocks, and the hub the tokens behind them; the last token was never computed.
            places = (0, SYSTEM) if number == 4 else (there // BLOCK * BLOCK, 0)
            assert (report["engine_tokens"], report["exact_tokens"]) == places
            assert report["settled_tokens"] == there - SYSTEM and report["spans"]["settled"] == [[SYSTEM, there]]
            assert all(start >= there for start, _ in report["spans"]["recomputed"])
            assert (answer.kv(there) == before).all()
        there = len(chat.prompt) + ANSWER - 1
        before = answer.kv(there)
    for mode in ("exact", "off"):
        asked = engine.one(chat.prompt, tokens=ANSWER, mode=mode, store=False)
        assert asked.report["settled_tokens"] == 0
        expected = plain.one(chat.prompt, tokens=ANSWER)
        assert disagreement([asked], [expected]) < TOLERANCE
        n = len(chat.prompt) - 1
        assert largest_difference(asked.kv(n), expected.kv(n)) < ROUNDING
    # vLLM has computed all of the prompt itself now, and that is what it is asked for.
    clean = engine.one(chat.prompt, tokens=ANSWER)
    assert clean.report["settled_tokens"] == 0
    assert clean.report["engine_tokens"] == (len(chat.prompt) - 1) // BLOCK * BLOCK


def test_what_nothing_has_stored_is_blended_again_when_vllm_has_evicted_it(engine, texts):
    chat = Chat(engine, texts)
    answer = chat.turn()
    there = len(chat.prompt) + ANSWER - 1
    answer = chat.turn(answer, store=False)
    engine.forget()
    last = chat.turn(answer, store=False).report
    assert (last["settled_tokens"], last["moved_tokens"], last["exact_tokens"]) == (there - SYSTEM, 320, SYSTEM)


def test_a_retry_and_a_second_user_blend_nothing_and_who_does_not_want_it_blends_anew(engine, texts, tmp_path):
    chat = Chat(engine, texts)
    first = chat.turn()
    there = (len(chat.prompt) - 1) // BLOCK * BLOCK
    again = engine.one(chat.prompt, tokens=ANSWER)
    assert again.report["engine_tokens"] == there and again.report["settled_tokens"] == there - SYSTEM
    assert again.report["moved_tokens"] == again.report["recomputed_tokens"] == 0
    assert disagreement([again], [first]) < TOLERANCE
    second = engine.one([*chat.prompt[:-10], *texts.new(10)], tokens=ANSWER)
    assert second.report["settled_tokens"] > 150
    # Another salt and an adapter find nothing.
    for asked in ({"cache_salt": "mine"}, {"lora": str(make_adapter(tmp_path / "one", 0))}):
        other = engine.one(chat.prompt, tokens=2, **asked)
        assert not any(other.report[f"{fate}_tokens"] for fate in ("engine", "settled", "moved"))
    anew = engine.one(chat.prompt, tokens=ANSWER, settled=False, store=False)
    assert anew.report["settled_tokens"] == 0 and anew.report["moved_tokens"] >= 160
    more = engine.one(chat.prompt, tokens=ANSWER, recompute_ratio=0.9, store=False)
    assert more.report["settled_tokens"] == 0 and more.report["recomputed_tokens"] >= 144
