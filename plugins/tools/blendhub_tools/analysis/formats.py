"""The prompts in the lines of a log: text, JSON of requests or of token ids, or vLLM's own log."""

import ast
import re
from array import array
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from blendhub.core.tokens import Tokens, as_tokens
from blendhub_tools.analysis.lines import BrokenLine, Place, decoded


class Prompt(msgspec.Struct):
    """One prompt of a log: one of ``text``, ``messages`` and ``ids``."""

    place: Place
    time: float | None = None
    """Seconds since 1970; None where the log has no times."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    ids: Tokens | None = None

    @property
    def size(self) -> int:
        """The approximate size of the prompt in bytes."""
        if self.ids is not None:
            return self.ids.nbytes
        return len(self.text or "") + sum(len(message["content"]) for message in self.messages or ())

    @property
    def conversation(self) -> str | None:
        """How the conversation begins, up to its first message of a user; None where the log has no messages."""
        messages = self.messages or []
        first = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
        return None if first is None else "\0".join(message["content"] for message in messages[: first + 1])


def read_text(place: Place, line: bytes) -> list[Prompt]:
    """The prompt of a line of plain text."""
    return [Prompt(place, text=decoded(line))]


def token_ids(given: Any) -> Tokens:
    if not isinstance(given, list) or not given:
        raise BrokenLine("its token ids are no list, or an empty one")
    try:
        return as_tokens(np.frombuffer(array("I", given), np.uint32))
    except (TypeError, OverflowError):
        raise BrokenLine("its token ids are not all integers from 0 to 2**32 - 1") from None


EARLIEST, LATEST = 946_684_800.0, 4_102_444_800.0
"""The years 2000 to 2100, in seconds: times beyond are in smaller units."""


def as_time(given: Any) -> float | None:
    """A time in any unit from seconds to nanoseconds, or as ISO 8601 writes it; None if it is none."""
    try:
        if isinstance(given, str) and not given.replace(".", "", 1).isdecimal():
            moment = datetime.fromisoformat(given)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        seconds = float("nan") if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        return None
    units = (seconds / 1000**power for power in range(4))
    return next((time for time in units if EARLIEST <= time < LATEST), None)


INSIDE = ("body", "request", "request_body", "params", "kwargs", "input")
"""Keys under which gateways and batch files keep the request itself."""

TIMES = ("timestamp", "time", "ts", "created", "created_at", "start_time", "startTime", "@timestamp", "date")
IDS = ("prompt_token_ids", "token_ids", "input_ids", "tokens")
WANTED = ("messages", "prompt", "prompt_token_ids")
"""The keys that errors name as missing in a line without a prompt."""


def read_json(place: Place, line: bytes) -> list[Prompt]:
    """The prompts of a line; a completion request may have several."""
    try:
        given = msgspec.json.decode(decoded(line))
    except msgspec.DecodeError as error:
        end = " (cut off?)" if "truncated" in str(error) else ""
        raise BrokenLine(f"is not JSON{end}") from None
    except RecursionError:
        raise BrokenLine("is nested too deeply") from None
    if isinstance(given, list):
        return [Prompt(place, ids=token_ids(given))]
    if not isinstance(given, Mapping):
        raise BrokenLine("is not a request")
    body = _body(given)
    time = next((seen for one in (given, body) for key in TIMES if (seen := as_time(one.get(key))) is not None), None)
    for key in IDS:
        if isinstance(body.get(key), list):
            return [Prompt(place, time, ids=token_ids(body[key]))]
    if body.get("prompt") is None or body.get("messages") is not None:
        tools = body.get("tools")
        return [Prompt(place, time, messages=_chat(body), tools=tools if isinstance(tools, list) else None)]
    prompts = body["prompt"]
    several = prompts if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else [prompts]
    return [
        Prompt(place, time, text=prompt) if isinstance(prompt, str) else Prompt(place, time, ids=token_ids(prompt))
        for prompt in several
    ]


def _body(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping that holds the prompt: the given one, or one inside it."""
    if _has_prompt(given):
        return given
    for key in INSIDE:
        inside = given.get(key)
        if isinstance(inside, str) and inside.startswith("{"):
            try:
                inside = msgspec.json.decode(inside)
            except msgspec.DecodeError:
                continue
        if isinstance(inside, Mapping) and _has_prompt(inside):
            return inside
    raise BrokenLine(f"has none of the keys {', '.join(WANTED)}")


def _has_prompt(body: Mapping[str, Any]) -> bool:
    named = any(body.get(key) is not None for key in ("messages", "prompt"))
    return named or isinstance(body.get("input"), str | list) or any(isinstance(body.get(key), list) for key in IDS)


def _chat(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat, also of OpenAI's newer endpoint, "responses"."""
    given, system = body.get("messages"), body.get("system")
    if given is None:
        given, system = body["input"], body.get("instructions")
        given = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(given, list) or not given:
        raise BrokenLine("its messages are no list, or an empty one")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in given):
        raise BrokenLine("a message of it has no role")
    messages = [{**message, "content": _content(message.get("content"))} for message in given]
    return [{"role": "system", "content": _content(system)}, *messages] if system else messages


def _content(given: Any) -> str:
    """The text of a message, without its pictures and the like."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise BrokenLine("the content of a message is no text")
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in given)
    return "\n".join(text for text in texts if isinstance(text, str))


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
BEGINS = re.compile(r"\.py:\d+\] (?:Received request |Request \S+ details: )")
"""The words that begin a request, behind a place in vLLM's code: users' texts in other lines may hold these words."""
PROMPT = re.compile(r"prompt: (?P<text>None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
WRITTEN_IDS = re.compile(r"prompt_token_ids: \[(?P<ids>[\d, ]*)\]")
WRITTEN_TIME = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) (?:(?P<year>\d{4})-)?(?P<rest>\d\d-\d\d \d\d:\d\d:\d\d)\b")
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
        ids = WRITTEN_IDS.search(text, begin.end())
        written = PROMPT.search(text, begin.end())
        if ids and ids["ids"]:
            self._has_prompts = True
            return [Prompt(place, self._time(text), ids=token_ids([int(one) for one in ids["ids"].split(",")]))]
        if written and written["text"] != "None":
            self._has_prompts = True
            try:
                return [Prompt(place, self._time(text), text=str(ast.literal_eval(written["text"])))]
            except (SyntaxError, ValueError):
                raise BrokenLine("its prompt is cut off or not written as Python writes texts") from None
        # Recent versions log each request twice: with its prompt at the level DEBUG, then without.
        if self._has_prompts:
            return []
        raise BrokenLine(WITHOUT_PROMPT)

    def _time(self, text: str) -> float | None:
        found = WRITTEN_TIME.search(text)
        try:
            return as_time(f"{found['year'] or self._year}-{found['rest']}") if found else None
        except ValueError:
            return None


def is_vllm_log(line: str) -> bool:
    """Whether a line is one of such a log."""
    return bool(WRITTEN_TIME.search(COLOUR.sub("", line)))
