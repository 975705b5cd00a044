"""``python -m examples.agent``: an agent that clears its old tool results, on vLLM with SmolLM2-135M-Instruct.

It reads Python's manual with three tools, and shows how long each turn took, and what became of its prompt.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from harness.engines.engine import transfer_config
from harness.engines.real_model import NoRealModel, make_real_model
from harness.engines.server import NAME, Server

Message = dict[str, Any]
CLEARED, KEPT_RESULTS, CLEARS_EVERY = "[cleared]", 2, 4
FATES = {"engine": "vLLM's cache"} | {fate: fate for fate in ("exact", "settled", "moved", "recomputed")}
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


TOOLS: dict[str, Callable[[str], str]] = {tool.__name__: tool for tool in (read, search, remember)}
TASKS = [
    *((f"Read what the manual says about `{name}`.", "read") for name in ("class", "for", "import")),
    *((f"Which topics name `{name}`?", "search") for name in ("try", "while")),
    ("Remember the topic of classes.", "remember"),
    *((f"Read what the manual says about `{name}`.", "read") for name in ("with", "yield", "lambda", "raise")),
]
NAMES = ["assert", "class", "del", "for", "import", "lambda", "pass", "raise", "try", "while", "with", "yield"]
SCHEMA = {"type": "object", "properties": {"topic": {"type": "string", "enum": NAMES}}, "required": ["topic"]}


def turns(client: OpenAI, model: str) -> Iterator[tuple[str, ...]]:
    """The cells of each turn's row."""
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
        call = f"{tool}({topic})"
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": TOOLS[tool](topic)}]
        report = (answer.model_extra.get("kv_transfer_params") or {}).get("blendhub", {})
        tokens = [f"{n:,}" for n in (answer.usage.prompt_tokens, *(report.get(f"{fate}_tokens", 0) for fate in FATES))]
        yield str(number + 1), f"{call}, old results cleared" if clears else call, *tokens, f"{seconds:.2f}"


def clear(messages: list[Message]) -> None:
    """Clear the results of tools, but the last ones."""
    for message in [message for message in messages if message["role"] == "tool"][:-KEPT_RESULTS]:
        message["content"] = CLEARED


@contextmanager
def own_server() -> Iterator[str]:
    """The address of a server that is started with BlendHub."""
    try:
        model = make_real_model()
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    connector = transfer_config({"hub": {"arena_gib": 1.0, "metrics": ""}})
    with (
        tempfile.TemporaryDirectory(prefix="blendhub-agent-") as place,
        Server(model, Path(place) / "log", connector, max_model_len=4096) as server,
    ):
        print("start vLLM", flush=True)
        server.wait_until_up()
        yield f"{server.url}/v1"


def show(server: str, model: str) -> None:
    caption = "Settled tokens that vLLM's cache has count in both columns; recomputed tokens count as moved, too."
    table = Table("turn", "calls", "prompt", *FATES.values(), "seconds", caption=caption)
    for cells in turns(OpenAI(base_url=server, api_key="none"), model):
        table.add_row(*cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser("python -m examples.agent", description=__doc__)
    address = "a server that runs, such as http://localhost:8000/v1; otherwise one is started"
    parser.add_argument("--server", metavar="URL", help=address)
    parser.add_argument("--model", default=NAME, help="its model's name")
    options = parser.parse_args()
    if options.server:
        show(options.server, options.model)
    else:
        with own_server() as server:
            show(server, NAME)


if __name__ == "__main__":
    main()
