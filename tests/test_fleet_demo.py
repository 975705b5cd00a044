"""The fleet's demo, small: what one machine's engine computed is reused by another's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from blendhub_mooncake import probe

from harness.servers.redis_server import needs_redis
from tests.test_demo import skip_without_real_model

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.long
@needs_redis
def test_a_machine_reuses_documents_that_only_another_has_seen(tmp_path):
    if missing := probe():
        pytest.skip(f"{missing.reason}: {missing.command}")
    skip_without_real_model()
    sizes = ["--prompts", "2", "--questions", "3"]
    command = [sys.executable, "-m", "examples.fleet_demo", *sizes, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    blended = report["ways"]["blended"]["tokens"]
    assert blended["moved"] > sum(blended.values()) / 2
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
