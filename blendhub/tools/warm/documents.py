"""The documents of a corpus: JSON lines, a folder of texts, or a column of a table; broken ones are noted."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from blendhub.core.errors import BlendHubError, InvalidInput
from blendhub.tools.analysis.formats import read_json
from blendhub.tools.analysis.lines import STANDARD_INPUT, BrokenLine, BrokenLines, LogFile, Place, decoded

TEXTS = (".txt", ".text", ".md", ".markdown")
TABLES = (".csv", ".tsv")
PARQUET = ".parquet"
TEXT, ID, NEIGHBOUR = "text", "id", "neighbour"
LONGEST_CELL = 2**26
"""Characters of a cell of a CSV file; Python's own limit is 128 KiB."""


class Document(msgspec.Struct, frozen=True):
    """A text of the corpus, or a conversation."""

    place: Place
    text: str
    """The document's words; those of all messages if it is a conversation."""
    messages: tuple[dict[str, Any], ...] = ()
    name: str = ""
    neighbour: str = ""
    """The name of the document that stands before this one in prompts; empty: the file does not say."""


class Corpus:
    """The documents of a file or a folder, each text once."""

    def __init__(self, path: str, column: str = TEXT) -> None:
        self.path = path
        self.broken = BrokenLines()
        self.copies = 0
        """How many documents have the text of an earlier one."""
        self._column = column

    def read(self) -> list[Document]:
        """All documents. Raises InvalidInput if there are none."""
        found: dict[tuple[str, bytes], Document] = {}
        for one in self._documents():
            known = found.setdefault((one.text, msgspec.json.encode(one.messages)), one)
            self.copies += known is not one
        if not found:
            raise InvalidInput(self._nothing())
        return list(found.values())

    def _documents(self) -> Iterator[Document]:
        path = Path(self.path)
        if self.path != STANDARD_INPUT and path.is_dir():
            return self._of_folder(path)
        if path.suffix.lower() == PARQUET:
            return self._of_rows(_parquet_rows(path, self._column))
        if path.suffix.lower() in TABLES:
            return self._of_rows(self._csv_rows(path))
        if path.suffix.lower() in TEXTS:
            return self._of_file(path, path.name)
        return self._of_lines()

    def _of_folder(self, folder: Path) -> Iterator[Document]:
        files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in TEXTS and file.is_file()]
        for file in files:
            yield from self._of_file(file, str(file.relative_to(folder)))

    def _of_file(self, file: Path, name: str) -> Iterator[Document]:
        place = Place(str(file), 1)
        try:
            text = decoded(file.read_bytes())
        except OSError as error:
            if str(file) == self.path:
                raise InvalidInput(f"cannot read {file}: {error.strerror}") from None
            self.broken.note(place, f"cannot be read: {error.strerror}")
            return
        yield from self._kept(Document(place, text, name=name))

    def _of_rows(self, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[Document]:
        for number, row in rows:
            name, neighbour = (_name(row.get(key)) for key in (ID, NEIGHBOUR))
            place, text = Place(self.path, number), row.get(self._column)
            if not isinstance(text, str):
                self.broken.note(place, f"has no text in the column {self._column!r}")
                continue
            yield from self._kept(Document(place, text, name=name, neighbour=neighbour))

    def _csv_rows(self, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
        csv.field_size_limit(LONGEST_CELL)
        try:
            with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
                rows = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
                _check_column(path, self._column, rows.fieldnames or ())
                for row in rows:
                    yield rows.line_num, row
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror}") from None
        except csv.Error as error:
            raise InvalidInput(f"{path}:{rows.line_num} is not CSV: {error}") from None

    def _of_lines(self) -> Iterator[Document]:
        for number, line in LogFile(self.path).lines():
            place = Place("standard input" if self.path == STANDARD_INPUT else self.path, number)
            try:
                yield from self._kept(_of_json(place, line))
            except BrokenLine as error:
                self.broken.note(place, str(error))

    def _kept(self, document: Document) -> Iterator[Document]:
        if document.text.strip():
            yield document
        else:
            self.broken.note(document.place, "is empty")

    def _nothing(self) -> str:
        if not self.broken:
            return f"{self.path} has no documents; expected JSON lines with {TEXT!r} or 'messages', a table, or texts"
        place, reason = self.broken.named[0]
        return f"{self.path}: none of {len(self.broken):,} documents can be computed; the first one, {place}, {reason}"


def _of_json(place: Place, line: bytes | BrokenLine) -> Document:
    if isinstance(line, BrokenLine):
        raise line
    try:
        given = msgspec.json.decode(decoded(line))
    except (msgspec.DecodeError, RecursionError):
        raise BrokenLine("is not JSON") from None
    if not isinstance(given, Mapping) or not (given.get(TEXT) or given.get("messages")):
        raise BrokenLine(f"has neither {TEXT!r} nor 'messages'")
    name, neighbour = (_name(given.get(key)) for key in (ID, NEIGHBOUR))
    if isinstance(text := given.get(TEXT), str):
        return Document(place, text, name=name, neighbour=neighbour)
    if text is not None:
        raise BrokenLine(f"its {TEXT!r} is not a text")
    messages = tuple(read_json(place, line)[0].messages or ())
    return Document(place, "\n".join(one["content"] for one in messages), messages, name, neighbour)


def _name(given: Any) -> str:
    return "" if given is None else str(given)


def _check_column(path: Path, column: str, columns: Iterable[str]) -> None:
    if column not in columns:
        names = ", ".join(columns) or "none"
        raise InvalidInput(f"{path} has no column {column!r}; name one of its columns with --column: {names}")


def _parquet_rows(path: Path, column: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise BlendHubError(f"reading {path} needs pyarrow: pip install 'blendhub[warm]', or give CSV") from None
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            _check_column(path, column, columns)
            wanted = [one for one in (column, ID, NEIGHBOUR) if one in columns]
            rows = (row for batch in file.iter_batches(columns=wanted) for row in batch.to_pylist())
            yield from enumerate(rows, 1)
    except (OSError, arrow.ArrowException) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from None
