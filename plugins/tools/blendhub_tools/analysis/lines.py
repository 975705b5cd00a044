"""The lines of a log file, whatever its size and compression, in bounded memory; and broken lines."""

import bz2
import contextlib
import gzip
import io
import lzma
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from blendhub.core.errors import InvalidInput

MAX_NAMED = 20
MAX_REASONS = 50


class BrokenLine(InvalidInput):
    """A line, or a request in it, cannot be played."""


class Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class BrokenLines:
    """Counts broken lines, however many there are, in bounded memory."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.first: list[str] = []
        """The place of each of the first broken lines, and why it is broken."""

    def note(self, place: Place, reason: str) -> None:
        is_counted = reason in self.reasons or len(self.reasons) < MAX_REASONS
        self.reasons[reason if is_counted else "other reasons"] += 1
        if len(self.first) < MAX_NAMED:
            self.first.append(f"{place} {reason}")


LONGEST_LINE = 2**26
"""Bytes; a line that is longer is broken. A prompt of ten million tokens fits."""

STANDARD_INPUT = "-"
COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
ZSTANDARD = b"\x28\xb5\x2f\xfd"
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, OSError)
"""The errors that reading raises where compressed data end early or are wrong."""


class LogFile:
    """A file, or standard input."""

    def __init__(self, path: str) -> None:
        self.name = "standard input" if path == STANDARD_INPUT else path
        try:
            # Closed by ``lines``, but for standard input.
            is_input = path == STANDARD_INPUT
            self._raw = open(sys.stdin.fileno() if is_input else path, "rb", closefd=not is_input)  # noqa: SIM115
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror}; name a file that exists, or -") from None

    def lines(self) -> Iterator[tuple[int, bytes | BrokenLine]]:
        """Each line that is not blank, with its number from 1 on."""
        number = 0
        with contextlib.closing(self._raw):
            try:
                content = self._content()
                while line := content.readline(LONGEST_LINE + 1):
                    number += 1
                    if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                        while (part := content.readline(2**20)) and not part.endswith(b"\n"):
                            pass
                        yield number, BrokenLine(f"is longer than {LONGEST_LINE >> 20} MiB")
                    elif line.strip():
                        yield number, line.rstrip(b"\r\n")
            except DAMAGED as error:
                yield number + 1, BrokenLine(f"cannot be read, nor what follows it: {error or type(error).__name__}")

    def _content(self) -> io.BufferedIOBase:
        """The file's content, decompressed."""
        start = self._raw.peek(6)[:6]
        if start.startswith(ZSTANDARD):
            raise InvalidInput(f"{self.name} is compressed by zstd: decompress it, zstd -dc FILE, and give - as FILE")
        content = self._raw
        for magic, decompress in COMPRESSED.items():
            if start.startswith(magic):
                content = io.BufferedReader(decompress(self._raw, "rb"))
        if b"\0" in content.peek(64)[:64]:
            raise InvalidInput(f"{self.name} is not text in UTF-8; export requests as JSON, one a line")
        return content


def decoded(line: bytes) -> str:
    """The text of a line. One that is not UTF-8 was written as Windows and older systems do."""
    try:
        # Files that were joined have marks inside.
        return line.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        return line.decode("cp1252", errors="replace")
