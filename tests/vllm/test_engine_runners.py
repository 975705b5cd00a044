"""vLLM's two model runners, and the attention backends of GPUs, as far as they can be had without a GPU."""

from pathlib import Path
from typing import Any

import pytest

from harness.engines import Engine, largest_difference
from harness.engines.tiny_model import make_tiny_model
from tests.vllm.arrangements import arrange, attend_on_device
from tests.vllm.conftest import ON_THE_SECOND_RUNNER, PROBING, SETTINGS
from tests.vllm.test_engine_own_attention import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDING = 1e-5
"""float32 computed in another order."""

IN_CHUNKS = SETTINGS | PROBING | {"chunk_tokens": 32}
FEW: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 256, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every further layer would call the same kernel, which takes seconds in Triton's interpreter."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "two_layers", num_hidden_layers=2)


def start(model: Path, backend: str, second: bool, kernel_block: str = "", **settings):
    stand_ins = ["tests.vllm.gpu_stand_ins:put_in_place", backend, str(int(second)), kernel_block]
    return Engine(model, IN_CHUNKS | settings, arrange=stand_ins, **ON_THE_SECOND_RUNNER, **FEW)


BACKENDS = {
    "FlashAttention": ("FLASH_ATTN", False, ""),
    "FlashAttention, second runner": ("FLASH_ATTN", True, ""),
    "FlashAttention in smaller blocks": ("FLASH_ATTN", True, "16"),
    "FlashInfer": ("FLASHINFER", False, ""),
    "FlashInfer, second runner": ("FLASHINFER", True, ""),
    "FlashInfer in smaller blocks": ("FLASHINFER", False, "16"),
    "FlexAttention": ("FLEX_ATTENTION", False, ""),
    "FlexAttention, second runner": ("FLEX_ATTENTION", True, ""),
    "Triton attention": ("TRITON_ATTN", True, ""),
}
IN_EVERY_RUN = ("FlashAttention, second runner", "FlashInfer", "FlexAttention")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=() if name in IN_EVERY_RUN else pytest.mark.long)
        for name, kind in BACKENDS.items()
    ],
)
def test_everything_recomputed_equals_full_prefill(kind, model, texts):
    first, second = texts.new(72), texts.new(70)
    with start(model, *kind) as engine:
        assert "text is reused anywhere" in engine.log
        engine.one([*first, *second])
        engine.forget()
        prompt = [*second, *texts.new(5), *first, *texts.new(4)]
        n = len(prompt) - 1
        expected = engine.full_prefill(prompt)
        blended = engine.one(prompt, recompute_ratio=1.0, store=False)
        assert blended.report["moved_tokens"] == blended.report["recomputed_tokens"] == 142
        assert largest_difference(blended.kv(n), expected) < ROUNDING
        engine.forget()
        # The probe of the first layers sees what the layers write.
        half = engine.one(prompt, recompute_ratio=0.5, store=False)
        assert half.report["recomputed_tokens"] == 71
        engine.forget()
        exact = engine.one([*first, *second, *texts.new(4)], store=False)
        assert exact.report["exact_tokens"] == 142


def test_the_kernel_for_chosen_tokens_serves_the_second_runner(model, texts):
    kernel = arrange(attend_on_device, "kernel", "TRITON_ATTN", "1", "")
    with Engine(model, IN_CHUNKS, arrange=kernel, **ON_THE_SECOND_RUNNER, **FEW) as engine:
        check(engine, texts, 70)


@pytest.mark.parametrize("second", [False, pytest.param(True, marks=pytest.mark.long)], ids=["first runner", "second"])
def test_runs_of_one_token_are_computed_by_the_kernels_for_one_token(second, model, texts):
    documents = texts.new(72), texts.new(70)
    with start(model, "FLASHINFER", second, selector={"name": "first_k", "options": {"k": 1}}) as engine:
        engine.one([*documents[0], *documents[1]])
        engine.forget()
        prompt = [*texts.new(7), *documents[1], *documents[0], *texts.new(4)]
        expected = engine.full_prefill(prompt)
        before = engine.log
        blended = engine.one(prompt, recompute_ratio=0.5, store=False)
        assert blended.report["recomputed_tokens"] == 2 and blended.report["hole_tokens"] == 7
        planned = [line for line in engine.log[len(before) :].splitlines() if line.startswith("FlashInfer")]
        # The hole and the first moved token come first in the prompt, and the other first token comes alone.
        assert planned[:2] == ["FlashInfer prefill: 1 runs in pages of 32", "FlashInfer decode: 1 runs in pages of 32"]
        assert largest_difference(blended.kv(8), expected[:, :, :8]) < ROUNDING
