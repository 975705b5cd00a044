"""The scheduler side and blended blocks in vLLM's own cache: who takes them, and what follows from it."""

import msgspec
import numpy as np
import pytest

from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.messages import LoadResult, WorkerReport
from tests.vllm.played_engine import BLOCK, SETTINGS, played_engine, text

DOCUMENT, BEGINNING, QUESTION = text(0, 96), text(1, 64), text(2, 32)
PROMPT = BEGINNING + DOCUMENT + QUESTION
GOES_ON = [*PROMPT, *text(3, 64)]
SETTLED = len(PROMPT)
"""Blocks of the prompt are whole."""


@pytest.fixture
def engine():
    with played_engine() as engine:
        engine.serve("document", DOCUMENT)
        yield engine


def blend(engine, name="blended", prompt=PROMPT, **asked):
    """Serve a prompt of which a document is moved; returns the hashes under which vLLM has cached its blocks."""
    request = engine.arrived(name, prompt, **asked)
    there = engine.load(request)
    engine.step(**{name: (there, len(prompt) - there)})
    engine.end(request, len(prompt))
    return list(request.block_hashes)


def arrived(engine, name, prompt=GOES_ON, **asked):
    request = engine.request(name, prompt, **asked)
    own = list(request.block_hashes)
    engine.side.arrived(request)
    return request, own


def test_a_request_looks_for_other_blended_blocks_only_so_often(engine):
    """In every step of a busy engine another request may blend the same prefix anew."""
    request, _ = arrived(engine, "waits")
    for number in range(20):
        blend(engine, f"blended {number}", settled=False)
        if engine.turn(request, 0)[0] is not None:
            break
    else:
        pytest.fail("it waits for as long as others blend")


def test_requests_that_need_every_token_computed_have_their_own_hashes(engine):
    blend(engine)
    request = engine.request("next", GOES_ON)
    request.skip_reading_prefix_cache = True
    own = list(request.block_hashes)
    engine.side.arrived(request)
    assert engine.turn(request, 0) == (0, False) and request.block_hashes == own


def test_what_stands_behind_settled_blocks_is_never_stored_as_exact(engine):
    blend(engine)
    engine.client.clear()
    request, _ = arrived(engine, "next")
    engine.load(request, local=SETTLED)
    engine.step(next=(SETTLED, 64))
    for token in text(4, 33):
        request.append_output_token_ids(token)
    engine.end(request, len(GOES_ON) + 32)
    whole = GOES_ON + text(4, 32)
    assert engine.found(whole, exact=True) == set(range(64))
    # The settled blocks themselves are no text that was computed here, so nothing may move them.
    assert engine.found(whole, exact=False) == set(range(SETTLED, len(whole)))


def test_what_was_blended_while_a_request_waited_is_taken_in_its_turn(engine):
    request, own = arrived(engine, "waiting")
    blended = blend(engine)
    assert request.block_hashes == own
    assert engine.turn(request, 0) == (None, False)
    assert request.block_hashes[: len(blended)] == blended
    assert engine.load(request, local=SETTLED) == SETTLED
    assert engine.report(request.request_id)["settled_tokens"] == SETTLED - 64


def test_what_was_evicted_while_a_request_waited_is_not_looked_for(engine):
    blend(engine)
    request, own = arrived(engine, "waiting")
    engine.blocks.cached = lambda hashes, most: 0
    assert engine.turn(request, 0) == (None, False)
    assert request.block_hashes == own
    assert engine.load(request, local=0) == SETTLED
    assert engine.side._requests["waiting"].settled_span is None


def test_a_request_whose_settled_blocks_are_gone_is_exact(engine):
    """Where vLLM cannot be asked, only its answer shows that the blocks are gone."""
    blend(engine)
    engine.client.clear()
    request, _ = arrived(engine, "next")
    assert engine.load(request, local=64) == 64
    assert engine.side._requests["next"].first_approximate is None
    engine.step(next=(64, len(GOES_ON) - 64))
    engine.end(request, len(GOES_ON))
    assert engine.found(GOES_ON, exact=True) == set(range(len(GOES_ON)))


def test_blended_blocks_are_taken_while_the_hub_is_gone(engine):
    blended = blend(engine)
    engine.side.executor.client.close()
    request, _ = arrived(engine, "next")
    assert engine.load(request, local=SETTLED) == SETTLED
    assert request.block_hashes[: len(blended)] == blended
    assert engine.report(request.request_id)["settled_tokens"] == SETTLED - 64


