"""Logs as prompts in the order of time: formats are recognised, files are merged, broken lines are noted."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias

from blendhub.core.errors import InvalidInput
from blendhub_tools.analysis.formats import Prompt, VLLMLog, is_vllm_log, read_json, read_text
from blendhub_tools.analysis.lines import BrokenLine, BrokenLines, LogFile, Place, decoded

Format: TypeAlias = Literal["jsonl", "text", "vllm"]
Reader: TypeAlias = Callable[[Place, bytes], list[Prompt]]

HEAD = 50
"""The number of lines by which a file's format is recognised."""


class Logs:
    """Several files as one sequence of prompts."""

    def __init__(self, paths: Sequence[str], format: Format | None = None) -> None:
        self.files = [LogFile(path) for path in paths]
        self.broken = BrokenLines()
        self._format = format

    @property
    def size(self) -> int:
        """The size in bytes; 0 if a file's size is not known."""
        return sum(file.size for file in self.files) if all(file.size for file in self.files) else 0

    @property
    def position(self) -> int:
        return sum(file.position for file in self.files)

    def __iter__(self) -> Iterator[Prompt]:
        """The prompts. Files are merged by time; those without times follow each other in the order given, first.

        Each file stays in its order: a server logs a request when it ends, which is when its KV is stored.
        """
        return heapq.merge(*map(self._prompts, self.files), key=_time)

    def _prompts(self, file: LogFile) -> Iterator[Prompt]:
        lines = file.lines()
        head = list(itertools.islice(lines, HEAD))
        read = _reader(self._format or recognise(file.name, [line for _, line in head]), file.name)
        latest: float | None = None
        for number, line in itertools.chain(head, lines):
            place = Place(file.name, number)
            try:
                if isinstance(line, BrokenLine):
                    raise line
                found = read(place, line)
            except BrokenLine as error:
                self.broken.note(place, str(error))
                continue
            for prompt in found:
                # One without a time stands where it stands in its file.
                prompt.time = latest = latest if prompt.time is None else prompt.time
                yield prompt


def recognise(name: str, lines: Iterable[bytes | BrokenLine]) -> Format:
    """The format of a file that begins with these lines. Some of them may be broken."""
    texts = [decoded(line).strip() for line in lines if isinstance(line, bytes)]
    if texts and (texts[0] in ("[", "{") or texts[0].startswith(("[{", '["'))):
        each = "." if texts[0] == "{" else "'.[]'"
        raise InvalidInput(f"{name} is JSON, but not with a request a line; jq makes it so: jq -c {each} {name}")
    if any(map(is_vllm_log, texts)):
        return "vllm"
    formats = Counter[Format](map(_format_of, texts))
    return formats.most_common(1)[0][0] if formats else "text"


def _format_of(text: str) -> Format:
    if text.startswith("{") or (text.startswith("[") and not text.strip("[]0123456789, ")):
        return "jsonl"
    return "text"


def _reader(format: Format, name: str) -> Reader:
    readers: dict[Format, Reader] = {"jsonl": read_json, "text": read_text}
    return readers.get(format) or VLLMLog(_year(name)).read


def _year(name: str) -> int:
    """When a file was last written to."""
    try:
        return datetime.fromtimestamp(Path(name).stat().st_mtime, UTC).year
    except OSError:
        return datetime.now(UTC).year


def _time(prompt: Prompt) -> float:
    return float("-inf") if prompt.time is None else prompt.time
