"""How many data-parallel engines of a machine share what one alone would have."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from blendhub.vllm.own_hub import engines_of_this_host

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
