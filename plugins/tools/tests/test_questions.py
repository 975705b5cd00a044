"""Files of questions to documents, in the shapes that are published."""

import json

import pytest
from blendhub_tools.advice.questions import Question, read_questions

from blendhub.core.errors import InvalidInput

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
        ({"question": [3], "documents": [[1, 2], "text"], "other": 1}, [], [[1, 2], "text"]),
    ],
    ids=["musique", "hotpotqa and 2wikimqa", "plain", "token ids"],
)
def test_published_shapes_are_read(entry, answers, documents, lines, tmp_path):
    file = tmp_path / "data.json"
    file.write_text("\n\n".join(map(json.dumps, [entry] * 3)) + "\n" if lines else json.dumps([entry] * 3, indent=1))
    read = Question(documents, entry["question"], answers)
    assert read_questions(file) == [read] * 3 and read_questions(file, 2) == [read] * 2


@pytest.mark.parametrize(
    "entry, complaint",
    [
        ({"query": "x"}, "the keys query, .*'documents' is missing"),
        (PLAIN | {"documents": "x"}, "documents is not a list"),
        (PLAIN | {"documents": [[-1]]}, "is no question .*documents"),
        ("text", "the keys str"),
    ],
)
def test_an_entry_of_no_known_shape_is_named(entry, complaint, tmp_path):
    file = tmp_path / "data.json"
    lines = f"{json.dumps(PLAIN)}\n{json.dumps(entry)}"
    for text, place in ((json.dumps([PLAIN, entry]), "entry 2"), (lines, "line 2")):
        file.write_text(text)
        with pytest.raises(InvalidInput, match=f"data.json, {place} has .*({complaint}).*should have entries like"):
            read_questions(file)


def test_answers_that_only_some_questions_have_are_a_mistake(tmp_path):
    file = tmp_path / "data.jsonl"
    unanswered = {key: value for key, value in PLAIN.items() if key != "answers"}
    file.write_text("\n".join(map(json.dumps, [PLAIN, PLAIN, unanswered, unanswered])))
    with pytest.raises(InvalidInput, match="2 of 4 questions have no answer, the first is question 3; give each an"):
        read_questions(file)
    assert len(read_questions(file, 2)) == 2
