"""Keys of an indexer (DeepSeek V3.2, GLM-5) are stored with their layers, as vLLM's own kernel writes them."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("cache_dtype, width, dtype", [("auto", 576, "bfloat16"), ("fp8_ds_mla", 656, "int8")])
def test_a_prefix_comes_back_byte_for_byte_in_other_blocks_and_nothing_moves(cache_dtype, width, dtype):
    command = [sys.executable, "-m", "tests.vllm.indexer_layers", cache_dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["copied"] == [True, True] and found["served"]
    assert [name.split(".")[2:5:2] for name in found["layers"]] == [
        ["0", "attn"], ["0", "indexer"], ["1", "attn"], ["1", "indexer"], ["2", "attn"]
    ], "processes number the layers differently"  # fmt: skip
    latents, keys = found["support"]["layouts"]
    assert (latents["layers"], latents["key_dim"], latents["dtype"]) == (3, width, dtype)
    assert (keys["layers"], keys["key_dim"], keys["value_dim"], keys["dtype"]) == (2, 128, 4, "int8")
    assert not found["support"]["blends"]
    assert not found["why_no_metadata"], "builders were made for forwards that there are not"
    assert "an indexer picks by keys of 8 bits" in found["support"]["reasons"][0]
    assert len(set(found["names"])) == 3, "engines that write scales in other ways share KV"
    assert "k_cache: index keys are not where BlendHub expects them" in found["refusal"][0]
