"""Text moves in layers with Kimi delta attention: vLLM's own operators, whose kernels run in Triton's interpreter."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDING = 2e-6


@pytest.mark.parametrize("kind", [pytest.param("Kimi Linear", marks=pytest.mark.long), "Ling 3"])
def test_maps_of_texts_compose_in_every_order_with_what_vllm_computes_at_once(kind):
    command = [sys.executable, "-m", "tests.vllm.kimi_delta_layers", kind]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["made"] < ROUNDING and found["composed"] < ROUNDING and found["behind"] < ROUNDING
    assert found["without_maps"] > 0.5, "what stood before is forgotten, and maps show nothing"
    assert "the map of a text is off by" in found["refusal"], "a map with rows for columns was taken"
    assert found["is_left_alone"]
