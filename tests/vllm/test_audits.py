"""Which requests are audited, and what the outcomes say of all."""

from types import SimpleNamespace
from typing import Any

from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.scheduler.audits import MAX_PAUSE_S, WATCHED, Audits
from blendhub.vllm.scheduler.request.repair import RequestRepair
from blendhub.vllm.settings import Settings

AGREES, DIFFERS = AuditOutcome(True, 0.25), AuditOutcome(False, 3.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(name: str, asks: bool = False, **audit: Any) -> Any:
    repair = RequestRepair()
    for field, value in audit.items():
        setattr(repair, field, value)
    return SimpleNamespace(id=name, terms=SimpleNamespace(audit=asks), repair=repair, kv=SimpleNamespace(ratio=0.15))


def audits(clock: Clock | None = None, possible: bool = True, **settings) -> Audits:
    return Audits(Settings(**settings), possible, "digest", clock or Clock())


def is_audited(audits: Audits, blended: Any) -> bool:
    audits.begin(blended)
    return blended.repair.is_audited


def test_the_choice_is_that_of_the_share_and_the_same_whenever_it_is_made():
    names = [f"cmpl-{number}-0" for number in range(20_000)]
    few, many = (
        {name for name in names if is_audited(audits(audit_share=share), request(name))} for share in (0.01, 0.1)
    )
    assert 150 < len(few) < 250 and 1850 < len(many) < 2150 and few < many
    assert is_audited(audits(audit_share=1.0), request("any"))
    # No request is audited twice.
    assert not is_audited(audits(audit_share=1.0), request("a", audit=AGREES))


def test_one_request_in_ten_minutes_is_audited_whatever_the_share_unless_it_is_zero():
    clock = Clock()
    some, none = audits(clock, audit_share=1e-9), audits(clock, audit_share=0.0)
    assert not is_audited(some, request("a"))
    clock.now = MAX_PAUSE_S
    assert is_audited(some, request("b"))
    assert not is_audited(some, request("c")) and not is_audited(none, request("c"))


def test_a_request_that_asks_is_audited_but_stands_for_no_other():
    some, asked = audits(audit_share=0.0), request("a", asks=True)
    assert is_audited(some, asked) and not asked.repair.is_sample
    some.end(asked, DIFFERS)
    assert some.take_records() == []
    assert not is_audited(audits(possible=False, audit_share=1.0), request("a", asks=True))


def test_few_agreements_are_warned_of_once_and_again_after_they_had_recovered(caplog):
    some, sample = audits(audit_share=1.0), request("a")
    some.begin(sample)
    for n_warnings in (1, 2):
        for outcome in [AGREES] * WATCHED + [DIFFERS] * WATCHED:
            some.end(sample, outcome)
            n_agree = sum(agrees for agrees in some._recent)
            assert not some._has_warned or n_agree < 0.9 * len(some._recent)
        assert sum("less than expected_agreement 0.9" in line for line in caplog.messages) == n_warnings
