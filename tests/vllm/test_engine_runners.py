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
FLASH_ATTENTION = "FlashAttention in smaller blocks and CUDA graphs, second runner"
FLASH_INFER = "FlashInfer in smaller blocks"
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


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    backend, replays = BACKENDS[request.param], request.param == FLASH_ATTENTION
    settings = SETTINGS | DEVICE | PROBING | (ASKING if replays else {})
    arranged = f"tests.vllm.{'graph' if replays else 'gpu'}_stand_ins:put_in_place"
    with Engine(model, settings, arrange=[arranged, *backend], **ON_THE_SECOND_RUNNER, **FEW) as engine:
        assert "text is reused anywhere" in engine.log and engine.call("batches_in_flight") == 2
        assert ("attends" in backend) == ("chosen tokens attend by the device" in engine.log)
        assert replays == ("forwards of at most 256 chosen tokens replay CUDA graphs" in engine.log)
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


@pytest.mark.parametrize("engine", [FLASH_ATTENTION], indirect=True)
def test_small_forwards_replay_graphs_of_vllm_and_leave_its_steps_as_they_are(engine, texts):
    first, second = texts.new(70), texts.new(70)
    store(engine, [*first, *second])
    prompt, before = [*second, *texts.new(5), *first, *texts.new(9)], engine.log
    engine.one(prompt, recompute_ratio=1.0, store=False)
    engine.forget()
    replays = [line for line in engine.log[len(before) :].splitlines() if line.startswith("replays")]
    assert "replays 256 for 145 tokens" in replays
    # A repair comes between a step's inputs and its forward.
    answer = engine.one(prompt, tokens=12, recompute_ratio=0.0, repair="always", store=False)
    since = answer.report["repair"]["exact_from"] - 1
    said = [engine.one([*prompt, *answer.tokens[:n]], mode="off").tokens[0] for n in range(since, 12)]
    assert said and answer.tokens[since:] == said
    engine.forget()


@pytest.mark.parametrize("engine", [FLASH_INFER], indirect=True)
def test_runs_of_one_token_are_computed_by_the_kernels_for_one_token(engine, texts):
    """One is a hole behind exact text, and another one of seven tokens stands elsewhere."""
    before, first, second = texts.new(72), texts.new(70), texts.new(66)
    store(engine, before, [*second, *first])
    prompt = [*before, *texts.new(1), *first, *texts.new(7), *second, *texts.new(4)]
    expected, log = engine.full_prefill(prompt), engine.log
    blended = engine.one(prompt, recompute_ratio=0.0, store=False)
    assert [blended.report[f"{fate}_tokens"] for fate in ("exact", "hole", "moved")] == [72, 8, 136]
    planned = [line for line in engine.log[len(log) :].splitlines() if line.startswith("FlashInfer")]
    assert planned[:2] == ["FlashInfer prefill: 1 runs in pages of 16", "FlashInfer decode: 1 runs in pages of 16"]
    assert largest_difference(blended.kv(73), expected[:, :, :73]) < ROUNDING
    engine.forget()
