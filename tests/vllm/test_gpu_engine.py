"""The engines of `make gpu-check`, on the CPU: what they measure is measured, and what does not start is said."""

import pytest

pytest.importorskip("vllm", reason="the engines need vLLM; `make setup` installs it")

from benchmarks import gpu_engine
from benchmarks.hardware_check import engine_of_the_checkout
from harness.engines.tiny_model import TIMED


def start(model, **options):
    """In float32: vLLM's kernels for mixtures of experts in bfloat16 end the process on some CPUs."""
    return engine_of_the_checkout(model={**model, "torch_dtype": "float32"}, dtype="float32", **options)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_row_is_measured_or_says_why_not(monkeypatch):
    once = {id: check for id, check in gpu_engine.CHECKS.items() if not id.endswith(tuple("2345"))}
    monkeypatch.setattr(gpu_engine, "CHECKS", once)
    rows = {row.id: row for row in gpu_engine.rows(start, (1024, 2048), TIMED)}
    assert {*gpu_engine.CHECKS, "ttft_full_2k", "ttft_moved_1k"} < set(rows)
    assert all(row.value is not None for id, row in rows.items() if id not in gpu_engine.CHECKS), rows
    assert rows["saves_failed"].ok
    mixture = rows["proofs_moe_bf16"]
    assert mixture.ok and "text is reused anywhere" in mixture.what
    # vLLM makes weights of 8 bits on GPUs only.
    assert rows["proofs_fp8"].ok is None and "no engine with a model" in rows["proofs_fp8"].what
