"""Lookups and clears of a hub's service, called directly."""

import numpy as np
import pytest

from blendhub.core.spans import Span
from tests.hub.hub_direct import spans_of, tokens


def test_what_was_stored_is_found_exactly_in_pieces_of_chunks(hub):
    member, text = hub.join(), tokens(1, 80)
    assert member.lookup(text).lease is None
    reserved = member.store(text)
    assert [slot.span for slot in reserved.slots] == [Span(0, 32), Span(32, 64), Span(64, 80)]
    found = member.read(np.concatenate([text[:70], tokens(2, 30)]))
    assert spans_of(found) == [(0, 32, True), (32, 64, True), (64, 70, True)]
    member.check(found, text)
    hub.state.check_integrity()


def test_moved_text_is_found_with_its_old_positions(hub):
    member, text = hub.join(), tokens(1, 200)
    member.store(text)
    prompt = np.concatenate([tokens(2, 45), text[40:160]])
    found = member.read(prompt)
    assert sum(len(piece.span) for piece in found.pieces) == 120
    assert all(piece.source_start - piece.span.start == 40 - 45 for piece in found.pieces)
    assert not any(match.exact for match in found.matches)
    member.check(found, prompt)


@pytest.mark.parametrize("skip", [39, 40, 50, 200])
def test_a_prefix_may_be_skipped_that_is_longer_than_what_is_found(hub, skip):
    member, text = hub.join(), tokens(1, 96)
    member.store(text)
    found = member.lookup(np.concatenate([text[:40], tokens(2, 60)]), skip_prefix_n_tokens=skip)
    assert [match.span for match in found.matches] == ([Span(39, 40)] if skip == 39 else [])
    assert hub.service.counters.totals["tokens_exact"] == (1 if skip == 39 else 0)
