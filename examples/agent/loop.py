"""The agent: ten turns with three tools. It asks any server with the OpenAI interface."""

import json
import time
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any, NamedTuple

from openai import OpenAI

NAMES = ["assert", "class", "del", "for", "import", "lambda", "pass", "raise", "try", "while", "with", "yield"]
CLEARED = "[cleared]"
KEPT_RESULTS, CLEARS_EVERY = 2, 4
notes: list[str] = []


def read(topic: str) -> str:
    """The beginning of a topic of Python's manual."""
    return str(topics[topic])[:900]


def search(topic: str) -> str:
    """The other topics of the manual that name this one."""
    return ", ".join(name for name, text in sorted(topics.items()) if f'"{topic}"' in text)[:900]


def remember(topic: str) -> str:
    """Put a topic on the list of those that matter."""
    notes.append(topic)
    return f"The list: {', '.join(notes)}."


TOOLS: dict[str, Callable[[str], str]] = {one.__name__: one for one in (read, search, remember)}
TASKS = [
    *((f"Read what the manual says about `{name}`.", "read") for name in ("class", "for", "import")),
    *((f"Which topics name `{name}`?", "search") for name in ("try", "while")),
    ("Remember the topic of classes.", "remember"),
    *((f"Read what the manual says about `{name}`.", "read") for name in ("with", "yield", "lambda", "raise")),
]
SCHEMA = {"type": "object", "properties": {"topic": {"type": "string", "enum": NAMES}}, "required": ["topic"]}
Message = dict[str, Any]


class Turn(NamedTuple):
    called: str
    cleared: bool
    prompt_tokens: int
    seconds: float
    report: dict[str, Any]
    """What BlendHub says of the prompt."""


def turns(client: OpenAI, model: str) -> Iterator[Turn]:
    described = "\n".join(f"{name}(topic): {tool.__doc__}" for name, tool in TOOLS.items())
    messages: list[Message] = [
        {"role": "system", "content": f"You read Python's manual with these tools:\n{described}"}
    ]
    for number, (task, tool) in enumerate(TASKS):
        clears = number > 0 and number % CLEARS_EVERY == 0
        if clears:
            clear(messages)
        messages.append({"role": "user", "content": task})
        begun = time.perf_counter()
        answer: Any = client.chat.completions.create(
            model=model,
            messages=messages,  # type: ignore[arg-type]
            response_format={"type": "json_schema", "json_schema": {"name": tool, "schema": SCHEMA}},
            max_tokens=64,
            temperature=0,
            extra_body={"kv_transfer_params": {"blendhub": {}}},
        )
        seconds = time.perf_counter() - begun
        topic = json.loads(answer.choices[0].message.content)["topic"]
        messages.append({"role": "assistant", "content": f"{tool}({topic})"})
        messages.append({"role": "tool", "content": TOOLS[tool](topic)})
        report = (answer.model_extra.get("kv_transfer_params") or {}).get("blendhub", {})
        yield Turn(f"{tool}({topic})", clears, answer.usage.prompt_tokens, seconds, report)


def clear(messages: list[Message]) -> None:
    """Clear the results of tools, but the last ones."""
    for message in [one for one in messages if one["role"] == "tool"][:-KEPT_RESULTS]:
        message["content"] = CLEARED
