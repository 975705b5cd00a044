"""Which requests the scheduler side has audited, and what comes of it: on a real hub, with a played worker."""

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.scheduler.audits import LONGEST_PAUSE_S, MOST_RECORDS, WATCHED, AgreementWatch, Audits, chance_of
from blendhub.vllm.settings import Settings
from blendhub.vllm.watching.stats import AuditRecord
from tests.vllm.played_engine import NAMESPACE, SETTINGS, played_engine, text

AGREES, DIFFERS = AuditOutcome(True, 0.25, 1, 1), AuditOutcome(False, 3.0, 4, 2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def state(name: str, asks: bool = False) -> Any:
    terms, decision = SimpleNamespace(audit=asks), SimpleNamespace(ratio=0.15)
    return SimpleNamespace(
        id=name,
        audit=None,
        has_begun_to_answer=False,
        has_media=False,
        is_sample=False,
        terms=terms,
        decision=decision,
    )


def audits(clock: Clock | None = None, possible: bool = True, **settings) -> Audits:
    return Audits(Settings(**settings), possible, "digest", clock or Clock())


def test_the_choice_is_that_of_the_share_and_the_same_whenever_it_is_made():
    names = [f"cmpl-{number}-0" for number in range(20_000)]
    chosen = {share: [name for name in names if audits(audit_share=share).wants(state(name))] for share in (0.01, 0.1)}
    assert 150 < len(chosen[0.01]) < 250 and 1850 < len(chosen[0.1]) < 2150
    assert set(chosen[0.01]) < set(chosen[0.1])
    assert all(0 <= chance_of(name) < 1 for name in names[:100])
    assert audits(audit_share=1.0).wants(state("any"))


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
    some = audits(audit_share=0.0)
    asked = state("a", asks=True)
    assert some.wants(asked) and not asked.is_sample
    some.ended(asked, DIFFERS)
    assert some.take_records() == []
    assert not audits(possible=False, audit_share=1.0).wants(state("a", asks=True))


def test_no_request_is_audited_twice_or_after_it_has_begun_to_answer():
    again, late = state("a"), state("b")
    again.audit, late.has_begun_to_answer = AGREES, True
    assert not any(audits(audit_share=1.0).wants(one) for one in (again, late))


def test_records_that_no_metrics_fetch_are_bounded():
    some, sample = audits(audit_share=1.0), state("a")
    some.wants(sample)
    for _ in range(2 * MOST_RECORDS):
        some.ended(sample, AGREES)
    assert len(some.take_records()) == MOST_RECORDS and some.take_records() == []


def test_few_agreements_are_warned_of_once_and_again_after_they_had_recovered():
    watch = AgreementWatch(0.9)
    assert not any(watch.note(True) for _ in range(WATCHED))
    warnings = [one for one in (watch.note(False) for _ in range(WATCHED)) if one]
    assert len(warnings) == 1
    assert "less than expected_agreement 0.9" in warnings[0]
    assert not any(watch.note(True) for _ in range(WATCHED))
    assert sum(watch.note(False) is not None for _ in range(WATCHED)) == 1


@given(st.lists(st.booleans(), max_size=60), st.floats(0, 1))
def test_nothing_is_warned_of_while_as_many_agree_as_expected(outcomes, expected):
    watch = AgreementWatch(expected)
    for number, agrees in enumerate(outcomes, 1):
        warning = watch.note(agrees)
        assert warning is None or sum(outcomes[:number]) < expected * number


# With vLLM's own requests.

ALL = msgspec.structs.replace(SETTINGS, audit_share=1.0)


def test_an_audited_request_waits_for_all_of_its_prompt_and_its_outcome_reaches_report_metrics_and_hub(caplog):
    with played_engine(settings=ALL, audits=True) as engine:
        engine.serve("stored", text(0, 96))
        prompt = text(1, 32) + text(0, 96) + text(2, 21)
        request = engine.arrived("audited", prompt)
        assert engine.load(request, outcome=DIFFERS) == len(prompt)
        (job,) = engine.loads
        assert job.decision.audit and job.end == len(prompt) > job.decision.end == 128
        assert len(job.blocks[0]) * 16 >= len(prompt)
        _, response = engine.side.ended(request, tuple(blocks.tolist() for blocks in job.blocks))
        assert response["blendhub"]["audit"] == {"agrees": False, "kl": 3.0, "tokens": 4, "agreed_tokens": 2}
        assert response["blendhub"]["hole_tokens"] == 32, "the rest of the prompt is no hole"
        assert engine.side.loads.audits.take_records() == [AuditRecord(NAMESPACE.digest, 0.15, False, 3.0, 0.9)]
        engine.step()
        assert engine.client.stats().namespaces[NAMESPACE.digest]["audit_disagreements"] == 1


@pytest.mark.parametrize(
    ("length", "max_tokens", "compared"),
    [(16 * 11 + 9, 100, 8), (16 * 11 + 9, 5, 5), (16 * 11 + 13, 100, 4), (16 * 12, 100, 1)],
    ids=["as set", "all of the answer", "room for three", "no room"],
)
def test_as_many_tokens_are_compared_as_are_set_asked_for_and_have_room_in_the_last_block(length, max_tokens, compared):
    with played_engine(settings=msgspec.structs.replace(ALL, audit_tokens=8), audits=True) as engine:
        engine.serve("stored", text(0, 96))
        prompt = text(1, 32) + text(0, 96) + text(2, length - 128)
        request = engine.request("audited", prompt)
        request.max_tokens = max_tokens
        request.sampling_params.all_stop_token_ids.add(7)
        engine.side.arrived(request)
        engine.load(request, outcome=DIFFERS)
        (job,) = engine.loads
        assert job.answer.tokens == compared and job.answer.stop_tokens == {7}
        assert len(prompt) + job.answer.tokens - 1 <= len(job.blocks[0]) * 16


def test_an_audited_request_s_blocks_stay_its_own():
    """It goes on with exact KV, but its blocks were salted before, and its KV is not stored as exact."""
    with played_engine(settings=ALL, audits=True) as engine:
        engine.serve("stored", text(0, 96))
        prompt = text(1, 32) + text(0, 96) + text(2, 32)
        request, twin = engine.request("audited", prompt), engine.request("twin", prompt)
        engine.side.arrived(request)
        engine.load(request, outcome=AGREES)
        assert request.block_hashes[:2] == twin.block_hashes[:2]
        assert not set(request.block_hashes[2:]) & set(twin.block_hashes)
        engine.step(audited=(len(prompt) - 1, 1))
        engine.end(request, len(prompt))
        assert max(engine.found(prompt, exact=True), default=0) < 32


@pytest.mark.parametrize("error", ["", "the hub is gone"], ids=["preempted", "failed"])
def test_what_was_not_audited_to_its_end_says_nothing(error):
    with played_engine(settings=ALL, audits=True) as engine:
        engine.serve("stored", text(0, 96))
        request = engine.arrived("r", text(1, 32) + text(0, 96) + text(2, 32))
        engine.load(request, error=error, outcome=None if error else AGREES)
        assert len(engine.side.loads.audits.take_records()) == (0 if error else 1)
        if not error:  # vLLM preempts it: it is loaded anew, and not audited again
            assert engine.load(request) == 128
            assert not engine.loads[0].decision.audit


def test_exact_reuse_is_not_audited_nor_is_a_model_without_predictions():
    for possible, prompt in ((True, text(0, 96) + text(2, 32)), (False, text(1, 32) + text(0, 96) + text(2, 32))):
        with played_engine(settings=ALL, audits=possible) as engine:
            engine.serve("stored", text(0, 96))
            request = engine.arrived("r", prompt)
            engine.load(request)
            assert engine.loads and not engine.loads[0].decision.audit


def test_a_warning_stands_in_vllm_s_log(caplog):
    with played_engine(settings=ALL, audits=True) as engine, caplog.at_level(logging.WARNING, "blendhub"):
        engine.serve("stored", text(0, 96))
        for number in range(12):
            request = engine.arrived(f"r{number}", text(1, 32) + text(0, 96) + text(2, 32))
            engine.load(request, outcome=DIFFERS)
            engine.end(request, 0)
    assert sum("less than expected_agreement" in line for line in caplog.messages) == 1
