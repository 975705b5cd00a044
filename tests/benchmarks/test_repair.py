"""What ``benchmarks.quality --only repair`` says of an engine whose answers are repaired in time."""

import pytest

pytest.importorskip("vllm", reason="the benchmark serves with vLLM; `make setup` installs it")

from blendhub_tools.advice import forced

from benchmarks.quality import repair
from benchmarks.quality.serving import SETTINGS
from benchmarks.texts import Sizes, Texts
from harness.engines import Engine
from harness.engines.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_answers_are_exact_from_the_token_that_the_report_names_and_not_without_repair(tmp_path, monkeypatch):
    monkeypatch.setattr(repair, "ANSWER_TOKENS", 32)
    texts = Texts(1, Sizes(2, 250, 20, 30, vocabulary=1000))
    settings = SETTINGS | {"hub": {"arena_gib": 0.25, "metrics": ""}, "repair_share": 20.0}
    with Engine(make_tiny_model(tmp_path), settings, **forced.OPTIONS) as engine:
        texts.store(engine)
        answers = repair.compare(engine, texts.shuffled(), texts.question(), ("off", "idle"))
    off, repaired = answers["off"], answers["idle"]
    assert off.exact_from is None and 1 < repaired.exact_from < 30
    assert max(off.differences[repaired.exact_from :]) > 0.01 < off.next_turn_kl
    made = {row.id: row for row in repair.rows([repair.Asked("random", 20.0, off, repaired)])}
    assert made["repair_exact_share_20"].ok and made["repair_next_turn_share_20"].ok
    assert made["repair_kl_128_share_20"].value < 0.9 and made["repair_gap_share_20"].value > 0
