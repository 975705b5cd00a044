"""The prompts in the lines of a log: text, JSON of requests or of token ids, or vLLM's own log."""

import ast
import re
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from blendhub.core.tokens import Tokens, as_tokens
from blendhub_tools.analysis.lines import BrokenLine, Place, decoded


class Prompt(msgspec.Struct):
    """One prompt of a log: one of ``text``, ``messages`` and ``ids``."""

    place: Place
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


def read_text(place: Place, line: bytes) -> list[Prompt]:
    """The prompt of a line of plain text."""
    return [Prompt(place, text=decoded(line))]


def token_ids(ids: Any) -> Tokens:
    if not isinstance(ids, list) or not ids:
        raise BrokenLine("its token ids are no list, or an empty one")
    try:
        return as_tokens(np.frombuffer(array("I", ids), np.uint32))
    except (TypeError, OverflowError):
        raise BrokenLine("its token ids are not all integers from 0 to 2**32 - 1") from None


INSIDE = ("body", "request", "request_body", "params", "kwargs", "input")
"""Keys under which gateways and batch files keep the request itself."""

IDS = ("prompt_token_ids", "token_ids", "input_ids", "tokens")


def read_json(place: Place, line: bytes) -> list[Prompt]:
    """The prompts of a line; a completion request may have several."""
    try:
        entry = msgspec.json.decode(decoded(line))
    except msgspec.DecodeError as error:
        end = " (cut off?)" if "truncated" in str(error) else ""
        raise BrokenLine(f"is not JSON{end}") from None
    except RecursionError:
        raise BrokenLine("is nested too deeply") from None
    if isinstance(entry, list):
        return [Prompt(place, ids=token_ids(entry))]
    if not isinstance(entry, Mapping):
        raise BrokenLine("is not a request")
    body = _body(entry)
    for key in IDS:
        if isinstance(body.get(key), list):
            return [Prompt(place, ids=token_ids(body[key]))]
    if body.get("prompt") is None or body.get("messages") is not None:
        tools = body.get("tools")
        return [Prompt(place, messages=_chat(body), tools=tools if isinstance(tools, list) else None)]
    prompts = body["prompt"]
    several = prompts if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else [prompts]
    return [
        Prompt(place, text=prompt) if isinstance(prompt, str) else Prompt(place, ids=token_ids(prompt))
        for prompt in several
    ]


def _body(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping that holds the prompt: the entry, or one inside it."""
    for key in (None, *INSIDE):
        body = entry.get(key) if key else entry
        if isinstance(body, str) and body.startswith("{"):
            try:
                body = msgspec.json.decode(body)
            except msgspec.DecodeError:
                continue
        if isinstance(body, Mapping) and (
            any(body.get(key) is not None for key in ("messages", "prompt"))
            or isinstance(body.get("input"), str | list)
            or any(isinstance(body.get(key), list) for key in IDS)
        ):
            return body
    raise BrokenLine("has none of the keys messages, prompt, prompt_token_ids")


def _chat(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat, also of OpenAI's newer endpoint, "responses"."""
    messages, system = body.get("messages"), body.get("system")
    if messages is None:
        messages, system = body["input"], body.get("instructions")
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not isinstance(messages, list) or not messages:
        raise BrokenLine("its messages are no list, or an empty one")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise BrokenLine("a message of it has no role")
    first = [{"role": "system", "content": system}] if system else []
    return [{**message, "content": _text(message.get("content"))} for message in [*first, *messages]]


def _text(content: Any) -> str:
    """The text of a message, without its pictures and the like."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BrokenLine("the content of a message is no text")
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
    return "\n".join(text for text in texts if isinstance(text, str))


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
BEGINS = re.compile(r"\.py:\d+\] (?:Received request |Request \S+ details: )")
"""The words that begin a request, behind a place in vLLM's code: users' texts in other lines may hold these words."""
PROMPT = re.compile(r"prompt: (?P<text>None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
WRITTEN_IDS = re.compile(r"prompt_token_ids: \[(?P<ids>[\d, ]*)\]")
WRITTEN_TIME = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d\b")
WITHOUT_PROMPT = "names a request without its prompt: vLLM logs prompts with VLLM_LOGGING_LEVEL=DEBUG"


class VLLMLog:
    """One log. Lines that are about other things are skipped."""

    def __init__(self) -> None:
        self._has_prompts = False

    def read(self, place: Place, line: bytes) -> list[Prompt]:
        if b"equest" not in line:
            return []
        text = COLOUR.sub("", decoded(line))
        begin = BEGINS.search(text)
        if begin is None:
            return []
        ids = WRITTEN_IDS.search(text, begin.end())
        prompt = PROMPT.search(text, begin.end())
        if ids and ids["ids"]:
            self._has_prompts = True
            return [Prompt(place, ids=token_ids([int(id) for id in ids["ids"].split(",")]))]
        if prompt and prompt["text"] != "None":
            self._has_prompts = True
            try:
                return [Prompt(place, text=str(ast.literal_eval(prompt["text"])))]
            except (SyntaxError, ValueError):
                raise BrokenLine("its prompt is cut off or not written as Python writes texts") from None
        # Recent versions log each request twice: with its prompt at the level DEBUG, then without.
        if self._has_prompts:
            return []
        raise BrokenLine(WITHOUT_PROMPT)


def is_vllm_log(line: str) -> bool:
    """Whether a line is one of such a log."""
    return bool(WRITTEN_TIME.search(COLOUR.sub("", line)))
