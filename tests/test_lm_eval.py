"""lm-eval asks a server with BlendHub the questions of the example, by the command of its README."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from harness.engines import Server
from harness.engines.real_model import make_real_model
from tests.test_demo import skip_without_real_model

ROOT = Path(__file__).parent.parent
CONNECTOR = {"kv_connector": "BlendHubConnector", "kv_role": "kv_both"}
FULL_PREFILL = ["--gen_kwargs", '{"kv_transfer_params": {"blendhub": {"mode": "off"}}}']


def command(port: int, out: Path) -> list[str]:
    """README's, for this server."""
    page = (ROOT / "examples" / "lm_eval" / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.S)
    assert all(one in page for one in FULL_PREFILL)
    _, *arguments = shlex.split(block.replace("\\\n", "").replace("MODEL", "tiny").replace("8000", str(port)))
    return [sys.executable, "-m", "lm_eval", *arguments, "--output_path", str(out)]


def evaluated(port: int, out: Path, *more: str) -> float:
    """The share of right answers."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "cache")}
    asked = [*command(port, out), *more]
    done = subprocess.run(asked, cwd=ROOT, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = out.rglob("results_*.json")
    result: float = json.loads(file.read_text())["results"]["documents"]["exact_match,first-word"]
    return result


def moved_tokens(server: Server) -> float:
    metrics = httpx.get(f"{server.url}/metrics").text
    return sum(map(float, re.findall(r"^vllm:blendhub_tokens_moved_total\{.*\} (\S+)$", metrics, re.M)))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_lm_eval_measures_answers_with_reuse_and_without(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval asks the server; it is not installed: pip install 'lm-eval[api]'")
    skip_without_real_model()
    with Server(make_real_model(), tmp_path / "log", CONNECTOR, max_model_len=2048) as server:
        server.wait_until_up()
        blended = evaluated(server.port, tmp_path / "blended")
        moved = moved_tokens(server)
        full = evaluated(server.port, tmp_path / "full", *FULL_PREFILL)
        assert moved_tokens(server) == moved > 1000
    assert full > 0.3 and abs(blended - full) <= 0.25
