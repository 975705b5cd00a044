"""How answers are scored, and which tokens are asked."""

import pytest

from benchmarks.quality.scores import exact_match, f1, rouge_l
from blendhub.core.errors import InvalidInput
from blendhub.tools.advice.questions import Question
from tests.benchmarks.word_model import WORDS, make_tokenizer


@pytest.mark.parametrize(
    "answer, right, expected",
    [
        ("Italy", ["Italy"], (1, 1, 1)),
        ("The Italy!", ["italy"], (1, 1, 2 / 3)),
        ("in Italy", ["Italy"], (2 / 3, 0, 2 / 3)),
        ("b a x", ["a b", "x y z"], (2 / 3, 0, 0.4)),
        ("Rome", ["Italy", "Rome"], (1, 1, 1)),
        ("Spain", ["Italy"], (0, 0, 0)),
        ("", ["Italy"], (0, 0, 0)),
        ("the", ["a"], (0, 0, 0)),
        ("Italy", [], (0, 0, 0)),
    ],
)
def test_scores(answer, right, expected):
    assert (f1(answer, right), exact_match(answer, right), rouge_l(answer, right)) == pytest.approx(expected)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pytest.importorskip("transformers", reason="vLLM brings it; `make setup` installs it")
    from transformers import AutoTokenizer

    return lambda **more: AutoTokenizer.from_pretrained(make_tokenizer(tmp_path_factory.mktemp("words"), **more))


EXAMPLE = Question(["Anna\nAnna lives in Rome .", "Rome is in Italy ."], "Where does Anna live ?", ["Rome"])


def test_documents_are_the_same_tokens_wherever_they_stand(tokenizer):
    from benchmarks.quality.text_cases import Writer

    writer = Writer(tokenizer(), ["F1", "exact match"])
    case = writer.case(EXAMPLE)
    other = writer.case(Question(EXAMPLE.documents[::-1], "Why ?", [""]))
    assert other.documents == case.documents[::-1] and other.header == case.header == writer.header
    assert case.header[0] == WORDS["<s>"] and WORDS["<s>"] not in [*case.documents[0], *case.questions[0].tokens]
    assert writer.stop == (WORDS["</s>"],)


def test_a_chat_template_stands_around_the_documents(tokenizer):
    from benchmarks.quality.text_cases import Writer

    template = "{{ '<s> user ' + messages[0]['content'] + ' </s> model' }}"
    writer = Writer(tokenizer(chat_template=template), ["F1"])
    case = writer.case(EXAMPLE)
    assert case.header[:2] == [WORDS["<s>"], WORDS["user"]] and case.header.count(WORDS["<s>"]) == 1
    assert case.questions[0].tokens[-2:] == [WORDS["</s>"], WORDS["model"]]


def test_only_the_first_line_of_an_answer_counts(tokenizer):
    from benchmarks.quality.text_cases import Writer, score

    writer = Writer(tokenizer(), ["F1", "exact match"])
    (question,) = writer.case(EXAMPLE).questions
    assert question.score([WORDS["Rome"], WORDS["</s>"]]) == [1.0, 1.0]
    assert question.score([WORDS["</s>"]]) == [0.0, 0.0]
    assert score(lambda tokens: " Rome\nQuestion: Why?", [f1], ["Rome"], []) == [1.0]


@pytest.mark.parametrize("read", [Question(["a"], "b"), Question([[1]], "b", ["c"]), Question(["a"], [1], ["c"])])
def test_a_question_without_an_answer_or_without_text_is_refused(tokenizer, read):
    from benchmarks.quality.text_cases import Writer

    with pytest.raises(InvalidInput, match="should be text, and have an answer"):
        Writer(tokenizer(), ()).case(read)
