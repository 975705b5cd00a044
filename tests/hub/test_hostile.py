"""A registered hostile client beside a good one: every message is answered, with a type, and the good one notices none.

What single messages of the worst kinds cost stands in test_bounds.py, test_match_queues.py and test_mixed_slots.py.
"""

import contextlib
import random
from collections import Counter

import numpy as np
import pytest

from benchmarks.soak.hostile import Hostile
from blendhub.client import wire
from blendhub.core.errors import ArenaFull, BlendHubError, UnknownSession
from tests.hub.hub_direct import CHUNK, ELSEWHERE, tokens

TEXTS = [tokens(seed, 3 * CHUNK) for seed in range(100, 120)]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("with_store", [False, True], ids=["memory alone", "with a store"])
def test_no_message_of_a_hostile_client_fails_the_hub_or_reaches_a_good_one(make_hub, tmp_path, seed, with_store):
    hub = make_hub(n_slots=200, store=tmp_path / "store" if with_store else None, inline=1000)
    good = hub.join("good", process=ELSEWHERE)
    chance = random.Random(seed)
    ids = [good.registered.session, *(good.reserve(text).run or 0 for text in TEXTS[:2])]
    hostile = Hostile(chance, good.registered.epoch, ids)
    answers: Counter[str] = Counter()
    stored = 0
    for number in range(1200):
        message, payload = hostile.next()
        try:
            hostile.note(message, hub.envelope(message, payload, b"hostile").message)
            answers[type(message).__name__] += 1
        except BlendHubError as error:
            # Any other error would reach the client as ServiceFailed.
            answers[type(error).__name__] += 1
        if number % 40 == 0:
            text = chance.choice(TEXTS)
            with contextlib.suppress(ArenaFull):  # the hostile one may hold every slot
                good.store(text)
                stored += 1
            found = good.read(np.concatenate([text, text[:CHUNK]]))
            good.check(found, np.concatenate([text, text[:CHUNK]]))
            if found.lease is not None:
                good.ask(wire.Release, lease=found.lease)
            hub.now += 1.0
            hub.service.tick()
        if number % 200 == 0:
            hub.state.check_integrity()
    assert {"Lookup", "Reserve", "Commit", "Register"} <= answers.keys(), f"some messages are accepted: {answers}"
    assert stored
    hub.state.check_integrity()
    hub.settle()
    # After both have left, the hub holds what was stored, and no more.
    good.ask(wire.Unregister)
    hub.service.gone(b"hostile")
    hub.now += 1000.0
    hub.service.tick()
    gauges = hub.service.stats().gauges
    assert gauges["sessions"] == gauges["read_leases"] == gauges["write_leases"] == 0
    assert gauges["arena_quarantined_bytes"] == 0
    good.join()
    assert good.store(TEXTS[0][:CHUNK]).span.end == CHUNK


def test_a_session_is_of_the_connection_that_registered_it(hub):
    good = hub.join()
    ids = {"session": good.registered.session, "epoch": good.registered.epoch}
    for message in (wire.Unregister(**ids), wire.Ping(**ids), wire.Clear(**ids)):
        with pytest.raises(UnknownSession, match="another connection"):
            hub.envelope(message, peer=b"hostile")
    good.store(TEXTS[0])
