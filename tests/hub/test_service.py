"""Counters and errors of a hub's service, called directly."""

import pytest

from blendhub.client import wire
from blendhub.core.errors import InvalidInput, LeaseError, ProtocolError, StaleEpoch, UnknownSession
from blendhub.core.spans import Span
from blendhub.hub.handlers import base
from tests.hub.hub_direct import tokens


@pytest.mark.parametrize(
    "kind, fields, payload, error, sentence",
    [
        (wire.Lookup, {"epoch": 1}, [b""], StaleEpoch, "an earlier hub"),
        (wire.Lookup, {"session": 1}, [b""], UnknownSession, "register again"),
        (wire.Lookup, {}, [], InvalidInput, "0 payloads"),
        (wire.Lookup, {}, [b"abc"], InvalidInput, "3 bytes"),
        (wire.Lookup, {}, [bytes(8), bytes(8)], InvalidInput, "2 payloads"),
        (wire.Lookup, {}, [bytes(4 * 5001)], InvalidInput, "more than the 5000"),
        (wire.Reserve, {"span": Span(0, 3)}, [bytes(8)], InvalidInput, "within 2 tokens"),
        (wire.Reserve, {"span": Span(1, 1)}, [bytes(8)], InvalidInput, "not empty"),
        (wire.Release, {"lease": 7}, [], LeaseError, "does not hold"),
        (wire.Commit, {"lease": 7, "upto": 1}, [], LeaseError, "does not hold"),
        (wire.Abort, {"lease": 7}, [], LeaseError, "does not hold"),
        (wire.Release, {"lease": -1}, [], ProtocolError, "does not decode"),
        (wire.Lookup, {"wait_s": 1e9}, [b""], ProtocolError, "does not decode"),
        (wire.Lookup, {"wait_s": float("nan")}, [b""], ProtocolError, "wait_s"),
        (wire.Reserve, {"span": Span(0, 2), "blended": True}, [bytes(8)], InvalidInput, "not for both"),
    ],
)
def test_bad_input_is_a_typed_error_and_changes_nothing(hub, monkeypatch, kind, fields, payload, error, sentence):
    monkeypatch.setattr(base, "MOST_PROMPT_TOKENS", 5000)
    member, text = hub.join(), tokens(1, 64)
    member.store(text)
    before = hub.service.stats().gauges["arena_free_bytes"]
    with pytest.raises(error, match=sentence):
        member.ask(kind, payload, **fields)
    hub.state.check_integrity()
    assert hub.service.stats().gauges["arena_free_bytes"] == before
    assert len(hub.state.reads.leases) == len(hub.state.writes.leases) == 0
    member.check(member.read(text), text)
