"""What other implementations of reuse with holes got wrong, as far as the adapter decides it.

Loads themselves are tested with the devices (by their conformance suite), and whole engines in
``tests/vllm/ascend``.
"""

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.core.spans import Match, Span, total
from blendhub.vllm.decision import Decision
from blendhub.vllm.worker.recompute import Blend, BlendContext
from tests.stand_in import StandIn
from tests.vllm.blending import load_job, to_the_end
from tests.vllm.played_engine import BLOCK, HOST, text
from tests.vllm.two_ranks import ALONE

FIRST, SECOND = text(0, 128), text(1, 96)


def decided(engine, prompt, local=0, **asked):
    """What would be loaded of a prompt, of which vLLM has the first ``local`` tokens itself."""
    request = engine.arrived(f"of {local}", prompt, **asked)
    n_external, _ = engine.turn(request, local)
    decision = engine.side._requests[request.request_id].decision
    assert n_external == decision.end - local
    engine.end(request, 0)
    return decision


def sources(decision):
    """The stored place of each reused token."""
    return {
        position: (match.run, match.source_start + position - match.span.start)
        for match in decision.matches
        for position in range(match.span.start, match.span.end)
    }


@pytest.mark.parametrize("local", [3 * BLOCK, 4 * BLOCK, 5 * BLOCK + 7, 9 * BLOCK])
def test_a_segment_stays_the_same_where_the_engine_s_own_prefix_ends_inside_it(engine, local):
    """A key of what is left of it would find nothing."""
    engine.serve("a", FIRST)
    prompt = [*text(2, 32), *FIRST, *text(3, 9)]
    whole = sources(decided(engine, prompt))
    assert whole.keys() == set(range(32, 160))
    left = decided(engine, prompt, local)
    assert sources(left) == {position: source for position, source in whole.items() if position >= local}
    assert left.start == local and not left.holes


def test_a_request_that_is_contiguous_reuses_what_stands_before_the_first_hole_and_stops_there(engine):
    engine.serve("a", [*SECOND, *text(5, 9), *FIRST])
    prompt = [*SECOND, *FIRST, *text(3, 21), *SECOND, *text(4, 9)]
    assert len(sources(decided(engine, prompt))) == 2 * len(SECOND) + len(FIRST)
    decision = decided(engine, prompt, mode="contiguous")
    assert sources(decision).keys() == set(range(224)) and not decision.holes
    assert decision.moved == [Span(96, 224)]
    # vLLM's own prefix is no hole, a piece of text that it lacks is one.
    assert sources(decided(engine, [*text(6, 32), *prompt], 32, mode="contiguous")).keys() == set(range(32, 256))


@pytest.mark.parametrize(
    ("local", "reason"),
    [(0, "nothing of this prompt is stored"), (2 * BLOCK, "0 tokens could be reused beyond the 32")],
)
def test_an_empty_hit_list_is_no_load_and_holds_nothing(engine, local, reason):
    request = engine.arrived("a", text(2, 100))
    assert engine.turn(request, local) == (0, False)
    engine.side.allocated(request, (list(range(7)),), 0)
    plan = engine.side.plan(SchedulerOutput.make_empty())
    assert not plan.loads and engine.report("a")["reason"].startswith(reason)
    engine.settle()
    assert engine.gauge("read_leases") == 0
    engine.end(request, 0)


@pytest.mark.parametrize("separator", [0, 1, 7])
def test_separators_are_computed_beside_the_recomputed_share_and_not_as_a_part_of_it(separator):
    """Holes cost the moved text nothing of its share, however many there are."""
    starts = [number * (40 + separator) + separator for number in range(5)]
    matches = tuple(Match(Span(start, start + 40), 1, 1000 + start, False) for start in starts)
    decision = Decision(0, starts[-1] + 40, matches, 0.25)
    computed = []
    model = StandIn(max_tokens=4096, max_spans=64, forward=lambda chosen: computed.extend(chosen.spans))
    selector, device = HOST.create("selector", "first_k", {"k": 0}), StandIn(block_tokens=1)
    context = BlendContext(model, [], (), device, selector, ALONE)
    blend = Blend(context, load_job("r", np.zeros(decision.end, np.uint32), (np.arange(40),), decision))
    to_the_end(context, [blend])
    assert total(blend.result.recomputed) == 0.25 * 5 * 40
    assert blend.result.holes == 5 * separator
    assert total(computed) == 50 + 5 * separator
    assert blend.result.probe_seconds > 0 and blend.result.recompute_seconds > 0
