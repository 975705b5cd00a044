"""Blended KV is found behind its whole prefix and nowhere else; what was computed behind it is found there as it is."""

import numpy as np
import pytest

from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span
from blendhub.hub.memory.eviction import STAYING_SHARE
from tests.hub.hub_direct import CHUNK, namespace, tokens

PROMPT = tokens(1, 5 * CHUNK)
BLENDED = Provenance("blended", 0.15)
SETTLED = [(40, 100, "settled"), (100, 160, "settled")]
COMPUTED_BEHIND = [(100, 160, "moved")]


@pytest.fixture
def member(hub):
    return store_blended(hub.join())


def store_blended(member):
    """What a blended request leaves: its own beginning, the blended part, and what was computed behind that."""
    member.store(PROMPT, Span(0, 40))
    member.store(PROMPT, Span(40, 100), provenance=BLENDED)
    member.store(PROMPT, Span(100, 160), provenance=Provenance("after_blended", 0.15))
    return member


def kinds(found):
    return [
        (match.span.start, match.span.end, "exact" if match.exact else "settled" if match.settled else "moved")
        for match in found.matches
    ]


@pytest.mark.parametrize(
    "prompt, settled, expected",
    [
        (np.concatenate([PROMPT, tokens(2, 20)]), 0.15, [(0, 40, "exact"), *SETTLED]),
        (PROMPT, None, [(0, 40, "exact"), *COMPUTED_BEHIND]),
        (PROMPT, 0.2, [(0, 40, "exact"), *COMPUTED_BEHIND]),
        (np.concatenate([PROMPT[:70], tokens(2, 40)]), 0.15, [(0, 40, "exact"), (40, 70, "settled")]),
        (np.concatenate([tokens(3, 7), PROMPT]), 0.0, [(7, 47, "moved"), (107, 167, "moved")]),
        (np.concatenate([PROMPT[:39], tokens(3, 1), PROMPT[40:]]), 0.0, [(0, 39, "exact"), *COMPUTED_BEHIND]),
        (PROMPT[40:], 0.0, [(60, 120, "moved")]),
    ],
    ids=["whole", "not asked for", "less was recomputed", "part", "elsewhere", "another prefix", "no prefix"],
)
def test_blended_kv_is_found_behind_its_whole_prefix_alone(hub, member, prompt, settled, expected):
    found = member.lookup(prompt, settled=settled)
    assert kinds(found) == expected
    member.check(found, prompt)
    n_settled = sum(end - start for start, end, kind in expected if kind == "settled")
    assert hub.service.counters.totals["tokens_settled"] == n_settled


def test_it_is_stored_once_however_much_was_recomputed_and_exact_text_comes_before_it(member):
    again = member.reserve(PROMPT, Span(40, 160), provenance=Provenance("blended", 0.5))
    assert again.lease is None and not len(again.span)
    more = np.concatenate([PROMPT, tokens(2, 32)])
    assert member.reserve(more, Span(40, 192), provenance=Provenance("blended", 0.5)).span == Span(160, 192)
    assert member.store(PROMPT, Span(0, 80)).span == Span(40, 80), "exact KV of the same text is stored beside it"
    assert kinds(member.lookup(PROMPT, settled=0.0))[:3] == [(0, 40, "exact"), (40, 80, "exact"), (80, 100, "settled")]


def test_without_a_matcher_of_prefixes_nothing_blended_is_stored(hub):
    member = hub.join(namespace=namespace(matchers=(PluginChoice("rolling_hash", {"min_match_tokens": 16}),)))
    assert member.reserve(PROMPT, Span(40, 100), provenance=BLENDED).lease is None
    store_blended(member)
    assert all(match.moved or match.exact for match in member.lookup(PROMPT, settled=0.0).matches)


def test_blended_kv_takes_what_nothing_else_needs_and_gives_way_down_to_its_share(make_hub):
    """A burst of blended prompts does not evict the text that they reuse."""
    hub = make_hub(16)
    member, document = hub.join(), tokens(1, 8 * CHUNK)

    def blended_chunks():
        return sum(not chunk.run.provenance.is_movable for chunk in hub.index.chunks())

    member.store(document)
    for seed in range(2, 32):
        member.store(tokens(seed, 2 * CHUNK), provenance=BLENDED)
    assert kinds(member.lookup(document, acquire=False)) == [(0, len(document), "exact")]
    assert blended_chunks() == 8
    for seed in range(32, 64):
        member.store(tokens(seed, 2 * CHUNK))
    # The slot that is allocated is no chunk yet.
    assert blended_chunks() == 16 * STAYING_SHARE - 1
    # All of what may be evicted makes room for a long prompt.
    member.store(tokens(64, 16 * CHUNK))
    assert blended_chunks() == 0


def test_the_store_keeps_what_it_is(make_hub, tmp_path):
    hub = make_hub(64, tmp_path / "store")
    store_blended(hub.join())
    hub.restart()
    member = hub.join()
    assert kinds(member.lookup(PROMPT, settled=0.15, wait_s=5.0)) == [(0, 40, "exact"), *SETTLED]
    assert kinds(member.lookup(PROMPT, settled=0.2)) == [(0, 40, "exact"), *COMPUTED_BEHIND]
