"""What people have: JSON lines, folders of texts, columns of tables; and what is wrong with them."""

import gzip
import json
import sys

import pytest

from blendhub.core.errors import BlendHubError, InvalidInput
from blendhub.tools.warm.documents import Corpus

TEXTS = ["First text,\nin two lines.", 'Second, with "quotes" and ümlauts.']


def texts_of(path, **how):
    return [one.text for one in Corpus(str(path), **how).read()]


def test_json_lines_have_texts_or_messages(tmp_path):
    parts = [{"type": "text", "text": "Hi"}]
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": parts}]
    lines = [{"text": TEXTS[0], "id": 7, "neighbour": "b"}, {"text": TEXTS[1], "id": "b"}, {"messages": messages}]
    file = tmp_path / "docs.jsonl.gz"
    file.write_bytes(gzip.compress("\n\n".join(map(json.dumps, lines)).encode()))
    first, second, chat = Corpus(str(file)).read()
    assert (first.text, first.name, first.neighbour) == (TEXTS[0], "7", "b")
    assert (second.text, second.name, second.neighbour) == (TEXTS[1], "b", "")
    assert chat.text == "Hello\nHi" and [one["content"] for one in chat.messages] == ["Hello", "Hi"]


def test_a_folder_has_texts_and_markdown(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "one.md").write_text(TEXTS[1])
    (tmp_path / "a.TXT").write_text(TEXTS[0])
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    found = Corpus(str(tmp_path)).read()
    assert [(one.name, one.text) for one in found] == [("a.TXT", TEXTS[0]), ("below/one.md", TEXTS[1])]
    assert texts_of(tmp_path / "a.TXT") == [TEXTS[0]]


def test_a_csv_file_has_a_column(tmp_path):
    file = tmp_path / "docs.csv"
    file.write_text('id,body,neighbour\n1,"First text,\nin two lines.",2\n2,"Second, with ""quotes"" and ümlauts.",\n')
    first, second = Corpus(str(file), "body").read()
    assert [first.text, second.text] == TEXTS and (first.name, first.neighbour, second.neighbour) == ("1", "2", "")
    with pytest.raises(InvalidInput, match=r"no column 'text'.*--column: id, body, neighbour"):
        texts_of(file)


def test_a_parquet_file_has_a_column(tmp_path):
    why = "Parquet needs pyarrow: pip install 'blendhub[warm]'"
    arrow = pytest.importorskip("pyarrow", reason=why)
    parquet = pytest.importorskip("pyarrow.parquet", reason=why)
    file = tmp_path / "docs.parquet"
    parquet.write_table(arrow.table({"body": [*TEXTS, None], "id": [1, 2, 3]}), file)
    corpus = Corpus(str(file), "body")
    assert [(one.text, one.name) for one in corpus.read()] == [(TEXTS[0], "1"), (TEXTS[1], "2")]
    assert [(place.line, reason) for place, reason in corpus.broken.named] == [(3, "has no text in the column 'body'")]
    with pytest.raises(InvalidInput, match="no column 'text'"):
        texts_of(file)
    file.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InvalidInput, match="cannot read"):
        texts_of(file, column="body")


def test_without_pyarrow_the_command_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BlendHubError, match=r"pip install 'blendhub\[warm\]'"):
        texts_of(tmp_path / "docs.parquet")


def test_broken_lines_are_noted_and_left_out(tmp_path):
    file = tmp_path / "docs.jsonl"
    lines = ["{", "[1]", '{"title": "x"}', '{"text": 3}', '{"messages": [{"content": "x"}]}', '{"text": "  "}']
    file.write_text("\n".join([*lines, json.dumps({"text": TEXTS[0]}), json.dumps({"text": TEXTS[0]})]))
    corpus = Corpus(str(file))
    assert [one.text for one in corpus.read()] == [TEXTS[0]]
    assert corpus.copies == 1
    assert [(place.line, reason) for place, reason in corpus.broken.named] == [
        (1, "is not JSON"),
        (2, "has neither 'text' nor 'messages'"),
        (3, "has neither 'text' nor 'messages'"),
        (4, "its 'text' is not a text"),
        (5, "a message of it has no role"),
        (6, "is empty"),
    ]


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("docs.jsonl", "", "has no documents"),
        ("docs.jsonl", "{\n{\n", r"none of 2 documents can be computed; the first one, .*docs.jsonl:1, is not JSON"),
        ("docs.csv", "", "no column 'text'.*: none"),
        ("docs.md", " \n", "none of 1 documents"),
    ],
)
def test_a_file_without_documents_is_refused_with_a_sentence(tmp_path, name, content, said):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(InvalidInput, match=said):
        texts_of(file)


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.csv", "docs.txt"])
def test_a_file_that_is_not_there_is_named(tmp_path, name):
    with pytest.raises(InvalidInput, match=rf"cannot read .*{name}: No such file"):
        texts_of(tmp_path / name)
