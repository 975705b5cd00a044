"""The agent of the example, on a server that it starts: what stands behind cleared results is moved."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.agent.loop import CLEARED, KEPT_RESULTS, clear
from tests.test_demo import skip_without_real_model

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.long
def test_turns_behind_cleared_results_move_what_is_left():
    skip_without_real_model()
    done = subprocess.run([sys.executable, "-m", "examples.agent"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    turns = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert len(turns) == 10
    for turn in turns:
        if "cleared" in turn[1]:
            prompt, moved = (int(turn[column].replace(",", "")) for column in (2, 6))
            assert moved > prompt / 4


def test_the_last_results_are_kept():
    messages = [{"role": role, "content": str(n)} for n in range(4) for role in ("user", "assistant", "tool")]
    clear(messages)
    results = [one["content"] for one in messages if one["role"] == "tool"]
    assert results == [CLEARED] * (4 - KEPT_RESULTS) + ["2", "3"]
    assert all(one["content"] != CLEARED for one in messages if one["role"] != "tool")
