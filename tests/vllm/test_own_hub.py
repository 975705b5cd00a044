"""Data-parallel engines of a machine, each with a hub, share what one alone would have."""

import os
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from blendhub import PluginHost
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm import own_hub
from blendhub.vllm.own_hub import engines_of_this_host, start_own_hub
from blendhub.vllm.settings import EmbeddedHubConfig

ENGINES = """
for n in $(seq "$0"); do exec -a "VLLM::EngineCore_DP$n" sleep 60 & echo $!; done
exec -a "VLLM::DPCoordinator" sleep 60 & echo $!
echo; wait
"""


@pytest.mark.parametrize("n_engines", [1, 3])
def test_the_engines_that_one_process_has_started_are_counted(n_engines):
    """vLLM tells an engine of a dense model nothing of the others."""
    parent = subprocess.Popen(["bash", "-c", ENGINES, str(n_engines)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    *engines, coordinator = (int(line) for line in iter(parent.stdout.readline, "\n"))
    for pid in (*engines, coordinator):  # before, a process still has the command line of its parent
        while Path(f"/proc/{pid}/comm").read_text() != "sleep\n":
            time.sleep(0.01)
    try:
        assert [engines_of_this_host(engine) for engine in engines] == [n_engines] * n_engines
        assert engines_of_this_host(coordinator) == engines_of_this_host(os.getpid()) == 1
    finally:
        for pid in (*engines, coordinator):
            os.kill(pid, 15)
        parent.wait()


@pytest.mark.parametrize("configured, expected", [(0.0, 2**26), (0.125, 2**27)], ids=["by default", "as configured"])
def test_the_arena_is_an_engine_s_share_unless_its_size_is_configured(monkeypatch, configured, expected):
    monkeypatch.setattr(own_hub, "engines_of_this_host", lambda: 4)
    monkeypatch.setattr(own_hub, "default_arena_bytes", lambda engines: 2**28 // engines)
    config = EmbeddedHubConfig(arena_gib=configured, embedded="thread")
    with start_own_hub(config, PluginHost.discover(), PluginChoice("zmq")) as hub, hub.connect() as client:
        assert client.stats().result().gauges["arena_bytes"] == expected
