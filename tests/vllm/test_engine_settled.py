"""A conversation blends each document once: its next turns find the blended KV again, and no other prompt does."""

import pytest

from harness.engines import Engine, disagreement, largest_difference
from harness.engines.adapters import make_adapter
from tests.vllm.conftest import PROBING, SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 32
ROUNDING = 1e-5
"""float32 computed in another order."""

ANSWER = 20


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="two batches in flight"),
        pytest.param(False, id="one batch at a time", marks=pytest.mark.long),
    ],
)
def engine(request, model):
    options = {"async_scheduling": request.param, "enable_lora": True, "max_lora_rank": 8}
    with Engine(model, SETTINGS | PROBING, **options) as engine:
        yield engine


class Chat:
    """A conversation; each turn brings a document that is stored, and a question."""

    def __init__(self, engine, texts, turns=6):
        self._engine = engine
        self._texts = texts
        self._documents = [texts.new(160) for _ in range(turns)]
        for document in self._documents:
            engine.one(document)
        engine.forget()
        self.prompt = texts.new(50)

    def turn(self, answer=None, **asked):
        """The answer to the next question, behind the last answer; ``prompt`` has everything that was said before."""
        if answer:
            self.prompt += answer.tokens
        self.prompt += [*self._texts.new(11), *self._documents.pop(), *self._texts.new(30)]
        return self._engine.one(self.prompt, tokens=ANSWER, explain=True, **asked)


def test_six_turns_blend_each_document_once(engine, plain, texts):
    chat, answer, before, there = Chat(engine, texts), None, None, 0
    for number in range(6):
        answer = chat.turn(answer)
        report = answer.report
        assert report["moved_tokens"] == 160 and report["recomputed_tokens"] == 24
        if number:
            # vLLM has whole blocks, and the hub the tokens behind them; the last token was never computed.
            assert report["engine_tokens"] == there // BLOCK * BLOCK
            assert report["settled_tokens"] == there - 61 and report["spans"]["settled"] == [[61, there]]
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


def test_a_retry_and_a_second_user_blend_nothing_and_who_does_not_want_it_blends_anew(engine, texts):
    chat = Chat(engine, texts)
    first = chat.turn()
    there = (len(chat.prompt) - 1) // BLOCK * BLOCK
    again = engine.one(chat.prompt, tokens=ANSWER, explain=True)
    assert again.report["engine_tokens"] == there and again.report["settled_tokens"] == there - 61
    assert again.report["moved_tokens"] == again.report["recomputed_tokens"] == 0
    assert disagreement([again], [first]) < TOLERANCE
    second = engine.one([*chat.prompt[:-10], *texts.new(10)], tokens=ANSWER)
    assert second.report["settled_tokens"] > 150
    anew = engine.one(chat.prompt, tokens=ANSWER, settled=False, store=False)
    assert anew.report["settled_tokens"] == 0 and anew.report["moved_tokens"] >= 160
    more = engine.one(chat.prompt, tokens=ANSWER, recompute_ratio=0.9, store=False)
    assert more.report["settled_tokens"] == 0 and more.report["recomputed_tokens"] >= 144


def test_evicted_blocks_are_found_in_the_hub_and_what_that_lacks_is_blended_again(engine, texts):
    chat, answer = Chat(engine, texts), None
    for _ in range(3):
        answer = chat.turn(answer)
    there = len(chat.prompt) + ANSWER - 1
    before = answer.kv(there)
    engine.forget()
    answer = chat.turn(answer)
    report = answer.report
    assert report["engine_tokens"] == 0 and report["exact_tokens"] == 61
    assert report["settled_tokens"] == there - 61 and report["moved_tokens"] == 160
    assert all(start >= there for start, _ in report["spans"]["recomputed"])
    assert (answer.kv(there) == before).all()
    # From here on nothing more is stored, so that vLLM alone has what is blended.
    there = len(chat.prompt) + ANSWER - 1
    answer = chat.turn(answer, store=False)
    engine.forget()
    last = chat.turn(answer, store=False).report
    assert last["settled_tokens"] == there - 61 and last["moved_tokens"] == 320 and last["exact_tokens"] == 61


def test_another_salt_and_an_adapter_find_nothing(engine, texts, tmp_path):
    chat = Chat(engine, texts)
    chat.turn()
    for asked in ({"cache_salt": "mine"}, {"lora": str(make_adapter(tmp_path / "one", 0))}):
        other = engine.one(chat.prompt, tokens=2, **asked)
        assert (other.report["engine_tokens"], other.report["settled_tokens"]) == (0, 0)
        assert other.report["moved_tokens"] == 0
    assert engine.one(chat.prompt, tokens=2).report["settled_tokens"] > 150


def test_an_audit_of_settled_text_ends_with_exact_kv(engine, plain, texts):
    chat = Chat(engine, texts)
    answer = chat.turn()
    engine.forget()
    audited = engine.one(chat.prompt, tokens=ANSWER, audit=True)
    assert audited.report["settled_tokens"] > 150 and audited.report["moved_tokens"] == 0
    assert audited.report["audit"]["kl"] >= 0
    n = len(chat.prompt) - 1
    expected = plain.one(chat.prompt, tokens=ANSWER)
    assert largest_difference(audited.kv(n), expected.kv(n)) < ROUNDING
    assert disagreement([audited], [expected]) < TOLERANCE
    assert audited.report["audit"]["agrees"] == (answer.tokens[0] == expected.tokens[0])
