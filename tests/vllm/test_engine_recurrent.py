"""Models with recurrent layers, whose state is that of a whole prefix, are served as without BlendHub."""

import json

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import LFM2, MAMBA2
from tests.vllm.conftest import SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WIDE = ["harness.engines.wide_weights:widen"]


@pytest.mark.parametrize(
    "shape, caches", [(LFM2, True), (LFM2, False), (MAMBA2, False)], ids=["lfm2-cached", "lfm2", "mamba2"]
)
def test_nothing_is_reused_and_one_line_says_why(shape, caches, tmp_path, texts):
    (tmp_path / "config.json").write_text(json.dumps(shape))
    prompts = [texts.new(n) for n in (200, 333)]
    options = {"load_format": "dummy", "seed": 7, "arrange": WIDE, "enable_prefix_caching": caches}
    with Engine(tmp_path, SETTINGS, **options) as engine:
        assert engine.log.count("keeps a recurrent state") == 1
        first = engine.ask(*prompts, tokens=9)
        engine.forget()
        again = engine.ask(*prompts, tokens=9)
        assert disagreement(again, first) < TOLERANCE
        assert all("served without reuse" in answer.report["reason"] for answer in again)
        assert engine.call("counts") == {"refused_model": 4}
