"""What only an engine on a GPU can tell about time, one question a function, the most decisive first.

Rows come one by one, so that a question that is cut off has told something. Engines are of one shape, with random
weights: only times are measured.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import call
from typing import Any, NamedTuple

from benchmarks.gpu_engine import StartEngine, wait_until_pinned
from benchmarks.hardware_check import SETTINGS, rows, start_row
from benchmarks.report import Row, row
from benchmarks.texts import Sizes, Texts
from benchmarks.timing import in_turn, ratios
from harness.engines import Engine

LARGE = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12_288,
    "vocab_size": 151_936,
}
"""The shape of a model of 8B."""
STEP = 8192
"""The tokens of an engine's step."""
DOCUMENTS, DOCUMENT_TOKENS = 15, 512
"""The most documents of a prompt, and the least tokens of one."""
RATIOS = (0.3, 0.15, 0.05)
STREAMS, STREAM_TOKENS, ANSWER_TOKENS = 4, 96, 48
PHASES = ("load", "probe", "recompute")
INSIDE = "benchmarks.inside_engine:"


class Scale(NamedTuple):
    """How large engines and prompts are, and how often each time is taken."""

    model: Mapping[str, int] = LARGE
    contexts: Sequence[int] = (2048, 4096, 8192, 32_768)
    sizes: Sequence[int] = (8, 64, 256, 512, 2048)
    """The tokens of single forwards."""
    runs: int = 20
    rounds: int = 3


class Engines(NamedTuple):
    start: StartEngine
    scale: Scale

    @property
    def step_context(self) -> int:
        """The longest prompt that a step computes."""
        return max(context for context in self.scale.contexts if context <= STEP)

    def of_large(self, context: int = 8192, **options: Any) -> Any:
        """An engine whose prompts may have so many tokens."""
        model = {**self.scale.model, "max_position_embeddings": context + STEP}
        sizes = {"max_model_len": context + STEP, "max_num_batched_tokens": STEP, "gpu_memory_utilization": 0.6}
        return self.start(model=model, load_format="dummy", **sizes, **options)

    def settings(self, *contexts: int, **changes: Any) -> dict[str, Any]:
        """BlendHub's, with room for documents of these prompts: keys and values of 16 bits in heads of 128 items."""
        model = self.scale.model
        kv_bytes = sum(contexts) * model["num_hidden_layers"] * model["num_key_value_heads"] * 2 * 2 * 128
        return SETTINGS | {"hub": {"arena_gib": 0.25 + 1.5 * kv_bytes / 2**30, "metrics": ""}} | changes


Question = Callable[[Engines], Iterator[Row]]


def forwards(engines: Engines) -> Iterator[Row]:
    """How long a forward of BlendHub's own takes, and the host for it: eager, compiled, and with graphs."""
    sizes, runs = list(engines.scale.sizes), engines.scale.runs
    for kind, options in {"eager": {"enforce_eager": True}, "compiled": {}}.items():
        with engines.of_large(**options) as engine:
            engine.one([10, 11, 12])
            yield start_row(f"engine_{kind}", f"start-up checks of an engine, {kind}", engine.log)
            engine.call("inside", f"{INSIDE}time_steps")
            for replays in (False, True) if kind == "compiled" else (False,):
                way = "piecewise" if replays else kind
                taken = engine.call("inside", f"{INSIDE}forwards", sizes, runs, replays)
                for n in sizes:
                    host, device = taken[n]
                    what = f"a forward of {n} chosen tokens behind as many, {way}"
                    yield row(
                        f"forward_host_{way}_{n}", f"the host's time for {what}", "ms", [1000 * host], None, "lower"
                    )
                    yield row(f"forward_{way}_{n}", what, "ms", [1000 * device], None, "lower")
            texts = Texts(1, Sizes(vocabulary=1000))
            for n in sizes:
                for _ in range(3 + runs):
                    engine.one(texts.new(n), mode="off", store=False)
                step = statistics.median(engine.call("inside", f"{INSIDE}steps", n)[3:])
                what = f"the host's time for vLLM's own step of a prompt of {n} tokens, {kind}"
                yield row(f"step_host_{kind}_{n}", what, "ms", [1000 * step], None, "lower")
                what = f"the host's time for a forward of {n} chosen tokens, {way}, relative to vLLM's step"
                yield row(f"forward_vs_step_{way}_{n}", what, "x", [taken[n][0] / step], None, "lower")


def first_tokens(engines: Engines) -> Iterator[Row]:
    """Times to first token without reuse and with documents in a new order, and what time decides about these."""
    scale = engines.scale
    policy = {"min_donor_context": 0}  # whether reuse pays is decided by time
    settings = engines.settings(*scale.contexts, policy=policy)
    with engines.of_large(max(scale.contexts), settings=settings) as engine:
        yield start_row("engine_large", "start-up checks of a model of 8B", engine.log)
        wait_until_pinned(engine, settings["hub"]["arena_gib"])
        for context in scale.contexts:
            yield from _first_tokens(engine, context, scale.rounds)
        failed = sum(count for name, count in engine.call("counts").items() if name.startswith("saves_failed"))
        yield row("saves_failed", "saves that failed in this engine", "", [failed], 0, "lower")


