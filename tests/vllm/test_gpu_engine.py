"""The engines of `make gpu-check`, on the CPU: what they measure is measured, and what does not start is said."""

import json

import pytest

pytest.importorskip("vllm", reason="the engines need vLLM; `make setup` installs it")

from benchmarks import gpu_check, gpu_engine, gpu_questions, hardware_check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = {"num_hidden_layers": 2, "num_key_value_heads": 2}


@pytest.fixture(autouse=True, scope="module")
def one_interpreter(tmp_path_factory):
    """Engines share an interpreter if they find the checkout's packages in the same place."""
    found = hardware_check.paths_of_the_checkout(tmp_path_factory.mktemp("metadata"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware_check, "paths_of_the_checkout", lambda metadata: found)
        yield


def rows_of(part, place, monkeypatch):
    """The rows of a quick run of a model as small as may be, by their ids."""
    monkeypatch.setenv("OUT", str(place))
    monkeypatch.setattr(gpu_check, "QUICK", gpu_check.QUICK._replace(model=SMALL))
    monkeypatch.setattr(gpu_questions, "STEP", 1024)
    gpu_check.run(part, quick=True)
    report = json.loads((place / f"gpu-{part}-check" / "report.json").read_text())
    return {row["id"]: row for row in report["engine"]}


@pytest.mark.parametrize("part, expected", [
    ("forwards", {"forward_host_piecewise_64", "forward_eager_8", "forward_vs_step_piecewise_64"}),
    ("first_tokens", {"ttft_full_1k", "ttft_30_1k", "ttft_5_1k", "saves_failed"}),
    ("streams", {"longest_gap_load", "gap_blend", "longest_gap_repair_0.25"}),
    ("exact", {"engine_start", "engine_blend"}),
])  # fmt: skip
def test_every_question_has_an_answer(part, expected, tmp_path, monkeypatch):
    rows = rows_of(part, tmp_path, monkeypatch)
    assert expected <= set(rows)
    assert all(row["value"] is not None and row["ok"] is not False for row in rows.values()), rows


def test_a_question_that_ends_its_engine_says_so(tmp_path, monkeypatch):
    def start(**options):
        raise RuntimeError("no memory")

    monkeypatch.setattr(gpu_check, "start_on_cpu", start)
    rows = rows_of("eight_bits", tmp_path, monkeypatch)
    assert "no memory" in rows["eight_bits"]["what"] and rows["eight_bits"]["ok"] is False
    assert sum(limit for limit, _ in gpu_questions.QUESTIONS.values()) <= 15 * 60


@pytest.mark.long
def test_every_model_is_started_or_the_row_says_why_not(monkeypatch, tmp_path):
    once = {id: check for id, check in gpu_engine.CHECKS.items() if not id.endswith(tuple("2345"))}
    monkeypatch.setattr(gpu_engine, "CHECKS", once)
    rows = rows_of("models", tmp_path, monkeypatch)
    assert set(gpu_engine.CHECKS) <= set(rows)
    mixture = rows["proofs_moe_bf16"]
    assert mixture["ok"] and "text is reused anywhere" in mixture["what"]
    # vLLM makes weights of 8 bits on GPUs only.
    assert rows["proofs_fp8"]["ok"] is None and "no engine with a model" in rows["proofs_fp8"]["what"]
