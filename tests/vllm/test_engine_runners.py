"""vLLM's second model runner, and the attention backends and the device for GPUs, as far as they run without one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.engines import Engine, largest_difference
from harness.engines.tiny_model import make_tiny_model
from tests.vllm.conftest import ON_THE_SECOND_RUNNER, PROBING, ROUNDING, SETTINGS, check_recomputation, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FEW: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 256, "max_num_batched_tokens": 256}
DEVICE: dict[str, Any] = {"chunk_tokens": 32, "device": {"name": "cuda"}, "hub": {"arena_gib": 2**-8, "metrics": ""}}
FLASH_ATTENTION, FLASH_INFER = "FlashAttention in smaller blocks, second runner", "FlashInfer in smaller blocks"
BACKENDS = {
    FLASH_ATTENTION: ("FLASH_ATTN", "1", "16"),
    FLASH_INFER: ("FLASHINFER", "0", "16"),
    "FlexAttention": ("FLEX_ATTENTION", "0", ""),
    "Triton attention and the kernel for chosen tokens, second runner": ("TRITON_ATTN", "1", "", "attends"),
}
ASKING: dict[str, Any] = {"selector": {"name": "attended", "options": {"layers": [0.0], "window_tokens": 1}}}
"""What the end of a prompt attends to is measured while the second layer is copied."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every further layer would call the same kernel, which takes seconds in Triton's interpreter."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "two_layers", num_hidden_layers=2)


def start(model: Path, *backend: str, stand_ins: str = "gpu_stand_ins", **settings):
    arranged = [f"tests.vllm.{stand_ins}:put_in_place", *backend]
    return Engine(model, SETTINGS | DEVICE | PROBING | settings, arrange=arranged, **ON_THE_SECOND_RUNNER, **FEW)


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    backend = BACKENDS[request.param]
    with start(model, *backend, **(ASKING if request.param == FLASH_ATTENTION else {})) as engine:
        assert "text is reused anywhere" in engine.log and engine.call("batches_in_flight") == 2
        assert ("attends" in backend) == ("chosen tokens attend by the device" in engine.log)
        yield engine
        assert not [count for count in engine.call("counts") if "failed" in count]


def test_everything_recomputed_equals_full_prefill(engine, texts):
    check_recomputation(engine, texts, 70)


@pytest.mark.parametrize("engine", [FLASH_ATTENTION, FLASH_INFER], indirect=True)
def test_what_prompts_store_and_load_together_equals_full_prefill(engine, texts):
    """The device copies as late as it may, and vLLM has fewer blocks than these prompts need: a copy that nothing waits
    for is one of other KV.
    """
    prompts = [texts.new(129) for _ in range(6)]
    computed = engine.ask(*prompts, tokens=4, keep_kv=True)
    engine.forget()
    for loaded, expected in zip(engine.ask(*prompts, store=False, keep_kv=True), computed, strict=True):
        assert loaded.report["exact_tokens"] == 128
        assert (loaded.kv(128) == expected.kv(128)).all()
    engine.forget()


def test_small_forwards_replay_graphs_of_vllm_and_leave_its_steps_as_they_are(model, texts):
    n = 70
    with start(model, *BACKENDS[FLASH_ATTENTION], stand_ins="graph_stand_ins", **ASKING) as engine:
        assert "forwards of at most 256 chosen tokens replay CUDA graphs" in engine.log
        before = engine.log
        check_recomputation(engine, texts, n)
        replays = [line for line in engine.log[len(before) :].splitlines() if line.startswith("replays")]
        assert f"replays 256 for {2 * n + 5} tokens" in replays
        # A repair comes between a step's inputs and its forward.
        first, second = texts.new(n), texts.new(n)
        store(engine, [*first, *second])
        prompt = [*second, *texts.new(5), *first, *texts.new(9)]
        answer = engine.one(prompt, tokens=12, recompute_ratio=0.0, repair="always", store=False)
        since = answer.report["repair"]["exact_from"] - 1
        said = [engine.one([*prompt, *answer.tokens[:n]], mode="off").tokens[0] for n in range(since, 12)]
        assert said and answer.tokens[since:] == said


def test_runs_of_one_token_are_computed_by_the_kernels_for_one_token(model, texts):
    documents = texts.new(72), texts.new(70)
    with start(model, "FLASHINFER", "0", "", selector={"name": "first_k", "options": {"k": 1}}) as engine:
        store(engine, [*documents[0], *documents[1]])
        prompt = [*texts.new(7), *documents[1], *documents[0], *texts.new(4)]
        expected = engine.full_prefill(prompt)
        before = engine.log
        blended = engine.one(prompt, recompute_ratio=0.5, store=False)
        assert blended.report["recomputed_tokens"] == 2 and blended.report["hole_tokens"] == 7
        planned = [line for line in engine.log[len(before) :].splitlines() if line.startswith("FlashInfer")]
        # The hole and the first moved token come first in the prompt, and the other first token comes alone.
        assert planned[:2] == ["FlashInfer prefill: 1 runs in pages of 32", "FlashInfer decode: 1 runs in pages of 32"]
        assert largest_difference(blended.kv(8), expected[:, :, :8]) < ROUNDING
