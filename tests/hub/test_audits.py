"""What a hub keeps of the audits that engines report."""

from blendhub.client import wire
from blendhub.hub.counters import RECENT, AuditTable
from tests.hub.hub_direct import CHUNK, tokens


def test_present_agreement_is_that_of_the_last_audits():
    table = AuditTable()
    table.add("a", 0, 9)
    table.add("a", RECENT, 0)
    assert table.of("a")["audits"] == RECENT + 9 and table.of("a")["audit_disagreements"] == 9
    assert (table.of("a")["recent_audits"], table.of("a")["recent_audit_disagreements"]) == (RECENT, 0)


def test_audits_are_counted_by_the_engine_s_namespace_whether_something_is_stored_there_or_not(hub):
    member = hub.join()
    member.ask(wire.Audited, agreed=3, disagreed=1)
    (numbers,) = hub.service.stats().namespaces.values()
    assert (numbers["audits"], numbers["audit_disagreements"], numbers["tokens"]) == (4, 1, 0)
    member.store(tokens(1, CHUNK))
    member.ask(wire.Audited, agreed=2, disagreed=0)
    (numbers,) = hub.service.stats().namespaces.values()
    assert (numbers["audits"], numbers["recent_audits"], numbers["tokens"]) == (6, 6, CHUNK)
