"""What the scheduler side gives to recomputation in a step, and what it leaves to vLLM because that is sooner done."""

import pytest

from blendhub.vllm.messages import LoadResult, WorkerReport
from tests.vllm.played_engine import played_engine, text

BUDGET = 2048
"""vLLM's, of a step."""
STORED = text(0, 600)
BLENDED = [*text(1, 32), *STORED, *text(2, 9)]
WITH_A_HOLE = [*text(1, 900), *STORED, *text(2, 9)]
"""990 of its tokens would be computed: less than all, and more than recomputation has in a step that vLLM fills."""


@pytest.fixture
def engine():
    with played_engine() as engine:
        engine.serve("stored", STORED)
        yield engine


def let_others_wait(engine, n=30):
    """Prompts of which nothing is stored, more than vLLM computes in some steps."""
    others = [engine.request(f"other {number}", text(3 + number, 1000)) for number in range(n)]
    for other in others:
        engine.side.arrived(other)
        assert engine.load(other) == 0
    engine.step()
    return others


def arrived(engine, name, prompt):
    request = engine.arrived(name, prompt)
    return request


def test_a_prompt_that_vllm_computes_sooner_is_served_without_blending_and_its_report_says_so(engine):
    others = let_others_wait(engine)
    request = arrived(engine, "r", WITH_A_HOLE)
    assert engine.load(request) == 0
    reason = engine.report("r")["reason"]
    assert reason.startswith("recomputing 990 tokens would take about 2 steps, and computing 1500 takes vLLM 1; ")
    assert engine.counters["refused_too_slow"] == 1
    # Once vLLM has computed the others, there is room.
    engine.side.ended(request, ([],))
    for other in others:
        other.num_computed_tokens = len(other.prompt_token_ids)
    engine.step()
    assert engine.load(arrived(engine, "again", WITH_A_HOLE)) == 1500


def test_moved_text_is_blended_however_much_vllm_has_to_compute(engine):
    let_others_wait(engine)
    assert engine.load(arrived(engine, "r", BLENDED)) == 632
    assert "reason" not in engine.report("r")


def test_the_report_says_why_only_exact_text_was_reused(engine):
    engine.serve("more", [*STORED, *text(40, 9)])
    let_others_wait(engine)
    moved = [*STORED, *text(1, 900), *STORED, *text(2, 9)]
    assert engine.load(arrived(engine, "r", moved)) == 600
    report = engine.report("r")
    assert report["exact_tokens"] == 600 and report["moved_tokens"] == 0
    assert "recomputing 990 tokens would take about 2 steps" in report["reason"]


def turn(engine, request):
    """What vLLM learns when it could begin this request: how much is loaded, or None if it waits."""
    return engine.turn(request, 0)[0]


def begin_load(engine, prompt=BLENDED):
    """A request whose load has begun, and has not ended."""
    request = arrived(engine, "loading", prompt)
    engine.side.allocated(request, (list(range(1, 42)),), turn(engine, request))
    engine.step()
    return request


def report_loaded(engine, request, **result):
    engine.side.process_report(WorkerReport(loads={request.request_id: LoadResult(**result)}))


@pytest.mark.parametrize("how", ["loaded", "failed", "aborted"])
def test_a_long_prompt_waits_while_an_earlier_one_is_blended(engine, how):
    blended = begin_load(engine)
    long = engine.request("long", text(3, BUDGET + 1), mode="off")  # a prompt without reuse, too
    engine.side.arrived(long)
    assert turn(engine, long) is None
    engine.step()
    assert turn(engine, long) is None
    if how == "aborted":
        engine.side.ended(blended, ([],))
    else:
        report_loaded(engine, blended, error="" if how == "loaded" else "the hub is gone")
    assert turn(engine, long) == 0


def test_short_prompts_go_beside_as_many_as_vllm_computes_in_a_step(engine):
    begin_load(engine)
    short = [arrived(engine, str(number), text(3 + number, 900)) for number in range(3)]
    for request, result in zip(short, [0, 0, None], strict=True):
        assert turn(engine, request) == result
        if result == 0:
            engine.side.allocated(request, ([],), 0)


def test_requests_are_blended_side_by_side(engine):
    begin_load(engine)
    assert turn(engine, arrived(engine, "second", [*text(4, 32), *STORED, *text(5, 9)])) == 632


def test_exact_text_alone_holds_up_nobody(engine):
    begin_load(engine, [*STORED, *text(2, 9)])
    assert turn(engine, arrived(engine, "long", text(3, BUDGET + 1))) == 0