def _first_tokens(engine: Engine, context: int, rounds: int) -> Iterator[Row]:
    count = min(DOCUMENTS, context // DOCUMENT_TOKENS - 1)
    texts, at = Texts(context, Sizes(count, context // (count + 1), 32, 32, 1000)), f"{context // 1024}k"
    texts.store(engine)
    reports: dict[float, dict[str, Any]] = {}
    phases: dict[float, str] = {}

    def first_token_s(ratio: float = 0.0, **asked: Any) -> float:
        engine.forget()
        before = engine.call("counts")
        answer = engine.one(texts.shuffled(), store=False, recompute_ratio=ratio, **asked)
        after, reports[ratio] = engine.call("counts"), answer.report
        taken = {phase: after.get(f"{phase}_seconds", 0.0) - before.get(f"{phase}_seconds", 0.0) for phase in PHASES}
        phases[ratio] = ", ".join(f"{phase} {1000 * seconds:.1f} ms" for phase, seconds in taken.items())
        return answer.first_token_s

    said = {}
    for ratio in RATIOS:
        first_token_s(ratio)
        said[ratio] = reports[ratio].get("reason") or "reuse pays"
    engine.call("inside", f"{INSIDE}decide_by_time", False)
    ways: dict[str, Callable[[], float]] = {f"{ratio:g}": partial(first_token_s, ratio) for ratio in RATIOS}
    timed = in_turn({"full": partial(first_token_s, mode="off"), **ways}, rounds, call)
    engine.call("inside", f"{INSIDE}decide_by_time", True)
    full = timed["full"]
    yield row(
        f"ttft_full_{at}", f"time to first token of a full prefill of {context:,} tokens", "s", full, None, "lower"
    )
    for ratio in RATIOS:
        percent = round(100 * ratio)
        what = f"of moved documents, {percent}% recomputed ({phases[ratio]}), to a full prefill"
        what += f"; by the start's times: {said[ratio]}"
        yield row(f"ttft_{percent}_{at}", what, "x", ratios(timed[f"{ratio:g}"], full), None, "lower")


def streams(engines: Engines) -> Iterator[Row]:
    """What four streams notice of a load, a blend and a repair beside them."""
    context, rounds = engines.step_context, engines.scale.rounds
    for share in (0.5, 0.25):
        settings = engines.settings(context, repair_share=share)
        with engines.of_large(context, settings=settings) as engine:
            wait_until_pinned(engine, settings["hub"]["arena_gib"])
            texts = Texts(3, Sizes(min(DOCUMENTS, context // DOCUMENT_TOKENS - 1), DOCUMENT_TOKENS, 32, 32, 1000))
            texts.store(engine)
            engine.one(texts.in_order(), mode="exact")
            beside = [texts.new(64 + number) for number in range(STREAMS)]
            alone = _gaps(engine, beside, partial(texts.new, 8), rounds, mode="off")
            ways: dict[str, tuple[Callable[[], list[int]], dict[str, Any]]] = {
                f"repair_{share:g}": (texts.shuffled, {"recompute_ratio": 0.15, "repair": "always"})
            }
            if share == 0.5:
                ways |= {
                    "load": (texts.in_order, {"mode": "exact"}),
                    "blend": (texts.shuffled, {"recompute_ratio": 0.15}),
                }
            for way, (prompt, asked) in ways.items():
                gaps = _gaps(engine, beside, prompt, rounds, **asked)
                for kind, ours, theirs in zip(("gap", "longest_gap"), gaps, alone, strict=True):
                    what = f"{kind.replace('_', ' ')} between tokens of {STREAMS} streams, {way} beside, to alone"
                    yield row(f"{kind}_{way}", what, "x", ratios(ours, theirs), None, "lower")


def _gaps(
    engine: Engine, beside: Sequence[list[int]], prompt: Callable[[], list[int]], rounds: int, **asked: Any
) -> tuple[list[float], list[float]]:
    """The median and the longest gap of streams in each round, while a prompt is served beside them."""
    median, longest = list[float](), list[float]()
    for _ in range(rounds):
        engine.forget()
        served = engine.beside(beside, STREAM_TOKENS, prompt(), ANSWER_TOKENS, store=False, **asked)
        median.append(statistics.median(served.gaps_s))
        longest.append(served.longest_gap_s)
    return median, longest


def eight_bits(engines: Engines) -> Iterator[Row]:
    """Reuse with KV in 8-bit floats, and what streams notice of saves."""
    context = engines.step_context
    settings = engines.settings(context)
    with engines.of_large(context, settings=settings, kv_cache_dtype="fp8") as engine:
        yield start_row("engine_fp8_kv", "start-up checks with KV in 8-bit floats", engine.log)
        texts = Texts(4, Sizes(vocabulary=1000))
        beside = [texts.new(64 + number) for number in range(STREAMS)]
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * engines.scale.rounds):
            saves = bool(number % 2)
            answer = engine.beside(beside, STREAM_TOKENS, texts.new(context // 2), 1, store=saves)
            gaps[saves].append(statistics.median(answer.gaps_s))
        what = f"gap between tokens of {STREAMS} streams beside a prompt that is saved, to one that is not"
        yield row("gap_saves", what, "x", ratios(gaps[True], gaps[False]), None, "lower")


def exact(engines: Engines) -> Iterator[Row]:
    """KV of moved text, all of it recomputed, beside that of a full prefill."""
    return rows("vllm", engines.start)


QUESTIONS: dict[str, tuple[int, Question]] = {
    "forwards": (300, forwards),
    "first_tokens": (240, first_tokens),
    "streams": (180, streams),
    "exact": (60, exact),
    "eight_bits": (120, eight_bits),
}
"""For each question its limit in seconds."""
