"""The prompts of the real model, and how far answers are from full prefill's."""

import math
import random
from itertools import islice
from types import SimpleNamespace

import pytest
from blendhub_tools.advice.judge import (
    ALL_KL,
    ANSWER,
    FIRST,
    KL,
    NATS,
    RIGHT,
    RIGHT_NATS,
    SURE_FIRST,
    divergence,
    judge,
)
from blendhub_tools.advice.outcomes import Outcome

from benchmarks.quality.measure import SELECTORS
from benchmarks.quality.reader.cases import READER
from benchmarks.quality.real import figures
from benchmarks.quality.real.chat import Chat
from benchmarks.quality.real.people import Half, people
from benchmarks.quality.real.sources import BFCL, manual, requests
from benchmarks.quality.real.workloads import CLEARED, WORKLOADS, RealQuestion, earlier

needs_texts = pytest.mark.skipif(not BFCL.exists(), reason="its texts are a package; `make setup` downloads it")
HALVES: tuple[Half, ...] = ("training", "test")


class Letters:
    """A tokenizer with a token for each letter."""

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert add_generation_prompt and not tokenize
        said = [f"<{one['role']}>{one['content']}</>" for one in messages]
        return "".join(said) + "<assistant>"

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]


def text(tokens):
    return "".join(map(chr, tokens))


@pytest.fixture(scope="module", params=WORKLOADS)
def cases(request):
    if not BFCL.exists():
        pytest.skip("its texts are a package; `make setup` downloads it")
    return request.param, list(islice(WORKLOADS[request.param](Chat(Letters()), "test"), 12))


def test_all_text_of_a_prompt_was_computed_before_elsewhere(cases):
    _, made = cases
    visits = [text(visit) for visit in earlier(made)]
    for case in made:
        pieces = [text(piece) for piece in case.pieces if CLEARED not in text(piece)]
        assert all(any(piece in visit for visit in visits) for piece in pieces)
        assert not any(text(case.body) in visit for visit in visits)
        assert not any(text(question.tokens) in visit for visit in visits for question in case.questions)


def test_documents_stand_in_the_company_of_others(cases):
    name, made = cases
    if name != "edits":
        for visit in map(text, earlier(made)):
            for case in made:
                places = sorted(visit.find(text(piece)) for piece in case.pieces[1:])
                assert sum(place >= 0 for place in places) < len(places)


def test_prompts_end_where_an_answer_begins_and_the_same_prompts_are_made_again(cases):
    name, made = cases
    assert all("<assistant>" in text(question.tokens) for case in made for question in case.questions)
    assert made[:3] == list(islice(WORKLOADS[name](Chat(Letters()), "test"), 3))


@needs_texts
def test_the_halves_have_no_name_topic_or_set_of_functions_in_common():
    names = [{one.name for one in islice(people(random.Random(0), half), 300)} for half in HALVES]
    sections = [{section for topic in manual(half) for section in topic} for half in HALVES]
    functions = [{frozenset(one.functions) for one in requests(half)} for half in HALVES]
    for one, other in (names, sections, functions):
        assert one and other and not one & other


def distribution(rng, tokens):
    weights = [rng.random() ** 8 for _ in range(tokens)]
    return {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}


def test_divergence_is_that_of_the_whole_distributions_where_all_tokens_are_known_and_less_where_not():
    rng = random.Random(0)
    for _ in range(50):
        full, ours = distribution(rng, 30), distribution(rng, 30)
        whole = sum(math.exp(p) * (p - ours[token]) for token, p in full.items())
        assert divergence(full, ours) == pytest.approx(whole)
        likely = [dict(sorted(one.items(), key=lambda item: -item[1])[:10]) for one in (full, ours)]
        assert -1e-9 <= divergence(*likely) <= whole + 1e-9
    assert divergence(full, full) == pytest.approx(0)


def said(tokens, *chances):
    """An answer of these tokens, and at each the chances of tokens."""
    return SimpleNamespace(
        tokens=tokens, logprobs=[{token: math.log(p) for token, p in one.items()} for one in chances]
    )


def test_an_answer_is_compared_at_each_token_of_full_prefill():
    full = said([1, 2], {1: 0.8, 2: 0.2}, {1: 0.4, 2: 0.6})
    ours = said([1, 2], {1: 0.4, 2: 0.6}, {1: 0.4, 2: 0.6})
    scores = judge(full, ours, 1)
    first = 0.8 * math.log(2) + 0.2 * math.log(0.2 / 0.6)
    assert scores[KL] == pytest.approx(-first) and scores[ALL_KL] == pytest.approx(-first / 2)
    assert scores[NATS] == scores[RIGHT_NATS] == pytest.approx(-math.log(2))
    assert scores[FIRST] == scores[SURE_FIRST] == scores[ANSWER] == scores[RIGHT] == 0
    assert judge(full, full, 2)[FIRST:] == [1, 1, 1, 1]
    assert judge(full, ours, 0)[RIGHT] is None and judge(full, ours, 0)[RIGHT_NATS] is None
    assert [RealQuestion([], right).answered([1, 2]) for right in ([1], [2], [1, 2], [])] == [1, 0, 2, 0]


def outcome(workload, selector, ratio, kl, cases=3):
    """An outcome of four questions a case, whose mean KL is given."""
    scores = [-4 * kl, -4 * kl, -4.0, -4.0, 3.0, 3.0, 2.0, 4.0]
    return Outcome(selector, "", ratio, [scores] * cases, [[4] * 8] * cases, [ratio] * cases, [1.0] * cases, workload)


def test_what_is_won_back_is_the_mean_of_workloads_that_lose_unlike_amounts():
    outcomes = [
        outcome(workload, selector, ratio, kl * share)
        for workload, kl, left in (("facts", 1.0, 0.2), ("tools", 0.01, 0.4))
        for selector, ratio, share in (
            ("full", 1.0, 0),
            ("reuse", 0.0, 1),
            ("attended", 0.15, left),
            ("hkvd", 0.15, 0.3),
        )
    ]
    found = figures.won_back(outcomes)
    compared = found.compared(found.all["attended", "", 0.15])
    assert [compared.share([column]) for column in (0, 1)] == pytest.approx([0.8, 0.6])
    assert compared.share(found.main) == pytest.approx(0.7)
    reader = [
        outcome(READER, name, ratio, kl)
        for name, ratio, kl in (("full", 1, 0), ("reuse", 0, 1), ("attended", 0.15, 0.5), ("first_k", 0.15, 0.6))
    ]
    values = {row.id: (row.value, row.bar) for row in figures.rows([*outcomes, *reader], SELECTORS)}
    assert values["real_recovered_15"] == pytest.approx((0.7, 0.7))
    assert values["reader_attended_15"] == pytest.approx((0.5, 0.4)) and values["reader_first_k_15"][0] == 0.4
    assert compared.interval(found.main) == pytest.approx((0.7, 0.7), abs=0.01)
