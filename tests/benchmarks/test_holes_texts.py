"""How answers are scored, and which tokens are asked."""

import pytest
from blendhub_tools.advice.questions import Question

from benchmarks.holes.reader_cases import make_cases
from benchmarks.holes.scores import f1, rouge_l
from benchmarks.quality.workload import Scores
from blendhub.core.errors import InvalidInput
from tests.benchmarks.word_model import WORDS, make_tokenizer


@pytest.mark.parametrize(
    "answer, right, expected",
    [
        ("Italy", ["Italy"], (1, 1)),
        ("The Italy!", ["italy"], (1, 2 / 3)),
        ("in Italy", ["Italy"], (2 / 3, 2 / 3)),
        ("b a x", ["a b", "x y z"], (2 / 3, 0.4)),
        ("Rome", ["Italy", "Rome"], (1, 1)),
        ("Spain", ["Italy"], (0, 0)),
        ("", ["Italy"], (0, 0)),
        ("the", ["a"], (0, 0)),
        ("Italy", [], (0, 0)),
    ],
)
def test_scores(answer, right, expected):
    assert (f1(answer, right), rouge_l(answer, right)) == pytest.approx(expected)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pytest.importorskip("transformers", reason="vLLM brings it; `make setup` installs it")
    from transformers import AutoTokenizer

    return lambda **more: AutoTokenizer.from_pretrained(make_tokenizer(tmp_path_factory.mktemp("words"), **more))


EXAMPLE = Question(["Anna\nAnna lives in Rome .", "Rome is in Italy ."], "Where does Anna live ?", ["Rome"])


def test_documents_are_the_same_tokens_wherever_they_stand(tokenizer):
    from benchmarks.holes.texts import Writer

    writer = Writer(tokenizer())
    case = writer.case(EXAMPLE)
    other = writer.case(Question(EXAMPLE.documents[::-1], "Why ?", [""]))
    assert other.documents == case.documents[::-1] and other.header == case.header == writer.header
    assert case.header[0] == WORDS["<s>"] and WORDS["<s>"] not in [*case.documents[0], *case.questions[0].tokens]
    assert writer.stop == (WORDS["</s>"],)


def test_a_chat_template_stands_around_the_documents(tokenizer):
    from benchmarks.holes.texts import Writer

    template = "{{ '<s> user ' + messages[0]['content'] + ' </s> model' }}"
    writer = Writer(tokenizer(chat_template=template))
    case = writer.case(EXAMPLE)
    assert case.header[:2] == [WORDS["<s>"], WORDS["user"]] and case.header.count(WORDS["<s>"]) == 1
    assert case.questions[0].tokens[-2:] == [WORDS["</s>"], WORDS["model"]]


def test_only_the_first_line_of_an_answer_counts(tokenizer):
    from benchmarks.holes.texts import Writer, score

    writer = Writer(tokenizer())
    (question,) = writer.case(EXAMPLE).questions
    assert question.score([WORDS["Rome"], WORDS["</s>"]]) == (1.0, 1.0)
    assert question.score([WORDS["</s>"]]) == (0.0, 0.0)
    assert score(lambda tokens: " Rome\nQuestion: Why?", ["Rome"], []) == (1.0, 1.0)


@pytest.mark.parametrize("read", [Question(["a"], "b"), Question([[1]], "b", ["c"]), Question(["a"], [1], ["c"])])
def test_a_question_without_an_answer_or_without_text_is_refused(tokenizer, read):
    from benchmarks.holes.texts import Writer

    with pytest.raises(InvalidInput, match="should be text, and have an answer"):
        Writer(tokenizer()).case(read)


def test_answers_of_the_reader_are_scored_as_text():
    (one,) = make_cases(1)
    (question,) = one.questions
    scores = [question.score([token]) for token in range(288)]
    assert sum(score == (1.0, 1.0) for score in scores) == 1 and scores.count(Scores(0.0, 0.0)) == 287
