"""The prompts in a line of JSON: requests, wherever they stand in the line, or token ids."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from blendhub.tools.analysis.broken import BrokenLine, Place
from blendhub.tools.analysis.lines import decoded
from blendhub.tools.analysis.requests import Prompt, token_ids
from blendhub.tools.analysis.times import as_time

INSIDE = ("body", "request", "request_body", "params", "kwargs", "input")
"""Keys under which gateways and batch files keep the request itself."""

TIMES = ("timestamp", "time", "ts", "created", "created_at", "start_time", "startTime", "@timestamp", "date")
IDS = ("prompt_token_ids", "token_ids", "input_ids", "tokens")
WANTED = ("messages", "prompt", "prompt_token_ids")
"""The keys that errors name as missing in a line without a prompt."""


def read_json(place: Place, line: bytes) -> list[Prompt]:
    """The prompts of a line."""
    try:
        return _prompts(place, msgspec.json.decode(decoded(line)))
    except msgspec.DecodeError as error:
        end = " (cut off?)" if "truncated" in str(error) else ""
        raise BrokenLine(f"is not JSON{end}") from None
    except RecursionError:
        raise BrokenLine("is nested too deeply") from None


def _prompts(place: Place, given: Any) -> list[Prompt]:
    if isinstance(given, list):
        return [Prompt(place, ids=token_ids(given))]
    if not isinstance(given, Mapping):
        raise BrokenLine(f"is {_kind(given)}, not a request")
    body = _body(given)
    time = next((seen for one in (given, body) for key in TIMES if (seen := as_time(one.get(key))) is not None), None)
    for key in IDS:
        if isinstance(body.get(key), list):
            return [Prompt(place, time, ids=token_ids(body[key]))]
    messages = _chat(body)
    if messages is not None:
        tools = body.get("tools")
        return [Prompt(place, time, messages=messages, tools=tools if isinstance(tools, list) else None)]
    return [_completion(place, time, one) for one in _completions(body["prompt"])]


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


def _chat(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of a chat; None if the body is no chat."""
    if body.get("messages") is not None:
        given, system = body["messages"], body.get("system")
    elif body.get("prompt") is None:
        # OpenAI's newer endpoint, "responses".
        given, system = body["input"], body.get("instructions")
        given = [{"role": "user", "content": given}] if isinstance(given, str) else given
    else:
        return None
    messages = _messages(given)
    return [{"role": "system", "content": _content(system)}, *messages] if system else messages


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
