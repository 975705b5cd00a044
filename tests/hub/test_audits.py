"""What a hub keeps of the audits that engines report."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from blendhub.client import wire
from blendhub.hub.counters import RECENT, AuditTable
from blendhub.hub.limits import MOST_AUDITED_NAMESPACES
from tests.hub.hub_direct import CHUNK, tokens

counts = st.integers(0, RECENT + 9)


@given(st.lists(st.tuples(st.sampled_from("ab"), counts, counts), max_size=8))
def test_numbers_are_those_of_all_audits_and_of_the_last_ones(reports):
    table = AuditTable()
    expected = {name: deque[bool]() for name in "abc"}
    for name, agreed, disagreed in reports:
        table.add(name, agreed, disagreed)
        expected[name].extend([False] * disagreed + [True] * agreed)
    for name, outcomes in expected.items():
        recent = list(outcomes)[-RECENT:]
        assert table.of(name) == {
            "audits": len(outcomes),
            "audit_disagreements": outcomes.count(False),
            "recent_audits": len(recent),
            "recent_audit_disagreements": recent.count(False),
        }


def test_the_number_of_namespaces_is_bounded_and_those_in_use_are_kept():
    table = AuditTable()
    for number in range(2 * MOST_AUDITED_NAMESPACES):
        table.add(f"namespace {number}", 1, 0)
        table.add("in use", 0, 1)
    assert len(table.namespaces) == MOST_AUDITED_NAMESPACES
    assert table.of("in use")["audits"] == 2 * MOST_AUDITED_NAMESPACES
    assert table.of("namespace 0")["audits"] == 0


def test_audits_are_counted_by_the_engine_s_namespace_whether_something_is_stored_there_or_not(hub):
    member = hub.join()
    member.ask(wire.Audited, agreed=3, disagreed=1)
    (numbers,) = hub.service.stats().namespaces.values()
    assert (numbers["audits"], numbers["audit_disagreements"], numbers["tokens"]) == (4, 1, 0)
    member.store(tokens(1, CHUNK))
    member.ask(wire.Audited, agreed=2, disagreed=0)
    (numbers,) = hub.service.stats().namespaces.values()
    assert (numbers["audits"], numbers["recent_audits"], numbers["tokens"]) == (6, 6, CHUNK)
