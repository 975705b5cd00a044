"""What engines report of prompts and audits: kept within bounds, found by id, and never a token of the text."""

from typing import Any

import msgspec
import numpy as np
import pytest

from blendhub.client import wire
from blendhub.core.errors import InvalidInput, ProtocolError
from blendhub.core.layout import Variant
from blendhub.core.spans import Match, Span
from blendhub.hub.counters import RECENT, Audits
from blendhub.hub.limits import MOST_KEPT_REPORTS, MOST_REPORTING_ENGINES
from blendhub.hub.reports import ReportTable
from blendhub.outcome.fates import Fate, count
from blendhub.outcome.reasons import NotReused, Why, not_reused
from blendhub.outcome.report import MOST_OUTCOMES, MOST_SPANS, ReusedSpans
from tests.hub.hub_direct import CHUNK, DirectHub, tokens
from tests.outcomes import audited, outcome

SPANS = {"exact": [Span(16, 32)], "moved": [Span(40, 90)], "recomputed": [Span(50, 60)], "holes": [Span(32, 40)]}
SOURCES = [Match(Span(16, 32), 7, 16, True), Match(Span(40, 90), 9, 0, False)]


def report(request: str = "cmpl-1", n_tokens: int = 100, **more):
    return outcome(request, n_tokens, 16, SPANS, SOURCES, **more)


def test_an_outcome_paints_the_whole_prompt():
    strip = report().strip()
    assert [(stretch.span.start, stretch.span.end, stretch.fate) for stretch in strip] == [
        (0, 16, Fate.CACHED),
        (16, 32, Fate.EXACT),
        (32, 40, Fate.HOLE),
        (40, 50, Fate.MOVED),
        (50, 60, Fate.RECOMPUTED),
        (60, 90, Fate.MOVED),
        (90, 100, Fate.COMPUTED),
    ]
    n_tokens = {fate: n for fate, n in count(strip).items() if n}
    assert n_tokens == {"cached": 16, "exact": 16, "moved": 40, "recomputed": 10, "hole": 8, "computed": 10}


def test_what_an_engine_sends_of_any_prompt_is_within_the_bounds_of_a_message():
    spans = {"moved": [Span(0, 10**6)], "recomputed": [Span(at, at + 1) for at in range(0, 10**6, 2)]}
    sources = [Match(Span(at, at + 1), 1, at, False) for at in range(2 * MOST_SPANS)]
    long = outcome("x" * 1000, 10**6, 0, spans, sources, "y" * 10**6).bounded()
    n_tokens = count(long.strip())
    assert n_tokens[Fate.MOVED] == n_tokens[Fate.RECOMPUTED] == 500_000
    sent = msgspec.msgpack.encode(long)
    assert len(sent) < 2**16 and msgspec.msgpack.decode(sent, type=type(long)) == long


def test_an_outcome_says_why_each_stretch_was_computed_and_nothing_of_what_was_reused():
    whys = {Why.NOTHING_STORED: [Span(0, 100)], Why.TOO_MUCH: [Span(30, 95)], Why.LAST: [Span(99, 100)]}
    why = report(whys=whys)
    assert [(stretch.span.start, stretch.span.end, stretch.why) for stretch in not_reused(why.strip(), why.unused)] == [
        (32, 40, Why.TOO_MUCH), (90, 95, Why.TOO_MUCH), (95, 99, Why.NOTHING_STORED), (99, 100, Why.LAST),
    ]  # fmt: skip
    assert not not_reused(report().strip(), report().unused)  # not known


def test_a_reported_request_is_found_by_the_id_of_its_response(hub: DirectHub):
    member = hub.join("an-engine")
    member.ask(wire.Reported, outcomes=(report("cmpl-12-0-abcdefgh", n_tokens=100), report("cmpl-1-0-abcdefgh")))
    found = hub.ask(wire.Explain("cmpl-1"))
    assert found.engine == "an-engine" and found.outcome == report("cmpl-1-0-abcdefgh")
    assert hub.ask(wire.Explain("cmpl-12-0-abcdefgh")).outcome.request == "cmpl-12-0-abcdefgh"
    assert hub.ask(wire.Explain("cmpl")).outcome is not None  # what stands before a dash
    assert hub.ask(wire.Explain("cmpl-2")) == wire.Explained()


