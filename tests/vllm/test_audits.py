"""Which requests the scheduler side has audited, and what comes of it: on a real hub, with a played worker."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.scheduler.audits import LONGEST_PAUSE_S, WATCHED, Audits
from blendhub.vllm.settings import Settings
from blendhub.vllm.watching.stats import AuditRecord
from tests.vllm.played_engine import NAMESPACE, SETTINGS, played_engine, text

AGREES, DIFFERS = AuditOutcome(True, 0.25, 1, 1), AuditOutcome(False, 3.0, 4, 2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def state(name: str, asks: bool = False, **facts: Any) -> Any:
    usual = {"audit": None, "has_begun_to_answer": False, "has_media": False, "is_sample": False}
    terms, decision = SimpleNamespace(audit=asks), SimpleNamespace(ratio=0.15)
    return SimpleNamespace(id=name, terms=terms, decision=decision, **usual | facts)


def audits(clock: Clock | None = None, possible: bool = True, **settings) -> Audits:
    return Audits(Settings(**settings), possible, "digest", clock or Clock())


def test_the_choice_is_that_of_the_share_and_the_same_whenever_it_is_made():
    names = [f"cmpl-{number}-0" for number in range(20_000)]
    few, many = ({name for name in names if audits(audit_share=share).wants(state(name))} for share in (0.01, 0.1))
    assert 150 < len(few) < 250 and 1850 < len(many) < 2150 and few < many
    assert audits(audit_share=1.0).wants(state("any"))
    # No request is audited twice, or after it has begun to answer.
    assert not audits(audit_share=1.0).wants(state("a", audit=AGREES))
    assert not audits(audit_share=1.0).wants(state("a", has_begun_to_answer=True))


def test_one_request_in_ten_minutes_is_audited_whatever_the_share_unless_it_is_zero():
    clock = Clock()
    some, none = audits(clock, audit_share=1e-9), audits(clock, audit_share=0.0)
    assert not some.wants(state("a"))
    clock.now = LONGEST_PAUSE_S
    due = state("b")
    assert some.wants(due) and some.wants(due), "vLLM may ask again before it has blocks"
    some.begun(due)
    assert not some.wants(state("c")) and not none.wants(state("c"))


def test_a_request_that_asks_is_audited_but_stands_for_no_other():
    some, asked = audits(audit_share=0.0), state("a", asks=True)
    assert some.wants(asked) and not asked.is_sample
    some.ended(asked, DIFFERS)
    assert some.take_records() == []
    assert not audits(possible=False, audit_share=1.0).wants(state("a", asks=True))


def test_few_agreements_are_warned_of_once_and_again_after_they_had_recovered(caplog):
    some, sample = audits(audit_share=1.0), state("a")
    some.wants(sample)
    for n_warnings in (1, 2):
        for outcome in [AGREES] * WATCHED + [DIFFERS] * WATCHED:
            some.ended(sample, outcome)
            n_agree = sum(agrees for agrees in some._recent)
            assert not some._has_warned or n_agree < 0.9 * len(some._recent)
        assert sum("less than expected_agreement 0.9" in line for line in caplog.messages) == n_warnings


# With vLLM's own requests.

ALL = msgspec.structs.replace(SETTINGS, audit_share=1.0)


PROMPT = text(1, 32) + text(0, 96) + text(2, 21)


@pytest.fixture
def engine():
    with played_engine(settings=ALL, audits=True) as engine:
        engine.serve("stored", text(0, 96))
        yield engine


def test_an_audited_request_waits_for_all_of_its_prompt_and_its_outcome_reaches_report_metrics_and_hub(engine):
    request, twin = engine.request("audited", PROMPT), engine.request("twin", PROMPT)
    engine.side.arrived(request)
    assert engine.load(request, outcome=DIFFERS) == len(PROMPT)
    (job,) = engine.loads
    assert job.decision.audit and job.end == len(PROMPT) > job.decision.end == 128
    assert len(job.blocks[0]) * 16 >= len(PROMPT)
    # It goes on with exact KV, but its blocks were salted before, and its KV is not stored as exact.
    assert request.block_hashes[:2] == twin.block_hashes[:2]
    assert not set(request.block_hashes[2:]) & set(twin.block_hashes)
    assert engine.side.loads.audits.take_records() == [AuditRecord(NAMESPACE.digest, 0.15, False, 3.0, 0.9)]
    # vLLM preempts it: it is loaded anew, and not audited again.
    assert engine.load(request) == 128 and not engine.loads[0].decision.audit
    report = engine.report("audited")
    assert report["audit"] == {"agrees": False, "kl": 3.0, "tokens": 4, "agreed_tokens": 2}
    assert report["hole_tokens"] == 32, "the rest of the prompt is no hole"
    engine.step(audited=(128, len(PROMPT) - 128))
    engine.end(request, len(PROMPT))
    assert max(engine.found(PROMPT, exact=True), default=0) < 32
    assert engine.client.stats().namespaces[NAMESPACE.digest]["audit_disagreements"] == 1


@pytest.mark.parametrize(
    ("length", "max_tokens", "compared"),
    [(16 * 11 + 9, 100, 8), (16 * 11 + 9, 5, 5), (16 * 11 + 13, 100, 4), (16 * 12, 100, 1)],
    ids=["as set", "all of the answer", "room for three", "no room"],
)
def test_as_many_tokens_are_compared_as_are_set_asked_for_and_have_room_in_the_last_block(length, max_tokens, compared):
    request: Any = SimpleNamespace(num_tokens=length, max_tokens=max_tokens)
    assert audits(audit_tokens=8).n_tokens(request, 16) == compared
    assert length + compared - 1 <= -(-length // 16) * 16


def test_neither_a_failed_audit_nor_exact_reuse_nor_a_model_without_predictions_says_anything(engine):
    engine.load(engine.arrived("failed", PROMPT), error="the hub is gone")
    assert engine.loads[0].decision.audit
    engine.load(engine.arrived("exact", text(0, 96) + text(2, 32)))
    assert not engine.loads[0].decision.audit and not engine.side.loads.audits.take_records()
    with played_engine(settings=ALL) as engine:
        engine.serve("stored", text(0, 96))
        engine.load(engine.arrived("blended", PROMPT))
        assert engine.loads and not engine.loads[0].decision.audit
