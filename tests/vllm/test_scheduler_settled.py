"""Blended blocks of vLLM's own cache: who takes them, and when. ``test_scheduler_histories`` has what they hold."""

import msgspec
import numpy as np
import pytest
from vllm.v1.core.kv_cache_utils import BlockHash

from blendhub.vllm.scheduler.blocks.settled_blocks import SettledBlocks
from tests.stand_in import StandIn
from tests.vllm.played_engine import SETTINGS, played_engine, text

PROMPT = text(1, 64) + text(0, 96) + text(2, 32)
GOES_ON = [*PROMPT, *text(3, 64)]
SETTLED = len(PROMPT)
"""Blocks of the prompt are whole."""


@pytest.fixture
def engine():
    with played_engine(settings=msgspec.structs.replace(SETTINGS, audit_share=0.0), audits=True) as engine:
        engine.serve("document", text(0, 96))
        yield engine


def arrived(engine, name, prompt=GOES_ON, **asked):
    """A request, and its own hashes."""
    own = list(engine.request(name, prompt).block_hashes)
    return engine.arrived(name, prompt, **asked), own


def test_a_request_looks_for_other_blended_blocks_only_so_often(engine):
    """In every step of a busy engine another request may blend the same prefix anew."""
    request, _ = arrived(engine, "waits")
    for number in range(20):
        engine.serve(f"blended {number}", PROMPT, settled=False)
        if engine.turn(request)[0] is not None:
            return
    pytest.fail("it waits for as long as others blend")


def test_what_was_blended_while_a_request_waited_is_taken_in_its_turn_with_and_without_a_hub(engine):
    request, own = arrived(engine, "waiting")
    engine.serve("blended", PROMPT)
    assert request.block_hashes == own
    assert engine.turn(request) == (None, False) and request.block_hashes[:12] != own[:12]
    assert engine.load(request, local=SETTLED) == SETTLED
    assert engine.report("waiting")["settled_tokens"] == SETTLED - 64 == engine.counters["tokens_settled"]
    engine.side.client.close()
    request, own = arrived(engine, "next")
    assert engine.load(request, local=SETTLED) == SETTLED and request.block_hashes[:12] != own[:12]
    # But not where every token has to be computed, nor once the cache is cleared.
    request = engine.request("all", GOES_ON)
    request.skip_reading_prefix_cache = True
    engine.side.arrived(request)
    assert engine.turn(request) == (0, False) and request.block_hashes == own
    engine.side.clear()
    request, own = arrived(engine, "after the clear")
    assert request.block_hashes == own


def test_the_blended_blocks_used_longest_ago_are_forgotten():
    cached = StandIn(cached_tokens=lambda hashes, most: sum(block.startswith(b"salted") for block in hashes))
    settled = SettledBlocks(cached, most=8)
    for first in (0, 100, 0, 200):
        own = [BlockHash(str(first + number).encode()) for number in range(4)]
        settled.add(own, [BlockHash(b"salted " + block) for block in own], 0, 0.15)
        assert len(settled) <= 8 and settled.find(own, 64, 0.15)
    assert not settled.find([BlockHash(b"100")], 64, 0.15) and settled.find([BlockHash(b"0")], 64, 0.15)


def kinds(engine, tokens, settled=0.15):
    found = engine.client.lookup(np.asarray(tokens, np.uint32), acquire=False, settled=settled).result()
    return [
        (match.span.start, match.span.end, "exact" if match.exact else "settled" if match.settled else "moved")
        for match in found.matches
    ]


def test_settled_blocks_of_vllm_are_stored_where_the_hub_has_lost_them_and_once(engine):
    engine.serve("blended", PROMPT)
    stored = engine.gauge("chunks")
    engine.serve("again", PROMPT, settled=False)
    assert engine.gauge("chunks") == stored
    engine.client.clear().result()
    request, _ = arrived(engine, "next")
    engine.load(request, local=SETTLED)
    engine.step(next=(SETTLED, 64))
    engine.end(request, len(GOES_ON))
    assert kinds(engine, GOES_ON) == [(0, 64, "exact"), (64, SETTLED, "settled"), (SETTLED, len(GOES_ON), "settled")]
    # What follows from them was recomputed no more than they were.
    assert kinds(engine, GOES_ON, settled=0.2) == [(0, 64, "exact"), (SETTLED, len(GOES_ON), "moved")]
    # The settled blocks themselves are no text that was computed here, so nothing may move them.
    assert kinds(engine, GOES_ON, settled=None) == [(0, 64, "exact"), (SETTLED, len(GOES_ON), "moved")]
