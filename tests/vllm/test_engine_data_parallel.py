"""Data-parallel engines of a dense model: vLLM configures each as if it were alone, and each has a hub."""

import re
from typing import Any

import pytest

from blendhub.hub.memory.default_size import default_arena_bytes
from harness.engines import Server

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(600)]

CONNECTOR = {"kv_connector": "BlendHubConnector", "kv_role": "kv_both"}
GIB = 2**30


SHARE = r"of 2 data-parallel engines .* its arena has ([\d.]+) GiB"


def test_the_engines_of_a_machine_share_what_one_alone_would_have(model, tmp_path):
    alone = default_arena_bytes()
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 512, "data_parallel_size": 2}
    # vLLM's CPU platform has cores for one engine only on each NUMA node, unless it binds none.
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with Server(model, tmp_path / "log", CONNECTOR, environment=unbound, **options) as server:
        server.wait_until_up()
        sizes = [float(size) for size in re.findall(SHARE, server.log)]
    assert len(sizes) == 2
    assert 0.5 * alone < sum(sizes) * GIB < 1.1 * alone
