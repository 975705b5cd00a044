"""Blended KV is found behind its whole prefix and nowhere else; what was computed behind it is found there as it is."""

import numpy as np
import pytest

from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Span
from blendhub.hub.memory.eviction import BLENDED_SHARE
from tests.hub.hub_direct import CHUNK, namespace, tokens

PROMPT = tokens(1, 5 * CHUNK)
EXACT, BLENDED, BEHIND = Span(0, 40), Span(40, 100), Span(100, 160)
ALL_SETTLED = [(40, 100, "settled"), (100, 160, "settled")]


@pytest.fixture
def member(hub):
    return store_blended(hub.join())


def store_blended(member):
    """What a blended request leaves: its own beginning, the blended part, and what was computed behind that."""
    member.store(PROMPT, EXACT)
    member.store(PROMPT, BLENDED, exact=False, blended=True, ratio=0.15)
    member.store(PROMPT, BEHIND, exact=False, ratio=0.15)
    return member


def kinds(found):
    return [
        (match.span.start, match.span.end, "exact" if match.exact else "settled" if match.settled else "moved")
        for match in found.matches
    ]


def test_behind_the_whole_prefix_it_is_settled_at_the_positions_where_it_was(hub, member):
    found = member.lookup(np.concatenate([PROMPT, tokens(2, 20)]), settled=0.15)
    assert kinds(found) == [(0, 40, "exact"), *ALL_SETTLED]
    assert all(match.source_start == match.span.start for match in found.matches)
    member.check(found, PROMPT)
    assert hub.service.counters.totals["tokens_settled"] == 120
    hub.state.check_integrity()


@pytest.mark.parametrize(
    "prompt, settled, expected",
    [
        (PROMPT, None, [(100, 160, "moved")]),
        (PROMPT, 0.2, [(100, 160, "moved")]),
        (np.concatenate([PROMPT[:70], tokens(2, 40)]), 0.15, [(40, 70, "settled")]),
    ],
    ids=["not asked for", "less was recomputed", "up to where the prompts part"],
)
def test_what_is_found_behind_the_exact_prefix(member, prompt, settled, expected):
    assert kinds(member.lookup(prompt, settled=settled)) == [(0, 40, "exact"), *expected]


@pytest.mark.parametrize("settled", [None, 0.0])
def test_elsewhere_only_what_was_computed_can_be_moved(member, settled):
    for prompt in (
        np.concatenate([tokens(3, 7), PROMPT]),
        np.concatenate([PROMPT[:39], tokens(3, 1), PROMPT[40:]]),
        PROMPT[40:],
    ):
        found = member.lookup(prompt, settled=settled)
        assert not any(match.settled for match in found.matches)
        positions = {position for match in found.matches for position in range(match.span.start, match.span.end)}
        shift = len(prompt) - len(PROMPT)
        assert not positions & set(range(40 + shift, 100 + shift))
        assert set(range(100 + shift, 160 + shift)) <= positions


def test_it_is_stored_once_however_much_was_recomputed_and_exact_text_comes_before_it(member):
    again = member.reserve(PROMPT, Span(40, 160), exact=False, blended=True, ratio=0.5)
    assert again.lease is None and not len(again.span)
    more = np.concatenate([PROMPT, tokens(2, 32)])
    assert member.reserve(more, Span(40, 192), exact=False, blended=True, ratio=0.5).span == Span(160, 192)
    assert member.store(PROMPT, Span(0, 80)).span == Span(40, 80), "exact KV of the same text is stored beside it"
    assert kinds(member.lookup(PROMPT, settled=0.0))[:3] == [(0, 40, "exact"), (40, 80, "exact"), (80, 100, "settled")]


def test_a_run_goes_on_as_what_it_is(member):
    longer = np.concatenate([PROMPT, tokens(2, 64)])
    first = member.store(longer, Span(160, 192), exact=False, blended=True, ratio=0.15)
    for more in ({}, {"exact": False}, {"exact": False, "blended": True, "ratio": 0.3}):
        assert member.reserve(longer, Span(192, 224), run=first.run, **more).run != first.run
    same = {"exact": False, "blended": True, "ratio": 0.15}
    assert member.reserve(longer, Span(192, 224), run=first.run, **same).run == first.run


def test_without_a_matcher_of_prefixes_nothing_blended_is_stored(hub):
    member = hub.join(namespace=namespace(matchers=(PluginChoice("rolling_hash", {"min_match_tokens": 16}),)))
    assert member.reserve(PROMPT, BLENDED, exact=False, blended=True).lease is None
    store_blended(member)
    assert all(match.moved or match.exact for match in member.lookup(PROMPT, settled=0.0).matches)
    hub.state.check_integrity()


def test_blended_kv_takes_what_nothing_else_needs_and_gives_way_down_to_its_share(make_hub):
    """A burst of blended prompts does not evict the text that they reuse."""
    hub = make_hub(16)
    member, document = hub.join(), tokens(1, 8 * CHUNK)

    def blended_chunks():
        return sum(chunk.run.origin.blended for chunk in hub.index.chunks())

    member.store(document)
    for seed in range(2, 32):
        member.store(tokens(seed, 2 * CHUNK), exact=False, blended=True, ratio=0.15)
        hub.state.check_integrity()
    assert kinds(member.lookup(document, acquire=False)) == [(0, len(document), "exact")]
    assert blended_chunks() == 8
    for seed in range(32, 64):
        member.store(tokens(seed, 2 * CHUNK))
        hub.state.check_integrity()
    # The slot that is allocated is no chunk yet.
    assert blended_chunks() == 16 * BLENDED_SHARE - 1
    # All of what may be evicted makes room for a long prompt.
    member.store(tokens(64, 16 * CHUNK))
    assert blended_chunks() == 0


def test_the_store_keeps_what_it_is(make_hub, tmp_path):
    hub = make_hub(64, tmp_path / "store")
    store_blended(hub.join())
    hub.restart()
    member = hub.join()
    assert kinds(member.lookup(PROMPT, settled=0.15, wait_s=5.0)) == [(0, 40, "exact"), *ALL_SETTLED]
    assert kinds(member.lookup(PROMPT, settled=0.2)) == [(0, 40, "exact"), (100, 160, "moved")]
