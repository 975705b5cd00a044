"""The question's rare words are found in moved text, and only where the tail is a question."""

from collections import Counter
from math import log

import numpy as np
import pytest
from blendhub_selectors.combined import CombinedSelector
from blendhub_selectors.options import CombinedOptions
from blendhub_selectors.question import COMMON, FRONT, LONGEST, TEMPLATE_TIMES, TEMPLATE_TOKENS, question
from blendhub_selectors.signals import moved_mask
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Selection
from plugins.selectors.tests.prompts import ranges, selections, tokens

OF_THE_QUESTION = CombinedSelector(CombinedOptions(head_share=0, question_tokens=6, question_before=0))


def windows_of(asked, width, before=0):
    asked = asked.checked()
    windows, worth = question(asked, moved_mask(asked), width, before)
    return ranges(windows.ordered(-worth))


def stripped(tail, text):
    """The tail without templates."""

    def times(part):
        return sum(text[at : at + len(part)] == part for at in range(len(text)))

    def length(is_template):
        return max((n for n in range(TEMPLATE_TOKENS, len(tail) + 1) if is_template(n)), default=0)

    tail = tail[length(lambda n: times(tail[:n]) >= TEMPLATE_TIMES) :]
    return tail[: len(tail) - length(lambda n: times(tail[len(tail) - n :]) >= TEMPLATE_TIMES)]


def twin(asked, width, before):
    """The windows of the question, word by word."""
    prompt = asked.tokens.tolist()
    text, tail = prompt[: asked.question.start], prompt[asked.question.start : asked.question.end]
    moved, counts = [at for at in tokens(asked.moved) if at < len(text)], Counter(text)

    def weights(words):
        found = set(words) & {text[at] for at in moved}
        return {word: log(COMMON * len(text) / counts[word]) for word in found if counts[word] < COMMON * len(text)}

    front = [at for hole in asked.holes if hole.end <= moved[0] for at in range(hole.start, hole.end)] if moved else []
    tail = stripped(tail, text)
    words = weights(tail)
    ours, theirs = sum(words.values()), sum(weights(text[at] for at in front).values())
    if theirs > ours + 1e-9 and theirs * len(tail) > FRONT * ours * len(front) + 1e-9:
        return []

    def value(start):
        seen, worth = set(), 0.0
        for offset, at in enumerate(range(start, min(start + width, len(text)))):
            if at in moved and text[at] in words and text[at] not in seen:
                seen.add(text[at])
                worth += words[text[at]] * (width - offset) / width
        return worth

    starts = sorted((at for at in moved if text[at] in words), key=lambda at: (-round(value(at), 9), at))
    return [(range(max(start - before, 0), min(start + width, len(text))), value(start)) for start in starts]


@given(asked=selections(words=40), width=st.sampled_from([1, 3, 8]), before=st.sampled_from([0, 2, 5]))
def test_windows_hold_the_most_and_the_rarest_words_of_the_question(asked, width, before):
    found, expected = windows_of(asked, width, before), twin(asked, width, before)
    assert sorted(map(str, found)) == sorted(str(window) for window, _ in expected)
    # Near the beginning and the end of the text the same window may stand for several words.
    value_of = {window: sorted(value for other, value in expected if other == window) for window, _ in expected}
    values = [value_of[window].pop() for window in found]
    assert values == pytest.approx(sorted(values, reverse=True))


FILLER = 1000


def prompt(*parts):
    """A selection of a prompt's parts: ``moved``, ``hole``, ``exact`` or ``question``, each with its tokens."""
    spans = {"moved": [], "hole": [], "exact": [], "question": []}
    text = []
    for kind, part in parts:
        spans[kind].append(Span(len(text), len(text) + len(part)))
        text += part
    return Selection(
        spans["moved"],
        0.1,
        holes=spans["hole"],
        question=spans["question"][0],
        tokens=np.array(text, np.uint32),
    )


def document(seed, n=300, **words):
    """Text of words that no question asks for, with others at their places: ``at_30=[1, 2]``."""
    text = np.random.default_rng(seed).integers(FILLER, 2 * FILLER, n).tolist()
    for place, part in words.items():
        at = int(place.removeprefix("at_"))
        text[at : at + len(part)] = part
    return text