def test_a_load_that_failed_or_was_aborted_leaves_nothing_to_take(engine):
    request, _ = arrived(engine, "failed", PROMPT)
    engine.load(request, error="the hub is gone")
    engine.step(failed=(0, len(PROMPT)))
    engine.end(request, len(PROMPT))
    following, own = arrived(engine, "next")
    assert following.block_hashes == own and not len(engine.side.loads._settled)
    aborted, _ = arrived(engine, "aborted", PROMPT)
    engine.side.allocated(aborted, (list(range(1, 20)),), engine.turn(aborted, 0)[0])
    engine.step()
    engine.side.ended(aborted, ([],))
    assert not len(engine.side.loads._settled)


def test_what_was_blended_is_taken_before_its_request_has_ended(engine):
    request, _ = arrived(engine, "blended", PROMPT)
    engine.load(request)
    following, own = arrived(engine, "next")
    assert following.block_hashes[:12] == request.block_hashes[:12] != own[:12]


def test_a_preempted_request_is_counted_once_and_stays_approximate(engine):
    blend(engine)
    request, _ = arrived(engine, "next")
    engine.load(request, local=SETTLED)
    engine.step(next=(SETTLED, 16))
    # vLLM took its blocks, and some of the settled ones were evicted meanwhile.
    assert engine.load(request, local=64 + BLOCK) >= 64 + BLOCK
    assert engine.side._requests["next"].first_approximate == 64
    assert engine.counters["tokens_settled"] == SETTLED - 64


def test_the_cleared_cache_has_nothing_to_take(engine):
    blend(engine)
    engine.side.clear()
    request, own = arrived(engine, "next")
    assert request.block_hashes == own


def test_a_request_that_is_to_be_audited_takes_nothing_and_is_taken_by_others():
    settings = msgspec.structs.replace(SETTINGS, audit_share=0.0)
    with played_engine(settings=settings, audits=True) as engine:
        engine.serve("document", DOCUMENT)
        blend(engine)
        request, own = arrived(engine, "audited", audit=True, recompute_ratio=0.15)
        assert request.block_hashes == own
        n_external, _ = engine.turn(request, 0)
        assert n_external == len(GOES_ON)
        engine.side.allocated(request, (list(range(1, 30)),), n_external)
        engine.step()
        audit = AuditOutcome(agrees=True, kl=0.0, tokens=1, agreed_tokens=1)
        engine.side.process_report(WorkerReport(loads={"audited": LoadResult(audit=audit)}))
        # Its KV is exact, so those may take it that ask for the most.
        following, own = arrived(engine, "next", recompute_ratio=1.0)
        assert following.block_hashes[:16] == request.block_hashes[:16] != own[:16]


def kinds(engine, tokens, settled=0.15):
    found = engine.client.lookup(np.asarray(tokens, np.uint32), acquire=False, settled=settled).result()
    return [
        (match.span.start, match.span.end, "exact" if match.exact else "settled" if match.settled else "moved")
        for match in found.matches
    ]


@pytest.mark.parametrize("asked", [{"settled": False}, {"recompute_ratio": 0.5}])
def test_requests_that_do_not_accept_settled_text_blend_anew_and_leave_no_second_copy(engine, asked):
    blend(engine)
    stored = engine.gauge("chunks")
    request, _ = arrived(engine, "anew", PROMPT, **asked)
    there = engine.load(request)
    report = engine.report("anew")
    assert report["settled_tokens"] == 0 and report["moved_tokens"] >= 96
    engine.step(anew=(there, len(PROMPT) - there))
    engine.end(request, len(PROMPT))
    assert engine.gauge("chunks") == stored


def test_blended_text_is_not_stored_where_that_is_off():
    with played_engine(settings=msgspec.structs.replace(SETTINGS, store_blended=False)) as engine:
        engine.serve("document", DOCUMENT)
        blend(engine)
        # The document is found where it is stored alone, and only what was computed behind it is settled.
        assert kinds(engine, PROMPT) == [(0, 64, "exact"), (64, 160, "moved"), (160, 192, "settled")]


def test_settled_blocks_of_vllm_are_stored_where_the_hub_has_lost_them(engine):
    blend(engine)
    engine.client.clear()
    request, _ = arrived(engine, "next")
    engine.load(request, local=SETTLED)
    engine.step(next=(SETTLED, 64))
    engine.end(request, len(GOES_ON))
    assert kinds(engine, GOES_ON) == [(0, 64, "exact"), (64, SETTLED, "settled"), (SETTLED, len(GOES_ON), "settled")]
    assert kinds(engine, GOES_ON, settled=None) == [(0, 64, "exact"), (SETTLED, len(GOES_ON), "moved")]
