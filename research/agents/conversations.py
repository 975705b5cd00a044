"""An agent that clears its old tool results every fifth turn, and asks vLLM's server.

Its conversations are those of BFCL, whose answers are replayed.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.quality.sources import Dialogue, Turn, dialogues, shuffled
from benchmarks.quality.workloads import CLEARED
from harness.engines.engine import transfer_config
from harness.engines.server import NAME, Server

Message = dict[str, str]
RESULT_CHARACTERS = 260
"""The length of a tool's result."""
EVERY, KEPT_RESULTS = 5, 2
"""So many turns after an edit comes the next, and the results that it leaves."""
OPTIONS: dict[str, Any] = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "enable_prompt_tokens_details": True,
}
SETTINGS = {"hub": {"arena_gib": 3.0, "metrics": ""}, "audit_share": 0.0, "repair": "off", "doubt": 0}
BLENDHUB = transfer_config(SETTINGS)


class Step(NamedTuple):
    """One request."""

    messages: list[Message]
    is_edited: bool
    """Whether text that an earlier request held has changed, gone or moved."""


def conversations(n_turns: int) -> Iterator[Dialogue]:
    """Dialogues strung together. None has one in common with the nineteen conversations after it."""
    source = cycle(shuffled(dialogues(), "agents"))
    while True:
        functions, turns = dict[str, str](), list[Turn]()
        while len(turns) < n_turns:
            dialogue = next(source)
            functions |= dialogue.functions
            turns += [turn._replace(result=turn.result[:RESULT_CHARACTERS]) for turn in dialogue.turns]
        yield Dialogue(functions, turns[:n_turns])


def clearing(conversation: Dialogue) -> Iterator[Step]:
    """What the agent asks: every fifth turn, all old tool results but the last two are cleared."""
    messages = [
        _message("system", "\n".join(["You act by calling these functions:", *conversation.functions.values()]))
    ]
    for number, turn in enumerate(conversation.turns):
        is_edited = number > 0 and number % EVERY == 0
        if is_edited:
            results = [at for at, message in enumerate(messages) if message["role"] == "tool"]
            for at in results[:-KEPT_RESULTS]:
                messages[at] = _message("tool", CLEARED)
        messages.append(_message("user", turn.user))
        yield Step([*messages], is_edited)
        messages += [_message("assistant", turn.calls), _message("tool", turn.result)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


class Reply(NamedTuple):
    seconds: float
    """Until the answer was whole."""
    prompt_tokens: int
    cached_tokens: int
    report: dict[str, Any]
    """BlendHub's."""


def ask(server: Server, step: Step, salt: str) -> Reply:
    body = {"model": NAME, "messages": step.messages, "cache_salt": salt, "max_tokens": 1}
    body |= {"temperature": 0, "kv_transfer_params": {"blendhub": {"explain": True}}}
    begun = time.perf_counter()
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    seconds, usage = time.perf_counter() - begun, answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    report = (answer.get("kv_transfer_params") or {}).get("blendhub", {})
    return Reply(seconds, usage["prompt_tokens"], cached, report)


@contextmanager
def serving(model: Path, connector: dict[str, Any] | None = None) -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="blendhub-agents-") as place,
        Server(model, Path(place, "log"), connector, **OPTIONS) as server,
    ):
        server.wait_until_up()
        yield server
