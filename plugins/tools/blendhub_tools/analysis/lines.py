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
from pathlib import Path
from typing import Any

import msgspec

from blendhub.core.errors import InvalidInput

MOST_NAMED = 20
MOST_REASONS = 50


class BrokenLine(InvalidInput):
    """A line, or a request in it, cannot be played."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class BrokenLines:
    """Counts broken lines, however many there are, in bounded memory."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.named: list[tuple[Place, str]] = []
        """The first broken lines, whatever their reasons, and why each is broken."""

    def __len__(self) -> int:
        return self.reasons.total()

    def note(self, place: Place, reason: str) -> None:
        known = reason in self.reasons or len(self.reasons) < MOST_REASONS
        self.reasons[reason if known else "other reasons"] += 1
        if len(self.named) < MOST_NAMED:
            self.named.append((place, reason))


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
            if path == STANDARD_INPUT:
                self._raw = open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115
            else:
                self._raw = open(path, "rb")  # noqa: SIM115
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror}; name a file that exists, or -") from None
        self._is_seekable = self._raw.seekable()
        self.size = Path(path).stat().st_size if self._is_seekable and path != STANDARD_INPUT else 0
        """The size in bytes; 0 if it is not known."""

    @property
    def position(self) -> int:
        """How many bytes of the file have been read."""
        return self._raw.tell() if self._is_seekable and not self._raw.closed else self.size

    def lines(self) -> Iterator[tuple[int, bytes | BrokenLine]]:
        """Each line that is not blank, with its number from 1 on."""
        number = 0
        with contextlib.closing(self._raw):
            try:
                content = self._content()
                while line := content.readline(LONGEST_LINE + 1):
                    number += 1
                    if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                        _skip_line(content)
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
        opened = self._raw
        for magic, decompress in COMPRESSED.items():
            if start.startswith(magic):
                opened = io.BufferedReader(decompress(self._raw, "rb"))
        if b"\0" in opened.peek(64)[:64]:
            raise InvalidInput(f"{self.name} is not text in UTF-8; export requests as JSON, one a line")
        return opened


def _skip_line(content: io.BufferedIOBase) -> None:
    while (part := content.readline(2**20)) and not part.endswith(b"\n"):
        pass


def decoded(line: bytes) -> str:
    """The text of a line. One that is not UTF-8 was written as Windows and older systems do."""
    try:
        # Files that were joined have marks inside.
        return line.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        return line.decode("cp1252", errors="replace")
