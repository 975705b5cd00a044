"""What a line of a log asks for: prompts as text, as chat messages or as token ids, and when."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from blendhub.analysis.broken import BrokenLine, Place
from blendhub.analysis.lines import decoded
from blendhub.tokens import Tokens, as_tokens

INSIDE = ("body", "request", "request_body", "params", "kwargs", "input")
"""Keys under which gateways and batch files keep the request itself."""

TIMES = ("timestamp", "time", "ts", "created", "created_at", "start_time", "startTime", "@timestamp", "date")
IDS = ("prompt_token_ids", "token_ids", "input_ids", "tokens")
SYSTEM = ("system", "developer")
EARLIEST, LATEST = 946_684_800.0, 4_102_444_800.0
"""The years 2000 to 2100, in seconds: times beyond are in smaller units."""


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
        """About as many bytes as it takes."""
        if self.ids is not None:
            return self.ids.nbytes
        texts = [self.text] if self.text is not None else [str(one.get("content")) for one in self.messages or ()]
        return sum(map(len, texts))

    @property
    def system(self) -> str | None:
        """The system prompt; None where there is none, or where it is not told from the rest."""
        first = self.messages[0] if self.messages else {}
        return first.get("content") if first.get("role") in SYSTEM else None


def read_json(place: Place, line: bytes) -> list[Prompt]:
    """The prompts of a line of JSON: a request to one of OpenAI's endpoints, wherever it stands in it, or token ids."""
    try:
        return prompts_in(place, msgspec.json.decode(decoded(line)))
    except msgspec.DecodeError as error:
        end = " (cut off?)" if "truncated" in str(error) else ""
        raise BrokenLine(f"is not JSON{end}") from None
    except RecursionError:
        raise BrokenLine("is nested too deeply") from None


def prompts_in(place: Place, given: Any) -> list[Prompt]:
    """The prompts of decoded JSON."""
    if isinstance(given, list):
        return [Prompt(place, ids=token_ids(given))]
    if not isinstance(given, Mapping):
        raise BrokenLine(f"is {_kind(given)}, not a request")
    body = _body(given)
    time = next((seen for one in (given, body) for key in TIMES if (seen := as_time(one.get(key))) is not None), None)
    for key in IDS:
        if body.get(key) is not None:
            return [Prompt(place, time, ids=token_ids(body[key]))]
    if body.get("messages") is not None:
        tools = body.get("tools")
        return [
            Prompt(place, time, messages=_messages(body["messages"]), tools=tools if isinstance(tools, list) else None)
        ]
    return [_completion(place, time, one) for one in _completions(body["prompt"])]


def read_text(place: Place, line: bytes) -> list[Prompt]:
    """The prompt of a line of plain text."""
    return [Prompt(place, text=decoded(line))]


def read_ids(place: Place, line: bytes) -> list[Prompt]:
    """The prompt of a line of token ids, with commas or blanks between."""
    try:
        return [Prompt(place, ids=token_ids([int(one) for one in line.replace(b",", b" ").split()]))]
    except ValueError:
        raise BrokenLine("is no list of token ids") from None


def token_ids(given: Any) -> Tokens:
    if not isinstance(given, list) or not given:
        raise BrokenLine("its token ids are no list, or an empty one")
    try:
        ids = array("I", given)
    except (TypeError, OverflowError):
        raise BrokenLine("its token ids are not all integers from 0 to 2**32 - 1") from None
    return as_tokens(np.frombuffer(ids, np.uint32))


def as_time(given: Any) -> float | None:
    """A time in any unit from seconds to nanoseconds, or as ISO 8601 writes it; None if it is none."""
    if isinstance(given, str):
        try:
            parsed = datetime.fromisoformat(given)
        except ValueError:
            return _number_as_time(given)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    return _number_as_time(given)


def _number_as_time(given: Any) -> float | None:
    if isinstance(given, bool) or given is None:
        return None
    try:
        seconds = float(given)
    except (TypeError, ValueError, OverflowError):
        return None
    for _ in range(4):
        if EARLIEST <= seconds < LATEST:
            return seconds
        seconds /= 1000
    return None


def _body(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping that has the prompt: this one, or one within it."""
    wanted = ("messages", "prompt", *IDS)
    if any(given.get(key) is not None for key in wanted):
        return given
    for key in INSIDE:
        inside = given.get(key)
        if isinstance(inside, str) and inside.startswith("{"):
            try:
                inside = msgspec.json.decode(inside)
            except msgspec.DecodeError:
                continue
        if isinstance(inside, Mapping) and any(inside.get(name) is not None for name in wanted):
            return inside
    raise BrokenLine(f"has none of the keys {', '.join(wanted[:3])}")


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise BrokenLine("its messages are no list, or an empty one")
    messages = []
    for one in given:
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise BrokenLine("a message of it has no role")
        messages.append({**one, "content": _content(one.get("content"))})
    return messages


def _content(given: Any) -> str:
    """The text of a message, without its pictures and the like."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise BrokenLine(f"the content of a message is {_kind(given)}")
    return "\n".join(_texts(given))


def _texts(parts: Iterable[Any]) -> Iterable[str]:
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text


def _completions(given: Any) -> Sequence[Any]:
    """The prompts of a completion request, which may ask for several."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return given
    return [given]


def _completion(place: Place, time: float | None, given: Any) -> Prompt:
    if isinstance(given, str):
        return Prompt(place, time, text=given)
    if isinstance(given, list):
        return Prompt(place, time, ids=token_ids(given))
    raise BrokenLine(f"its prompt is {_kind(given)}")


def _kind(given: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(given), "a number")
