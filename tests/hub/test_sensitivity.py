"""What engines report of tokens' sensitivity: merged, given out with lookups, kept through a restart."""

import msgspec
import numpy as np
import pytest
from hub_direct import CHUNK, namespace, tokens
from hypothesis import given
from hypothesis import strategies as st

from blendhub.client import wire
from blendhub.core.errors import InvalidInput, ProtocolError
from blendhub.core.layout import Variant
from blendhub.core.spans import Match, Span
from blendhub.hub.handlers import reads
from blendhub.hub.index.sensitivity import merge

TEXT = tokens(1, 3 * CHUNK)
BYTES = np.arange(1, len(TEXT) + 1, dtype=np.uint8)


def matches(run: int, start: int = 0) -> tuple[Match, ...]:
    return (Match(Span(start, start + len(TEXT)), run, 0, False),)


def known(hub, member, prompt, **more) -> bytes:
    """What a lookup that asks for sensitivity gets beside the matches."""
    ids = {"session": member.registered.session, "epoch": member.registered.epoch}
    answer = hub.envelope(wire.Lookup(**ids, sensitivity=True, acquire=False, **more), [prompt.tobytes()])
    assert answer.message.matches
    return b"".join(answer.payload)


def moved(n: int):
    """A prompt with the text behind ``n`` other tokens."""
    return np.concatenate([tokens(2, n), TEXT])


def test_bytes_come_back_at_the_positions_of_another_prompt(hub):
    member = hub.join()
    run = member.store(TEXT).run
    member.ask(wire.Learn, [bytes(7) + BYTES.tobytes()], matches=matches(run, 7))
    assert known(hub, member, moved(50)) == bytes(50) + BYTES.tobytes()
    assert known(hub, member, np.concatenate([tokens(2, 5), TEXT[20:]])) == bytes(5) + BYTES[20:].tobytes()
    hub.state.check_integrity()


def test_nothing_is_sent_where_nothing_is_known_or_asked(hub):
    member = hub.join()
    run = member.store(TEXT).run
    assert known(hub, member, moved(50)) == b""
    member.ask(wire.Learn, [BYTES.tobytes()], matches=matches(run))
    ids = {"session": member.registered.session, "epoch": member.registered.epoch}
    assert not hub.envelope(wire.Lookup(**ids), [TEXT.tobytes()]).payload