def test_the_newest_reports_of_some_engines_are_kept():
    table = ReportTable()
    for number in range(MOST_KEPT_REPORTS + 10):
        table.add("busy", [report(f"r{number}")])
    assert len(table.encoded("busy")) == MOST_KEPT_REPORTS
    assert table.find("r9") is None and table.find("r10") and table.find(f"r{MOST_KEPT_REPORTS + 9}")
    for number in range(MOST_REPORTING_ENGINES):
        table.add(f"e{number}", [report()])
    assert len(table.engines()) == MOST_REPORTING_ENGINES and "busy" not in table.engines()
    assert table.latest_engine == f"e{MOST_REPORTING_ENGINES - 1}" and table.encoded("unknown") == []


def test_a_message_of_reports_is_bounded(hub: DirectHub):
    member = hub.join()
    secret: Any = "secret"
    many = MOST_SPANS + 1
    for wrong in (
        (report(),) * (MOST_OUTCOMES + 1),
        (msgspec.structs.replace(report(), spans=ReusedSpans(recomputed=(Span(0, 1),) * many)),),
        (msgspec.structs.replace(report(), sources=(SOURCES[0],) * many),),
        (msgspec.structs.replace(report(), unused=(NotReused(Span(0, 1), Why.LAST),) * many),),
        (msgspec.structs.replace(report(), unused=(NotReused(Span(0, 1), secret),)),),
        (msgspec.structs.replace(report(), request="x" * 1000),),
        (msgspec.structs.replace(report(), reason="x" * 10**4),),
        (msgspec.structs.replace(report(), prompt_tokens=2**40),),
    ):
        with pytest.raises(ProtocolError):
            member.ask(wire.Reported, outcomes=wrong)
    assert hub.service.reports.engines() == []


def test_audits_that_engines_chose_are_counted_by_namespace_whether_something_is_stored_there_or_not(hub: DirectHub):
    member = hub.join()
    member.ask(wire.Reported, outcomes=audited(True, True, True, False))
    member.ask(wire.Reported, outcomes=audited(False, is_sample=False))
    (numbers,) = hub.service.stats().namespaces.values()
    assert (numbers["audits"], numbers["audit_disagreements"], numbers["tokens"]) == (4, 1, 0)
    member.store(tokens(1, CHUNK))
    member.ask(wire.Reported, outcomes=audited(True, True))
    (numbers,) = hub.service.stats().namespaces.values()
    assert (numbers["audits"], numbers["recent_audits"], numbers["tokens"]) == (6, 6, CHUNK)
    audits = Audits()
    for agrees in [False] * 9 + [True] * RECENT:
        audits.add(agrees=agrees)
    numbers = audits.numbers()
    assert numbers["audits"] == RECENT + 9 and numbers["audit_disagreements"] == 9
    assert (numbers["recent_audits"], numbers["recent_audit_disagreements"]) == (RECENT, 0), "of the last audits"


def test_a_preview_says_what_would_be_found_and_changes_nothing(hub: DirectHub):
    member = hub.join("an-engine")
    text, other = tokens(1, 2 * CHUNK), tokens(2, CHUNK)
    member.store(text)
    member.store(text, variant=Variant(cache_salt="salt"))
    before = hub.service.stats().counters
    prompt = np.concatenate([other, text])
    found = hub.ask(wire.Preview(), [prompt.tobytes()])
    assert (found.engine, found.model) == ("an-engine", "m")
    assert found.matches == member.lookup(prompt, acquire=False).matches
    assert hub.ask(wire.Preview(engine="an-engine"), [text.tobytes()]).matches[0].exact
    assert hub.ask(wire.Preview(variant=Variant(cache_salt="else")), [text.tobytes()]).matches == ()
    assert hub.ask(wire.Preview(), [b""]).matches == ()
    after = hub.service.stats().counters
    counted = ("tokens_exact", "tokens_moved", "lookups_that_found", "requests_lookup")
    assert after["tokens_moved"] == before["tokens_moved"] + 2 * CHUNK  # of the one lookup
    assert [after[name] - before.get(name, 0) for name in counted[2:]] == [1, 1]
    assert not hub.state.reads.leases and hub.service.stats().gauges["read_leases"] == 0


def test_a_preview_names_the_engines_that_there_are(hub: DirectHub):
    with pytest.raises(InvalidInput, match="none: start vLLM with this hub"):
        hub.ask(wire.Preview(), [b""])
    hub.join("one"), hub.join("two")
    with pytest.raises(InvalidInput, match="name one of the engines that are registered: one, two"):
        hub.ask(wire.Preview(), [b""])
    with pytest.raises(InvalidInput, match="no engine 'three' is registered; name one of: one, two"):
        hub.ask(wire.Preview(engine="three"), [b""])
    assert hub.ask(wire.Preview(engine="two"), [b""]).engine == "two"