def test_common_words_of_the_question_are_not_looked_for():
    text = [[token, 7, 8][n % 3] for n, token in enumerate(document(1))]
    text[120] = 50
    assert windows_of(prompt(("moved", text), ("question", [7, 50, 8])), 4) == [range(120, 124)]


def test_a_window_reaches_across_the_border_of_two_spans():
    asked = prompt(("moved", document(1, 100, at_98=[50, 51])), ("moved", document(2, 100)), ("question", [50, 51]))
    assert windows_of(asked, 6)[0] == range(98, 104)
    assert set(range(98, 105)) <= set(tokens(OF_THE_QUESTION.select(asked)))


def test_without_a_question_there_is_nothing_to_look_for():
    assert windows_of(prompt(("moved", document(1)), ("question", [])), 8) == []
    assert windows_of(Selection([Span(0, 50)], 0.2), 8) == []


def test_words_that_stand_in_other_text_only_are_not_looked_for():
    asked = prompt(("exact", document(1, 300, at_30=[50])), ("moved", document(2)), ("question", [50]))
    assert windows_of(asked, 8) == []


def test_of_a_long_tail_the_end_is_the_question():
    tail = [50, *range(3000, 3000 + LONGEST - 1), 51]
    asked = prompt(("moved", document(1, 300, at_40=[50], at_80=[51])), ("question", tail))
    assert windows_of(asked, 8) == [range(80, 88)]


def test_a_question_before_the_documents_is_recognised():
    """The tail's words stand in the documents by chance, those of the question because it asks for them."""
    documents = document(1, 600, at_40=[50, 51], at_200=[52], at_300=[60])
    asked = prompt(("hole", [50, 51, 52, 53]), ("moved", documents), ("question", [60, 61, 62]))
    assert windows_of(asked, 8) == []


def test_a_question_that_is_repeated_at_the_end_is_one():
    documents = document(1, 600, at_40=[50, 51], at_200=[52], at_300=[60])
    asked = prompt(("hole", [50, 51, 52, 53]), ("moved", documents), ("question", [60, 50, 51, 52]))
    assert windows_of(asked, 8)[0] == range(44, 52)


def test_other_new_text_before_the_documents_is_no_question():
    """By chance it shares more words with them than the question does, but they stand far apart in it."""
    documents = document(1, 600, at_40=[50, 51], at_200=[60, 61, 62, 63])
    front = document(2, 100)
    front[::20] = [60, 61, 62, 63, 60]
    asked = prompt(("hole", front), ("moved", documents), ("question", [50, 51]))
    assert windows_of(asked, 8)[0] == range(140, 148)


def test_a_new_document_before_the_others_is_no_question():
    """It shares more words with them than a question does, as another version of one of them does."""
    shared = list(range(50, 250))
    parts = [("hole", document(1, 300, at_50=shared)), ("moved", document(2, 300, at_40=shared))]
    asked = prompt(*parts, ("question", [50, 51, 900, 901, 902, 903]))
    assert windows_of(asked, 8)[0] == range(340, 348)


def test_a_tail_that_is_a_template_asks_nothing():
    """Such as the end of a user's message and the beginning of the assistant's, after a question that was stored."""
    template = [90, 91, 92, 93]
    turns = [document(seed, 200, at_190=template) for seed in range(TEMPLATE_TIMES)]
    asked = prompt(*(("moved", turn) for turn in turns), ("question", template))
    assert windows_of(asked, 8) == []
    with_question = prompt(*(("moved", turn) for turn in turns), ("question", [turns[1][50], *template]))
    assert windows_of(with_question, 8) == [range(250, 258)]


def test_a_name_of_the_question_that_stands_in_several_places_is_no_template():
    name = [50, 51]
    turns = [document(seed, 200, at_100=name) for seed in range(5)]
    asked = prompt(*(("moved", turn) for turn in turns), ("question", [60, *name]))
    assert windows_of(asked, 8)[:5] == [range(start, start + 8) for start in range(100, 1100, 200)]
