"""The prompts in vLLM's own log, which ``--enable-log-requests`` writes."""

import ast
import re
from datetime import UTC, datetime

from blendhub.tools.analysis.broken import BrokenLine, Place
from blendhub.tools.analysis.lines import decoded
from blendhub.tools.analysis.requests import Prompt, token_ids

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
BEGINS = re.compile(r"\.py:\d+\] (?:Received request |Request \S+ details: )")
"""The words that begin a request, behind a place in vLLM's code: users' texts in other lines may hold these words."""
PROMPT = re.compile(r"prompt: (?P<text>None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
IDS = re.compile(r"prompt_token_ids: \[(?P<ids>[\d, ]*)\]")
TIME = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) (?:(?P<year>\d{4})-)?(?P<rest>\d\d-\d\d \d\d:\d\d:\d\d)\b")
WITHOUT_PROMPT = "names a request without its prompt: vLLM logs prompts with VLLM_LOGGING_LEVEL=DEBUG"


class VLLMLog:
    """One log. Lines that are about other things are skipped."""

    def __init__(self, year: int) -> None:
        self._year = year
        """The year of the log's end: the lines have only month and day."""
        self._has_prompts = False

    def read(self, place: Place, line: bytes) -> list[Prompt]:
        if b"equest" not in line:
            return []
        text = COLOUR.sub("", decoded(line))
        begin = BEGINS.search(text)
        if begin is None:
            return []
        ids = IDS.search(text, begin.end())
        written = PROMPT.search(text, begin.end())
        time = self._time(text)
        if ids and ids["ids"]:
            self._has_prompts = True
            return [Prompt(place, time, ids=token_ids([int(one) for one in ids["ids"].split(",")]))]
        if written and written["text"] != "None":
            self._has_prompts = True
            return [Prompt(place, time, text=_unquoted(written["text"]))]
        # Recent versions log each request twice: with its prompt at the level DEBUG, then without.
        if self._has_prompts:
            return []
        raise BrokenLine(WITHOUT_PROMPT)

    def _time(self, text: str) -> float | None:
        found = TIME.search(text)
        if found is None:
            return None
        try:
            moment = datetime.strptime(f"{found['year'] or self._year}-{found['rest']}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            return None
        return moment.replace(tzinfo=UTC).timestamp()


def is_vllm_log(line: str) -> bool:
    """Whether a line is one of such a log."""
    return bool(TIME.search(COLOUR.sub("", line)))


def _unquoted(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        raise BrokenLine("its prompt is cut off or not written as Python writes texts") from None
