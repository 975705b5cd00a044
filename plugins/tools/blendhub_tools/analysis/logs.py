"""Logs as prompts, in their order: formats are recognised, broken lines are noted."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias, get_args

from blendhub.core.errors import InvalidInput
from blendhub_tools.analysis.formats import Prompt, VLLMLog, is_vllm_log, read_json, read_text
from blendhub_tools.analysis.lines import BrokenLine, BrokenLines, LogFile, Place, decoded

Format: TypeAlias = Literal["jsonl", "text", "vllm"]
FORMATS: tuple[Format, ...] = get_args(Format)

HEAD = 50
"""The number of lines by which a file's format is recognised."""


class Logs:
    """Several files as one sequence of prompts.

    A server logs a request when it ends, which is when its KV is stored, so lines stay in their order.
    """

    def __init__(self, paths: Sequence[str], format: Format | None = None) -> None:
        self.files = [LogFile(path) for path in paths]
        self.broken = BrokenLines()
        self._format = format

    def __iter__(self) -> Iterator[Prompt]:
        return itertools.chain.from_iterable(map(self._prompts, self.files))

    def _prompts(self, file: LogFile) -> Iterator[Prompt]:
        lines = file.lines()
        head = list(itertools.islice(lines, HEAD))
        format = self._format or recognise(file.name, [line for _, line in head])
        readers: dict[Format, Callable[[Place, bytes], list[Prompt]]]
        readers = {"jsonl": read_json, "text": read_text, "vllm": VLLMLog().read}
        for number, line in itertools.chain(head, lines):
            place = Place(file.name, number)
            try:
                if isinstance(line, BrokenLine):
                    raise line
                yield from readers[format](place, line)
            except BrokenLine as error:
                self.broken.note(place, str(error))


def recognise(name: str, lines: Iterable[bytes | BrokenLine]) -> Format:
    """The format of a file that begins with these lines. Some of them may be broken."""
    texts = [decoded(line).strip() for line in lines if isinstance(line, bytes)]
    if texts and (texts[0] in ("[", "{") or texts[0].startswith(("[{", '["'))):
        each = "." if texts[0] == "{" else "'.[]'"
        raise InvalidInput(f"{name} is JSON, but not with a request a line; jq makes it so: jq -c {each} {name}")
    if any(map(is_vllm_log, texts)):
        return "vllm"
    formats = Counter[Format](
        "jsonl" if text.startswith("{") or (text.startswith("[") and not text.strip("[]0123456789, ")) else "text"
        for text in texts
    )
    return formats.most_common(1)[0][0] if formats else "text"
