"""Files of questions in the shapes that are published, how answers are scored, and which tokens are asked."""

import json

import pytest

from benchmarks.quality.files import Example, read_examples
from benchmarks.quality.scores import exact_match, f1, rouge_l
from tests.benchmarks.word_model import WORDS, make_tokenizer

MUSIQUE = {
    "id": "2hop__1_2",
    "paragraphs": [
        {"idx": 0, "title": "Anna", "paragraph_text": "Anna lives in Rome.", "is_supporting": True},
        {"idx": 1, "title": "Rome", "paragraph_text": "Rome is in Italy.", "is_supporting": True},
    ],
    "question": "In which country does Anna live?",
    "answer": "Italy",
    "answer_aliases": ["Italia"],
    "answerable": True,
}
HOTPOT = {
    "_id": "5a8b57f25542995d1e6f1371",
    "question": "In which country does Anna live?",
    "answer": "Italy",
    "supporting_facts": [["Anna", 0]],
    "context": [["Anna", ["Anna lives in Rome.", " She is old."]], ["Rome", ["Rome is in Italy."]]],
    "type": "bridge",
}
PLAIN = {"question": "Where?", "answers": ["here", "there"], "documents": ["No title.", {"title": "T", "text": "One."}]}


@pytest.mark.parametrize("lines", [False, True], ids=["list", "lines"])
@pytest.mark.parametrize(
    "entry, answers, documents",
    [
        (MUSIQUE, ["Italy", "Italia"], ["Anna\nAnna lives in Rome.", "Rome\nRome is in Italy."]),
        (HOTPOT, ["Italy"], ["Anna\nAnna lives in Rome. She is old.", "Rome\nRome is in Italy."]),
        (PLAIN, ["here", "there"], ["No title.", "T\nOne."]),
        ({"question": "Where?", "answer": 7, "ctxs": [{"title": "", "text": "One."}]}, ["7"], ["One."]),
        (HOTPOT | {"context": {"title": ["Anna"], "sentences": [["A.", "B."]]}}, ["Italy"], ["Anna\nA. B."]),
    ],
    ids=["musique", "hotpotqa and 2wikimqa", "plain", "contexts", "columns"],
)
def test_published_shapes_are_read(entry, answers, documents, lines, tmp_path):
    file = tmp_path / "data.json"
    file.write_text("\n".join(map(json.dumps, [entry] * 2)) + "\n" if lines else json.dumps([entry] * 2, indent=1))
    assert read_examples(file) == [Example(entry["question"], answers, documents)] * 2


@pytest.mark.parametrize(
    "entries, complaint",
    [
        ([PLAIN, {"query": "x"}], r"data.json: entry 1 has the keys query, .*\n.*Musique"),
        ([PLAIN | {"documents": []}], "entry 0 .*no documents"),
        ([PLAIN | {"answers": []}], "entry 0 .*no answers"),
        (["text"], "entry 0 has the keys str"),
        ([], "has no entries"),
    ],
)
def test_an_entry_of_no_known_shape_is_named(entries, complaint, tmp_path):
    file = tmp_path / "data.json"
    file.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=complaint):
        read_examples(file)


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


EXAMPLE = Example("Where does Anna live ?", ["Rome"], ["Anna\nAnna lives in Rome .", "Rome is in Italy ."])


def test_documents_are_the_same_tokens_wherever_they_stand(tokenizer):
    from benchmarks.quality.text_cases import Writer

    writer = Writer(tokenizer(), ["F1", "exact match"])
    case = writer.case(EXAMPLE)
    other = writer.case(Example("Why ?", [""], EXAMPLE.documents[::-1]))
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
