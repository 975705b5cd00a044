"""The prompts of the real model, and how far answers are from full prefill's."""

import math
import random
from itertools import islice
from types import SimpleNamespace

import pytest
from blendhub_tools.advice.judge import ANSWER, FIRST, KL, NATS, RIGHT, SURE_FIRST, divergence, judge
from blendhub_tools.advice.outcomes import Comparison, Outcome, accuracy, won_back

from benchmarks.quality.sources import BFCL
from benchmarks.quality.workloads import CLEARED, WORKLOADS, Chat, Question, visits
from blendhub.core.layout import MIN_DONOR_CONTEXT


class Letters:
    """A tokenizer with a token for each letter, and one before each text."""

    chat_template = "a template"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"<{one['role']}>{one['content']}</>" for one in messages) + "<assistant>"

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in ("^" if add_special_tokens else "") + text]


def text(tokens):
    return "".join(map(chr, tokens))


@pytest.mark.parametrize("name", WORKLOADS)
def test_all_text_of_a_prompt_was_computed_before_in_other_company(name):
    if not BFCL.exists():
        pytest.skip("its texts are a package; `make setup` downloads it")
    cases = list(islice(WORKLOADS[name](Chat(Letters())), 12))
    earlier = [text(visit) for visit in visits(cases)]
    for case in cases:
        pieces = [text(piece) for piece in case.pieces if CLEARED not in text(piece)]
        assert all(any(piece in visit for visit in earlier) for piece in pieces)
        assert not any(text(case.body) in visit for visit in earlier)
        for question in case.questions:
            assert "<assistant>" in text(question.tokens) and text(question.tokens) not in text(case.body)
        if name != "edits":
            assert not any(all(piece in visit for piece in pieces[1:]) for visit in earlier)
    assert cases[:3] == list(islice(WORKLOADS[name](Chat(Letters())), 3))


def test_every_document_is_visited_until_it_may_move_and_no_longer():
    cases = list(islice(WORKLOADS["facts"](Chat(Letters())), 4))
    documents = {text(piece) for case in cases for piece in case.pieces[1:]}

    def deep(visits):
        return {document for document in documents if any(text(v).find(document) >= MIN_DONOR_CONTEXT for v in visits)}

    once, often = visits(cases), visits(cases, until_deep=True)
    assert often[: len(once)] == once and deep(once) < deep(often) == documents
    assert deep(often[: -len(once)]) < documents and len({*map(tuple, often)}) == len(often)


def test_a_model_without_a_chat_template_gets_paragraphs_behind_the_token_with_which_texts_begin():
    letters = Letters()
    letters.chat_template = None
    case = next(WORKLOADS["facts"](Chat(letters)))
    assert text(case.pieces[0]) == "^You answer questions about the documents with one word.\n\n"
    first, question = text(case.pieces[1]), text(case.questions[0].tokens)
    assert first.startswith("Document: ") and question.startswith("Question: ") and "?\n" in question
    assert "^" not in text(case.body)[1:] + question


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


def said(tokens, *chances):
    """An answer of these tokens, and at each the chances of tokens."""
    logprobs = [{token: math.log(p) for token, p in likely.items()} for likely in chances]
    return SimpleNamespace(tokens=tokens, logprobs=logprobs)


def test_an_answer_is_compared_at_each_token_of_full_prefill():
    full = said([1, 2], {1: 0.8, 2: 0.2}, {1: 0.4, 2: 0.6})
    ours = said([1, 2], {1: 0.4, 2: 0.6}, {1: 0.4, 2: 0.6})
    scores = judge(full, ours, 1)
    assert scores[KL] == pytest.approx(-0.8 * math.log(2) - 0.2 * math.log(0.2 / 0.6))
    assert scores[NATS] == pytest.approx(-math.log(2))
    assert scores[FIRST] == scores[SURE_FIRST] == scores[ANSWER] == scores[RIGHT] == 0
    assert judge(full, full, 2)[FIRST:] == [1, 1, 1, 1] and judge(full, ours, 0)[RIGHT] is None
    assert [Question([], right).answered([1, 2]) for right in ([1], [2], [1, 2], [])] == [1, 0, 2, 0]


def test_what_is_won_back_is_the_share_of_the_loss_and_its_interval_widens_with_what_prompts_differ_in():
    assert [won_back(ours, 0.8, 0.2) for ours in (0.2, 0.8, 0.1)] == pytest.approx([0.0, 1.0, -1 / 6])
    assert won_back(0.97, 0.98, 0.97) is None, "reuse loses next to nothing"

    def outcome(*scores):
        return Outcome("s", "", 0.1, [[score] for score in scores], [[10]] * len(scores))

    full, reuse = outcome(*[10] * 20), outcome(*[1] * 20)
    same, differing = (Comparison(ours, full, reuse) for ours in (outcome(*[5] * 20), outcome(*[0, 10] * 10)))
    assert same.interval([0]) == pytest.approx((same.share([0]),) * 2)
    low, high = differing.interval([0])
    assert low < same.share([0]) - 0.1 and high > same.share([0]) + 0.1
    uneven = Outcome("s", "", 0.1, [[1, 0], [0, 1]], [[1, 0], [3, 1]])
    assert accuracy(uneven).tolist() == [0.25, 1.0], "means over questions, not over cases"


def test_rows_are_means_of_workloads_that_lose_unlike_amounts():
    pytest.importorskip("vllm", reason="the benchmark serves with vLLM; `make setup` installs it")
    from benchmarks.quality import figures

    def outcome(workload: str, selector: str, ratio: float, kl: float) -> Outcome:
        """Four questions a case, whose mean KL is given."""
        scores = [-4 * kl, -4.0, 3.0, 3.0, 2.0, 4.0]
        return Outcome(selector, "", ratio, [scores] * 3, [[4] * 6] * 3, [ratio] * 3, [1.0] * 3, workload)

    ways = (("full", 1.0, 0.0), ("reuse", 0.0, 1.0), ("attended", 0.0, 0.6), ("hkvd", 0.15, 0.3))
    outcomes = [
        outcome(workload, selector, ratio, kl * share)
        for workload, kl, left in (("facts", 1.0, 0.2), ("tools", 0.01, 0.4))
        for selector, ratio, share in (*ways, ("attended", 0.15, left))
    ]
    made = {row.id: row for row in figures.rows(outcomes)}
    assert made["steady_15"].value == pytest.approx(0.7) and not made["steady_15"].ok
    assert made["steady_15_worst"].value == pytest.approx(0.6) and made["steady_00"].value == pytest.approx(0.4)
    assert made["real_facts_attended_15"].value == pytest.approx(0.8)
    assert made["real_default_wins"].value == pytest.approx(0.1) and made["steady_05"].value is None
