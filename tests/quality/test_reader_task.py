"""The reader's task: prompts whose questions have one answer each, which a plain reading of the words finds."""

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality.reader import words as w
from benchmarks.quality.reader.task import MOST_FACTS, STRATA, Prompt, Shape, headers, make_prompt

SHORT = Shape((2, 4), (25, 60), (0, 1000), (1, 3), (1, 2), (0, 1))
SEEDS = st.integers(0, 2**40)


class Reading:
    """What someone understands who reads words from first to last."""

    def __init__(self, tokens: list[int]) -> None:
        self.values: dict[tuple[int, int], list[int]] = {}
        self.nicknames: dict[int, int] = {}
        topic = partner = subject = relation = -1
        before = w.BOS
        for place, token in enumerate(tokens):
            if token in w.NICKNAME:
                self.nicknames[token] = tokens[place - 2]
            elif token in w.NAME and before == w.WITH:
                partner = token
            elif token in w.NAME and before == w.ABOUT:
                topic = token
            elif token == w.THEM:
                topic = partner
            elif token == w.IT:
                subject = topic
            elif token in w.NAME:
                subject = token
            elif token in w.RELATION or token in w.SYNONYM:
                relation = meaning(token)
            elif token in w.VALUE:
                self.values.setdefault((subject, relation), []).append(token)
                subject = relation = -1
            before = token

    def answer(self, question: list[int]) -> list[int]:
        _, subject, word = question
        if subject == w.COUNT:
            return [w.NUMBER[sum(one == word for one, _ in self.values) - 1]]
        return self.values.get((self.nicknames.get(subject, subject), meaning(word)), [])


def meaning(word: int) -> int:
    return word - (w.RELATION if word in w.RELATION else w.SYNONYM)[0]


def joined(prompt: Prompt) -> list[int]:
    return [*prompt.header, *(token for document in prompt.documents for token in document)]


@given(SEEDS, st.sampled_from(["train", "test"]))
def test_each_question_has_the_one_answer_that_reading_finds(seed, split):
    prompt = make_prompt(seed, split, SHORT)
    reading = Reading(joined(prompt))
    assert prompt.questions
    for question in prompt.questions:
        assert reading.answer(question.tokens) == [question.answer], (w.text(joined(prompt)), w.text(question.tokens))


@given(SEEDS)
def test_plain_and_local_facts_are_settled_in_their_document_and_no_others(seed):
    prompt = make_prompt(seed, "test", SHORT)
    alone = [Reading([w.BOS, *document]) for document in prompt.documents]
    documents = {(one.subject, one.relation): one for one in prompt.facts}
    for question in prompt.questions:
        if question.stratum in ("alias", "counting"):
            continue
        _, subject, word = question.tokens
        document = documents[subject, meaning(word)].document
        settled = alone[document].answer(question.tokens) == [question.answer]
        assert settled == (question.stratum in ("plain", "local")), w.text(question.tokens)


@given(SEEDS)
def test_a_fact_depends_on_other_documents_unless_it_is_plain_or_local(seed):
    prompt = make_prompt(seed, "test", SHORT)
    for fact in prompt.facts:
        depends = fact.position in prompt.dependent[fact.document]
        assert depends == (fact.stratum not in ("plain", "local"))
        assert prompt.documents[fact.document][fact.position] == fact.value
    for document, dependent in zip(prompt.documents, prompt.dependent, strict=True):
        assert all(place in dependent for place, token in enumerate(document) if token == w.THEM)


@given(SEEDS)
def test_a_chain_needs_two_references_and_cross_facts_only_one(seed):
    prompt = make_prompt(seed, "train", SHORT)
    topics: list[int] = []
    begun = [len(prompt.header)]
    for document in prompt.documents:
        begun.append(begun[-1] + len(document))
    tokens = joined(prompt)
    for fact in prompt.facts:
        if fact.stratum in ("plain", "split"):
            continue
        place = begun[fact.document] + fact.position
        topics = [i for i in range(place) if tokens[i] == w.ABOUT]
        assert (tokens[topics[-1] + 1] == w.THEM) == (fact.stratum == "chained")
        assert (topics[-1] >= begun[fact.document]) or fact.stratum != "local"


def test_headers_before_visits_are_of_no_prompt_that_is_asked(shipped):
    given = {tuple(header) for header in islice(headers(), 5)}
    assert len(given) == 5 and not given & {tuple(prompt.header) for prompt in shipped}


@given(SEEDS)
def test_the_same_seed_makes_the_same_prompt(seed):
    assert make_prompt(seed, "train", SHORT) == make_prompt(seed, "train", SHORT)


@given(SEEDS)
def test_an_alias_question_shares_no_word_with_its_fact(seed):
    prompt = make_prompt(seed, "test", SHORT)
    begun = {(one.subject, one.relation): one for one in prompt.facts}
    nicknames = Reading(prompt.header).nicknames
    for question in prompt.questions:
        if question.stratum == "alias":
            fact = begun[nicknames[question.tokens[1]], meaning(question.tokens[2])]
            stated = prompt.documents[fact.document][fact.position - 11 : fact.position + 1]
            assert question.tokens[1] not in stated
            assert question.tokens[2] in (w.SYNONYM if not fact.synonym else w.RELATION)


@pytest.fixture(scope="module")
def shipped() -> list[Prompt]:
    return [make_prompt(seed, "test") for seed in range(60)]


def test_prompts_have_the_sizes_that_the_benchmark_needs(shipped):
    for prompt in shipped:
        assert 1000 <= len(joined(prompt)) <= 2000
        assert all(100 <= len(document) <= 250 for document in prompt.documents)
        share = sum(map(len, prompt.dependent)) / sum(map(len, prompt.documents))
        assert 0.05 <= share <= 0.10


def test_every_stratum_is_asked_for_and_numbers_vary(shipped):
    asked = Counter(question.stratum for prompt in shipped for question in prompt.questions)
    assert set(asked) == set(STRATA) and min(asked.values()) >= 200
    numbers = Counter(q.answer for prompt in shipped for q in prompt.questions if q.stratum == "counting")
    assert len(numbers) == MOST_FACTS and max(numbers.values()) < 0.5 * numbers.total()


def test_facts_are_3_to_12_tokens_long_and_are_read_at_different_places(shipped):
    lengths, ends = set(), Counter()
    for prompt in shipped:
        for fact in prompt.facts:
            document = prompt.documents[fact.document]
            if fact.stratum == "plain":
                begin = max(i for i in range(fact.position) if document[i] == fact.subject)
                lengths.add(fact.position - begin + 1)
            ends[document[min(fact.position + 1, len(document) - 1)] == w.STOP] += 1
    assert min(lengths) <= 3 and max(lengths) >= 9
    assert min(ends.values()) > 0.2 * ends.total(), "values stand before a full stop, and before other words"
