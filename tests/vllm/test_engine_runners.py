"""vLLM's second model runner, and the attention backends of GPUs, as far as they can be had without a GPU."""

from pathlib import Path
from typing import Any

import pytest

from harness.engines import Engine, largest_difference
from harness.engines.tiny_model import make_tiny_model
from tests.vllm.arrangements import arrange, attend_on_device
from tests.vllm.conftest import ON_THE_SECOND_RUNNER, PROBING, ROUNDING, SETTINGS, check_recomputation, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FEW: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 256, "max_num_batched_tokens": 256}
BACKENDS = {
    "FlashAttention in smaller blocks, second runner": ("FLASH_ATTN", "1", "16"),
    "FlashInfer in smaller blocks": ("FLASHINFER", "0", "16"),
    "FlexAttention": ("FLEX_ATTENTION", "0", ""),
    "Triton attention, second runner": ("TRITON_ATTN", "1", ""),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every further layer would call the same kernel, which takes seconds in Triton's interpreter."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "two_layers", num_hidden_layers=2)


def start(model: Path, arranged: list[str], **settings):
    return Engine(
        model, SETTINGS | {"chunk_tokens": 32} | PROBING | settings, arrange=arranged, **ON_THE_SECOND_RUNNER, **FEW
    )


@pytest.mark.parametrize(
    "arranged",
    [
        *(["tests.vllm.gpu_stand_ins:put_in_place", *backend] for backend in BACKENDS.values()),
        arrange(attend_on_device, "kernel", "TRITON_ATTN", "1", ""),
    ],
    ids=[*BACKENDS, "the kernel for chosen tokens, second runner"],
)
def test_everything_recomputed_equals_full_prefill(arranged, model, texts):
    with start(model, arranged) as engine:
        assert "text is reused anywhere" in engine.log
        assert ("kernel" in arranged) == ("chosen tokens attend by the device" in engine.log)
        check_recomputation(engine, texts, 70)


def test_runs_of_one_token_are_computed_by_the_kernels_for_one_token(model, texts):
    documents = texts.new(72), texts.new(70)
    arranged = ["tests.vllm.gpu_stand_ins:put_in_place", "FLASHINFER", "0", ""]
    with start(model, arranged, selector={"name": "first_k", "options": {"k": 1}}) as engine:
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