@given(st.lists(st.integers(0, 255), max_size=30))
def test_the_largest_counts_and_what_is_not_confirmed_falls(reports):
    expected = 0
    byte = np.zeros(1, np.uint8)
    for report in reports:
        if report:
            expected = max(report, expected - -(-expected // 8))
        byte = merge(byte, np.array([report], np.uint8))
        assert byte == expected


def test_what_is_measured_often_and_never_differs_falls_to_the_lowest_byte():
    byte = np.array([255], np.uint8)
    for _ in range(40):
        byte = merge(byte, np.ones(1, np.uint8))
    assert byte == 1


def test_chunks_that_were_not_measured_take_no_memory(hub):
    member = hub.join()
    run = member.store(TEXT).run
    measured = bytearray(len(TEXT))
    measured[CHUNK + 3] = 9
    member.ask(wire.Learn, [measured], matches=matches(run))
    assert hub.service.stats().gauges["sensitivity_bytes"] == CHUNK
    assert hub.service.stats().counters["tokens_learned"] == 1
    assert known(hub, member, TEXT) == measured
    member.ask(wire.Clear)
    assert hub.service.stats().gauges["sensitivity_bytes"] == 0
    hub.state.check_integrity()


def test_memory_for_bytes_is_counted_as_the_index_s(hub, monkeypatch):
    member = hub.join()
    run = member.store(TEXT).run
    before = hub.state.indexes.sums()[namespace().base.digest]["sensitivity_bytes"]
    member.ask(wire.Learn, [BYTES.tobytes()], matches=matches(run))
    assert hub.state.indexes.sums()[namespace().base.digest]["sensitivity_bytes"] == before + len(TEXT)


def test_a_report_reaches_its_own_namespace_only(hub):
    good, salted = hub.join(), Variant(cache_salt="s")
    run = good.store(TEXT).run
    hostile = hub.join("hostile", namespace=namespace("another"))
    for variant in (Variant(), salted):
        hostile.ask(wire.Learn, [BYTES.tobytes()], matches=matches(run), variant=variant)
    good.ask(wire.Learn, [BYTES.tobytes()], matches=matches(run), variant=salted)
    assert known(hub, good, TEXT) == b""


FIRST = 0
"""Stands for the id of a hub's first run, which differs from hub to hub."""

LEARN = matches(FIRST)


def of_run(some: tuple[Match, ...], run: int) -> tuple[Match, ...]:
    """The matches, those of ``FIRST`` with the run's id."""
    return tuple(msgspec.structs.replace(one, run=run) if one.run == FIRST else one for one in some)


@pytest.mark.parametrize(
    "payload, given, error",
    [
        ([], LEARN, InvalidInput),
        ([b""], LEARN, InvalidInput),
        ([BYTES.tobytes()[1:]], LEARN, InvalidInput),
        ([BYTES.tobytes(), b""], LEARN, InvalidInput),
        ([bytes(2 * len(TEXT))], matches(FIRST) + matches(FIRST, 5), InvalidInput),
        ([b""], (Match(Span(0, 0), FIRST, 0, False),), InvalidInput),
        ([b""], (), ProtocolError),
        ([bytes(2000)], (Match(Span(0, 2000), FIRST, 0, False),), InvalidInput),
        ([b"1"], (Match(Span(0, 1), FIRST, 0, False),) * (wire.MOST_MATCHES + 1), ProtocolError),
    ],
    ids=["no payload", "no bytes", "a byte too few", "two payloads", "overlap", "empty match", "none", "long", "many"],
)
def test_a_report_that_fits_nothing_is_refused_with_a_type(hub, monkeypatch, payload, given, error):
    monkeypatch.setattr(reads, "MOST_PROMPT_TOKENS", 1000)
    member = hub.join()
    run = member.store(TEXT).run
    with pytest.raises(error):
        member.ask(wire.Learn, payload, matches=of_run(given, run))
    assert known(hub, member, TEXT) == b""


@pytest.mark.parametrize("run, source", [(FIRST, 2 * CHUNK), (FIRST, 2**40), (1, 0), (2**62, 0)])
def test_tokens_that_are_not_stored_are_left_out_of_a_report(hub, run, source):
    member = hub.join()
    given = of_run((Match(Span(0, len(TEXT)), run, source, False),), member.store(TEXT).run)
    member.ask(wire.Learn, [BYTES.tobytes()], matches=given)
    expected = bytes(2 * CHUNK) + BYTES[:CHUNK].tobytes() if source == 2 * CHUNK else b""
    assert known(hub, member, TEXT) == expected
    hub.state.check_integrity()


@pytest.mark.parametrize("restarts", [False, True], ids=["evicted", "after a restart"])
def test_bytes_are_kept_with_what_only_the_store_has(make_hub, tmp_path, restarts):
    hub = make_hub(n_slots=4, store=tmp_path / "store")
    member = hub.join()
    run = member.store(TEXT).run
    hub.settle()
    member.ask(wire.Learn, [BYTES.tobytes()], matches=matches(run))
    for seed in range(3, 6):
        member.store(tokens(seed, 3 * CHUNK))
        hub.settle()
    if restarts:
        hub.stop()
        hub.start()
        member = hub.join()
    assert known(hub, member, TEXT, wait_s=5.0) == BYTES.tobytes()
    hub.state.check_integrity()


def test_bytes_that_come_before_their_chunk_is_saved_are_saved_behind_it(make_hub, tmp_path):
    hub = make_hub(store=tmp_path / "store")
    member = hub.join()
    run = member.store(TEXT).run
    assert hub.tier.writer.waiting
    member.ask(wire.Learn, [BYTES.tobytes()], matches=matches(run))
    hub.settle()
    hub.stop()
    hub.start()
    assert known(hub, hub.join(), TEXT, wait_s=5.0) == BYTES.tobytes()


def test_what_a_store_fails_to_keep_costs_the_hint_alone(make_hub, tmp_path, monkeypatch):
    hub = make_hub(n_slots=4, store=tmp_path / "store")
    member = hub.join()
    run = member.store(TEXT).run
    hub.settle()

    def fail(*given):
        raise OSError("the disk fell off")

    monkeypatch.setattr(type(hub.tier.store), "write_note", fail)
    monkeypatch.setattr(type(hub.tier.store), "note", fail)
    member.ask(wire.Learn, [BYTES.tobytes()], matches=matches(run))
    hub.stop()
    hub.start()
    member = hub.join()
    member.check(member.read(TEXT, wait_s=5.0), TEXT)
    assert known(hub, member, TEXT) == b"" and hub.tier.failures == 3
