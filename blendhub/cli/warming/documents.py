"""The documents of a corpus: JSON lines, a folder of texts, or a column of a CSV file."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from blendhub.core.errors import InvalidInput, reason_of

TEXTS = (".txt", ".text", ".md", ".markdown")
TABLES = (".csv", ".tsv")
STANDARD_INPUT = "-"


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Document(msgspec.Struct, frozen=True):
    """A text, or a conversation."""

    text: str = ""
    messages: tuple[Message, ...] = ()


class Corpus(msgspec.Struct):
    documents: dict[Document, str] = {}
    """Each document once, and its place."""
    copies: int = 0
    """How many documents are the same as an earlier one."""
    left_out: list[str] = []
    """For each document that cannot be computed, its place and the reason."""

    def add(self, place: str, document: Document) -> None:
        if document in self.documents:
            self.copies += 1
        elif document.text.strip() or document.messages:
            self.documents[document] = place
        else:
            self.left_out.append(f"{place} has neither a text nor messages")


def read_corpus(path: str, column: str) -> Corpus:
    """All documents; raises InvalidInput if there are none."""
    corpus = Corpus()
    try:
        for place, given in _entries(Path(path), path, column):
            try:
                document = given if isinstance(given, Document) else msgspec.json.decode(given, type=Document)
                corpus.add(place, document)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                corpus.left_out.append(f"{place} is no document: {error}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"cannot read {path}: {reason_of(error)}") from None
    if not corpus.documents:
        first = f"; the first one: {corpus.left_out[0]}" if corpus.left_out else ""
        raise InvalidInput(f"{path} has no documents; expected JSON lines with 'text' or 'messages', or texts{first}")
    return corpus


def _entries(path: Path, name: str, column: str) -> Iterator[tuple[str, Document | str]]:
    """Each document with its place, as a line of JSON if it is one."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix.lower() in TEXTS:
                yield str(file), Document(file.read_text(encoding="utf-8"))
    elif path.suffix.lower() in TEXTS:
        yield name, Document(path.read_text(encoding="utf-8"))
    elif path.suffix.lower() in TABLES:
        csv.field_size_limit(2**26)  # Python's own limit is 128 KiB
        with path.open(newline="", encoding="utf-8-sig") as table:
            rows = csv.DictReader(table, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            if column not in (rows.fieldnames or ()):
                names = ", ".join(rows.fieldnames or ()) or "none"
                raise InvalidInput(f"{path} has no column {column!r}; name one of its columns with --column: {names}")
            for row in rows:
                yield f"{name}:{rows.line_num}", Document(row[column] or "")
    else:
        with sys.stdin if name == STANDARD_INPUT else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{name}:{number}", line
