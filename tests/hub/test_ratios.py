"""The ratio that the hub finds: where it goes, and what it learns from."""

from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import FIRST_RATIO as FIRST
from blendhub.core.layout import KVLayout, Namespace
from blendhub.hub.config import HubConfig, Listen
from blendhub.hub.embedded import HubInThread
from blendhub.hub.ratios import LEAST, MOST, STEP, TOKENS, FoundRatio
from blendhub.outcome.report import AuditOutcome, Outcome, RepairOutcome
from tests.hub.processes import until

NAMESPACE = Namespace(model="m", layout=KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float16"))


def repaired(ratio: float | None, compared: int, *differing: int, answer_tokens: int = TOKENS) -> Outcome:
    return Outcome(
        request="r", prompt_tokens=9, engine_tokens=0, ratio=ratio, has_found_ratio=True, answer_tokens=answer_tokens,
        repair=RepairOutcome(9, compared + 1, compared, differing),
    )  # fmt: skip


@given(share=st.floats(0.0, 0.3), seed=st.integers(0, 2**32))
def test_it_goes_down_while_answers_stay_right_and_up_while_they_do_not_and_stays_within_its_bounds(share, seed):
    found, ratios, random = FoundRatio(), [FIRST], Random(seed)
    for _ in range(600):
        wrong = [number for number in range(TOKENS) if random.random() < share]
        found.learn(repaired(found.ratio, TOKENS, *wrong))
        ratios.append(found.ratio)
        assert LEAST <= found.ratio <= MOST
        before, after = ratios[-2:]
        assert after in (before, max(LEAST, before * STEP), min(MOST, before / STEP))
    if share == 0:
        assert found.ratio == LEAST
    if share > 0.05:
        assert found.ratio == MOST


def test_one_wrong_answer_is_no_proof_but_two_of_few_are():
    found = FoundRatio()
    found.learn(repaired(FIRST, TOKENS, 3))
    assert found.ratio == FIRST
    found.learn(repaired(FIRST, TOKENS, 3, 4, 5))
    assert found.ratio == FIRST / STEP


@pytest.mark.parametrize(
    "outcome",
    [
        repaired(None, TOKENS, 1, 2, 3),
        repaired(0.15, TOKENS, 1, 2, 3),
        repaired(FIRST, 99, 50, 60, 70),
        Outcome(request="r", prompt_tokens=9, engine_tokens=0, ratio=FIRST, repair=RepairOutcome(9, 9, 9, (1, 2, 3))),
    ],
    ids=["nothing was moved", "another ratio", "later tokens", "its client named the ratio"],
)
def test_it_does_not_learn_that_answers_differ_from(outcome):
    found = FoundRatio()
    for _ in range(3):
        found.learn(outcome)
    assert found.ratio <= FIRST


def test_a_hub_that_is_restarted_hears_from_its_engines_how_far_it_had_come(tmp_path):
    listen = Listen(endpoint=f"ipc://{tmp_path}/hub.sock")
    config = HubConfig(arena_gib=0.01, metrics="", silence_s=3.0, listen=(listen,))
    with HubClient(listen.endpoint) as engine:
        with HubInThread(config):
            engine.register("engine", NAMESPACE)
            engine.report([repaired(FIRST, TOKENS, 1, 2, 3)] * 2).result()
            assert engine.lookup(np.arange(9, dtype=np.uint32)).result().ratio == pytest.approx(FIRST / STEP)
        before = engine.registrations
        with HubInThread(config):
            until(lambda: engine.registrations > before)
            assert engine.lookup(np.arange(9, dtype=np.uint32)).result().ratio == pytest.approx(FIRST / STEP)


@pytest.mark.parametrize("compared, n_answers", [(0, 27), (5, 30), (TOKENS, 27)])
def test_tokens_behind_exact_kv_count_as_those_that_agree(compared, n_answers):
    """In an answer in doubt, the token that was held and all behind it follow from exact KV."""
    found, shorter = FoundRatio(), FoundRatio()
    for _ in range(n_answers):
        assert found.ratio == shorter.ratio == FIRST
        found.learn(repaired(FIRST, compared))
        shorter.learn(repaired(FIRST, compared, answer_tokens=compared))
    assert found.ratio == FIRST * STEP
    assert (shorter.ratio == FIRST) == (compared < TOKENS)


def test_answers_that_were_not_compared_are_as_those_that_were():
    """On a busy engine, only answers in doubt are: most tokens may be those of answers that were not."""
    found, busy = FoundRatio(), FoundRatio()
    for _ in range(30):
        found.learn(repaired(FIRST, 5))
        busy.learn(repaired(FIRST, 5))
        for _ in range(3):
            busy.learn(msgspec.structs.replace(repaired(FIRST, 0), repair=None))
    assert found.ratio < busy.ratio == FIRST


def test_where_nothing_is_repaired_sampled_audits_teach():
    found = FoundRatio()
    for is_sample in (False, True):
        for _ in range(5):
            audit = AuditOutcome(agrees=False, kl=1.0)
            found.learn(
                Outcome(
                    request="r",
                    prompt_tokens=9,
                    engine_tokens=0,
                    ratio=FIRST,
                    has_found_ratio=True,
                    answer_tokens=TOKENS,
                    audit=audit,
                    is_sample=is_sample,
                )
            )
        assert (found.ratio > FIRST) == is_sample


def test_an_engine_hears_of_it_with_each_lookup_also_when_it_comes_back():
    with HubInThread(HubConfig(arena_gib=0.01, metrics="")) as hub:
        for expected in (FIRST, FIRST / STEP):
            with hub.connect() as engine:
                engine.register("engine", NAMESPACE)
                found = engine.lookup(np.arange(9, dtype=np.uint32)).result()
                assert found.ratio == pytest.approx(expected)
                engine.report([repaired(FIRST, TOKENS, 1, 2, 3)] * 2).result()
                assert engine.lookup(np.arange(9, dtype=np.uint32)).result().ratio == pytest.approx(FIRST / STEP)
                other = Namespace(model="other", layout=NAMESPACE.layout)
            with hub.connect() as engine:
                engine.register("other", other)
                reserved = engine.reserve(np.arange(300, dtype=np.uint32), Span(0, 256)).result()
                assert reserved.right and engine.lookup(np.arange(9, dtype=np.uint32)).result().ratio == FIRST
