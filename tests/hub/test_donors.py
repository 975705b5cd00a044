"""Which stored KV may move. Text that stays is found behind its whole prefix only; a lookup says where it stands."""

import time

import msgspec
import numpy as np
import pytest

from blendhub.contracts import RunKey, StoredRun
from blendhub.core.errors import InvalidInput
from blendhub.core.layout import MIN_SAVED_TOKENS
from blendhub.core.provenance import Provenance
from blendhub.core.spans import NOWHERE, Span
from blendhub.hub.stores.store_tier import described
from blendhub.hub.stores.store_writer import RunDescription
from blendhub.outcome.reasons import NotReused, Why
from tests.hub.hub_direct import CHUNK, tokens
from tests.hub.test_settled import kinds

SHALLOW = 3 * CHUNK
"""KV with fewer tokens before it stays."""
TEXT = tokens(1, 5 * CHUNK)
DEEP = Provenance(donates_from=SHALLOW)
OF_OTHERS = Provenance("by_other")
ELSEWHERE = np.concatenate([tokens(2, 40), TEXT, tokens(3, 10)])


@pytest.fixture
def member(hub):
    member = hub.join()
    member.store(TEXT, provenance=DEEP)
    return member


@pytest.mark.parametrize("stored", [False, True])
def test_what_another_connector_loaded_is_refused(hub, stored):
    member = hub.join()
    if stored:
        member.store(TEXT)
    with pytest.raises(InvalidInput, match="another connector"):
        member.reserve(TEXT, provenance=OF_OTHERS)
    description = msgspec.msgpack.encode(RunDescription(member.namespace, OF_OTHERS))
    key = RunKey(member.namespace.digest, "0" * 32)
    with pytest.raises(InvalidInput, match="another connector"):
        described(StoredRun(key, TEXT.tobytes(), description, (Span(0, CHUNK),)))


def test_the_store_keeps_what_may_move(make_hub, tmp_path):
    hub = make_hub(64, tmp_path / "store")
    hub.join().store(TEXT, provenance=DEEP)
    hub.restart()
    member = hub.join()
    assert member.read(TEXT) == len(TEXT)
    found = member.lookup(ELSEWHERE, wait_s=5.0)
    assert kinds(found) == [(40 + SHALLOW, 40 + len(TEXT), "moved")]
    assert found.staying == (NotReused(Span(40, 40 + SHALLOW), Why.SHALLOW),)


def test_a_short_beginning_that_stays_is_computed_once_with_what_is_behind_it(member):
    """It was a hole too short to be stored, which every prompt computed anew."""
    text, before, other = tokens(7, 8 * CHUNK), tokens(4, 4 * CHUNK), tokens(5, 4 * CHUNK)
    for stored in (text, before, other):
        member.store(stored, provenance=DEEP)
    # Where it would stay once more, no more is computed than that.
    assert kinds(member.lookup(np.concatenate([before[:40], text[SHALLOW - 20 :]])))[1][0] == 60
    document, begins = text[SHALLOW - 20 :], len(before) + 20 + MIN_SAVED_TOKENS
    prompt = np.concatenate([before, document])
    found = member.lookup(prompt)
    assert kinds(found)[1:] == [(begins, len(prompt), "moved")]
    assert NotReused(Span(len(before) + 20, begins), Why.SHALLOW) in found.staying
    member.store(prompt, Span(0, begins), provenance=DEEP)
    matches = member.lookup(np.concatenate([other, document])).matches
    assert [(match.span.start, match.moved) for match in matches[:2]] == [(0, False), (len(other), True)]


@pytest.mark.slow
@pytest.mark.alone
def test_a_prompt_of_thousands_of_texts_half_of_which_stay_is_looked_up_in_linear_time(make_hub):
    """Each text that stays was compared with all that move."""
    n_texts, length = 8000, 2 * CHUNK
    hub = make_hub(2 * 2 * n_texts)
    member, stored = hub.join(), [tokens(seed, n_texts * length) for seed in (1, 2)]
    for text, donates_from in zip(stored, (0, NOWHERE), strict=True):
        member.store_all(text, provenance=Provenance(donates_from=donates_from))
    while not hub.index.queue.is_idle:
        time.sleep(0.01)
    texts = np.stack([text.reshape(n_texts, length) for text in stored], axis=1)
    prompt = np.ascontiguousarray(texts[np.random.default_rng(3).permutation(n_texts)].ravel())
    begun = time.process_time()
    found = hub.index.look_up(prompt)
    assert time.process_time() - begun < 0.5
    assert sum(len(match.span) for match in found.matches) == sum(len(text.span) for text in found.staying)
    assert sum(len(match.span) for match in found.matches) == n_texts * length
